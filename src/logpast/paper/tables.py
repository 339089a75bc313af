"""`logpast paper`: the paper's tables as it prints them, and ours beside.

What it prints is in paper.yaml; what we measured is in the ledger. Ours are runs of a smaller scale on other training
text, and say so wherever they stand.
"""

from __future__ import annotations

from pathlib import Path

from logpast.ledger.row import RESULTS
from logpast.paper import printed
from logpast.paper.measured import measured
from logpast.paper.ours import beside, of_ours
from logpast.reporting.tables import Table, as_text, check_table_path, print_and_write, write
from logpast.util.validation import validate_arguments


@validate_arguments
def table1(out: Path | None = None) -> Table:
    """Print the paper's Table 1, and the same figures on one basis: every token, words and line ends counted.

    Examples:
        logpast paper table1
        logpast paper table1 --out table1.md

    Args:
        out: write it to this file too: .md, .csv or .json. An existing one is replaced.

    Returns:
        The table.
    """
    check_table_path(out, RESULTS)
    page, sweep = printed.page()["table1"], printed.sweep("A1")
    raw = {(row.slots, k): cell.raw for row in sweep.rows for k, cell in [("delta", row.delta), *row.filters.items()]}
    rows = []
    for row in page["rows"]:
        basis = printed.if_all_counted(sweep, raw[tuple(row["cell"])], line_ends=True) if "cell" in row else None
        rows.append([
            row["model"], f"{row['parameters']}M", str(row["attention"]), f"{row['ppl_word']:.2f}",
            f"{row['ppl_word'] if basis is None else basis:.2f}" + ("" if basis is None else " †"),
        ])  # fmt: skip
    words = sweep.words + (sweep.lines or 0)
    notes = [
        f"Last column: per word and line end, {words:,} of them, the basis of the three cited systems, as printed.",
        "† an inference: from the printed raw perplexity, if the tokens that appear to be left out of the sum are like "
        "the rest; see `logpast paper accounting`. The cited systems read text with <unk>: beside, not against.",
    ]
    heads = ["model", "parameters", "attention", "per-word PPL", "on one basis"]
    return print_and_write(Table(heads, rows, page["title"], notes), out)


@validate_arguments
def table_a1(out: Path | None = None, results: Path = RESULTS, where: list[str] | None = None) -> Table:
    """Print the paper's Table A1, WikiText-103 by L and k, and what we measured beside it, where there is any.

    Examples:
        logpast paper tableA1
        logpast paper tableA1 --out tableA1.csv

    Args:
        out: write it to this file too: .md, .csv or .json. An existing one is replaced.
        results: folder of the ledger.
        where: NAME=VALUE, as many as wanted: of ours only rows of which all hold, as for `logpast results`.

    Returns:
        The table.
    """
    return _give_sweep("A1", out, results, where)


@validate_arguments
def table_a2(out: Path | None = None, results: Path = RESULTS, where: list[str] | None = None) -> Table:
    """Print the paper's Table A2, PG-19 by L and k, and what we measured beside it, where there is any.

    Examples:
        logpast paper tableA2
        logpast paper tableA2 --out tableA2.json

    Args:
        out: write it to this file too: .md, .csv or .json. An existing one is replaced.
        results: folder of the ledger.
        where: NAME=VALUE, as many as wanted: of ours only rows of which all hold, as for `logpast results`.

    Returns:
        The table.
    """
    return _give_sweep("A2", out, results, where)


def _give_sweep(name: str, out: Path | None, results: Path, where: list[str] | None) -> Table:
    """As printed, and below it what we measured, each beside the printed figure; in a file, all cells in one table."""
    check_table_path(out, results, RESULTS)
    table = printed.sweep(name)
    series = measured(table, results, where)
    heads = ["L", "delta", "τ*max", *map(printed.k_equals, printed.SHARPNESSES)]
    rows = [[str(row.slots), str(row.delta), f"{row.window:,}", *map(str, row.filters.values())] for row in table.rows]
    print(as_text(Table(heads, rows, table.title)))
    found = beside(table, series)
    if series:
        title = "Ours, at a smaller scale, every token counted, beside the printed:"
        print("\n" + as_text(of_ours(found)._replace(title=title)))
    else:
        print(f"no row of {results} belongs beside this table yet: the printed values alone are given")
    if out is not None:
        write(found, out)
    return found
