"""Rows of the ledger: all published ones load, and damaged ones are reported with file, line and field."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ledger_rows import scored_row
from logpast.data import TokenStore
from logpast.ledger import row as ledger
from logpast.ledger.row import FIELDS
from logpast.models import build, config_from_dict
from logpast.training.checkpoint import Checkpoint
from logpast.training.config import TrainConfig
from logpast.util.errors import UserError

RESULTS = Path(__file__).parents[2] / "results"
MEASURED = {"state_bytes": 9, "tokens_per_second": 9.0, "peak_bytes": None}
COMPARISON = {
    "system": "a", "budget": "tokens", "learning_rate": 0.1, "attention_length": 9,
}  # fmt: skip


def changed(path: str, value: Any = None, remove: bool = False) -> dict[str, Any]:
    """A row with every optional part, and one value replaced or removed."""
    row = scored_row(
        validation_data={"name": "c", "sha256": "3"}, comparison=dict(COMPARISON), sweep={"cell": "c", "key": "k"},
        **MEASURED,
        scores={
            "ppl_token": 2.718281828, "ppl_word": None, "bits_per_byte": 1, "interval": {"ppl_token": [1.0, None]},
            "by_document": {"nats": [1.0, 2.0], "tokens": [1, 2], "unseen": [0, 0]},
        },
    )  # fmt: skip
    *parents, name = path.split(".")
    part = row
    for parent in parents:
        part = part[parent]
    if remove:
        del part[name]
    else:
        part[name] = value
    return row


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_all_published_rows_load_and_their_fields_are_listed() -> None:
    rows = [row for file in sorted(RESULTS.glob("*.jsonl")) for row in ledger.read(file)]
    assert len(rows) >= 127
    assert {name for row in rows for name in row} <= {field.name for field in FIELDS}
    assert all(ledger.is_run(row) for row in rows)


def test_state_bytes_of_published_rows_are_those_of_the_models() -> None:
    """Rows keep what was computed when they were made; a later correction has to reach them too."""

    @cache
    def state_bytes(settings: str) -> int:
        with torch.device("meta"):
            return build(config_from_dict(json.loads(settings))).eval().state_bytes

    for file in sorted(RESULTS.glob("*.jsonl")):
        for row in ledger.read(file):
            kept = row.get("state_bytes")
            if kept is not None:
                assert state_bytes(json.dumps(row["recipe"]["model"])) == kept, file


def test_row_makes_a_valid_row(train_config: TrainConfig, store: TokenStore) -> None:
    state = {
        "step": 3, "revision": "0", "parameters": 9, "tokens": 9, "seconds": 1.0, "data": store.identity,
        "validation_data": None, "hardware": {},
    }  # fmt: skip
    row = ledger.row(Checkpoint(Path("run"), state, train_config), store, scored_row()["scores"] | {"checkpoint": "x"})
    ledger.validate(row)
    assert set(row) <= {field.name for field in FIELDS}
    assert "checkpoint" not in row["scores"]


@pytest.mark.parametrize("name", [field.name for field in FIELDS if field.required])
def test_missing_fields_are_named(name: str, tmp_path: Path) -> None:
    row = changed(name, remove=True)
    if name in ("recipe", "scores"):  # without these it is another measurement
        ledger.validate(row)
        return
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 2 .*\b{name};"):
        ledger.read(write(tmp_path / "rows.jsonl", scored_row(), row))


def test_optional_fields_may_be_missing(tmp_path: Path) -> None:
    rows = [
        changed("run", remove=True), changed("scores.by_document", remove=True), changed("validation_data", None),
        changed("scores.interval", None), changed("scores.stride", 4),
        changed("scores.training_overlap", "it is the training text"),
    ]  # fmt: skip
    assert ledger.read(write(tmp_path / "rows.jsonl", *rows)) == rows


@pytest.mark.parametrize("name", ["state_bytes", "tokens_per_second", "peak_bytes"])
def test_rows_of_comparisons_need_what_was_measured(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 1 .*\b{name}\b"):
        ledger.read(write(tmp_path / "rows.jsonl", changed(name, remove=True)))


def test_rows_of_comparisons_without_a_schema_number_are_migrated(tmp_path: Path) -> None:
    old = scored_row(comparison=COMPARISON | MEASURED)
    assert ledger.read(write(tmp_path / "rows.jsonl", old)) == [scored_row(comparison=COMPARISON) | MEASURED]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trained_at_revision", None), ("recipe", None), ("recipe.model", [1]), ("recipe.model.system", 5),
        ("seed", "0"), ("seed", True), ("seed", 0.5), ("parameters", None), ("train_tokens", [1]),
        ("train_data", "kjv"), ("test_data.name", 3), ("validation_data", "x"), ("scores", None),
        ("scores.ppl_token", "x"), ("scores.ppl_word", {}), ("scores.bits_per_byte", {"a": 1}),
        ("scores.interval", []), ("scores.interval.ppl_token", [1.0]), ("scores.interval.ppl_token", ["x", 1.0]),
        ("scores.stride", "4"), ("scores.training_overlap", True),
        ("scores.by_document", []), ("scores.by_document.nats", 3), ("scores.by_document.nats", [1.0, "x"]),
        ("scores.by_document.tokens", [None, 2]), ("state_bytes", "x"), ("seconds", "1"), ("sweep", 3),
        ("sweep.key", None), ("comparison", {}), ("peak_bytes", "x"), ("tokens_per_second", None),
        ("schema", 2), ("schema", "1"), ("scores.level", "95 %"), ("scores.bootstrap_samples", 1e300),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"rows\.jsonl, line 1 .*\b{name}"):
        ledger.read(write(tmp_path / "rows.jsonl", changed(name, value)))


@pytest.mark.parametrize("name", ["nats", "tokens", "unseen"])
def test_lists_of_documents_must_have_equal_lengths(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1 .*scores\.by_document differ in length"):
        ledger.read(write(tmp_path / "rows.jsonl", changed(f"scores.by_document.{name}", [1])))


@pytest.mark.parametrize("ppl", [12.0, 0.0, None])
def test_documents_must_add_up_to_the_perplexity(ppl: float | None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1 .*scores\.by_document adds up .*scores\.ppl_token"):
        ledger.read(write(tmp_path / "rows.jsonl", changed("scores.ppl_token", ppl)))


@pytest.mark.parametrize("row", [{}, {"recorded": "by hand"}, scored_row()])
def test_required_parts_are_named(row: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", scored_row(comparison=COMPARISON, **MEASURED), row)
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 .* comparison"):
        ledger.read(tmp_path / "rows.jsonl", "comparison")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "not a row"), ('"x"', "not a row"), ("3", "not a row"), ("null", "not a row"), ('{"a":', "not a row"),
        ('{"a": NaN}', "NaN"), ('{"a": -Infinity}', "-Infinity"), ('{"a": 1e999}', "1e999"),
        ('{"a": 1' + "0" * 400 + "}", "too large"),
    ],
)  # fmt: skip
def test_lines_that_are_not_rows_are_reported(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n\n{line}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3 .*{problem}"):
        ledger.read(tmp_path / "a.jsonl")


def test_other_measurements_are_not_validated(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 3.0}, {"scores": 3}, {"recipe": "demo"}]
    assert ledger.read(write(tmp_path / "log.jsonl", *lines)) == lines


def test_a_row_that_changed_since_it_was_appended_is_noticed(tmp_path: Path) -> None:
    file, entry = tmp_path / "rows.jsonl", {"case": "é", "milliseconds": 1.25}
    ledger.append(file, entry)
    assert ledger.read(file) == [entry]
    file.write_text(file.read_text().replace("1.25", "1.75"))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1 .*crc32"):
        ledger.read(file)
