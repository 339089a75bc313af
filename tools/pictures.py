"""The pictures of docs/how-it-works.md, drawn from the filters and from recall themselves.

python -m tools.pictures docs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from logpast.data.corpora import kjv_chapters
from logpast.filters import FilterBank
from logpast.recall.naive import distribution
from logpast.reporting.palette import AXIS, CONTROL, FAINT, INK, MEMORY, NEUTRAL, RECALL, SHADE
from logpast.reporting.plots import write_plot
from logpast.util.errors import UserError

WINDOW = 256
ORDERS, EDGES = 4, (8, 32, 128, 512)  # of the recall that is drawn: few words, so few lags
UNTIL = "And the LORD God said unto the"  # the text that is drawn ends here


def spans(bank: FilterBank) -> list[tuple[int, int]]:
    """The lags at which each filter is above half of its maximum."""
    return [(int(start) + 1, int(stop)) for start, stop in bank.support(0.5)]


def words() -> list[str]:
    """Genesis 3, the first of the demo's unseen chapters, up to verse 14; punctuation marks are words."""
    text = b"".join(next(iter(kjv_chapters("test"))).blocks).decode()
    return re.findall(r"\w+|[^\w\s]", text[: text.rindex(UNTIL) + len(UNTIL)])


def matches(text: list[str]) -> list[tuple[int, int, str]]:
    """Where the last words, or some of them, occurred before: the lag, how many matched, and the word that followed."""
    found = []
    for lag in range(1, len(text)):
        same = [text[-lag - 1 - n] == text[-1 - n] for n in range(min(ORDERS, len(text) - lag))]
        if same[0]:
            found.append((lag, [*same, False].index(False), text[-lag]))
    return found


def draw_slots(out: Path, slots: int = 53, sharpness: float = 200) -> None:
    """`[slots | window]`: which part of the text each slot holds, and the input that the transformer sees."""
    bank = FilterBank(slots=slots, sharpness=sharpness)
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axis = figure.subplots()
    total = bank.horizon + WINDOW
    text_y, input_y, slot_width = 2.0, 0.0, total / (slots + 16)  # the window is drawn as wide as 16 slots
    axis.barh(text_y, -bank.horizon, left=-WINDOW, height=0.3, color=SHADE, edgecolor=FAINT)
    axis.barh(text_y, -WINDOW, height=0.3, color=CONTROL)
    axis.barh(input_y, -16 * slot_width, height=0.5, color=CONTROL)
    for number, (near, far) in enumerate(spans(bank)):
        right = -(16 + number) * slot_width
        axis.barh(input_y, -slot_width, left=right, height=0.5, color=MEMORY, edgecolor="white", linewidth=0.8,
                  alpha=0.95 - 0.7 * number / slots)  # fmt: skip
        if number % 4 == 0:
            x = [-WINDOW - far, -WINDOW - near + 1, right, right - slot_width]
            axis.fill(x, [text_y - 0.16, text_y - 0.16, input_y + 0.26, input_y + 0.26], color=MEMORY, alpha=0.18)
            axis.barh(text_y, near - far - 1, left=-WINDOW - near + 1, height=0.3, color=MEMORY, alpha=0.45)
    axis.text(-total, text_y + 0.3, f"the text: {bank.horizon:,} tokens before the window", color=INK)
    axis.text(0, text_y + 0.3, f"window: {WINDOW} tokens", color=CONTROL, ha="right")
    axis.text(-total, input_y - 0.55, f"the input: {slots} slots, far and coarse …", color=MEMORY)
    axis.text(-16.5 * slot_width, input_y - 0.55, "near and fine", color=MEMORY, ha="right")
    axis.text(-8 * slot_width, input_y - 0.55, "the window", color=CONTROL, ha="center")
    axis.set(xlim=(-total * 1.01, total * 0.01), ylim=(-0.8, 2.6))
    axis.set_axis_off()
    write_plot(figure, out)


