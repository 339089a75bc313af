"""The numbers that the paper prints (paper.yaml), and what its two columns imply about the tokens they count.

A cell of Tables A1 and A2 holds a raw perplexity e^(nats/tokens) and a per-word one e^(nats/words) of the same model on
the same text. So ln(per-word)/ln(raw) = tokens/words, which should be one constant per corpus. The printed ratios
differ from row to row. They fit a sum over only the tokens of `metrics.paper_span`. This is an inference from the
printed tables, made with the functions below.
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
MEAN_TOLERANCE = 1e-4  # for the mean ratio of a row
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

    def fits(self, ratio: float) -> bool:
        """Whether numbers that round to the printed ones can have this ratio."""
        lowest = math.log(self.word - ROUNDING) / math.log(self.raw + ROUNDING)
        highest = math.log(self.word + ROUNDING) / math.log(self.raw - ROUNDING)
        return lowest <= ratio <= highest


class Row(NamedTuple):
    """A row of Table A1 or A2: one L with its control and its filters for three k."""

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
    """the lowest and the highest number of tokens that fit the table"""
    words: int
    lines: int | None


@cache
def load() -> dict[str, Any]:
    """The content of paper.yaml."""
    text = Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def sweep(name: str) -> Sweep:
    """Table A1 or A2."""
    table = load()[f"table{name}"]
    rows = [
        Row(row["slots"], row["window"], Cell(*row["delta"]), {k: Cell(*row[k]) for k in SHARPNESSES})
        for row in table["rows"]
    ]
    low, high = table["tokens"]
    return Sweep(name, table["title"], table["corpus"], rows, (low, high), table["words"], table["lines"])


def filter_name(sharpness: float) -> str:
    """The name of a memory system in the tables and figures."""
    return f"k = {sharpness:g}"


def summed_tokens(sweep: Sweep, slots: int) -> int:
    """The number of tokens that a row's losses appear to be summed over; the same for all of `sweep.tokens`."""
    span = paper_span(sweep.tokens[0], WINDOW, paper_horizon(slots))
    return span.stop - span.start


def ratio_by_formula(sweep: Sweep, slots: int) -> float:
    """Tokens summed over words, by the formula of `metrics.paper_span`."""
    return summed_tokens(sweep, slots) / sweep.words


def mean_ratio(sweep: Sweep, row: Row) -> float:
    """The mean of a row's printed ratios over k, without the one cell that looks like a misprint."""
    return statistics.mean(cell.ratio for k, cell in row.filters.items() if (sweep.name, row.slots, k) != MISPRINT)


def ratio_difference(sweep: Sweep, row: Row) -> float:
    """The mean printed ratio of a row minus the formula's."""
    return mean_ratio(sweep, row) - ratio_by_formula(sweep, row.slots)


def ppl_word_of_all_tokens(sweep: Sweep, raw: float, line_ends: bool = False) -> float:
    """The per-word perplexity of a raw one if no token is left out and the missing tokens are like the rest.

    With `line_ends`, line ends count as words: the basis of Transformer-XL's numbers.
    """
    tokens = statistics.mean(sweep.tokens)
    return perplexity(math.log(raw) * tokens, sweep.words + (sweep.lines or 0) * line_ends)
