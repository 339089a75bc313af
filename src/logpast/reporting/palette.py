"""The colours of all plots and pages. No other module has colour literals."""

from __future__ import annotations

#: a model with memory, the control it is compared with, and a model with recall
MEMORY = "#b3282d"
CONTROL = "#2b5c8a"
RECALL = "#2e7d4f"

#: the analysis page: the past beyond a lag is cut off, replaced or shuffled
CUT = MEMORY
REPLACED = "#5b7f95"
SHUFFLED = "#c98a1b"

#: further systems, runs or settings, in this order (matplotlib's default cycle)
SERIES = (
    "#1f77b4",  # blue
    "#ff7f0e",  # orange
    "#2ca02c",  # green
    "#d62728",  # red
    "#9467bd",  # purple
    "#8c564b",  # brown
    "#e377c2",  # pink
    "#7f7f7f",  # grey
    "#bcbd22",  # olive
    "#17becf",  # cyan
)

#: greys, from dark to light
INK = "#222222"  # text, error bars
AXIS = "#4d4d4d"  # the line at zero
NEUTRAL = "#666666"  # notes, guide lines, a baseline that is not one of the series
FAINT = "#bfbfbf"  # intervals and connecting lines in the background
RULE = "#dddddd"  # rows of tables
SHADE = "#f5f3ee"  # background of quoted text
PAPER = "#ffffff"


def greys(number: int) -> list[str]:
    """Greys from black to light, for lines in an order."""
    return [str(0.75 * i / max(1, number - 1)) for i in range(number)]
