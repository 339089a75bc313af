"""`logpast paper`: the paper's figures and tables drawn anew, and its numbers beside ours.

What it prints is in paper.yaml; what we measured is in the ledger. Ours are runs of a smaller scale on other training
text, and say so wherever they stand.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from textwrap import fill
from typing import Any

from logpast.experiments import figures, printed
from logpast.experiments.by_document import UNSEEN, against, spread
from logpast.experiments.measured import RESULTS, Measure, Series, k_equals, measured
from logpast.experiments.pictures import check_picture, write_picture
from logpast.experiments.tables import Table, aligned, check_form, give, write
from logpast.filters import paper_horizon
from logpast.typed import typed

UNITS: dict[Measure, str] = {"ppl_token": "token", "ppl_word": "word", "ppl_familiar": "token, familiar documents"}
HEADS = ("L", "τ*max", "system", "printed", "printed − delta",
         "ours", "ours − delta", "ours, familiar", "ours − delta, familiar", "tokens seen", "state KiB")  # fmt: skip
COLOURS = {"delta": "0.4", "k = 100": "tab:blue", "k = 150": "tab:orange", "k = 200": "tab:green"}


@typed
def fig1(out: Path = Path("fig1.png")) -> Path:
    """Draw the paper's Figure 1: ten filters with k = 50 over time and log time, and the memory that they hold.

    Examples:
        logpast paper fig1
        logpast paper fig1 --out docs/fig1.svg

    Args:
        out: the picture to write; .png, .svg and .pdf are known. An existing one is replaced.

    Returns:
        Where the picture is.
    """
    return figures.draw_rows(out, [50.0])


@typed
def fig_a1(out: Path = Path("figA1.png")) -> Path:
    """Draw the paper's Figure A1: as Figure 1, with wider filters (k = 10) and narrower ones (k = 100).

    Examples:
        logpast paper figA1
        logpast paper figA1 --out docs/figA1.pdf

    Args:
        out: the picture to write; .png, .svg and .pdf are known. An existing one is replaced.

    Returns:
        Where the picture is.
    """
    return figures.draw_rows(out, [10.0, 100.0], first_panel=3)


@typed
def results_figure(
    out: Path = Path("results-figure.png"),
    measure: Measure = "ppl_token",
    results: Path = RESULTS,
    where: list[str] | None = None,
) -> Path:
    """Draw the paper's results, perplexity against L on both corpora, and under them ours, where there are any.

    The top axis is τ*max, how far the filters reach. Ours are runs of a smaller scale on other training text: they
    stand in panels of their own, and what they were trained on stands with them.

    Examples:
        logpast paper results-figure
        logpast paper results-figure --measure ppl_word --out docs/results.svg
        logpast paper results-figure file=sweep-small

    Args:
        out: the picture to write; .png, .svg and .pdf are known. An existing one is replaced.
        measure: ppl_token, the paper's raw perplexity, or ppl_word, its per-word one, as printed; see `paper
            accounting` for what the latter appears to count. Ours count every token. ppl_familiar is ppl_token; of
            ours, without documents of which more than 1 % of tokens never stand in the training text.
        results: folder of the ledger.
        where: NAME=VALUE, as many as wanted: of ours only rows of which all hold, as for `logpast results`.

    Returns:
        Where the picture is.
    """
    check_picture(out)
    tables = [printed.sweep("A1"), printed.sweep("A2")]
    ours = [measured(table, results, where) for table in tables]
    from matplotlib.figure import Figure

    rows = 2 if any(ours) else 1
    figure = Figure(figsize=(12, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    for column, (table, series) in enumerate(zip(tables, ours, strict=True)):
        title = _draw_printed(axes[0, column], table, measure)
        _dress(axes[0, column], f"{'AB'[column]}. {title}", "ppl_token" if measure == "ppl_familiar" else measure)
        if rows == 2:
            told = measure != "ppl_familiar" or any(one.documents.tell_apart for one in series)
            title = _draw_measured(axes[1, column], series, measure)
            _dress(axes[1, column], f"{'CD'[column]}. {title}", measure if told else "ppl_token")
    write_picture(figure, out)
    if not any(ours):
        print(f"no row of {results} belongs beside these tables yet: the printed values alone are drawn")
    print(f"wrote {out}")
    return out


def _draw_printed(axis: Any, table: printed.Sweep, measure: Measure) -> str:
    place = 1 if measure == "ppl_word" else 0
    across = [row.slots for row in table.rows]
    axis.plot(across, [row.delta[place] for row in table.rows], "s--", color="0.4", markersize=4, label="delta")
    for k in printed.SHARPNESSES:
        up = [row.filters[k][place] for row in table.rows]
        axis.plot(across, up, "o-", color=COLOURS[k_equals(k)], markersize=4, label=k_equals(k))
    return f"as printed, {table.title.partition(',')[0]}"


def _draw_measured(axis: Any, series: list[Series], measure: Measure) -> str:
    """A point a seed, white where there is one alone, a line through the means; where nothing was measured, that."""
    if not any(one.values(slots, measure) for one in series for slots in one.points):
        why = "no row tells of familiar documents" if series else "not measured yet"
        axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center", color="0.4")
        axis.set_yticks([])
        return "ours"
    notes, drawn = _abouts(series), list[str]()
    for one in series:
        places = [slots for slots in sorted(one.points) if one.values(slots, measure)]
        means = [statistics.mean(one.values(slots, measure)) for slots in places]
        again = drawn.count(one.kind)
        style = ("s^vDP"[again % 5] + "--") if one.kind == "delta" else ("o^vDP"[again % 5] + "-")
        label = fill(one.name + (f" {_mark(one, series)}" if len(notes) > 1 else ""), 40)
        look = {"color": COLOURS.get(one.kind), "alpha": 0.5 if again else 1.0, "markersize": 6 if again else 4}
        (line,) = axis.plot(places, means, style, label=label, **look)
        drawn.append(one.kind)
        for slots in places:
            values = one.values(slots, measure)
            for value in values:
                axis.plot(slots, value, "o", color=line.get_color() if len(values) > 1 else "white", markersize=2.5)
    lines = ["ours, smaller scale", *notes] if len(notes) > 1 else [f"ours, smaller scale: {series[0].about}"]
    return "\n".join([*lines, *_remarks(series, measure)])


def _remarks(series: list[Series], measure: Measure) -> list[str]:
    """What else must be known to read our panel: which documents are in it, and what its small points are."""
    apart = [one for one in series if one.documents.tell_apart and measure == "ppl_familiar"]
    remarks = [f"only {each} documents, the familiar ones" for each in dict.fromkeys(_familiar(one) for one in apart)]
    if any(len(seeds) > 1 for one in series for seeds in one.points.values()):
        remarks.append("small points: single seeds")
    if any(len(seeds) == 1 for one in series for seeds in one.points.values()):
        remarks.append("white: one seed alone")
    return ["; ".join(remarks)] if remarks else []


def _dress(axis: Any, title: str, measure: Measure) -> None:
    """L along the bottom, τ*max of each along the top."""
    places = [row.slots for row in printed.sweep("A1").rows]
    axis.set(xlabel="number of filters L", ylabel=f"test perplexity per {UNITS[measure]}", xlim=(3, 55))
    axis.set_title("\n".join(fill(line, 78) for line in title.split("\n")), loc="left", fontsize=9)
    if axis.lines:
        shown = axis.get_legend_handles_labels()[1]
        axis.legend(frameon=False, fontsize=8, ncols=2 if len(shown) > 4 else 1)  # low, so as not to lie over curves
    axis.set_xticks(places)
    top = axis.secondary_xaxis("top")
    top.set_xticks(places, [f"{paper_horizon(slots):,}" for slots in places], fontsize=7)
    top.set_xlabel(r"$\tau^*_{\max}$ (tokens)", fontsize=8)
    axis.spines["right"].set_visible(False)


@typed
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
    check_form(out, RESULTS)
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
    return give(Table(heads, rows, page["title"], notes), out)


@typed
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


@typed
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
    check_form(out, results, RESULTS)
    table = printed.sweep(name)
    series = measured(table, results, where)
    heads = ["L", "delta", "τ*max", *map(k_equals, printed.SHARPNESSES)]
    rows = [
        [str(row.slots), _pair(row.delta), f"{row.window:,}", *map(_pair, row.filters.values())] for row in table.rows
    ]
    print(aligned(Table(heads, rows, table.title)))
    found = _beside(table, series)
    if series:
        title = "Ours, at a smaller scale, every token counted, beside the printed:"
        print("\n" + aligned(_of_ours(found)._replace(title=title)))
    if out is not None:
        write(found, out)
    return found


def ours(name: str, results: Path) -> Table | None:
    """What we measured beside Table A1 or A2: a row an L and system; None where there is nothing."""
    table = printed.sweep(name)
    series = measured(table, results)
    return _of_ours(_beside(table, series)) if series else None


def _of_ours(table: Table) -> Table:
    """Its rows that have a figure of ours."""
    place = table.heads.index("ours")
    return table._replace(rows=[row for row in table.rows if row[place]])


def _beside(table: printed.Sweep, series: list[Series]) -> Table:
    """A row an L and system that is printed, or that we measured: the paper's figures, and ours."""
    lines = []
    for row in table.rows:
        cells = {"delta": row.delta} | {k_equals(k): cell for k, cell in row.filters.items()}
        measured_here = [one for one in series if row.slots in one.points]
        for kind in dict.fromkeys([*cells, *(one.kind for one in measured_here)]):
            runs: list[Series | None] = [one for one in measured_here if one.kind == kind]
            for one in runs or [None]:
                line = {"L": str(row.slots), "τ*max": f"{row.window:,}", "system": kind, **_as_printed(cells, kind)}
                lines.append(line | (_as_measured(one, series, row.slots) if one else {}))
    heads = [head for head in HEADS if any(line.get(head) for line in lines)]
    notes = _our_notes(series, heads)
    return Table(heads, [[line.get(head, "") for head in heads] for line in lines], table.title, notes)


def _as_printed(cells: dict[str, printed.Cell], name: str) -> dict[str, str]:
    if name not in cells:
        return {}
    gain = "" if name == "delta" else f"{math.log(cells[name].raw / cells['delta'].raw):+.3f}"
    return {"printed": _pair(cells[name]), "printed − delta": gain}


def _as_measured(one: Series, series: list[Series], slots: int) -> dict[str, str]:
    seeds = len(one.points[slots])
    means = f"{_means(one, slots, 'ppl_token')}/{_means(one, slots, 'ppl_word')}"
    found = {
        "system": f"{one.name}{_mark(one, series)}",
        "ours": means + (f" ({seeds} seeds)" if seeds > 1 else ""),
        "tokens seen": "–".join(dict.fromkeys(f"{each / 1e6:,.1f}M" for each in _extremes(one, slots))),
    }
    if one.documents.tell_apart:
        found["ours, familiar"] = _means(one, slots, "ppl_familiar")
    if slots in one.states:
        found["state KiB"] = f"{one.states[slots] / 2**10:,.0f}"
    for control in series:
        if control.is_control_of(one) and slots in control.points:
            both = one.points[slots], control.points[slots], one.documents
            found["ours − delta"] = against(*both)
            if one.documents.tell_apart:
                found["ours − delta, familiar"] = against(*both, familiar=True)
    return found


def _extremes(one: Series, slots: int) -> tuple[int, int]:
    """The fewest and the most tokens that a seed's weights have seen."""
    seen = [scores["seen"] for scores in one.points[slots].values()]
    return min(seen), max(seen)


def _our_notes(series: list[Series], heads: list[str]) -> list[str]:
    notes = [
        *_abouts(series),
        f"{'printed, ours' if series else 'printed'}: perplexity per token/per word; − delta: nats per token against "
        "the control of the same L, below 0 where the memory is better",
    ]
    if any(len(seeds) > 1 for one in series for seeds in one.points.values()):
        notes.append("±: standard deviation over seeds")
    if "ours − delta" in heads:
        notes.append(
            "ours − delta: between runs of the same seed; in brackets, 95 % over documents: of these runs, it says "
            "nothing of other seeds"
        )
    if any(one.documents.tell_apart for one in series):
        notes.append(
            "familiar: per token, over the documents with at most "
            f"{100 * UNSEEN:g} % of tokens that the training text never has ("
            + ", ".join(
                dict.fromkeys(_familiar(one) + _mark(one, series) for one in series if one.documents.tell_apart)
            )
            + ")"
        )
    if series:
        notes.append(
            "tokens seen: by the weights that were scored, those of the training that did best on validation text"
        )
    if any(one.states for one in series):
        notes.append("state: what must be kept of a stream to go on with it, in float32")
    return notes


def _familiar(one: Series) -> str:
    of = one.documents
    return f"{of.familiar.sum()} of {len(of.tokens)}"


def _abouts(series: list[Series]) -> list[str]:
    """What each kind of runs was trained and scored on, as notes."""
    kinds = dict.fromkeys(one.about for one in series)
    raised = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    return [f"{str(number).translate(raised)} {about}" for number, about in enumerate(kinds, 1)]


def _mark(one: Series, series: list[Series]) -> str:
    """The sign of the note that tells of it."""
    notes = (note.partition(" ") for note in _abouts(series))
    return next(mark for mark, _, about in notes if about == one.about)


def _pair(cell: printed.Cell) -> str:
    return f"{cell.raw:.2f}/{cell.word:.2f}"


def _means(series: Series, slots: int, measure: Measure) -> str:
    """Over seeds, if all rows tell it."""
    found = series.values(slots, measure)
    return spread(found, 2) if len(found) == len(series.points[slots]) else "?"
