"""`logpast paper table1`, `tableA1`, `tableA2`: the paper's tables as printed, and ours next to them.

The printed numbers are in paper.yaml, ours in the ledger. Our runs are smaller and trained on other text; the tables
say so.
"""

from __future__ import annotations

from pathlib import Path

from logpast.ledger.row import RESULTS
from logpast.paper import printed
from logpast.paper.measured import measured
from logpast.paper.ours import only_ours, printed_and_ours
from logpast.reporting.tables import Table, as_text, check_table_path, print_and_write, write
from logpast.util.validation import validate_arguments


@validate_arguments
def table1(out: Path | None = None) -> Table:
    """Print the paper's Table 1, also with all numbers on one basis: every token counted, per word and line end.

    Examples:
        logpast paper table1
        logpast paper table1 --out table1.md

    Args:
        out: also write the table to this file: .md, .csv or .json. An existing file is replaced.

    Returns:
        The table.
    """
    check_table_path(out, RESULTS)
    table, sweep = printed.load()["table1"], printed.sweep("A1")
    raw = {(row.slots, k): cell.raw for row in sweep.rows for k, cell in [("delta", row.delta), *row.filters.items()]}
    rows = []
    for row in table["rows"]:
        same_basis = f"{row['ppl_word']:.2f}"
        if "cell" in row:
            cell = raw[tuple(row["cell"])]
            same_basis = f"{printed.ppl_word_of_all_tokens(sweep, cell, line_ends=True):.2f} †"
        rows.append(
            [row["model"], f"{row['parameters']}M", str(row["attention"]), f"{row['ppl_word']:.2f}", same_basis]
        )
    notes = [
        f"Last column: per word and line end, {sweep.words + (sweep.lines or 0):,} in all, the basis of the three "
        "cited systems, whose numbers are as printed.",
        "† inferred from the printed raw perplexity, if the tokens that appear to be left out of the sum are like the "
        "rest; see `logpast paper accounting`. The cited systems were scored on text with <unk>, so their numbers are "
        "not directly comparable.",
    ]
    heads = ["model", "parameters", "attention", "per-word PPL", "on one basis"]
    return print_and_write(Table(heads, rows, table["title"], notes), out)


@validate_arguments
def table_a1(out: Path | None = None, results: Path | None = None, where: list[str] | None = None) -> Table:
    """Print the paper's Table A1, WikiText-103 by L and k, and our results for the same cells if there are any.

    Examples:
        logpast paper tableA1
        logpast paper tableA1 --out tableA1.csv

    Args:
        out: also write the table to this file: .md, .csv or .json. An existing file is replaced.
        results: folder of the ledger; by default results/, or, where there is none, what `logpast results` finds.
        where: NAME=VALUE conditions that our rows must meet, as for `logpast results`.

    Returns:
        The table.
    """
    return _print_sweep("A1", out, results, where)


@validate_arguments
def table_a2(out: Path | None = None, results: Path | None = None, where: list[str] | None = None) -> Table:
    """Print the paper's Table A2, PG-19 by L and k, and our results for the same cells if there are any.

    Examples:
        logpast paper tableA2
        logpast paper tableA2 --out tableA2.json

    Args:
        out: also write the table to this file: .md, .csv or .json. An existing file is replaced.
        results: folder of the ledger; by default results/, or, where there is none, what `logpast results` finds.
        where: NAME=VALUE conditions that our rows must meet, as for `logpast results`.

    Returns:
        The table.
    """
    return _print_sweep("A2", out, results, where)


def _print_sweep(name: str, out: Path | None, results: Path | None, where: list[str] | None) -> Table:
    """Print the table as in the paper, then our cells next to the printed ones. A file gets all cells in one table."""
    check_table_path(out, results or RESULTS, RESULTS)
    sweep = printed.sweep(name)
    series = measured(sweep, results, where)
    heads = ["L", "delta", "τ*max", *map(printed.filter_name, printed.SHARPNESSES)]
    rows = [[str(row.slots), str(row.delta), f"{row.window:,}", *map(str, row.filters.values())] for row in sweep.rows]
    print(as_text(Table(heads, rows, sweep.title)))
    table = printed_and_ours(sweep, series)
    if series:
        title = "Ours, at a smaller scale and with every token counted, next to the printed:"
        print("\n" + as_text(only_ours(table)._replace(title=title)))
    else:
        print(f"no row of {results or RESULTS} belongs to this table yet: only the printed values are shown")
    if out is not None:
        write(table, out)
    return table
