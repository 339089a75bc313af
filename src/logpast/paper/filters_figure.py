"""The paper's Figure 1 and its continuation A1: what the filters are, and what a memory of them holds."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase

import numpy as np
from numpy.typing import NDArray

from logpast.filters import MOST_SHARP, impulse_response
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments

NOW = 30.0  # when the memory is read; also the last peak


@validate_arguments
def draw_filters(
    out: Path = Path("filters.png"), sharpness: float | list[float] | None = None, peaks: int = 10
) -> Path:
    """Draw the filters: a row of three panels for each sharpness k, as the paper's Figures 1 (A–C) and A1 (D–I).

    Left, the impulse responses over time; middle, the same on a logarithmic axis; right, a signal and the memory
    of it that the filters hold at time 30, each filter's value drawn at the moment it tells of.

    Examples:
        logpast filters                                    # the paper's three rows, into filters.png
        logpast filters --sharpness 200
        logpast filters --sharpness "[25, 200]" --out filters.svg

    Args:
        out: the picture to write; .png, .svg and .pdf are known. An existing one is replaced.
        sharpness: one k, or a list with one per row; the paper's 50, 10 and 100 by default.
        peaks: how many filters, their peaks spaced geometrically from 1 to 30.

    Returns:
        Where the picture is.
    """
    rows_of_k = [50.0, 10.0, 100.0] if sharpness is None else np.atleast_1d(sharpness).tolist()
    if not rows_of_k or not all(0 < k <= MOST_SHARP for k in rows_of_k):
        raise UserError(f"sharpness must be one or more numbers above 0 and at most {MOST_SHARP:g}, got {sharpness}")
    if peaks < 2:
        raise UserError(f"peaks must be at least 2, got {peaks}")
    return _draw_rows(out, rows_of_k, peaks)


@validate_arguments
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
    return _draw_rows(out, [50.0])


@validate_arguments
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
    return _draw_rows(out, [10.0, 100.0], first_panel=3)


def _draw_rows(out: Path, rows_of_k: list[float], peaks: int = 10, first_panel: int = 0) -> Path:
    """The panels of `draw_filters`, lettered from the so-many-th letter on."""
    check_plot_path(out)
    from matplotlib.figure import Figure  # no pyplot: nothing global, no screen wanted

    centres = np.geomspace(1, NOW, peaks)
    shades = [str(shade) for shade in np.linspace(0.0, 0.75, peaks)]
    figure = Figure(figsize=(12, 3.1 * len(rows_of_k)), layout="constrained")
    rows = figure.subplots(len(rows_of_k), 3, squeeze=False)
    times, log_times = np.linspace(0.01, 50, 4000), np.geomspace(0.3, 100, 4000)
    for number, (k, (linear, logarithmic, memory)) in enumerate(zip(rows_of_k, rows, strict=True)):
        for axis, at in ((linear, times), (logarithmic, log_times)):
            for curve, shade in zip(impulse_response(at, centres, k), shades, strict=True):
                axis.plot(at, curve, color=shade, linewidth=1.4)
            axis.set(xlabel="time since the impulse", ylabel=rf"$\Phi(t, \tau^*)$, k = {k:g}", ylim=(0, None))
        linear.set_xlim(0, 50)
        logarithmic.set(xscale="log", xlim=(0.3, 100), xlabel="time since the impulse (log)")

        past = np.linspace(0, NOW, 3001)
        memory.plot(past, signal(past), color="tab:blue", linewidth=1.4, label="signal f")
        values = remembered(centres, k)
        memory.plot(NOW - centres, values, color="0.6", linewidth=0.8, zorder=1)
        memory.scatter(NOW - centres, values, c=shades, s=36, edgecolors="black", linewidths=0.6, zorder=3,
                       label=r"memory $\tilde{f}$ at 30")  # fmt: skip
        memory.set(xlabel="time", ylabel="value", xlim=(-0.5, NOW + 0.5))
        memory.legend(frameon=False, fontsize=8, loc="lower left")
        for panel, axis in enumerate((linear, logarithmic, memory)):
            letter = ascii_uppercase[(first_panel + 3 * number + panel) % 26]
            axis.set_title(letter, loc="left", fontweight="bold")
            remove_frame(axis)
    write_plot(figure, out)
    print(f"wrote {out}")
    return out


def signal(time: NDArray[np.float64]) -> NDArray[np.float64]:
    """A signal with slow and quick changes: what is near can be followed closely, what is far only in outline."""
    return np.sin(0.35 * time) + 0.5 * np.sin(1.3 * time + 1.0) + 0.25 * np.sin(2.9 * time)


def remembered(peaks: NDArray[np.float64], sharpness: float) -> NDArray[np.float64]:
    """f̃(30, τ*) of the signal since time 0: its average under each filter, Φ divided by its area τ*."""
    step = 0.002
    lags = np.arange(step / 2, NOW, step)
    return impulse_response(lags, peaks, sharpness) / peaks[:, None] @ signal(NOW - lags) * step
