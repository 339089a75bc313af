"""The demo's page: what `templates/demo.html` shows, for readers who do not know the project."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from logpast.filters import FilterBank
from logpast.reporting import palette
from logpast.reporting.differences import in_words
from logpast.reporting.html import data_uri, render_page
from logpast.reporting.plots import remove_frame
from logpast.training.log import read_log
from logpast.util.files import atomic_write

COLOURS = {"control": palette.CONTROL, "memory": palette.MEMORY, "recall": palette.RECALL}


def write_report(out: Path, results: dict[str, Any]) -> None:
    """Write report.html into the demo's folder."""
    plots: dict[str, Any] = {}
    topics = None
    if "text" in results:
        plots |= {"text": _loss_plot(out / "text"), "filters": _filters_plot()}
    if "topics" in results:
        topics = {name: math.log(results["topics"][name]["ppl_token"]) for name in ("memory", "control")}
        topics |= {name: results["topics"][name] for name in ("optimum_given_all", "optimum_given_recent")}
        optima = {"whole past": topics["optimum_given_all"], "what the control sees": topics["optimum_given_recent"]}
        plots["topics"] = _loss_plot(out / "topics", optima)
    page = render_page(
        "demo.html",
        seed=results["seed"],
        systems=list(COLOURS),
        text=results.get("text"),
        topics=topics,
        in_words=in_words,
        plots={name: data_uri(figure) for name, figure in plots.items()},
    )
    atomic_write(out / "report.html", page)


def _loss_plot(home: Path, levels: dict[str, float] | None = None) -> Any:
    """Training and validation loss of all models over the steps, and the best possible losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    heights = []
    for name, colour in COLOURS.items():
        records = read_log(home / name)
        if not records:
            continue
        training = [(r["step"], r["loss"]) for r in records if "loss" in r]
        validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
        axis.plot(*zip(*training, strict=True), color=colour, alpha=0.35, linewidth=1)
        axis.plot(*zip(*validation, strict=True), color=colour, marker="o", label=f"{name}, validation")
        heights += [loss for _, loss in validation]
    for label, level in (levels or {}).items():
        axis.axhline(level, color=palette.AXIS, linestyle=":", linewidth=1)
        axis.annotate(
            f"best possible, {label}", (0.995, level), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=8,
        )  # fmt: skip
        heights.append(level)
    low, high = min(heights), max(heights)
    margin = high - low
    axis.set(xlabel="step", ylabel="loss, nats per token", ylim=(low - 0.3 * margin, high + 0.6 * margin))
    axis.legend(frameon=False)
    remove_frame(axis)
    return figure


def _filters_plot() -> Any:
    """Every fourth filter of a bank: how much each slot weighs the tokens of the past."""
    from matplotlib.figure import Figure

    bank = FilterBank(slots=33, normalize="peak")
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axis = figure.subplots()
    for number, weights in enumerate(bank.weights[::4]):
        axis.plot(range(1, bank.horizon + 1), weights, color=palette.SERIES[number], linewidth=1.4)
    axis.set(xscale="log", xlabel="tokens ago", ylabel="weight", xlim=(1, bank.horizon))
    remove_frame(axis)
    return figure
