"""Our ledger rows for the cells of the paper's tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logpast.ledger.row import append
from logpast.paper import printed
from logpast.paper.measured import Series, footnotes, measured
from logpast.util.errors import UserError
from paper_rows import row, with_documents

Save = Callable[..., Path]
A1 = printed.sweep("A1")
COMPARISON = {
    "system": "memory",
    "budget": "tokens",
    "learning_rate": 1e-3,
    "attention_length": 309,
    "state_bytes": 1,
    "tokens_per_second": 1.0,
    "peak_bytes": None,
}


def by_name(folder: Path) -> dict[str, Series]:
    return {series.name: series for series in measured(A1, folder)}


@pytest.mark.parametrize(
    "other",
    [
        row(5, 100, 9, 1.0, test_data={"name": "wikitext103:validation"}),
        row(5, 100, 9, 1.0, test_data={"name": "wikitext103:test[:5]"}),
        row(5, 100, 9, 1.0, model={"window": 128}),
        row(5, 100, 9, 1.0, model={"reach": 3.0}),
        row(6, 100, 9, 1.0),
        row(5, 100, 9, 1.0, comparison=COMPARISON),
        row(5, 100, 9, 1.0, model={"system": "transformer_xl"}),
        row(5, 100, 9, 1.0, scores={"accounting": "paper"}),
        row(5, 100, 9, 1.0, scores={"stride": 64}),
    ],
)
def test_rows_that_do_not_match_the_table_are_left_out(other: dict[str, Any], ledger: Path) -> None:
    append(ledger / "other.jsonl", other)
    found = measured(A1, ledger)
    assert [(one.name, sorted(one.scores)) for one in found] == [
        ("delta", [5, 53]),
        ("k = 100", [5]),
        ("k = 200", [53]),
    ]
    assert [one.values(5, "ppl_token") for one in found[:2]] == [[40.0, 41.0], [38.0]]
    assert measured(printed.sweep("A2"), ledger) == []


def test_without_results_the_rows_of_sweeps_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    append(Path("runs/sweep-paper/ledger.jsonl"), row(5, 100, 0, 38.0))
    assert [one.values(5, "ppl_token") for one in measured(A1, None)] == [[38.0]]
    append(Path("results/mine.jsonl"), row(5, 100, 0, 39.0))
    assert [one.values(5, "ppl_token") for one in measured(A1, None)] == [[39.0]]


def test_series_that_differ_are_named_by_their_settings(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(53, 100, 0, 35.0, model={"normalize": "area"}))
    assert list(by_name(ledger)) == [
        "delta",
        "k = 100, model.normalize = area",
        "k = 100, model.normalize = none",
        "k = 200",
    ]


def test_part_of_the_test_set_is_described_as_such(save: Save) -> None:
    folder = save(row(53, 100, 0, 35.0, test_data={"name": "pg19:test", "tokens": 10_000_000}))
    (series,) = measured(printed.sweep("A2"), folder)
    assert "10,000,000 tokens: not the official set" in series.description


def test_settings_that_are_not_the_papers_are_named_even_if_all_runs_share_them(save: Save) -> None:
    (series,) = measured(A1, save(*(row(slots, 100, 0, 40.0, model={"normalize": "area"}) for slots in (5, 53))))
    assert series.name == "k = 100, model.normalize = area"


def test_repeated_row_counts_once(ledger: Path) -> None:
    append(ledger / "sweep.jsonl", row(5, 100, 0, 38.0))
    assert by_name(ledger)["k = 100"].values(5, "ppl_token") == [38.0]


def test_other_way_of_scoring_is_a_series_of_its_own(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(5, 100, 0, 99.0, scores={"streams": "document"}))
    found = by_name(ledger)
    assert found["k = 100, scores.streams = document"].values(5, "ppl_token") == [99.0]
    assert found["k = 100, scores.streams = None"].values(5, "ppl_token") == [38.0]


def test_two_rows_of_one_run_with_other_scores_are_an_error(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(5, 100, 0, 98.0, run="again"))
    with pytest.raises(UserError, match=r"jsonl, run '\w+': .*L = 5, k = 100, seed 0"):
        measured(A1, ledger)


def test_infinite_perplexity_is_kept(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(9, 100, 0, float("inf")))
    assert by_name(ledger)["k = 100"].values(9, "ppl_word") == [float("inf")]


def test_damaged_row_is_reported_with_its_file(ledger: Path) -> None:
    (ledger / "damaged.jsonl").write_text('{"recipe": 3, "scores": {}}\n')
    with pytest.raises(UserError, match=r"damaged\.jsonl, line 1"):
        measured(A1, ledger)


def test_documents_that_differ_between_rows_of_one_text_are_an_error(save: Save) -> None:
    other = with_documents(row(53, None, 1, 40.0, run="other"), [300.0, 400.0])
    other["scores"]["by_document"] |= {"tokens": [100, 300], "unseen": [0, 0]}
    folder = save(with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]), other)
    with pytest.raises(UserError, match=r"saved\.jsonl, run 'other': scores\.by_document"):
        measured(A1, folder)


def test_benchmark_tables_are_ignored(ledger: Path) -> None:
    before = len(measured(A1, ledger))
    (ledger / "speed.json").write_text('{"rows": [{"recipe": "demo", "ms": 3}]}')
    assert len(measured(A1, ledger)) == before > 0


def test_conditions_select_rows(ledger: Path) -> None:
    assert [one.name for one in measured(A1, ledger, ["k=100", "seed=0"])] == ["k = 100"]


@pytest.mark.parametrize("word", ["seed", "page"])
def test_bad_condition_is_refused_before_anything_is_read(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'{word}'"):
        measured(A1, tmp_path / "nowhere", [word])


def test_footnotes_go_beyond_nine(save: Save) -> None:
    rows = [row(53, None, 0, 40.0, length={"steps": 1000 * number}) for number in range(1, 13)]
    marks = footnotes(measured(A1, save(*rows)))
    assert list(marks.values()) == ["¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹", "¹⁰", "¹¹", "¹²"]
    assert all(description.startswith("trained on") for description in marks)
