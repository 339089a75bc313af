"""Our runs that belong beside the paper's tables: which they are, and that damaged rows are told."""

from pathlib import Path

import pytest

from logpast.ledger.row import append
from logpast.paper import printed
from logpast.paper.measured import measured
from logpast.util.errors import UserError
from paper_rows import row, with_documents


def test_only_what_belongs_stands_beside_the_table(ledger: Path) -> None:
    table = printed.sweep("A1")
    for entry in (
        row(5, 100, 9, 1.0, test_data={"name": "wikitext103:validation", "tokens": 1}),
        row(5, 100, 9, 1.0, test_data={"name": "wikitext103:test[:5]", "tokens": 1}),
        row(5, 100, 9, 1.0, model={"window": 128}),
        row(5, 100, 9, 1.0, model={"reach": 3.0}),
        row(6, 100, 9, 1.0),
        row(5, 100, 9, 1.0, comparison={"system": "memory"}),
        row(5, 100, 9, 1.0, model={"system": "transformer_xl"}),
        row(5, 100, 9, 1.0, scores={"accounting": "paper", "ppl_token": 1.0, "ppl_word": 1.0, "bits_per_byte": 1.0}),
    ):
        append(ledger / "other.jsonl", entry)
    found = measured(table, ledger)
    assert [(one.name, sorted(one.points)) for one in found] == [
        ("delta", [5, 53]),
        ("k = 100", [5]),
        ("k = 200", [53]),
    ]
    assert [one.values(5, "ppl_token") for one in found[:2]] == [[40.0, 41.0], [38.0]]
    assert measured(printed.sweep("A2"), ledger) == []


def test_recipes_are_told_apart_and_parts_of_a_test_set_named(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(53, 100, 0, 35.0, model={"normalize": "area"}))
    names = [one.name for one in measured(printed.sweep("A1"), ledger)]
    assert names == ["delta", "k = 100, model.normalize = area", "k = 100, model.normalize = none", "k = 200"]
    append(ledger / "books.jsonl", row(53, 100, 0, 35.0, test_data={"name": "pg19:test", "tokens": 10_000_000}))
    (one,) = measured(printed.sweep("A2"), ledger)
    assert "10,000,000 tokens: not the official set" in one.about


def test_filters_that_are_not_the_papers_are_named_where_all_are_alike(tmp_path: Path) -> None:
    for slots in (5, 53):
        append(tmp_path / "s.jsonl", row(slots, 100, 0, 40.0, model={"normalize": "area", "kernel": "paper"}))
    (series,) = measured(printed.sweep("A1"), tmp_path)
    assert series.name == "k = 100, model.normalize = area"


def test_the_same_row_twice_counts_once(ledger: Path) -> None:
    append(ledger / "sweep.jsonl", row(5, 100, 0, 38.0))
    found = {one.name: one for one in measured(printed.sweep("A1"), ledger)}
    assert found["k = 100"].values(5, "ppl_token") == [38.0]


def test_a_second_row_never_replaces_the_first(ledger: Path) -> None:
    anew = row(5, 100, 0, 99.0, run="anew")
    anew["scores"]["streams"] = "document"
    append(ledger / "other.jsonl", anew)
    found = {one.name: one for one in measured(printed.sweep("A1"), ledger)}
    assert found["k = 100, scores.streams = document"].values(5, "ppl_token") == [99.0]
    assert found["k = 100, scores.streams = None"].values(5, "ppl_token") == [38.0]
    anew["scores"]["ppl_token"] = 98.0
    append(ledger / "other.jsonl", anew)
    with pytest.raises(UserError, match=r"other\.jsonl, run 'anew': .*L = 5, k = 100, seed 0.*remove one"):
        measured(printed.sweep("A1"), ledger)


def test_damaged_and_diverged_rows(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(9, 100, 0, float("inf")))
    found = {one.name: one for one in measured(printed.sweep("A1"), ledger)}
    assert found["k = 100"].values(9, "ppl_word") == [float("inf")]
    append(ledger / "other.jsonl", row(9, 100, 1, 1.0, parameters=None))
    with pytest.raises(UserError, match=r"other\.jsonl, run 'r' is not a row .*mend or remove"):
        measured(printed.sweep("A1"), ledger)


@pytest.mark.parametrize(
    "documents",
    [{"nats": [1.0]}, {"tokens": [1, 2]}, {"nats": [1.0], "tokens": [1, 2]}, {"nats": [1.0], "tokens": [None]}, []],
)
def test_damaged_documents_are_told(tmp_path: Path, documents: object) -> None:
    made = row(53, 200, 0, 39.0)
    append(tmp_path / "s.jsonl", made | {"scores": made["scores"] | {"by_document": documents}})
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' is not a row of a scored run"):
        measured(printed.sweep("A1"), tmp_path)


@pytest.mark.parametrize("ppl", [12.0, 0.0, None])
def test_documents_that_add_up_to_something_else_are_told(tmp_path: Path, ppl: float | None) -> None:
    made = with_documents(row(53, 200, 0, 39.0), [300.0, 400.0, 800.0])
    append(tmp_path / "s.jsonl", made | {"scores": made["scores"] | {"ppl_token": ppl}})
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' .* add up to another perplexity"):
        measured(printed.sweep("A1"), tmp_path)


def test_documents_of_another_text_are_told(tmp_path: Path) -> None:
    other = with_documents(row(53, None, 1, 40.0), [300.0, 400.0])
    other["scores"]["by_document"] |= {"tokens": [100, 100], "unseen": [0, 0]}
    for made in (with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]), other):
        append(tmp_path / "s.jsonl", made)
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' .* has other documents than rows of the same text"):
        measured(printed.sweep("A1"), tmp_path)


def test_a_state_that_is_no_number_is_told(tmp_path: Path) -> None:
    append(tmp_path / "s.jsonl", row(53, None, 0, 40.0, state_bytes="x"))
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' is not a row of a scored run"):
        measured(printed.sweep("A1"), tmp_path)


@pytest.mark.parametrize("seen", [None, "x", [1]])
def test_tokens_seen_that_are_no_number_are_told(tmp_path: Path, seen: object) -> None:
    for seed in (0, 1):
        append(tmp_path / "s.jsonl", row(53, None, seed, 40.0, train_tokens=seen if seed else 1))
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' is not a row of a scored run"):
        measured(printed.sweep("A1"), tmp_path)


def test_rows_of_another_kind_are_passed_by(ledger: Path) -> None:
    before = len(measured(printed.sweep("A1"), ledger))
    (ledger / "speed.json").write_text('{"rows": [{"recipe": "demo", "ms": 3}]}')
    assert len(measured(printed.sweep("A1"), ledger)) == before > 0


def test_a_condition_that_is_none_is_told_before_anything_is_read(tmp_path: Path) -> None:
    for word in ("seed", "page"):  # no verb of another command is meant
        with pytest.raises(UserError, match=f"'{word}' is no condition; write NAME=VALUE"):
            measured(printed.sweep("A1"), tmp_path / "nowhere", [word])
