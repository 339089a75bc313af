"""What we measured beside what the paper prints."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from logpast.ledger.row import append
from logpast.paper import printed
from logpast.paper.measured import measured
from logpast.paper.ours import beside, ours
from logpast.reporting.tables import Table
from paper_rows import row, with_documents


def beside_a1(folder: Path) -> Table:
    table = printed.sweep("A1")
    return beside(table, measured(table, folder))


def test_each_of_a_kind_stands_beside_the_printed_figure(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(5, 100, 0, 35.0, model={"normalize": "area"}))
    append(ledger / "other.jsonl", row(5, 100, 0, 36.0, train_data={"name": "books", "tokens": 49_000_000}))
    append(ledger / "other.jsonl", row(5, 50, 0, 37.0))
    table = ours("A1", ledger)
    assert table
    lines = [dict(zip(table.heads, line, strict=True)) for line in table.rows if line[0] == "5"]
    assert [(line["τ*max"], line["system"], line["printed"], line["ours"]) for line in lines] == [
        ("2", "delta¹", "19.26/30.78", "40.50 ± 0.71/81.00 ± 1.41 (2 seeds)"),
        ("2", "k = 100²", "19.74/31.31", "36.00/72.00"),
        ("2", "k = 100, model.normalize = area¹", "19.74/31.31", "35.00/70.00"),
        ("2", "k = 100, model.normalize = none¹", "19.74/31.31", "38.00/76.00"),
        ("2", "k = 50¹", "", "37.00/74.00"),
    ]


def test_a_memory_stands_beside_the_control_of_its_length_and_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        append(tmp_path / "s.jsonl", with_documents(row(5, None, seed, 40.0), [300.0, 400.0, 800.0]))
        append(tmp_path / "s.jsonl", with_documents(row(53, None, seed, 40.0), [300.0, 400.0, 800.0]))
    append(tmp_path / "s.jsonl", with_documents(row(53, 200, 1, 39.0), [700.0, 390.0, 788.0]))
    table = beside_a1(tmp_path)
    lines = {(line[0], line[2]): dict(zip(table.heads, line, strict=True)) for line in table.rows}
    # e^(1200 / 300), of the two familiar ones
    assert lines["53", "delta¹"]["ours"] == f"{math.exp(1500 / 400):.2f} ± 0.00/80.00 ± 0.00 (2 seeds)"
    assert lines["53", "delta¹"]["ours, familiar"] == "54.60 ± 0.00"
    assert [lines["53", "k = 200¹"][head] for head in ("ours", "ours, familiar")] == ["109.40/78.00", "50.74"]
    assert "±: standard deviation over seeds" in table.notes
    assert lines["53", "k = 200¹"]["ours − delta"].startswith("+0.9450 [")
    assert lines["53", "k = 200¹"]["ours − delta, familiar"] == "-0.0733 [-0.1000, -0.0600]"
    assert {where for where, line in lines.items() if line["ours − delta"]} == {("53", "k = 200¹")}
    assert "never has (2 of 3¹)" in "".join(table.notes)
    (series,) = (one for one in measured(printed.sweep("A1"), tmp_path) if one.name == "delta")
    assert series.values(5, "ppl_familiar") == pytest.approx([math.exp(4)] * 2)
    assert series.values(5, "ppl_token") == [math.exp(1500 / 400)] * 2


def test_what_a_state_takes_stands_beside(tmp_path: Path) -> None:
    for k, kib in ((None, 1000), (100, 1032), (200, 1032)):
        append(tmp_path / "s.jsonl", row(53, k, 0, 40.0, state_bytes=kib * 1024))
        append(tmp_path / "s.jsonl", row(5, k, 0, 40.0, state_bytes=900 * 1024))
    append(tmp_path / "s.jsonl", row(9, None, 0, 40.0))  # a row of before
    table = beside_a1(tmp_path)
    place = table.heads.index("state KiB")
    found = [(line[0], line[2], line[place]) for line in table.rows if line[place]]
    assert found[0] == ("5", "delta¹", "900")
    assert found[-3:] == [("53", "delta¹", "1,000"), ("53", "k = 100¹", "1,032"), ("53", "k = 200¹", "1,032")]
    assert table.notes[-1].startswith("state: what must be kept")


def test_how_much_the_scored_weights_have_seen_stands_beside(tmp_path: Path) -> None:
    """Which may be less than the training, and another length with each seed, of what is still one training."""
    for k, seed, seen in ((None, 0, 49_000_000), (None, 1, 30_000_000), (200, 0, 12_340_000)):
        append(tmp_path / "s.jsonl", row(53, k, seed, 40.0, train_tokens=seen))
    table = beside_a1(tmp_path)
    place = table.heads.index("tokens seen")
    found = [(line[2], line[place]) for line in table.rows if line[place]]
    assert found == [("delta¹", "30.0M–49.0M"), ("k = 200¹", "12.3M")]
    assert table.notes[-1].startswith("tokens seen: by the weights")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("recipe", "batch_size"), 8),
        (("recipe", "model", "layers"), 9),
        (("train_data", "sha256"), "another"),
        (("test_data", "sha256"), "another"),
    ],
)
def test_a_control_that_is_not_alike_is_none(tmp_path: Path, place: tuple[str, ...], value: object) -> None:
    other, memory = row(53, None, 0, 40.0, model={"layers": 2}), row(53, 200, 0, 39.0, model={"layers": 2})
    rows = [with_documents(each, [300.0, 400.0, 800.0]) for each in (copy.deepcopy(other), memory)]
    for each in rows:
        append(tmp_path / "same" / "s.jsonl", each)
    assert "ours − delta" in beside_a1(tmp_path / "same").heads
    part: Any = rows[0]
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    for each in rows:
        append(tmp_path / "other" / "s.jsonl", each)
    assert "ours − delta" not in beside_a1(tmp_path / "other").heads


def test_texts_of_one_name_are_two_series(tmp_path: Path) -> None:
    for number, ppl in enumerate((39.0, 99.0)):
        test = {"name": "wikitext103:test", "tokens": 286_221, "sha256": str(number)}
        append(tmp_path / "s.jsonl", row(53, 200, 0, ppl, test_data=test))
    table = beside_a1(tmp_path)
    assert [line[-2] for line in table.rows[-2:]] == ["39.00/78.00", "99.00/198.00"]


def test_of_two_rows_of_a_run_the_one_that_tells_more_counts(tmp_path: Path) -> None:
    newer = with_documents(row(53, 200, 0, 39.0), [700.0, 390.0, 788.0])
    older = newer | {"scores": {name: value for name, value in newer["scores"].items() if name != "by_document"}}
    for each in (older, newer, older):
        append(tmp_path / "s.jsonl", each)
    assert beside_a1(tmp_path).rows[-1][-3:] == ["109.40/78.00", "50.74", "49.0M"]


def test_documents_that_a_model_gives_no_chance(tmp_path: Path) -> None:
    append(tmp_path / "s.jsonl", with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]))
    append(tmp_path / "s.jsonl", with_documents(row(53, 200, 0, 39.0), [700.0, None, 788.0]))  # type: ignore[list-item]
    table = beside_a1(tmp_path)
    assert table.rows[-1][-3:] == ["39.00/78.00", "?", "49.0M"]
    assert "ours − delta" not in table.heads


def test_more_kinds_of_runs_than_single_digits(tmp_path: Path) -> None:
    for steps in range(1, 13):
        append(tmp_path / "s.jsonl", row(53, None, 0, 40.0, length={"steps": 1000 * steps}))
    table = beside_a1(tmp_path)
    marks = [line[2].removeprefix("delta") for line in table.rows if line[table.heads.index("ours")]]
    assert len(marks) == len(set(marks)) == 12
    assert {"⁹", "¹⁰", "¹²"} < set(marks)
    assert all(any(note.startswith(f"{mark} trained on") for note in table.notes) for mark in marks)
