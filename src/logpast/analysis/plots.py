"""The plots of the analysis page, each drawn from one part of analysis.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.analysis.labels import difference, span, spans
from logpast.reporting import palette
from logpast.reporting.plots import remove_frame

Part = dict[str, Any]

LINEAR = 0.01  # nats up to which the axis of increases is linear; it is logarithmic above
RARE = 0.001  # bins with a smaller share of the tokens are not drawn: their intervals would dwarf the others
DIFFERENCE = "model − control, nats per token\n(below 0: lower loss)"
COLOURS = {"model": palette.MEMORY, "control": palette.CONTROL}
#: how the past is changed beyond a lag -> label, colour and marker
CHANGES = {
    "cut": ("cut off beyond lag d", palette.CUT, "o"),
    "replaced": ("replaced beyond lag d", palette.REPLACED, "^"),
    "shuffled": ("shuffled beyond lag d", palette.SHUFFLED, "s"),
}


def position_plot(part: Part) -> Any:
    """Loss by position in the window, and the difference from the control if there is one."""
    each, binned = part["each"], part["binned"]
    seen = range(1, len(each["tokens"]) + 1)
    figure, left, right = _panels("gain" in each)
    middles = [math.sqrt((first + 1) * (last + 1)) for first, last in spans(binned)]
    for name in COLOURS:
        if name in each:  # single positions are noisy where there are many: the line connects the bins
            left.plot(seen, each[name]["nats"], ".", color=COLOURS[name], alpha=0.35, markersize=3)
            _curve(left, middles, binned[name]["nats"], binned[name]["interval"], name, COLOURS[name], "o")
    label = "tokens of the window in view (position + 1)"
    left.set(xscale="log", xlabel=label, ylabel="nats per token")
    _powers_of_two(left, seen[-1])
    left.legend(frameon=False)
    if right:
        _bars(right, [span(a + 1, b + 1) for a, b in spans(binned)], difference(binned["gain"]), shares(binned))
        right.set(xlabel=label, ylabel=DIFFERENCE)
    return figure


def frequency_plot(part: Part) -> Any:
    """Loss by how often a token occurs, and the difference from the control if there is one."""
    figure, left, right = _panels("gain" in part)
    shown = [i for i, share in enumerate(shares(part)) if share >= RARE]
    labels = [span(part["from"][i], part["to"][i]) for i in shown]
    for name in COLOURS:
        if name in part:
            column = _select(part[name], shown)
            _curve(left, range(len(labels)), column["nats"], column["interval"], name, COLOURS[name], "o")
    _ticks(left, labels)
    left.set(xlabel="occurrences of the token", ylabel="nats per token")
    left.legend(frameon=False)
    if right:
        _bars(right, labels, _select(difference(part["gain"]), shown), [shares(part)[i] for i in shown])
        right.set(xlabel="occurrences of the token", ylabel=DIFFERENCE)
    return figure


def last_seen_plot(part: Part, histories: dict[str, int]) -> Any:
    """By how far before the window a token last occurred, the difference from the control, or the loss without one.

    Marks where each history ends.
    """
    lags = part["by_lag"]
    column, what = (difference(lags["gain"]), DIFFERENCE) if "gain" in lags else (lags["model"], "nats per token")
    figure, axis, _ = _panels(False)
    order = _bars_by_lag(axis, lags, column)
    axis.set(xlabel="how far before the window the token last occurred (lag)", ylabel=what)
    for height, (name, history) in enumerate(histories.items()):
        for place, i in enumerate(order):
            if 0 < lags["from"][i] <= history <= lags["to"][i]:
                along = place - 0.5 + math.log2((history + 1) / lags["from"][i])
                _mark(axis, along, f"end of the {name}'s history", height)
    return figure


def recall_gain_plot(part: Part) -> Any:
    """The loss with recall compared with the loss without it, by position and by last occurrence of the token."""
    figure, left, right = _panels(True)
    position, lags = part["position"], part["by_lag"]
    labels = [span(a + 1, b + 1) for a, b in spans(position)]
    _bars(left, labels, difference(position["gain"]), shares(position))
    left.set(xlabel="tokens of the window in view (position + 1)",
             ylabel="with − without recall, nats per token\n(below 0: lower loss)")  # fmt: skip
    _bars_by_lag(right, lags, difference(lags["gain"]))
    right.set(xlabel="how far before the window the token last occurred (lag)")
    return figure


def recall_plot(part: Part) -> Any:
    """Mean weight of recall's components, their share of the targets' probability, and calibration of all together."""
    components, gate = part["components"], part["gate"]["calibration"]
    figure, axes = _axes(3)
    lags = [span(*edges) for edges in spans(components["by_lag"])]
    for axis, name, title in (
        (axes[0], "weight", "mean weight"),
        (axes[1], "share", "share of the target's probability"),
    ):
        _heat_map(axis, components[name], lags, [str(order) for order in components["by_order"]["order"]])
        axis.set(xlabel="lag of the match (tokens)", ylabel="length of the match (tokens)", title=title)
    axes[2].plot([0, 1], [0, 1], color=palette.AXIS, linewidth=0.8)
    _curve(axes[2], gate["weight"], gate["share"], gate["interval"], "copies", palette.MEMORY, "o")
    for *place, share in zip(gate["weight"], gate["share"], shares(gate), strict=True):
        axes[2].annotate(f"{share:.0%}", place, (4, -9), textcoords="offset points", fontsize=7, color=palette.NEUTRAL)
    axes[2].set(xlabel="weight of all copies", ylabel="share of the target's probability", title="calibration",
                xlim=(0, 1.05), ylim=(0, 1.05))  # fmt: skip
    return figure


def slots_plot(part: Part) -> Any:
    """The increase of the loss when one slot is zero, by the lag at which the slot peaks."""
    figure, axis, _ = _panels(False)
    errors = _errors(part["increase"], part["interval"])
    axis.errorbar(part["lag"], part["increase"], errors, fmt="o", color=palette.MEMORY, markersize=4, linewidth=1)
    axis.axhline(0, color=palette.AXIS, linewidth=0.8)
    axis.set(xscale="log", xlabel="lag at which the slot peaks (tokens)", ylabel="increase, nats per token")
    _powers_of_two(axis, part["lag"][-1])
    return figure


def lags_plot(part: Part) -> Any:
    """The increase of the loss when the past beyond a lag is changed."""
    figure, axis, _ = _panels(False)
    changes = {way: part[way] for way in CHANGES if way in part}
    places = [max(lag, 0.5) for lag in part["lag"]]  # lag 0 is drawn at one half
    for way, curve in changes.items():
        _curve(axis, places, curve["increase"], curve["interval"], *CHANGES[way])
    axis.axhline(0, color=palette.AXIS, linewidth=0.8)
    axis.set(xscale="log", xlabel="lag d (tokens before the window)", ylabel="increase, nats per token")
    _powers_of_two(axis, part["lag"][-1], zero_at=0.5)
    heights = [height for curve in changes.values() for height in curve["increase"]]
    heights += [end for curve in changes.values() for interval in curve["interval"] if interval for end in interval]
    axis.set_yscale("symlog", linthresh=LINEAR)  # cutting off may cost a hundred times what shuffling does
    axis.set_ylim(min(1.5 * min(heights), -LINEAR / 5), max(1.5 * max(heights), LINEAR))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False)
    return figure


def stride_plot(sides: dict[str, Part]) -> Any:
    """Perplexity by the stride between windows."""
    figure, axis, _ = _panels(False)
    for name, own in sides.items():
        axis.plot(own["stride"], own["ppl_token"], marker="o", color=COLOURS[name], label=name)
        for *place, cost in zip(own["stride"], own["ppl_token"], own["cost"], strict=True):
            axis.annotate(f"{cost:.3g}×", place, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axis.set(xscale="log", xlabel="stride s (tokens scored per window)", ylabel="perplexity per token")
    axis.margins(y=0.15)
    strides = sorted({stride for own in sides.values() for stride in own["stride"]})
    axis.set_xticks(strides, [f"{stride:,}" for stride in strides])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return figure


def shares(part: Part) -> list[float]:
    """The share of the tokens in each bin."""
    return [tokens / sum(part["tokens"]) for tokens in part["tokens"]]


def _select(column: Part, rows: list[int]) -> Part:
    return {name: [column[name][i] for i in rows] for name in ("nats", "interval")}


def _panels(two: bool) -> tuple[Any, Any, Any]:
    """A figure with one panel, or with two next to each other."""
    figure, axes = _axes(2 if two else 1)
    return figure, axes[0], axes[1] if two else None


def _axes(number: int) -> tuple[Any, Any]:
    """A figure with so many panels next to each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.7), layout="constrained")
    axes = figure.subplots(1, number, squeeze=False)[0]
    remove_frame(*axes)
    return figure, axes


