"""`logpast filters` and the paper's Figures 1 and A1: impulse responses of the filters, and the memory of a signal."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.filters import MOST_SHARP, impulse_response
from logpast.reporting import palette
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments

NOW = 30.0  # the time at which the memory is read, and the last peak


@validate_arguments
def draw_filters(
    out: Path = Path("filters.png"), sharpness: float | list[float] | None = None, peaks: int = 10
) -> Path:
    """Plot filters, one row of three panels per sharpness k, like the paper's Figures 1 (A–C) and A1 (D–I).

    Left: the impulse responses over time. Middle: the same on a logarithmic axis. Right: a signal and the memory of it
    at time 30; the value of each filter is at the time of the filter's peak.

    Examples:
        logpast filters                                    # the paper's three rows, into filters.png
        logpast filters --sharpness 200
        logpast filters --sharpness "[25, 200]" --out filters.svg

    Args:
        out: the plot to write: .png, .svg or .pdf. An existing file is replaced.
        sharpness: one k, or a list with one per row; the default is the paper's 50, 10 and 100.
        peaks: number of filters; their peaks are spaced geometrically from 1 to 30.

    Returns:
        The path of the plot.
    """
    rows_of_k = [50.0, 10.0, 100.0] if sharpness is None else np.atleast_1d(sharpness).tolist()
    if not rows_of_k or not all(0 < k <= MOST_SHARP for k in rows_of_k):
        raise UserError(f"sharpness must be one or more numbers above 0 and at most {MOST_SHARP:g}, got {sharpness}")
    if peaks < 2:
        raise UserError(f"peaks must be at least 2, got {peaks}")
    return _plot(out, rows_of_k, peaks)


@validate_arguments
def fig1(out: Path = Path("fig1.png")) -> Path:
    """Plot the paper's Figure 1: ten filters with k = 50 over time and log time, and their memory of a signal.

    Examples:
        logpast paper fig1
        logpast paper fig1 --out docs/fig1.svg

    Args:
        out: the plot to write: .png, .svg or .pdf. An existing file is replaced.

    Returns:
        The path of the plot.
    """
    return _plot(out, [50.0])


@validate_arguments
def fig_a1(out: Path = Path("figA1.png")) -> Path:
    """Plot the paper's Figure A1: like Figure 1, with wider filters (k = 10) and narrower ones (k = 100).

    Examples:
        logpast paper figA1
        logpast paper figA1 --out docs/figA1.pdf

    Args:
        out: the plot to write: .png, .svg or .pdf. An existing file is replaced.

    Returns:
        The path of the plot.
    """
    return _plot(out, [10.0, 100.0], first_letter=3)


def _plot(out: Path, rows_of_k: list[float], peaks: int = 10, first_letter: int = 0) -> Path:
    check_plot_path(out)
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    centres, greys = np.geomspace(1, NOW, peaks), palette.greys(peaks)
    figure = Figure(figsize=(12, 3.1 * len(rows_of_k)), layout="constrained")
    panels = figure.subplots(len(rows_of_k), 3, squeeze=False)
    for k, (linear, logarithmic, memory) in zip(rows_of_k, panels, strict=True):
        _plot_responses(linear, np.linspace(0.01, 50, 4000), centres, k, greys)
        linear.set(xlim=(0, 50), xlabel="time since the impulse")
        _plot_responses(logarithmic, np.geomspace(0.3, 100, 4000), centres, k, greys)
        logarithmic.set(xscale="log", xlim=(0.3, 100), xlabel="time since the impulse (log)")
        _plot_memory(memory, centres, k, greys)
    for number, axis in enumerate(panels.flat, first_letter):
        axis.set_title(ascii_uppercase[number % 26], loc="left", fontweight="bold")
        remove_frame(axis)
    write_plot(figure, out)
    print(f"wrote {out}")
    return out


def _plot_responses(
    axis: Any, times: NDArray[np.float64], centres: NDArray[np.float64], k: float, greys: list[str]
) -> None:
    for curve, grey in zip(impulse_response(times, centres, k), greys, strict=True):
        axis.plot(times, curve, color=grey, linewidth=1.4)
    axis.set(ylabel=rf"$\Phi(t, \tau^*)$, k = {k:g}", ylim=(0, None))


def _plot_memory(axis: Any, centres: NDArray[np.float64], k: float, greys: list[str]) -> None:
    times, values = np.linspace(0, NOW, 3001), memory_of_signal(centres, k)
    axis.plot(times, signal(times), color=palette.SERIES[0], linewidth=1.4, label="signal f")
    axis.plot(NOW - centres, values, color=palette.FAINT, linewidth=0.8, zorder=1)
    axis.scatter(NOW - centres, values, c=greys, s=36, edgecolors=palette.INK, linewidths=0.6, zorder=3,
                 label=r"memory $\tilde{f}$ at 30")  # fmt: skip
    axis.set(xlabel="time", ylabel="value", xlim=(-0.5, NOW + 0.5))
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def signal(time: NDArray[np.float64]) -> NDArray[np.float64]:
    """A signal with slow and fast changes: the memory follows near ones closely and far ones only roughly."""
    return np.sin(0.35 * time) + 0.5 * np.sin(1.3 * time + 1.0) + 0.25 * np.sin(2.9 * time)


def memory_of_signal(peaks: NDArray[np.float64], sharpness: float) -> NDArray[np.float64]:
    """f̃(30, τ*) of the signal since time 0: its average under each filter, Φ divided by its area τ*."""
    step = 0.002
    lags = np.arange(step / 2, NOW, step)
    return impulse_response(lags, peaks, sharpness) / peaks[:, None] @ signal(NOW - lags) * step
