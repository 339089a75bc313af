"""The log of a run: log.jsonl, one JSON record per line, and the same numbers for TensorBoard."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from logpast.util.errors import UserError
from logpast.util.files import atomic_write
from logpast.util.schema import parse_json
from logpast.util.serialization import json_safe

TAIL = 4096  # bytes at the end of the file, enough for several records
TRAINING_FIELDS = ("step", "epoch", "loss", "tokens_per_second")  # every record of a training step has these numbers


class Log:
    """Writes log.jsonl and, if wanted, TensorBoard files. `Log()` without a folder writes nothing.

    Records after `step`, which a killed run may have left, are removed first. `saved` is the `state` of the log after
    that step, which the checkpoint has.
    """

    def __init__(
        self,
        folder: Path | None = None,
        tensorboard: bool = False,
        step: int = 0,
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.file = self.board = None
        if folder is None:
            return
        self.path = folder / "log.jsonl"
        kept = _content(self.path, step, saved)
        atomic_write(self.path, kept)
        self.bytes, self.hash = len(kept), hashlib.sha256(kept)
        self.file = self.path.open("ab", buffering=0)
        if tensorboard:
            self.board = Board(folder / "tensorboard", step)

    def write(self, step: int, **values: Any) -> None:
        if self.file:
            line = (json.dumps(json_safe({"step": step, **values}), allow_nan=False) + "\n").encode()
            _write(self.file, line)
            self.bytes += len(line)
            self.hash.update(line)
        if self.board:
            self.board.write(step, {name: value for name, value in values.items() if isinstance(value, int | float)})

    def state(self) -> dict[str, Any] | None:
        """Size and hash of log.jsonl, which is on disk then. A UserError if it is no longer in the run folder."""
        if not self.file:
            return None
        os.fsync(self.file.fileno())
        if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))):
            raise UserError(
                f"{self.path.parent} was deleted or replaced while the run was writing to it; start again, or with "
                "another --run folder"
            )
        return {"bytes": self.bytes, "sha256": self.hash.hexdigest()}

    def close(self) -> None:
        if self.file:
            self.file.close()


class Board:
    """A file of events for TensorBoard. On a full disk it ends with a warning, and training continues.

    SummaryWriter has a thread for this, which prints a traceback on a full disk, and stops the training.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.ended = False
        self._write(file_version="brain.Event:2")
        if step:  # hides what a killed run has left
            self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=found))

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self.ended:
            return
        record = BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                _write(file, record.getvalue())
        except OSError as error:
            self.ended = True
            problem = f"cannot write {self.path}: {error.strerror}"
            print(f"logpast: warning: {problem}; TensorBoard gets no more numbers, log.jsonl does", file=sys.stderr)


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
            record = parse_json(line, finite=False)
        except ValueError:
            continue  # cut off, by a kill or by reading only the end
        if isinstance(record, dict) and all(isinstance(record.get(name), int | float) for name in TRAINING_FIELDS):
            return record
    return {}


def _write(file: IO[bytes], content: bytes) -> None:
    """Write to an unbuffered file, which takes a part on a disk that becomes full."""
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _content(path: Path, step: int, saved: dict[str, Any] | None) -> bytes:
    """The records up to a step that a log has."""
    if not saved:  # a new run; checkpoints of early versions
        return "".join(json.dumps(line) + "\n" for line in _lines(path) if line["step"] <= step).encode()
    if saved["bytes"] and not path.exists():
        print(f"logpast: warning: {path} is missing; the log starts after step {step}", file=sys.stderr)
        return b""
    kept = path.read_bytes()[: saved["bytes"]] if path.exists() else b""
    if _first_step(kept) > step:  # the checkpoint was copied from the run that this one resumes
        return b""
    if hashlib.sha256(kept).hexdigest() != saved["sha256"]:
        raise UserError(
            f"{path} has changed since step {step} was saved; restore it, or move it away to resume without its records"
        )
    return kept


def _first_step(content: bytes) -> int:
    """The step of the first record; -1 if it is damaged."""
    try:
        return int(json.loads(content.partition(b"\n")[0])["step"])
    except (ValueError, TypeError, KeyError):
        return -1


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that a kill has cut off."""
    if not path.exists():
        return []
    found, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line, finite=False)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is damaged: {error}; repair or remove it") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number} is damaged: it has no step; repair or remove it")
        found.append(record)
    return found