def _heat_map(axis: Any, rows: list[list[float]], across: list[str], down: list[str]) -> None:
    """Cells with their percentages; the first row is the lowest."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("share", [palette.PAPER, palette.MEMORY])
    most = max(max(row) for row in rows)
    axis.imshow(rows, cmap=colours, vmin=0, vmax=most or 1, origin="lower", aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            colour = palette.PAPER if value > most / 2 else palette.INK
            axis.annotate(f"{value:.1%}", (x, y), ha="center", va="center", fontsize=8, color=colour)
    axis.set_yticks(range(len(down)), down)
    _ticks(axis, across)


def _curve(axis: Any, x: Any, y: list[float], intervals: list[Any], label: str, colour: str, marker: str) -> None:
    """A line and the band of its intervals."""
    low, high = _errors(y, intervals)
    axis.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.4, label=label)
    axis.fill_between(x, y - low, y + high, color=colour, alpha=0.18, linewidth=0)


def _bars(axis: Any, labels: list[str], column: Part, share_of_tokens: list[float]) -> None:
    """Bars with intervals, and the share of the tokens above each."""
    for place, share in enumerate(share_of_tokens):
        text = f"{share:.0%}" if share >= 0.01 else "<1%"
        at = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axis.annotate(text, (place, 1.0), fontsize=7, color=palette.NEUTRAL, **at)
    places, errors = range(len(labels)), _errors(column["nats"], column["interval"])
    axis.bar(places, column["nats"], color=palette.MEMORY, alpha=0.75, width=0.75)
    axis.errorbar(places, column["nats"], errors, fmt="none", ecolor=palette.INK, elinewidth=1, capsize=2)
    axis.axhline(0, color=palette.AXIS, linewidth=0.8)
    _ticks(axis, labels)


def _bars_by_lag(axis: Any, lags: Part, column: Part) -> list[int]:
    """Bars by where a token last occurred. Returns which bins they show, from left to right."""
    share = shares(lags)
    order = [i for i in range(len(share)) if share[i] >= RARE]
    order.sort(key=lambda i: (lags["from"][i] < 0, lags["from"][i]))  # never (−1) comes last
    special = {-1: "never", 0: "in the\nwindow"}
    labels = [special.get(lags["from"][i], span(lags["from"][i], lags["to"][i])) for i in order]
    _bars(axis, labels, _select(column, order), [share[i] for i in order])
    return order


def _mark(axis: Any, place: float, label: str, height: int) -> None:
    """A vertical line; its label stands above the shares, at a height of its own because two lines may be close."""
    axis.axvline(place, color=palette.NEUTRAL, linestyle=":", linewidth=1)
    style = {"ha": "center", "va": "bottom", "fontsize": 8, "color": palette.NEUTRAL}
    above = {"xytext": (0, 10 + 10 * height), "textcoords": "offset points"}
    axis.annotate(label, (place, 1), xycoords=("data", "axes fraction"), **above, **style)


def _errors(values: list[float], intervals: list[Any]) -> NDArray[np.float64]:
    """(2, values): the lengths of the interval below and above each value; NaN, which is not drawn, without one."""
    low, high = np.array([interval or [math.nan] * 2 for interval in intervals]).T
    return np.maximum(0, [values - low, high - values])


def _ticks(axis: Any, labels: list[str]) -> None:
    crowded = len(labels) > 7 or sum(map(len, labels)) > 45  # as much text as fits below half a page
    axis.set_xticks(range(len(labels)), labels, rotation=45 if crowded else 0, ha="right" if crowded else "center",
                    rotation_mode="anchor" if crowded else None, fontsize=8)  # fmt: skip


def _powers_of_two(axis: Any, last: float, zero_at: float | None = None) -> None:
    """Label a logarithmic axis with powers of two, or of four on a long one; 0 has no logarithm and needs a place."""
    step = 1 if last <= 10_000 else 2
    ticks = [float(2**power) for power in range(0, round(last).bit_length(), step)]
    labels = [f"{tick:,.0f}" for tick in ticks]
    if zero_at is not None:
        ticks, labels = [zero_at, *ticks], ["0", *labels]
    axis.set_xticks(ticks, labels)
    axis.minorticks_off()
