"""`logpast paper results-figure`: perplexity against L, the paper's and ours."""

from __future__ import annotations

import statistics
from pathlib import Path
from textwrap import fill
from typing import Any

from logpast.filters import paper_horizon
from logpast.paper import printed
from logpast.paper.measured import Measure, Series, footnotes, measured
from logpast.reporting import palette
from logpast.reporting.plots import check_plot_path, write_plot
from logpast.util.validation import validate_arguments

UNITS: dict[Measure, str] = {
    "ppl_token": "token",
    "ppl_word": "word",
    "ppl_in_vocabulary": "token, in-vocabulary documents",
}
SYSTEMS = ("delta", *map(printed.filter_name, printed.SHARPNESSES))
COLOURS = dict(zip(SYSTEMS, (palette.NEUTRAL, *palette.SERIES), strict=False))
TITLE_WIDTH, LEGEND_WIDTH = 78, 40  # characters per line


@validate_arguments
def results_figure(
    out: Path = Path("results-figure.png"),
    measure: Measure = "ppl_token",
    results: Path | None = None,
    where: list[str] | None = None,
) -> Path:
    """Plot the paper's results, perplexity against L on both corpora, and ours below them if there are any.

    The top axis is τ*max, the reach of the filters. Our runs are smaller and trained on other text, so they have
    panels of their own that say what they were trained on.

    Examples:
        logpast paper results-figure
        logpast paper results-figure --measure ppl_word --out docs/results.svg
        logpast paper results-figure file=sweep-small

    Args:
        out: the plot to write: .png, .svg or .pdf. An existing file is replaced.
        measure: ppl_token: the paper's raw perplexity. ppl_word: its per-word perplexity, as printed (`logpast paper
            accounting` shows what it appears to count); ours counts every token. ppl_in_vocabulary: ppl_token, ours
            only over documents in which at most 1 % of the tokens never occur in the training text.
        results: folder of the ledger; by default results/, or, where there is none, what `logpast results` finds.
        where: NAME=VALUE conditions that our rows must meet, as for `logpast results`.

    Returns:
        The path of the plot.
    """
    check_plot_path(out)
    sweeps = [printed.sweep("A1"), printed.sweep("A2")]
    ours = [measured(sweep, results, where) for sweep in sweeps]
    from matplotlib.figure import Figure

    rows = 2 if any(ours) else 1
    figure = Figure(figsize=(12, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    for column, (sweep, series) in enumerate(zip(sweeps, ours, strict=True)):
        _plot_printed(axes[0, column], sweep, measure)
        _label(axes[0, column], f"{'AB'[column]}. as printed, {sweep.title.partition(',')[0]}", _printed_as(measure))
        if rows == 2:
            title = _plot_measured(axes[1, column], series, measure)
            known = measure != "ppl_in_vocabulary" or any(one.documents.has_both_kinds for one in series)
            _label(axes[1, column], f"{'CD'[column]}. {title}", measure if known else "ppl_token")
    write_plot(figure, out)
    if not any(ours):
        print(f"no row of {results} belongs to these tables yet: only the printed values are plotted")
    print(f"wrote {out}")
    return out


def _printed_as(measure: Measure) -> Measure:
    """The paper has no numbers for in-vocabulary documents: its raw ones are plotted."""
    return "ppl_token" if measure == "ppl_in_vocabulary" else measure


def _plot_printed(axis: Any, sweep: printed.Sweep, measure: Measure) -> None:
    column = {"ppl_token": 0, "ppl_word": 1}[_printed_as(measure)]
    slots = [row.slots for row in sweep.rows]
    delta = [row.delta[column] for row in sweep.rows]
    axis.plot(slots, delta, "s--", color=COLOURS["delta"], markersize=4, label="delta")
    for k in printed.SHARPNESSES:
        name, values = printed.filter_name(k), [row.filters[k][column] for row in sweep.rows]
        axis.plot(slots, values, "o-", color=COLOURS[name], markersize=4, label=name)


def _plot_measured(axis: Any, all_series: list[Series], measure: Measure) -> str:
    """A line through the means and a small point per seed, white for a single seed. Returns the panel's title."""
    if not any(series.values(slots, measure) for series in all_series for slots in series.scores):
        reason = "no row has scores of in-vocabulary documents" if all_series else "not measured yet"
        axis.text(0.5, 0.5, reason, transform=axis.transAxes, ha="center", color=palette.NEUTRAL)
        axis.set_yticks([])
        return "ours"
    marks, plotted = footnotes(all_series), list[str]()
    for series in all_series:
        repeat = plotted.count(series.system)  # further series of a system are paler, with another marker
        plotted.append(series.system)
        mark = f" {marks[series.description]}" if len(marks) > 1 else ""
        style = ("s^vDP"[repeat % 5] + "--") if series.system == "delta" else ("o^vDP"[repeat % 5] + "-")
        look = {"color": COLOURS.get(series.system), "alpha": 0.5 if repeat else 1.0, "markersize": 6 if repeat else 4}
        points = {slots: values for slots in sorted(series.scores) if (values := series.values(slots, measure))}
        means = list(map(statistics.mean, points.values()))
        (line,) = axis.plot(list(points), means, style, label=fill(series.name + mark, LEGEND_WIDTH), **look)
        for slots, values in points.items():
            colour = line.get_color() if len(values) > 1 else palette.PAPER
            for value in values:
                axis.plot(slots, value, "o", color=colour, markersize=2.5)
    if len(marks) > 1:
        lines = ["ours, smaller scale", *(f"{mark} {description}" for description, mark in marks.items())]
    else:
        lines = [f"ours, smaller scale: {all_series[0].description}"]
    return "\n".join([*lines, *_remarks(all_series, measure)])


def _remarks(all_series: list[Series], measure: Measure) -> list[str]:
    """Which documents a panel of ours covers, and what its small points are."""
    remarks = []
    if measure == "ppl_in_vocabulary" and any(one.documents.has_both_kinds for one in all_series):
        counts = dict.fromkeys(one.in_vocabulary_count for one in all_series)
        remarks.append(f"in-vocabulary documents only: {', '.join(counts)}")
    runs = [(len(seeds), one.values(slots, measure)) for one in all_series for slots, seeds in one.scores.items()]
    if missing := sum(number - len(values) for number, values in runs):
        remarks.append(
            f"not plotted: {missing} of {sum(number for number, _ in runs)} runs, whose rows lack this score"
        )
    seeds = {len(seeds) for one in all_series for seeds in one.scores.values()}
    if max(seeds) > 1:
        remarks.append("small points: single seeds")
    if 1 in seeds:
        remarks.append("white: only one seed")
    return ["; ".join(remarks)] if remarks else []


def _label(axis: Any, title: str, measure: Measure) -> None:
    """L on the bottom axis, τ*max on the top one."""
    slots = [row.slots for row in printed.sweep("A1").rows]
    axis.set(xlabel="number of filters L", ylabel=f"test perplexity per {UNITS[measure]}", xlim=(3, 55))
    axis.set_title("\n".join(fill(line, TITLE_WIDTH) for line in title.split("\n")), loc="left", fontsize=9)
    if axis.lines:
        labels = axis.get_legend_handles_labels()[1]
        axis.legend(frameon=False, fontsize=8, ncols=2 if len(labels) > 4 else 1)  # a tall legend would hide curves
    axis.set_xticks(slots)
    top = axis.secondary_xaxis("top")
    top.set_xticks(slots, [f"{paper_horizon(each):,}" for each in slots], fontsize=7)
    top.set_xlabel(r"$\tau^*_{\max}$ (tokens)", fontsize=8)
    axis.spines["right"].set_visible(False)
