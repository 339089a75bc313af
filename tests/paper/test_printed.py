"""The paper's numbers: that they are transcribed correctly, and what they imply."""

import math
from itertools import pairwise
from typing import Any

import pytest

from logpast.filters import paper_horizon
from logpast.paper import printed
from logpast.paper.printed import Cell, Row, Sweep

SWEEPS = {name: printed.sweep(name) for name in ("A1", "A2")}
ROWS = [(sweep, row) for sweep in SWEEPS.values() for row in sweep.rows]
# cells that do not fit, apart from the control at L = 5, 9, 13, 17 in both tables
NOT_FITTING = {("A1", 9, 150), ("A2", 21, 100), ("A2", 41, 200)}


def ids(value: Any) -> str | None:
    return value.name if isinstance(value, Sweep) else str(value.slots) if isinstance(value, Row) else None


def test_tables_have_all_rows_and_windows() -> None:
    for sweep in SWEEPS.values():
        assert [row.slots for row in sweep.rows] == list(range(5, 54, 4))
        assert [row.window for row in sweep.rows] == [paper_horizon(row.slots) for row in sweep.rows]
    assert [len(printed.load()[name]["rows"]) for name in ("table1", "tableA1", "tableA2")] == [5, 13, 13]


def test_bold_cells_are_the_lowest_and_table_1_repeats_them() -> None:
    for name, sweep in SWEEPS.items():
        _, slots, k = min((cell, row.slots, k) for row in sweep.rows for k, cell in row.filters.items())
        assert printed.load()[f"table{name}"]["best"] == {"slots": slots, "sharpness": k}
    last = SWEEPS["A1"].rows[-1]
    cells = {"delta": last.delta, 200: last.filters[200]}
    repeated = [row for row in printed.load()["table1"]["rows"] if "cell" in row]
    assert [(row["cell"], row["ppl_word"]) for row in repeated] == [([53, k], cells[k].word) for k in ("delta", 200)]
    assert {row["ppl_word"] for row in printed.load()["table1"]["rows"]} == {25.48, 24.00, 24.85, 23.99, 23.56}


@pytest.mark.parametrize(("sweep", "row"), ROWS, ids=ids)
def test_mean_ratio_of_every_row_fits_the_formula(sweep: Sweep, row: Row) -> None:
    """A wrong digit in paper.yaml would fail here or in the next test."""
    assert printed.ratio_difference(sweep, row) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("sweep", "row"), ROWS, ids=ids)
def test_only_the_known_cells_do_not_fit(sweep: Sweep, row: Row) -> None:
    formula = printed.ratio_by_formula(sweep, row.slots)
    assert {k for k, cell in row.filters.items() if not cell.fits(formula)} == {
        k for name, slots, k in NOT_FITTING if (name, slots) == (sweep.name, row.slots)
    }
    assert row.delta.fits(formula) == (row.slots not in (5, 9, 13, 17))


@pytest.mark.parametrize(("name", "step"), [("A1", -0.34), ("A2", -1.07)])
def test_first_four_controls_fall_in_equal_steps(name: str, step: float) -> None:
    first = [row.delta.word for row in SWEEPS[name].rows[:4]]
    assert [b - a for a, b in pairwise(first)] == pytest.approx([step] * 3)


def test_misprint_would_fit_with_another_digit() -> None:
    cell = SWEEPS["A2"].rows[4].filters[100]
    assert cell == (20.46, 96.87)
    assert cell._replace(word=97.87).fits(printed.ratio_by_formula(SWEEPS["A2"], 21))


def test_pg19_fits_exactly_the_given_range_of_token_counts() -> None:
    sweep = SWEEPS["A2"]

    def fits(tokens: int) -> bool:
        other = sweep._replace(tokens=(tokens, tokens))
        differences = [printed.ratio_difference(other, row) for row in sweep.rows]
        return max(map(abs, differences)) <= printed.MEAN_TOLERANCE

    low, high = sweep.tokens
    assert [fits(n) for n in (low - 1, low, (low + high) // 2, high, high + 1)] == [False, True, True, True, False]


def test_per_word_perplexity_of_all_tokens() -> None:
    sweep = SWEEPS["A1"]
    assert (sweep.tokens, sweep.words, sweep.lines) == ((286_221, 286_221), 241_211, 4_358)
    assert printed.summed_tokens(sweep, 53) == 270_336
    assert printed.ppl_word_of_all_tokens(sweep, 16.76) == pytest.approx(28.36, abs=0.005)
    assert printed.ppl_word_of_all_tokens(sweep, 16.76, line_ends=True) == pytest.approx(26.73, abs=0.005)


def test_cell_fits_ratios_within_half_a_printed_digit() -> None:
    cell = Cell(20.0, 40.0)
    assert cell.ratio == math.log(40) / math.log(20)
    assert cell.fits(math.log(40.0049) / math.log(20))
    assert cell.fits(math.log(40) / math.log(20.0049))
    assert not cell.fits(math.log(40.006) / math.log(19.994))
