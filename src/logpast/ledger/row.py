"""The ledger: one JSON line, a row, per scored run in results/*.jsonl. Every number we publish comes from such a row.

FIELDS lists the fields of a row, `row` makes one, `append` writes it, and `read` validates rows when it reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Optional

from pydantic import Field as Limits
from pydantic import TypeAdapter

from logpast.ledger.documents import validate_documents
from logpast.util import schema
from logpast.util.checksums import seal, unseal
from logpast.util.errors import UserError
from logpast.util.files import try_lock
from logpast.util.serialization import json_safe
from logpast.version import __version__

if TYPE_CHECKING:
    from logpast.data import TokenStore
    from logpast.training.checkpoint import Checkpoint

RESULTS = Path("results")  # in a checkout of the repository

SCHEMA = 1  # version of the rows that `row` makes
MEASURED = ("state_bytes", "tokens_per_second", "peak_bytes")  # of every cell of a sweep or a comparison
INTERVAL = Annotated[list[float | None], Limits(min_length=2, max_length=2)]


class Field(NamedTuple):
    """One field of a row. A field below an optional one, such as sweep.cell, is required where that one is present."""

    name: str
    type: Any
    """float is any number; `| None` allows null, which in scores stands for infinity"""
    meaning: str
    required: bool = True
    """rows of earlier versions may lack the others"""


FIELDS = (
    Field("schema", int, "version of this list of fields", required=False),
    Field("recorded", str, "time at which the run was scored, UTC", required=False),
    Field("logpast", str, "version that scored the run", required=False),
    Field("scored_at_revision", str, "git commit that scored the run", required=False),
    Field("trained_at_revision", str, "git commit that trained the run"),
    Field("run", str, "name of the run's folder", required=False),
    Field("recipe", dict, "settings of the training that decide its result"),
    Field("recipe.model", dict, "settings of the model"),
    Field("recipe.model.system", str, "key in logpast.models.SYSTEMS"),
    Field("recipe_hash", str, "hash_recipe(recipe)", required=False),
    Field("seed", int, "seed of the training"),
    Field("step", int, "optimizer step of the scored checkpoint", required=False),
    Field("parameters", int, "number of parameters"),
    Field("train_tokens", int, "tokens trained on up to that step"),
    Field("train_seconds", float, "time up to that step, validation included", required=False),
    Field("init_from", dict, "path, step and sha256 of the initial weights, if the run had any", required=False),
    Field("extended", list[dict], "step and total_steps each time that the run got another length", required=False),
    Field("train_data", dict, "text that the run was trained on"),
    Field("train_data.name", str, "as it was given: a corpus or a path"),
    Field("train_data.sha256", str, "hash of its tokens"),
    Field("train_data.tokens", int, "number of its tokens", required=False),
    Field("validation_data", dict | None, "text that the checkpoint was chosen on", required=False),
    Field("validation_data.name", str, "as for train_data"),
    Field("validation_data.sha256", str, "as for train_data"),
    Field("hardware", dict, "machine that trained the run", required=False),
    Field("test_data", dict, "text that the run was scored on"),
    Field("test_data.name", str, "as for train_data"),
    Field("test_data.sha256", str, "as for train_data"),
    Field("test_data.tokens", int, "as for train_data", required=False),
    Field("scores", dict, "result of `logpast eval`; logpast.evaluation.metrics defines its numbers"),
    Field("scores.ppl_token", float | None, "perplexity per token"),
    Field("scores.ppl_word", float | None, "perplexity per word"),
    Field("scores.bits_per_byte", float | None, "bits per byte"),
    Field("scores.interval", dict | None, "bootstrap intervals over documents; null: too few", required=False),
    Field("scores.interval.ppl_token", INTERVAL, "of that score", required=False),
    Field("scores.interval.ppl_word", INTERVAL, "of that score", required=False),
    Field("scores.interval.bits_per_byte", INTERVAL, "of that score", required=False),
    Field("scores.level", float, "confidence level of the intervals; before schema 1 it was 0.95", required=False),
    Field("scores.bootstrap_samples", int, "samples that the intervals come from; before 2,000", required=False),
    Field("scores.stride", int, "stride of overlapping windows; without it windows do not overlap", required=False),
    Field("scores.training_overlap", str, "what the test text has of the training text, if any", required=False),
    Field("scores.by_document", dict, "one list entry per document of the test text", required=False),
    Field("scores.by_document.nats", list[float | None], "negative log-likelihood in nats"),
    Field("scores.by_document.tokens", list[int], "number of scored tokens"),
    Field("scores.by_document.unseen", list[int], "tokens that never occur in the training text", required=False),
    # cells of sweeps and comparisons; before schema 1 comparisons had the first three under `comparison`
    Field("state_bytes", int, "state to keep per stream at inference, in float32", required=False),
    Field("tokens_per_second", float, "training speed", required=False),
    Field("peak_bytes", int | None, "peak memory of the training", required=False),
    Field("seconds", float, "time to train and score the cell", required=False),
    Field("sweep", dict, "written by `logpast sweep`", required=False),
    Field("sweep.cell", str, "name of the cell"),
    Field("sweep.key", str, "hash of its settings and its test text"),
    Field("comparison", dict, "written by `logpast compare`", required=False),
    Field("comparison.system", str, "name of the system in the table"),
    Field("comparison.budget", str, "tokens or time: what all systems have in equal amount"),
    Field("comparison.learning_rate", float, "found by the search"),
    Field("comparison.attention_length", int, "positions attended to when scoring"),
)


def _keys_below(parent: str = "") -> dict[str, Any]:
    """The fields directly below one, as `schema` takes them."""
    found = {}
    for field in FIELDS:
        above, _, name = field.name.rpartition(".")
        if above == parent:
            kind, inner = field.type, _keys_below(field.name)
            if inner:
                kind = schema.schema(inner) if field.type is dict else Optional[schema.schema(inner)]  # noqa: UP045
            found[name + "?" * (not field.required)] = kind
    return found


ROW: TypeAdapter[Any] = TypeAdapter(schema.schema(_keys_below()))


def row(checkpoint: Checkpoint, store: TokenStore, scores: dict[str, Any]) -> dict[str, Any]:
    """The row of a scored run: what was trained and scored, how to do it again, and the scores."""
    from logpast.util.environment import revision  # reading a ledger must not import torch

    state = checkpoint.state
    settings = checkpoint.recipe
    return {
        "schema": SCHEMA,
        "recorded": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "logpast": __version__,
        "scored_at_revision": revision(),
        "trained_at_revision": state["revision"],
        "run": checkpoint.config.run.name,
        "recipe": settings,
        "recipe_hash": hash_recipe(settings),
        "seed": checkpoint.config.seed,
        "step": checkpoint.step,
        "parameters": state["parameters"],
        "train_tokens": state["tokens"],
        "train_seconds": state["seconds"],
        **{name: state[name] for name in ("init_from", "extended") if name in state},
        "train_data": state["data"],
        "validation_data": state.get("validation_data"),
        "hardware": state["hardware"],
        "test_data": store.identity,
        "scores": {name: value for name, value in scores.items() if name != "checkpoint"},
    }


def is_run(row: dict[str, Any]) -> bool:
    """Whether a line is the row of a scored run; a .jsonl file may also hold other measurements."""
    return "recipe" in row and "scores" in row


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line with its checksum, whole or not at all, however many processes write to the same file."""
    line = json.dumps(seal(json_safe(entry)), ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try_lock(handle, wait=True)
        end = os.lseek(handle, 0, os.SEEK_END)
        if end and os.pread(handle, 1, end - 1) != b"\n":  # an editor left it so, or the last row is damaged
            read(path)
            line = "\n" + line
        try:
            written = os.write(handle, line.encode())
            if written != len(line.encode()):
                raise OSError("the disk is full")
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, end)
            raise UserError(f"could not add a row to {path}: {error}; the file is unchanged") from error
    finally:
        os.close(handle)


