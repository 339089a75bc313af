"""`logpast paper results-figure`: the paper's results as it prints them, and under them ours."""

from __future__ import annotations

import statistics
from pathlib import Path
from textwrap import fill
from typing import Any

from logpast.filters import paper_horizon
from logpast.ledger.row import RESULTS
from logpast.paper import printed
from logpast.paper.measured import Measure, Series, abouts, mark, measured
from logpast.reporting.plots import check_plot_path, write_plot
from logpast.util.validation import validate_arguments

UNITS: dict[Measure, str] = {"ppl_token": "token", "ppl_word": "word", "ppl_familiar": "token, familiar documents"}
COLOURS = {"delta": "0.4", "k = 100": "tab:blue", "k = 150": "tab:orange", "k = 200": "tab:green"}


@validate_arguments
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
    check_plot_path(out)
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
    write_plot(figure, out)
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
        axis.plot(across, up, "o-", color=COLOURS[printed.k_equals(k)], markersize=4, label=printed.k_equals(k))
    return f"as printed, {table.title.partition(',')[0]}"


def _draw_measured(axis: Any, series: list[Series], measure: Measure) -> str:
    """A point a seed, white where there is one alone, a line through the means; where nothing was measured, that."""
    if not any(one.values(slots, measure) for one in series for slots in one.points):
        why = "no row tells of familiar documents" if series else "not measured yet"
        axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center", color="0.4")
        axis.set_yticks([])
        return "ours"
    notes, drawn = abouts(series), list[str]()
    for one in series:
        places = [slots for slots in sorted(one.points) if one.values(slots, measure)]
        means = [statistics.mean(one.values(slots, measure)) for slots in places]
        again = drawn.count(one.kind)
        style = ("s^vDP"[again % 5] + "--") if one.kind == "delta" else ("o^vDP"[again % 5] + "-")
        label = fill(one.name + (f" {mark(one, series)}" if len(notes) > 1 else ""), 40)
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
    remarks = [f"only {each} documents, the familiar ones" for each in dict.fromkeys(one.familiar for one in apart)]
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