def draw_scales(out: Path, slots: int = 53, sharpness: float = 200) -> None:
    """The same filters over the lag, and over its logarithm."""
    bank = FilterBank(slots=slots, sharpness=sharpness, normalize="peak")
    lags = np.arange(1, bank.horizon + 1)
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    linear, logarithmic = figure.subplots(1, 2)
    for axis in (linear, logarithmic):
        for number in range(20, slots, 4):
            start, stop = bank.support(1e-3)[number]
            axis.plot(
                lags[start:stop],
                bank.weights[number, start:stop],
                color=MEMORY,
                alpha=0.95 - 0.7 * number / slots,
                linewidth=1.4,
            )
        axis.set(yticks=[], xlabel="tokens back")
        axis.invert_xaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    logarithmic.set(xscale="log", xlabel="tokens back, logarithmic axis", xlim=(bank.horizon, 20))
    logarithmic.xaxis.set_major_formatter("{x:,.0f}")
    linear.xaxis.set_major_formatter("{x:,.0f}")
    linear.set_xticks(range(0, bank.horizon, 2000))
    write_plot(figure, out)


def draw_recall(out: Path) -> None:
    """What followed the last words before, on a logarithmic time axis, and how often."""
    text = words()
    found = matches(text)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    timeline, shares = figure.subplots(1, 2, width_ratios=(3, 1))
    for start, end in zip((1, *EDGES), EDGES, strict=False):
        timeline.axvspan(start, end, color=SHADE if EDGES.index(end) % 2 else "white", zorder=0)
    level, last = 0.0, 1
    for lag, length, word in found:
        timeline.plot([lag, lag], [0, length], color=RECALL, linewidth=1 + 0.6 * length, alpha=0.35 + 0.16 * length)
        if length > 1:
            level, last = level + 0.3 if lag < 1.5 * last else 0.0, lag  # labels of neighbours stand above each other
            timeline.text(lag, length + 0.1 + level, word, ha="center", color=INK)
    timeline.set(xscale="log", xlim=(1.2 * EDGES[-1], 1), ylim=(0, ORDERS + 0.7), yticks=range(1, ORDERS + 1),
                 xlabel="words back, logarithmic axis", ylabel="words that match")  # fmt: skip
    timeline.set_xticks(EDGES, [str(edge) for edge in EDGES])
    timeline.minorticks_off()
    timeline.set_title(f"… {' '.join(text[-6:])} ?", loc="right", color=INK, fontsize=11)
    _draw_shares(shares, text)
    for axis in (timeline, shares):
        axis.spines[["top", "right"]].set_visible(False)
    write_plot(figure, out)


def _draw_shares(axis: Any, text: list[str]) -> None:
    """How often each word followed, for the longest matches and for shorter ones."""
    vocabulary = sorted(set(text))
    counts = distribution([vocabulary.index(word) for word in text], ORDERS, EDGES, len(vocabulary)).sum(1)[2:]
    shown = np.argsort(-counts.sum(0), kind="stable")[: int((counts.sum(0) > 0).sum())][::-1]
    for row, which in enumerate(shown):
        left = 0
        for length, count in zip(range(2, ORDERS + 1), counts[:, which], strict=True):
            axis.barh(row, count, left=left, color=RECALL, alpha=0.35 + 0.16 * length, edgecolor="white")
            left += count
    axis.set_yticks(range(len(shown)), [vocabulary[which] for which in shown])
    axis.set_xlabel("matches of 2, 3 and 4 words", color=NEUTRAL)
    axis.tick_params(colors=AXIS)


def draw(folder: Path) -> list[Path]:
    """All pictures of the page."""
    pictures = {"slots-and-window": draw_slots, "two-scales": draw_scales, "recall-lookup": draw_recall}
    for name, picture in pictures.items():
        picture(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in pictures]


if __name__ == "__main__":
    try:
        draw(Path(sys.argv[1]))
    except (UserError, IndexError) as error:
        sys.exit(f"pictures: {error}")