def read(path: Path, *required: str) -> list[dict[str, Any]]:
    """All rows of a ledger, validated. `required` names optional fields that every row must have here."""
    return [row for _, row in read_lines(path, *required)]


def read_lines(path: Path, *required: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The same, each row with the number of its line."""
    with schema.reading(f"{path} is not a ledger", "give a file of rows (.jsonl)"):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if line:
            with schema.reading(f"{path}, line {number} is not a row"):
                row = schema.parse_json(line)
                if not isinstance(row, dict):
                    raise TypeError(f"it is {reprlib.repr(row)}, not {{…}}")
            with schema.reading(f"{path}, line {number} cannot be used", "fix or remove it, or give another file"):
                row = migrate(unseal(row))
                validate(row, *required)
            yield number, row


def migrate(row: dict[str, Any]) -> dict[str, Any]:
    """A row of any version, with each value in the place that FIELDS names."""
    cell = row.get("comparison")
    if "schema" in row or not isinstance(cell, dict):
        return row
    moved = {name: cell[name] for name in MEASURED if name in cell}
    return row | moved | {"comparison": {name: value for name, value in cell.items() if name not in moved}}


def validate(row: dict[str, Any], *required: str) -> None:
    """A ValueError that names the field if a row is damaged. Only rows of scored runs have to have FIELDS."""
    if not (required or is_run(row)):
        return
    if row.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(
            f"schema is {reprlib.repr(row['schema'])}, not {SCHEMA}; upgrade logpast if a newer one wrote it"
        )
    for name in (*required, *(MEASURED if "comparison" in row else ())):
        if name not in row:
            raise ValueError(f"it has no {name}, which is needed here")
    schema.validate(ROW, row)
    validate_documents(row["scores"])


def hash_recipe(value: Any) -> str:
    """A short hash of a recipe; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
