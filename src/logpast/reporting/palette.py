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

#: pages, by the names of their CSS variables. A text is coloured by `loss`, or by `gain` and `harm` against a control;
#: the mixtures of these three with the paper are light enough to read the ink on them
LIGHT = {
    "ink": INK, "muted": "#5f5f5f", "rule": RULE, "shade": SHADE, "paper": PAPER, "mark": "#ffd84d",
    "memory": MEMORY, "control": CONTROL, "recall": RECALL, "gain": "#12808c", "harm": "#cf6310", "loss": "#7d4bb0",
}  # fmt: skip
DARK = {
    "ink": "#e6e3dd", "muted": "#a3a19b", "rule": "#3a3d43", "shade": "#22252b", "paper": "#17191d", "mark": "#8a6d00",
    "memory": "#f0777b", "control": "#7fb2e5", "recall": "#6cc492", "gain": "#2fb3c0", "harm": "#e07b2e",
    "loss": "#a47bd6",
}  # fmt: skip


def greys(number: int) -> list[str]:
    """Greys from black to light, for lines in an order."""
    return [str(0.75 * i / max(1, number - 1)) for i in range(number)]
