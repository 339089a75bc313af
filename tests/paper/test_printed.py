"""The paper's numbers: transcribed without a slip, and what they imply."""

import math
from itertools import pairwise
from typing import Any

import pytest

from logpast.filters import paper_horizon
from logpast.paper import printed
from logpast.paper.printed import Cell, Row, Sweep

SWEEPS = {name: printed.sweep(name) for name in ("A1", "A2")}
ROWS = [(table, row) for table in SWEEPS.values() for row in table.rows]
# outside what the printed digits allow, besides the control at L = 5, 9, 13, 17 of both tables
OUTSIDE = {("A1", 9, 150), ("A2", 21, 100), ("A2", 41, 200)}


def ids(value: Any) -> str | None:
    return value.name if isinstance(value, Sweep) else str(value.slots) if isinstance(value, Row) else None


def test_shape_of_the_tables() -> None:
    for table in SWEEPS.values():
        assert [row.slots for row in table.rows] == list(range(5, 54, 4))
        assert [row.window for row in table.rows] == [paper_horizon(row.slots) for row in table.rows]
    assert [len(printed.page()[name]["rows"]) for name in ("table1", "tableA1", "tableA2")] == [5, 13, 13]


def test_bold_cells_are_the_lowest_and_table_1_repeats_them() -> None:
    for name, table in SWEEPS.items():
        _, slots, k = min((cell, row.slots, k) for row in table.rows for k, cell in row.filters.items())
        assert printed.page()[f"table{name}"]["best"] == {"slots": slots, "sharpness": k}
    last = SWEEPS["A1"].rows[-1]
    cells = {"delta": last.delta, 200: last.filters[200]}
    repeated = [row for row in printed.page()["table1"]["rows"] if "cell" in row]
    assert [(row["cell"], row["ppl_word"]) for row in repeated] == [([53, k], cells[k].word) for k in ("delta", 200)]
    assert {row["ppl_word"] for row in printed.page()["table1"]["rows"]} == {25.48, 24.00, 24.85, 23.99, 23.56}


@pytest.mark.parametrize(("table", "row"), ROWS, ids=ids)
def test_every_row_meets_the_formula(table: Sweep, row: Row) -> None:
    """A slip in any digit that is copied would show here, or in the next test."""
    formula = printed.ratio_by_formula(table, row.slots)
    assert printed.mean_ratio(table, row) == pytest.approx(formula, abs=1e-4)


@pytest.mark.parametrize(("table", "row"), ROWS, ids=ids)
def test_exactly_the_known_cells_are_outside_their_rounding(table: Sweep, row: Row) -> None:
    formula = printed.ratio_by_formula(table, row.slots)
    assert {k for k, cell in row.filters.items() if not cell.allows(formula)} == {
        k for name, slots, k in OUTSIDE if (name, slots) == (table.name, row.slots)
    }
    assert row.delta.allows(formula) == (row.slots not in (5, 9, 13, 17))


@pytest.mark.parametrize(("name", "step"), [("A1", -0.34), ("A2", -1.07)])
def test_four_controls_fall_in_equal_steps(name: str, step: float) -> None:
    first = [row.delta.word for row in SWEEPS[name].rows[:4]]
    assert [b - a for a, b in pairwise(first)] == pytest.approx([step] * 3)


def test_the_odd_cell_would_fit_with_another_digit() -> None:
    cell = SWEEPS["A2"].rows[4].filters[100]
    formula = printed.ratio_by_formula(SWEEPS["A2"], 21)
    assert cell == (20.46, 96.87)
    assert cell._replace(word=97.87).allows(formula)


def test_pg19_fits_with_exactly_these_numbers_of_tokens() -> None:
    table = SWEEPS["A2"]

    def fits(tokens: int) -> bool:
        other = table._replace(tokens=(tokens, tokens))
        apart = [printed.mean_ratio(other, row) - printed.ratio_by_formula(other, row.slots) for row in table.rows]
        return max(map(abs, apart)) <= printed.MEAN_TOLERANCE

    low, high = table.tokens
    assert [fits(n) for n in (low - 1, low, (low + high) // 2, high, high + 1)] == [False, True, True, True, False]


def test_with_every_token_counted() -> None:
    table = SWEEPS["A1"]
    assert (table.tokens, table.words, table.lines) == ((286_221, 286_221), 241_211, 4_358)
    assert printed.summed_tokens(table, 53) == 270_336
    assert printed.if_all_counted(table, 16.76) == pytest.approx(28.36, abs=0.005)
    assert printed.if_all_counted(table, 16.76, line_ends=True) == pytest.approx(26.73, abs=0.005)


def test_rounding_is_half_a_digit() -> None:
    cell = Cell(20.0, 40.0)
    assert cell.ratio == math.log(40) / math.log(20)
    assert cell.allows(math.log(40.0049) / math.log(20))
    assert cell.allows(math.log(40) / math.log(20.0049))
    assert not cell.allows(math.log(40.006) / math.log(19.994))
