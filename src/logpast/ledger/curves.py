"""`logpast results curves`: what runs learned on their way, from their logs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from logpast.evaluation.metrics import perplexity
from logpast.ledger.row import reading
from logpast.reporting.plots import check_plot_path, escape_label, line_style, remove_frame, write_plot
from logpast.reporting.tables import Table, as_text
from logpast.training.log import read_log
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments

Points = dict[int, float]  # step -> nats per token
SMOOTH = 20  # a line of training losses is a mean over this part of them


@dataclass(frozen=True)
class Curve:
    name: str
    tokens: Points
    """how many were trained on by a step"""
    training: Points
    validation: Points

    def at(self, steps: list[int], x: str) -> NDArray[np.float64]:
        """Where steps lie along the bottom of the picture."""
        if x == "step":
            return np.array(steps, float)
        return np.interp(steps, [0, *self.tokens], [0, *self.tokens.values()]) / 1e6


@validate_arguments
def curves(
    logs: list[str],
    plot: Path = Path("curves.png"),
    x: Literal["tokens", "step"] = "tokens",
    pairs: bool = False,
) -> list[Curve]:
    """Draw losses of runs over the tokens that they were trained on, and how far each is from the first.

    Examples:
        logpast results curves runs/control runs/memory
        logpast results curves results/logs/rivals-pg19/{delta,memory}-tokens-0.jsonl --plot pg19.png
        logpast results curves results/logs/sweep-small/wiki22k-slots{5,53}-{delta,k100}-seed0.jsonl --pairs

    Args:
        logs: folders of runs, finished or not, or their log.jsonl under any name; the first is what others are set
            beside.
        plot: the picture; .png, .svg and .pdf are known. An existing one is replaced.
        x: what lies along its bottom.
        pairs: every two logs are a pair, of which the second is set beside the first. Runs of one seed learn from the
            same batches, so that what lies between their training losses is smooth; between seeds it is not.

    Returns:
        The curves.
    """
    check_plot_path(plot)
    if pairs and len(logs) % 2:
        raise UserError(f"{len(logs)} logs do not make pairs; give an even number, a control and a run, another two, …")
    paths = list(dict.fromkeys(map(Path, logs)))
    known = {path: read_curve(path, name) for path, name in zip(paths, _names(paths), strict=True)}
    rows = []
    for curve in known.values():
        last = list(curve.training.values())[-max(1, len(curve.training) // 10) :]
        best = min(curve.validation, key=lambda step: curve.validation[step], default=None)
        rows.append([
            curve.name, f"{max(curve.training):,}", f"{max(curve.tokens.values()):,.0f}", f"{np.mean(last):.4f}",
            *([f"{perplexity(curve.validation[best], 1):.3f}", f"{best:,}"] if best is not None else ["", ""]),
        ])  # fmt: skip
    note = "loss: of training, the mean of the last tenth that was logged; validation: the best"
    print(as_text(Table(["run", "steps", "tokens", "loss", "validation ppl", "at step"], rows, notes=[note])))
    found = [known[Path(log)] for log in logs]
    size = 2 if pairs else len(found)
    _draw([found[place : place + size] for place in range(0, len(found), size)], plot, x)
    print(f"wrote {plot}")
    return found


def read_curve(path: Path, name: str = "") -> Curve:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a run's folder, or its log.jsonl")
    with reading(f"{path} is not a run's log", "give a run's folder, or its log.jsonl"):
        records = read_log(path)
        training, validation = (
            {int(r["step"]): float(r[loss]) for r in records if loss in r and math.isfinite(r[loss])}
            for loss in ("loss", "validation_loss")
        )
        if not training:
            raise UserError(f"{path} has no log of training yet; give a run's folder, or its log.jsonl")
        tokens = {int(r["step"]): float(r["tokens"]) for r in records if "loss" in r}
        if not all(map(math.isfinite, tokens.values())):
            raise ValueError("not all of its tokens are numbers")
        return Curve(name, tokens, training, validation)


def _names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    paths = [path.absolute() if path.name in ("", "..") else path for path in paths]  # which have no name of their own
    parts = [path.with_suffix("").parts if path.suffix == ".jsonl" else path.parts for path in paths]
    parts = [some[:-1] if some[-1:] == ("log",) and len(some) > 1 else some for some in parts]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(some[-length:]) for some in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _draw(groups: list[list[Curve]], plot: Path, x: str) -> None:
    """All losses, and in each group how far curves are from its first. Of several groups each has one colour."""
    from matplotlib.figure import Figure

    found = [curve for group in groups for curve in group]
    height = max(4.2, 0.18 * len(found))  # for the legend
    figure = Figure(figsize=(14 if len(found) > 1 else 8, height), layout="constrained")
    widths = [1] if len(found) == 1 else [1, 1] if len(groups) == 1 else [2, 3]  # pairs lie close, unlike their gaps
    losses, *others = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    drawn = set()
    for number, group in enumerate(groups):
        for place, curve in enumerate(group):
            several = len(groups) > 1
            how = line_style(number if several else place) | ({"linestyle": ":"} if several and not place else {})
            if curve.name not in drawn:  # a control may be in several pairs
                drawn.add(curve.name)
                faint = 0.5 if curve.validation else 1
                _line(losses, curve, curve.training, x, **how, alpha=faint, label=escape_label(curve.name))
                _dots(losses, curve, curve.validation, x, **how)
            for axis in others if place else ():
                _line(axis, curve, above(curve.training, group[0].training), x, **how, alpha=0.5)
                _dots(axis, curve, above(curve.validation, group[0].validation), x, **how)
    ends = [value for curve in found for value in [*curve.validation.values(), *list(curve.training.values())[-5:]]]
    highest = max(list(curve.training.values())[len(curve.training) // 10] for curve in found)
    losses.set(title="loss (lines: training, a running\nmean; dots: validation)")
    low, high = min(ends), max(highest, *ends)
    if high > low:
        losses.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    for axis in others:
        if not axis.lines:
            axis.text(0.5, 0.5, "no logged step in common", transform=axis.transAxes, ha="center")
        axis.axhline(0, color="0.3", linewidth=0.8)
        other = escape_label(found[0].name) if len(groups) == 1 else "the first of its pair (dotted)"
        axis.set(title=f"loss less that of {other}\nat the same step: below 0 it is ahead")
    for axis in (losses, *others):
        axis.set(xlabel="million tokens" if x == "tokens" else x, ylabel="nats per token")
    remove_frame(losses, *others)
    legend = figure.legend(loc="outside right upper", frameon=False, fontsize=8)  # beside the lines, which may be many
    for handle in filter(None, legend.legend_handles):
        handle.set_alpha(1)
    write_plot(figure, plot)


def above(ours: Points, theirs: Points) -> Points:
    """How far ours are above theirs, at the steps that both have."""
    return {step: value - theirs[step] for step, value in ours.items() if step in theirs}


def _line(axis: Any, curve: Curve, points: Points, x: str, **how: Any) -> None:
    """A running mean: single batches scatter more than runs differ."""
    if points:
        share = np.full(width := max(1, len(points) // SMOOTH), 1 / width)
        steps, values = (np.convolve(list(each), share, "valid") for each in (points, points.values()))
        axis.plot(curve.at(list(steps), x), values, **how)


def _dots(axis: Any, curve: Curve, points: Points, x: str, **how: Any) -> None:
    if points:
        axis.plot(curve.at(list(points), x), list(points.values()), marker="o", markersize=4, linewidth=1, **how)
