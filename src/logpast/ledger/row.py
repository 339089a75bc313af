"""The ledger: one JSON line per scored run in results/*.jsonl. Every figure we publish comes from such a line."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logpast.util.errors import UserError
from logpast.util.files import try_lock
from logpast.util.serialization import json_safe
from logpast.version import __version__

if TYPE_CHECKING:
    from logpast.data import TokenStore
    from logpast.training.checkpoint import Checkpoint

RESULTS = Path("results")  # of the checkout


def row(checkpoint: Checkpoint, store: TokenStore, scores: dict[str, Any]) -> dict[str, Any]:
    """Everything needed to know what a score is of, and to get it again."""
    from logpast.training.config import recorded_settings
    from logpast.util.environment import revision  # whoever only reads a ledger need not wait for torch

    state = checkpoint.state
    how = recorded_settings(checkpoint.config)
    return {
        "recorded": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "logpast": __version__,
        "scored_at_revision": revision(),
        "trained_at_revision": state["revision"],
        "run": checkpoint.config.run.name,
        "recipe": how,
        "recipe_hash": hash_recipe(how),
        "seed": checkpoint.config.seed,
        "step": checkpoint.step,
        "parameters": state["parameters"],
        "train_tokens": state["tokens"],
        "train_seconds": state["seconds"],
        "train_data": state["data"],
        "validation_data": state.get("validation_data"),
        "hardware": state["hardware"],
        "test_data": store.identity,
        "scores": {name: value for name, value in scores.items() if name != "checkpoint"},
    }


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line, whole or not at all, however many processes write to the same file."""
    line = json.dumps(json_safe(entry), ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try_lock(handle, wait=True)
        end = os.lseek(handle, 0, os.SEEK_END)
        if end and os.pread(handle, 1, end - 1) != b"\n":  # as editors leave it, or because the last row is damaged
            read(path)
            line = "\n" + line
        try:
            written = os.write(handle, line.encode())
            if written != len(line.encode()):
                raise OSError("the disk is full")
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, end)
            raise UserError(f"could not add a row to {path}: {error}; it is as it was before") from error
    finally:
        os.close(handle)


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a ledger."""
    return [row for _, row in read_lines(path)]


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line, and its row."""
    fix = "mend or remove it, or give a file of rows (.jsonl)"
    with reading(f"{path} is not a ledger", fix):
        text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), 1):
        if line:
            with reading(f"{path}, line {number} is not a row", fix):
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise TypeError("it should be {…}")
            yield number, row


def parse_json(text: str) -> Any:
    """JSON and no more: Python would also read NaN, Infinity and 1e999, which compare and add up to nonsense."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is no number of JSON, which has null for it")
    return value


@contextmanager
def reading(told: str, fix: str = "mend or remove it") -> Iterator[None]:
    """Around what reads a file: a value that is missing or of a wrong kind is the file's mistake, told in a line."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{told}: it has no {error}; {fix}") from None
    except OSError as error:
        if error.filename is None or isinstance(error, FileNotFoundError):
            raise  # of the latter, who asked for it knows more
        raise UserError(f"{error.filename}: {error.strerror}; see that it is a file that you may read") from None
    except (ArithmeticError, AttributeError, IndexError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{told}: {error}; {fix}") from None


def hash_recipe(value: Any) -> str:
    """A short name for a recipe: equal recipes have equal hashes, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
