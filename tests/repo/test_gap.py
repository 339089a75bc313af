"""tools/gap.py: the share of the gap that a memory closes, the front, table and plot."""

from pathlib import Path
from typing import Any

import pytest
from tools.gap import draw, rows_of, table


def row(attention: str, window: int, nats: float, state: int, ms: float, **changes: Any) -> dict[str, Any]:
    usual = {"slots": 0, "trained": "gates", "control": False, "recall": False, "text": "books"}
    return usual | changes | {"system": f"{attention}-{window}", "attention": attention, "window": window,
                              "nats_per_token": nats, "state_bytes": state,
                              "ms_per_token": {"1": 9.0, "64": ms}}  # fmt: skip


REPORT: dict[str, Any] = {
    "recipe": {"model": "small"},
    "texts": {"books": {"scored": 1000, "documents_scored": 3}},
    "rows": [
        row("disjoint", 256, 4.0, 10, 1.0),
        row("disjoint", 256, 3.5, 11, 2.0, recall=True,
            minus_without_recall={"nats_per_token": -0.5, "interval": None}),
        row("sliding", 256, 3.6, 10, 1.5),
        row("full", 8192, 3.0, 100, 1.6),
        row("disjoint", 256, 3.9, 12, 2.1, slots=9, trained="slots"),
        row("disjoint", 256, 3.8, 12, 1.0, slots=9, trained="lora", control=True),
        row("disjoint", 256, 3.2, 13, 1.0, slots=9, trained="lora", recall=True),
        row("full", 8192, 2.8, 100, 1.0, trained="lora"),
        row("full", 8192, 2.0, 1, 0.1, text="other"),
    ],
}  # fmt: skip


def test_share_of_the_gap_is_from_the_same_window_to_full_attention() -> None:
    rows = rows_of(REPORT, "books")
    assert [each["closed"] for each in rows] == [
        None, pytest.approx(0.5), None, None, pytest.approx(0.1), None, pytest.approx(0.6), None
    ]  # fmt: skip


def test_front_is_what_no_other_row_beats_at_the_same_cost() -> None:
    fronts = [each["front"] for each in rows_of(REPORT, "books")]
    assert fronts == [["time"], ["state"], ["state", "time"], ["state", "time"], [], ["state"], ["state"],
                      ["state", "time"]]  # fmt: skip


def test_table_and_plot_have_every_row_of_a_text(tmp_path: Path) -> None:
    lines = table(REPORT, "books").rows
    assert [line[0] for line in lines[:3]] == ["disjoint-256", "disjoint-256 + recall", "sliding-256"]
    assert lines[1][1:4] == ["3.5000", "-0.5000", "50%"]
    assert lines[1][5:7] == ["9.000", "2.000"]
    draw([REPORT | {"rows": REPORT["rows"][:-1]}], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count("<!-- disjoint-256 -->") == 6  # three rows without recall, in two panels
    assert drawn.count("<!-- full-8192 -->") == 4


def test_rows_whose_time_was_not_measured_are_on_no_front_of_time_and_in_no_panel_of_it(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "ms_per_token"} for row in REPORT["rows"]]
    report = REPORT | {"rows": rows}
    assert {cost for row in rows_of(report, "books") for cost in row["front"]} == {"state"}
    assert len(table(report, "books").rows[0]) == len(table(REPORT, "books").rows[0]) - 2
    draw([report], tmp_path / "plot.svg")
    assert "ms per token" not in (tmp_path / "plot.svg").read_text()
