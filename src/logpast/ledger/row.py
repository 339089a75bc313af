"""The ledger: one JSON line, a row, per scored run in results/*.jsonl. Every number we publish comes from such a row.

FIELDS lists the fields of a row, `row` makes one, `append` writes it, and `read` validates rows when it reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

from logpast.ledger.documents import validate_documents
from logpast.util.errors import UserError
from logpast.util.files import try_lock
from logpast.util.serialization import json_safe
from logpast.version import __version__

if TYPE_CHECKING:
    from logpast.data import TokenStore
    from logpast.training.checkpoint import Checkpoint

RESULTS = Path("results")  # in a checkout of the repository

INTERVAL = tuple[float | None, float | None]


class Field(NamedTuple):
    """One field of a row. A field below an optional one, such as sweep.cell, is required where that one is present."""

    name: str
    type: Any
    """float is any number, tuple a list of that length; `| None` allows null, which in scores stands for infinity"""
    meaning: str
    required: bool = True
    """rows of earlier versions may lack the others"""


FIELDS = (
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
    Field("scores.interval", dict | None, "95 % bootstrap intervals over documents; null: too few", required=False),
    Field("scores.interval.ppl_token", INTERVAL, "of that score", required=False),
    Field("scores.interval.ppl_word", INTERVAL, "of that score", required=False),
    Field("scores.interval.bits_per_byte", INTERVAL, "of that score", required=False),
    Field("scores.stride", int, "stride of overlapping windows; without it windows do not overlap", required=False),
    Field("scores.training_overlap", str, "what the test text has of the training text, if any", required=False),
    Field("scores.by_document", dict, "one list entry per document of the test text", required=False),
    Field("scores.by_document.nats", list[float | None], "negative log-likelihood in nats"),
    Field("scores.by_document.tokens", list[int], "number of scored tokens"),
    Field("scores.by_document.unseen", list[int], "tokens that never occur in the training text", required=False),
    # cells of a sweep; those of a comparison have the first three under `comparison`
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
    Field("comparison.state_bytes", int, "as above"),
    Field("comparison.tokens_per_second", float, "as above"),
    Field("comparison.peak_bytes", int | None, "as above"),
)


def row(checkpoint: Checkpoint, store: TokenStore, scores: dict[str, Any]) -> dict[str, Any]:
    """The row of a scored run: what was trained and scored, how to do it again, and the scores."""
    from logpast.training.config import recorded_settings
    from logpast.util.environment import revision  # reading a ledger must not import torch

    state = checkpoint.state
    settings = recorded_settings(checkpoint.config)
    return {
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
    """Add one line, whole or not at all, however many processes write to the same file."""
    line = json.dumps(json_safe(entry), ensure_ascii=False, allow_nan=False) + "\n"
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
    with reading(f"{path} is not a ledger", "give a file of rows (.jsonl)"):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if line:
            with reading(f"{path}, line {number} is not a row"):
                row = parse_json(line)
            try:
                validate(row, *required)
            except UserError as error:
                raise UserError(
                    f"{path}, line {number} cannot be used: {error}; fix or remove it, or give another file"
                ) from None
            yield number, row


def validate(row: Any, *required: str) -> None:
    """A UserError that names the field if a row is damaged. Only rows of scored runs have to have FIELDS."""
    if not isinstance(row, dict):
        raise UserError(f"{repr(row)[:40]} is not a row, {{…}}")
    for name in required:
        if name not in row:
            raise UserError(f"it has no {name}, which is needed here")
    if not (required or is_run(row)):
        return
    for field in FIELDS:
        parent, _, name = field.name.rpartition(".")
        holder = _part(row, parent)
        if holder is None:
            continue
        if name in holder:
            if not _has_type(holder[name], field.type):
                kind = field.type.__name__ if field.type in (str, int, float, dict) else field.type
                raise UserError(f"{field.name} is {repr(holder[name])[:40]}, not {kind}")
        elif field.required:
            raise UserError(f"it has no {field.name}")
    validate_documents(row["scores"])


def _part(row: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The part of a row that a dotted name stands for; None where it is missing or null."""
    part: dict[str, Any] | None = row
    for key in name.split(".") if name else ():
        part = part.get(key) if part is not None else None
    return part


def _has_type(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_has_type(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(_has_type(each, inner[0]) for each in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_has_type, value, inner))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def parse_json(text: str) -> Any:
    """Strict JSON with finite numbers: Python would also accept NaN, Infinity, 1e999 and integers of any length."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_integer)


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is not a number in JSON; write null")
    return value


def _integer(word: str) -> int:
    float(value := int(word))  # an OverflowError if it is too large to compute with
    return value


@contextmanager
def reading(problem: str, fix: str = "fix or remove it") -> Iterator[None]:
    """Use around the parsing of a file, and nothing else: a value that is missing or wrong becomes a UserError.

    Args:
        problem: what is wrong with the file, by its name: "FILE is not a ledger".
        fix: what the user can do.
    """
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{problem}: it has no {error}; {fix}") from None
    except OSError as error:
        if error.filename is None or isinstance(error, FileNotFoundError):
            raise  # the caller knows better what to say of a missing file
        raise UserError(f"{error.filename}: {error.strerror}; it must be a readable file") from None
    except (ArithmeticError, AttributeError, IndexError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{problem}: {error}; {fix}") from None


def hash_recipe(value: Any) -> str:
    """A short hash of a recipe; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
