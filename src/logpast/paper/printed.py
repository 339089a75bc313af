"""The numbers that the paper prints (paper.yaml), and what its two columns imply about how they were counted.

A cell of Tables A1 and A2 holds a raw perplexity e^(nats/tokens) and a per-word one e^(nats/words) of the same model on
the same text. Then ln(per-word)/ln(raw) = tokens/words, one constant per corpus; the printed ratios differ from row to
row. They fit the sum being taken over the tokens of `metrics.paper_span` alone: an inference from the printed
tables, by the functions here.
"""

from __future__ import annotations

import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from logpast.evaluation.metrics import paper_span, perplexity
from logpast.filters import paper_horizon

WINDOW = 256  # m
SHARPNESSES = (100, 150, 200)
ROUNDING = 0.005  # two decimals are printed
MEAN_TOLERANCE = 1e-4  # of the mean ratio of a row
MISPRINT = ("A2", 21, 100)  # left out of its row's mean: its per-word 96.87 would fit as 97.87


class Cell(NamedTuple):
    """Perplexities as printed."""

    raw: float
    word: float

    def __str__(self) -> str:
        return f"{self.raw:.2f}/{self.word:.2f}"

    @property
    def ratio(self) -> float:
        """ln(per-word) / ln(raw): tokens summed over words counted."""
        return math.log(self.word) / math.log(self.raw)

    def allows(self, ratio: float) -> bool:
        """Whether numbers that round to the printed ones can have this ratio."""
        lowest = math.log(self.word - ROUNDING) / math.log(self.raw + ROUNDING)
        highest = math.log(self.word + ROUNDING) / math.log(self.raw - ROUNDING)
        return lowest <= ratio <= highest


class Row(NamedTuple):
    """A row of Table A1 or A2: one L, its control, and its filters with three k."""

    slots: int
    window: int
    delta: Cell
    filters: dict[int, Cell]

    @property
    def best(self) -> tuple[int, Cell]:
        """The k with the lowest raw perplexity, and its cell."""
        return min(self.filters.items(), key=lambda item: item[1].raw)


class Sweep(NamedTuple):
    """Table A1 or A2, and the counts of its test set, which the paper does not print."""

    name: str
    title: str
    corpus: str
    rows: list[Row]
    tokens: tuple[int, int]
    words: int
    lines: int | None


@cache
def page() -> dict[str, Any]:
    """paper.yaml as it stands."""
    text = Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def sweep(name: str) -> Sweep:
    """Table A1 or A2."""
    found = page()[f"table{name}"]
    rows = [
        Row(row["slots"], row["window"], Cell(*row["delta"]), {k: Cell(*row[k]) for k in SHARPNESSES})
        for row in found["rows"]
    ]
    low, high = found["tokens"]
    return Sweep(name, found["title"], found["corpus"], rows, (low, high), found["words"], found["lines"])


def summed_tokens(table: Sweep, slots: int) -> int:
    """How many tokens the row's losses appear to be summed over; the same for any number of tokens in the range."""
    span = paper_span(table.tokens[0], WINDOW, paper_horizon(slots))
    return span.stop - span.start


def ratio_by_formula(table: Sweep, slots: int) -> float:
    return summed_tokens(table, slots) / table.words


def mean_ratio(table: Sweep, row: Row) -> float:
    """Of the row's three k, as printed; without the one cell that reads like a misprint."""
    return statistics.mean(cell.ratio for k, cell in row.filters.items() if (table.name, row.slots, k) != MISPRINT)


def if_all_counted(table: Sweep, raw: float, line_ends: bool = False) -> float:
    """The per-word perplexity that goes with a raw one if no token is left out and the missing ones are like the rest.

    Per word, or per word and line end: the basis of Transformer-XL's figures.
    """
    tokens = statistics.mean(table.tokens)
    return perplexity(math.log(raw) * tokens, table.words + (table.lines or 0) * line_ends)


def k_equals(sharpness: float) -> str:
    """A system's name."""
    return f"k = {sharpness:g}"
