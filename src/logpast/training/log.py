"""The log of a run: log.jsonl, one JSON record per line, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from logpast.util.errors import UserError
from logpast.util.files import atomic_write
from logpast.util.serialization import json_safe

TAIL = 4096  # bytes at the end of the file, enough for several records
TRAINING_FIELDS = ("step", "epoch", "loss", "tokens_per_second")  # every record of a training step has these numbers


class Log:
    """Writes log.jsonl and, if wanted, TensorBoard files. `Log()` without a folder writes nothing.

    Records after `step`, which a killed run may have left, are removed first.
    """

    def __init__(self, folder: Path | None = None, tensorboard: bool = False, step: int = 0) -> None:
        self.file = self.board = None
        if folder is None:
            return
        path = folder / "log.jsonl"
        kept = [line for line in _lines(path) if line["step"] <= step]
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = path.open("a", buffering=1)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, **values: Any) -> None:
        if self.file:
            self.file.write(json.dumps(json_safe({"step": step, **values}), allow_nan=False) + "\n")
        if self.board:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.file:
            self.file.close()
        if self.board:
            self.board.close()


def read_log(run: Path) -> list[dict[str, Any]]:
    """All records of a log; `run` is a run folder or a log file."""
    return _lines(run if run.is_file() else run / "log.jsonl")


def last_record(folder: Path) -> dict[str, Any]:
    """The last record of a training step in a run's log, read from its end; empty if there is none."""
    try:
        with (folder / "log.jsonl").open("rb") as file:
            file.seek(-min(file.seek(0, os.SEEK_END), TAIL), os.SEEK_END)
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off, by a kill or by reading only the end
        if isinstance(record, dict) and all(isinstance(record.get(name), int | float) for name in TRAINING_FIELDS):
            return record
    return {}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that a kill has cut off."""
    if not path.exists():
        return []
    found, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is damaged: {error}; repair or remove it") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number} is damaged: it has no step; repair or remove it")
        found.append(record)
    return found
