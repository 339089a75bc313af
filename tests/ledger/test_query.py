"""The rows of results/: all of them, those that are asked for, and damaged ones told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from logpast.ledger import row as ledger
from logpast.ledger.query import Entry, parse_condition, read, select
from logpast.models import build, config_from_dict
from logpast.util.errors import UserError

HERE = Path(__file__).parents[2] / "results"
RUN: dict[str, Any] = {
    "trained_at_revision": "0", "train_data": {"name": "a"}, "test_data": {"name": "a"}, "recipe": {}, "scores": {},
}  # fmt: skip


def asked(where: list[str]) -> list[Entry]:
    return select(read(HERE), [parse_condition(word) for word in where])


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (["file=demo-text"], 10),
        (["file=demo-text", "seed=3"], 2),
        (["system=log_memory", "seed=0", "file=demo*"], 2),
        (["recipe.model.system=log_memory", "seed=0", "file=demo*"], 2),
        (["model.system=log_memory", "k=20", "file=demo*"], 3),
        (["run=log*-0", "file=demo*"], 2),
        (["scores.documents=118", "file=demo*"], 10),
        (["case=full*", "file=train_gpu"], 7),
        (["k=*", "file=demo-text"], 5),
        (["L=3*", "file=demo-text"], 10),
        (["k=10*", "file=demo-text"], 5),
        (["recipe.data.jitter=false", "file=demo-text"], 10),
        (["recipe.epochs=null", "file=demo-text"], 10),
        (["tokens=1,228,788", "file=demo-text"], 8),
        (["k=many", "file=*"], 0),
        (["seed=7"], 0),
    ],
)
def test_filters(where: list[str], count: int) -> None:
    if count:
        assert len(asked(where)) == count
    else:
        with pytest.raises(UserError, match="none of the"):
            asked(where)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        *(("a.jsonl", line, "line 2 is not a row: it should be") for line in ("[]", '"x"', "3", "null")),
        ("a.jsonl", json.dumps({"recipe": {}, "scores": {}}), "line 2 .* it has no 'trained_at_revision'"),
        ("a.jsonl", json.dumps(RUN | {"test_data": {"name": 3}}), "line 2 is not a row of a scored run"),
        ("a.jsonl", json.dumps(RUN | {"recipe": None}), "line 2 is not a row of a scored run: its recipe is None"),
        ("a.jsonl", json.dumps(RUN | {"scores": {"ppl_token": "x"}}), "line 2 .* ppl_token is 'x', not a number"),
        *(
            ("a.jsonl", json.dumps(RUN | {"scores": {"ppl_word": wrong}}), "line 2 .* its ppl_word is")
            for wrong in ({}, {"a": 1})
        ),
        ("a.jsonl", "\udcff", "is not a ledger"),
        ("a.json", "\udcff", "is not a table"),
        *(("a.json", text, "is not a table") for text in ('{"rows":5}', '{"rows":[1]}', '{"hardware":"H200"}')),
        *(
            ("a.jsonl", f'{{"a": {word}}}', f"line 2 is not a row: {word} is no")
            for word in ("NaN", "-Infinity", "1e999")
        ),
        ("a.json", '{"rows":[{"a": NaN}]}', "is not a table of results: NaN is no number"),
        ("a.jsonl", '{"a": 1' + "0" * 400 + "}", "line 2 .* too large"),
        ("a.jsonl", '{"a":' * 3000 + "1" + "}" * 3000, "line 2 is not a row.* recursion"),
        ("a.json", '{"hardware":{}}', "is not a table of results: it has no 'name'"),
        ("a.json", '{"rows":[{"ppl_word": "x"}]}', "ppl_word is 'x'"),
    ],
)
def test_damaged_files_are_named(name: str, content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\n" + content, errors="surrogateescape")
    with pytest.raises(UserError, match=rf"{name}.* {told}.*; mend or remove it"):
        read(tmp_path)


def test_rows_with_values_of_several_kinds_are_listed(tmp_path: Path) -> None:
    seeds = ["x", 3, None, [1], 1]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(RUN | {"seed": seed}) + "\n" for seed in seeds))
    (tmp_path / "b.json").write_text('{"what": 3}')
    assert [entry.get("seed") for entry in read(tmp_path)] == [None, 1, 3, [1], "x", None]


def test_states_are_those_of_the_systems() -> None:
    """Rows keep what was computed when they were made; a later insight has to reach them too."""
    for place in sorted(HERE.glob("*.jsonl")):
        for row in ledger.read(place):
            kept = (row if "state_bytes" in row else row.get("comparison", {})).get("state_bytes")
            if kept is not None:
                with torch.device("meta"):
                    model = build(config_from_dict(row["recipe"]["model"])).eval()
                assert model.state_bytes == kept, place


def test_lists_that_may_be_asked_for_are_not_told_whole() -> None:
    with pytest.raises(UserError, match=r"its scores\.by_document\.nats may be \[[0-9., ]+…, .* and others$") as error:
        asked(["scores.by_document.nats=1"])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_is_no_file_is_told_with_a_fix(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name}: Is a directory; see that it is a file that you may read"):
        read(tmp_path)
