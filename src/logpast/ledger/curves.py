"""`logpast results curves`: loss curves of runs, from their logs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from logpast.evaluation.metrics import perplexity
from logpast.reporting import palette
from logpast.reporting.plots import check_plot_path, escape_label, line_style, remove_frame, write_plot
from logpast.reporting.tables import Table, as_text
from logpast.training.log import read_log
from logpast.util.errors import UserError
from logpast.util.schema import reading
from logpast.util.validation import validate_arguments

Points = dict[int, float]  # step -> nats per token
SMOOTHING = 20  # the running mean of a training loss covers 1/SMOOTHING of the records


@dataclass(frozen=True)
class Curve:
    name: str
    tokens: Points
    """step -> tokens trained on so far"""
    training: Points
    validation: Points

    def at(self, steps: list[int], x: str) -> NDArray[np.float64]:
        """Steps as coordinates on the x axis."""
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
    """Plot the losses of runs over the tokens they were trained on, and each run's difference from the first one.

    Examples:
        logpast results curves runs/control runs/memory
        logpast results curves results/logs/rivals-pg19/{delta,memory}-tokens-0.jsonl --plot pg19.png
        logpast results curves results/logs/sweep-small/wiki22k-slots{5,53}-{delta,k100}-seed0.jsonl --pairs

    Args:
        logs: folders of runs, finished or not, or their log.jsonl under any name. The others are compared with the
            first.
        plot: file for the plot: .png, .svg or .pdf. Replaces an existing file.
        x: quantity on the x axis.
        pairs: treat every two logs as a pair and compare the second of each with its first. Runs with the same seed
            train on the same batches, so the difference of their training losses is smooth; between seeds it is not.

    Returns:
        The curves.
    """
    check_plot_path(plot)
    if pairs and len(logs) % 2:
        raise UserError(f"--pairs needs an even number of logs, got {len(logs)}; give two for each pair")
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
    note = "loss: training loss, mean of the last tenth of the log; validation ppl: the best, and its step"
    print(as_text(Table(["run", "steps", "tokens", "loss", "validation ppl", "at step"], rows, notes=[note])))
    found = [known[Path(log)] for log in logs]
    size = 2 if pairs else len(found)
    _draw([found[start : start + size] for start in range(0, len(found), size)], plot, x)
    print(f"wrote {plot}")
    return found


def read_curve(path: Path, name: str = "") -> Curve:
    """The curve of a run's folder, or of a log under any name."""
    fix = "give a run's folder, or its log.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist; {fix}")
    with reading(f"{path} is not a run's log", fix):
        records = read_log(path)
        training, validation = (
            {int(r["step"]): float(r[loss]) for r in records if loss in r and math.isfinite(r[loss])}
            for loss in ("loss", "validation_loss")
        )
        tokens = {int(r["step"]): float(r["tokens"]) for r in records if "loss" in r}
        if not all(map(math.isfinite, tokens.values())):
            raise ValueError("tokens must be finite numbers")
    if not training:
        raise UserError(f"{path} has no training loss yet; {fix}")
    return Curve(name, tokens, training, validation)


def _names(paths: list[Path]) -> list[str]:
    """The shortest endings of the paths that are all different."""
    paths = [path.absolute() if path.name in ("", "..") else path for path in paths]  # these have no name of their own
    parts = [path.with_suffix("").parts if path.suffix == ".jsonl" else path.parts for path in paths]
    parts = [some[:-1] if some[-1:] == ("log",) and len(some) > 1 else some for some in parts]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(some[-length:]) for some in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _draw(groups: list[list[Curve]], plot: Path, x: str) -> None:
    """Left, all losses; right, the difference of each curve from the first of its group. One colour per group."""
    from matplotlib.figure import Figure

    found = [curve for group in groups for curve in group]
    height = max(4.2, 0.18 * len(found))  # for the legend
    figure = Figure(figsize=(14 if len(found) > 1 else 8, height), layout="constrained")
    # pairs have losses close to each other but many differences to show
    widths = [1] if len(found) == 1 else [1, 1] if len(groups) == 1 else [2, 3]
    losses, *differences = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    drawn = set()
    for number, group in enumerate(groups):
        for index, curve in enumerate(group):
            several = len(groups) > 1
            style = line_style(number if several else index) | ({"linestyle": ":"} if several and not index else {})
            if curve.name not in drawn:  # a control may be in several pairs
                drawn.add(curve.name)
                alpha = 0.5 if curve.validation else 1
                _line(losses, curve, curve.training, x, **style, alpha=alpha, label=escape_label(curve.name))
                _dots(losses, curve, curve.validation, x, **style)
            for axis in differences if index else ():
                _line(axis, curve, above(curve.training, group[0].training), x, **style, alpha=0.5)
                _dots(axis, curve, above(curve.validation, group[0].validation), x, **style)
    losses.set(title="loss (lines: training, running\nmean; dots: validation)")
    _limit_losses(losses, found)
    for axis in differences:
        if not axis.lines:
            axis.text(0.5, 0.5, "no logged step in common", transform=axis.transAxes, ha="center")
        axis.axhline(0, color=palette.AXIS, linewidth=0.8)
        other = escape_label(found[0].name) if len(groups) == 1 else "the first of its pair (dotted)"
        axis.set(title=f"loss − loss of {other}\nat the same step (below 0: better)")
    for axis in (losses, *differences):
        axis.set(xlabel="million tokens" if x == "tokens" else x, ylabel="nats per token")
    remove_frame(losses, *differences)
    legend = figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    for handle in filter(None, legend.legend_handles):
        handle.set_alpha(1)
    write_plot(figure, plot)


def _limit_losses(axis: Any, curves: list[Curve]) -> None:
    """Cut off the steep first tenth of the training losses."""
    ends = [value for curve in curves for value in [*curve.validation.values(), *list(curve.training.values())[-5:]]]
    highest = max(list(curve.training.values())[len(curve.training) // 10] for curve in curves)
    low, high = min(ends), max(highest, *ends)
    if high > low:
        axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def above(ours: Points, theirs: Points) -> Points:
    """Ours − theirs, at the steps that both have."""
    return {step: value - theirs[step] for step, value in ours.items() if step in theirs}


def _line(axis: Any, curve: Curve, points: Points, x: str, **style: Any) -> None:
    """A running mean: single batches vary more than runs differ."""
    if points:
        kernel = np.full(width := max(1, len(points) // SMOOTHING), 1 / width)
        steps, values = (np.convolve(list(each), kernel, "valid") for each in (points, points.values()))
        axis.plot(curve.at(list(steps), x), values, **style)


def _dots(axis: Any, curve: Curve, points: Points, x: str, **style: Any) -> None:
    if points:
        axis.plot(curve.at(list(points), x), list(points.values()), marker="o", markersize=4, linewidth=1, **style)
