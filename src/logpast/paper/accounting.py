"""`logpast paper accounting`: what the per-word figures of the paper's tables appear to count, row by row."""

from __future__ import annotations

from pathlib import Path

from logpast.ledger.row import RESULTS
from logpast.paper import printed
from logpast.reporting.tables import Table, check_table_path, print_and_write
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments


@validate_arguments
def accounting(out: Path | None = None) -> Table:
    """Print, row by row, what the per-word figures of the paper's Tables A1 and A2 appear to count.

    ln(per-word)/ln(raw) is tokens over words, and should be one number per corpus. As printed it differs from row to
    row, in a way that fits the first τ*max tokens and the last partial batch being left out of the summed loss while
    all words are counted: an inference from the printed tables. Exit code 2 if the mean ratio of a row is not met to
    1e-4.

    Examples:
        logpast paper accounting
        logpast paper accounting --out accounting.md

    Args:
        out: write it to this file too: .md, .csv or .json. An existing one is replaced.

    Returns:
        The table.
    """
    check_table_path(out, RESULTS)
    table = print_and_write(accounting_table(), out)
    for sweep in (printed.sweep("A1"), printed.sweep("A2")):
        for row in sweep.rows:
            apart = printed.mean_ratio(sweep, row) - printed.ratio_by_formula(sweep, row.slots)
            if abs(apart) > printed.MEAN_TOLERANCE:
                raise UserError(
                    f"Table {sweep.name}, L = {row.slots}: the mean of the printed ratios is {apart:+.6f} from the "
                    "formula's; check paper.yaml against the paper"
                )
    return table


def accounting_table() -> Table:
    sweeps = [printed.sweep("A1"), printed.sweep("A2")]
    rows = [_account(sweep, row) for sweep in sweeps for row in sweep.rows]
    heads = ["table", "L", "left out", "formula", "mean k", "apart",
             "delta", *map(printed.k_equals, printed.SHARPNESSES),
             "delta: word → all", "best k: word → all"]  # fmt: skip
    title = "ln(per-word)/ln(raw) of Tables A1 and A2: as printed, and by the formula of metrics.paper_span"
    return Table(heads, rows, title, _notes(*sweeps))


def _account(table: printed.Sweep, row: printed.Row) -> list[str]:
    """One row: tokens left out, ratios, and what the per-word figures would be with every token counted."""
    formula, mean = printed.ratio_by_formula(table, row.slots), printed.mean_ratio(table, row)
    left_out = table.tokens[0] - printed.summed_tokens(table, row.slots)
    ratios = [f"{cell.ratio:.4f}{'' if cell.allows(formula) else '*'}" for cell in (row.delta, *row.filters.values())]
    k, best = row.best
    digits = 2 if table.tokens[0] == table.tokens[1] else 1  # how sure the number of tokens is
    return [
        table.name, str(row.slots), f"{left_out:,} ({left_out / table.tokens[0]:.2%})", f"{formula:.4f}",
        f"{mean:.4f}", f"{mean - formula:+.6f}", *ratios,
        f"{row.delta.word:.2f} → {printed.if_all_counted(table, row.delta.raw):.{digits}f}",
        f"{best.word:.2f} → {printed.if_all_counted(table, best.raw):.{digits}f} ({printed.k_equals(k)})",
    ]  # fmt: skip


def _notes(wiki: printed.Sweep, books: printed.Sweep) -> list[str]:
    last = wiki.rows[-1].filters[200]
    words, with_ends = (printed.if_all_counted(wiki, last.raw, line_ends=ends) for ends in (False, True))
    return [
        "* outside what the printed digits allow. The control at L = 5, 9, 13, 17: its per-word values fall in equal "
        "steps (-0.34 in A1, -1.07 in A2), and its ratios do not follow the row's. A2, L = 21, k = 100: would fit "
        "with 97.87 for 96.87; it is not in its row's mean. A1, L = 9, k = 150 and A2, L = 41, k = 200: by a hair.",
        f"Left out: of {wiki.tokens[0]:,} tokens on WikiText-103 (counted) and {books.tokens[0]:,} on PG-19 (inferred: "
        f"any number up to {books.tokens[1]:,} gives the same ratios). Words: {wiki.words:,} and {books.words:,}.",
        "Word → all: the per-word figure as printed, and e^(ln(raw) · tokens/words), what it would be with every token "
        "counted if those left out are like the rest. An inference from the printed tables, not a measurement: "
        f"{last.word:.2f} would read {words:.2f} on {wiki.words:,} words, and {with_ends:.2f} on "
        f"{wiki.words + (wiki.lines or 0):,} words and line ends, Transformer-XL's basis. In the raw column, memory "
        "against control within a row of L above 21 is not touched by it.",
    ]
