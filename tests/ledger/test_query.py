"""Rows of a results folder: filters, order, and damaged files."""

import json
from pathlib import Path

import pytest

from ledger_rows import scored_row
from logpast.ledger.query import Entry, find_files, parse_condition, read, select
from logpast.ledger.row import append
from logpast.util.errors import UserError

RESULTS = Path(__file__).parents[2] / "results"


def matching(where: list[str]) -> list[Entry]:
    return select(read(find_files(RESULTS)), [parse_condition(word) for word in where])


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (["file=demo-text"], 15),
        (["file=demo-text", "seed=2"], 3),
        (["system=log_memory", "seed=0", "file=demo*"], 2),
        (["recipe.model.system=log_memory", "seed=0", "file=demo*"], 2),
        (["model.system=log_memory", "k=20", "file=demo*"], 3),
        (["run=mem*y", "file=demo*"], 5),
        (["scores.documents=118", "file=demo*"], 15),
        (["case=full*", "file=train_gpu"], 7),
        (["k=*", "file=demo-text"], 5),
        (["L=3*", "file=demo-text"], 15),
        (["k=10*", "file=demo-text"], 5),
        (["recipe.data.jitter=false", "file=demo-text"], 15),
        (["recipe.epochs=null", "file=demo-text"], 15),
        (["tokens=813,147", "file=demo-text"], 3),
        (["k=many", "file=*"], 0),
        (["seed=7"], 0),
    ],
)
def test_conditions_select_rows(where: list[str], count: int) -> None:
    if count:
        assert len(matching(where)) == count
    else:
        with pytest.raises(UserError, match="none of the"):
            matching(where)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", json.dumps(scored_row(scores={"ppl_token": "x"})), "line 2 .*scores.ppl_token"),
        ("a.jsonl", "\udcff", "not a ledger"),
        ("a.jsonl", '{"a":' * 3000 + "1" + "}" * 3000, "line 2 .* nested too deeply"),
        ("a.jsonl", '{"a.b": 1, "a": {"b": 1}}', r"line 2 .*a\.b is given twice"),
        ("a.json", "\udcff", "not a table"),
        ("a.json", "[1]", "not a table"),
        ("a.json", '{"rows":5}', "rows"),
        ("a.json", '{"rows":[1]}', "rows"),
        ("a.json", '{"rows":[{"a": NaN}]}', "NaN"),
        ("a.json", '{"hardware":"H200"}', "hardware"),
        ("a.json", '{"hardware":{}}', "hardware"),
    ],
)
def test_damaged_files_are_named(name: str, content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n" + content, errors="surrogateescape")
    with pytest.raises(UserError, match=rf"{name}.*{problem}"):
        read(find_files(tmp_path))


def test_rows_are_sorted_by_missing_values_then_numbers_then_text(tmp_path: Path) -> None:
    recipes = [{"model": {"system": "recent", "slots": slots}} for slots in ("x", 3, None, [1], 1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(scored_row(recipe=recipe)) + "\n" for recipe in recipes))
    (tmp_path / "b.json").write_text('{"what": 3}')
    assert [entry.get("L") for entry in read(find_files(tmp_path))] == [None, 1, 3, [1], "x", None]


def test_long_lists_are_shortened_in_error_messages() -> None:
    with pytest.raises(UserError, match=r"scores\.by_document\.nats: \[[0-9., ]+…, .*…$") as error:
        matching(["scores.by_document.nats=1"])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_folder_in_place_of_a_file_is_reported(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name}: Is a directory"):
        read(find_files(tmp_path))


def test_rows_of_results_sweeps_and_comparisons_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to two levels down, but not in hidden folders, and no files of other programs."""
    monkeypatch.chdir(tmp_path)
    found = {
        "ledger.jsonl": "ledger",
        "out/rows.jsonl": "out",
        "runs/sweep-toy/ledger.jsonl": "runs/sweep-toy",
        "runs/rivals-toy/rows.jsonl": "runs/rivals-toy",
        "results/a.jsonl": "a",
        "results/rows.jsonl": "rows",
    }
    others = ["runs/a/b/ledger.jsonl", ".hidden/ledger.jsonl", "other.jsonl", "runs/run/log.jsonl"]
    for name in [*found, *others]:
        append(Path(name), scored_row())
    append(Path("data/rows.jsonl"), {"text": "of another program"})
    assert find_files() == {Path(name): file for name, file in found.items()}
    assert sorted(entry.file for entry in read(find_files())) == sorted(found.values())
    assert find_files(Path("runs/sweep-toy")) == {Path("runs/sweep-toy/ledger.jsonl"): "ledger"}
