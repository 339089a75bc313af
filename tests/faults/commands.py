"""`logpast` commands in processes of their own, and what must hold after a fault.

Importing PyTorch takes seconds, so the processes are forked from one that has imported everything.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from logpast.training.checkpoint import find_checkpoint, sorted_checkpoints
from logpast.training.log import read_log

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "lightning_fabric.strategies", "tensorboard", "logpast.analysis.analyze", "logpast.evaluation.evaluate",
    "logpast.generation", "logpast.ledger.results", "logpast.training.attach", "logpast.training.loop",
])  # fmt: skip
TIMES = 5
STEPS = 60
FOREVER = 300.0  # seconds after which a command has failed to end
WALL_CLOCK = {"tokens_per_second"}  # fields of the log that differ from run to run
FREE = {"seconds", "log", "revision"}  # the same of state.json; the hash of the log depends on them
ERROR = re.compile(r"logpast: (?!warning|moved )(.*)")


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Its error messages, which are lines that start with the name of the program."""
        return [found[1] for line in self.err.splitlines() if (found := ERROR.fullmatch(line))]


class Command:
    """`logpast` with these arguments, running."""

    log_before: int | None = None  # the log of an earlier part of the run

    def __init__(self, *words: object, cwd: Path, **environment: str) -> None:
        self.output = cwd / f"{time.monotonic_ns()}"
        self.process = CONTEXT.Process(
            target=_main, args=([str(word) for word in words], cwd, self.output, environment)
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    def wait(self) -> Done:
        self.process.join(FOREVER)
        if self.process.is_alive():
            self.process.kill()
            pytest.fail(f"the command did not end: {self._read('.err')}")
        assert self.process.exitcode is not None
        return Done(self.process.exitcode, self._read(".out"), self._read(".err"))

    def _read(self, suffix: str) -> str:
        file = self.output.with_suffix(suffix)
        return file.read_text(errors="replace") if file.exists() else ""


def _main(words: list[str], cwd: Path, output: Path, environment: dict[str, str]) -> None:
    """Runs in the new process."""
    import torch

    from logpast.cli import main

    os.chdir(cwd)
    os.environ.update(environment)
    torch.set_num_threads(1)
    for number, suffix in ((1, ".out"), (2, ".err")):
        handle = os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    main(words)


def run(*words: object, cwd: Path, **environment: str) -> Done:
    return Command(*words, cwd=cwd, **environment).wait()


@dataclass
class Training:
    """How `logpast train` is called, and the run that was not disturbed."""

    words: list[object]
    cwd: Path
    undisturbed: Path

    def start(self, run: Path, *more: object, **environment: str) -> Command:
        """Start the run, or resume it."""
        before = _inode(run / "log.jsonl")
        command = Command("train", *self.words, "--run", run, "--resume", "auto", *more, cwd=self.cwd, **environment)
        command.log_before = before
        return command

    def finish(self, run: Path, *more: object, **environment: str) -> Done:
        """Start or resume the run, which must reach its end."""
        done = self.start(run, *more, **environment).wait()
        assert done.code == 0, done.err
        return done

    def disturb(self, run: Path, random: Random, fault: Callable[[Command], Any], *more: object) -> Done:
        """Start the run, cause the fault at a random moment of the training, and wait for the end."""
        command = self.start(run, *more)
        wait_for_step(run, command, random.randrange(STEPS * 3 // 4))
        time.sleep(random.uniform(0, 0.03))
        assert command.running, "it ended before the fault"
        fault(command)
        return command.wait()

    def assert_equal(self, run: Path) -> None:
        assert_runs_equal(self.undisturbed, run)


def wait_for_step(run: Path, command: Command, step: int) -> None:
    """Wait until the log has so many records; until training begins, which opens a new log, in any case."""
    log = run / "log.jsonl"

    def ready() -> bool:
        if _inode(log) in (None, command.log_before):
            return False
        return log.read_bytes().count(b"\n") >= step

    wait_until(lambda: ready() or not command.running)


def _inode(file: Path) -> int | None:
    return file.stat().st_ino if file.exists() else None


def wait_until(ready: Callable[[], bool], seconds: float = FOREVER) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def assert_runs_equal(undisturbed: Path, run: Path) -> None:
    """Bit for bit: the weights, the optimizer, the carried state, the log and the progress."""
    one, other = (find_checkpoint(each, "latest", for_training=True) for each in (undisturbed, run))
    assert one.path.name == other.path.name
    for name in ("model", "optimizer", "carried"):
        expected, found = (load_file(each.path / f"{name}.safetensors") for each in (one, other))
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert value.numpy().tobytes() == found[key].numpy().tobytes(), (name, key)
    states = [{name: value for name, value in each.state.items() if name not in FREE} for each in (one, other)]
    assert states[0] == states[1]
    assert records(undisturbed) == records(run)
    assert find_checkpoint(undisturbed).step == find_checkpoint(run).step
    assert [folder.name for folder in sorted_checkpoints(undisturbed)] == [f.name for f in sorted_checkpoints(run)]
    assert not [*run.glob(".*"), *(run / "checkpoints").glob(".*")]  # half-written files


def records(run: Path) -> list[dict[str, Any]]:
    """The log without the speed."""
    return [{name: value for name, value in line.items() if name not in WALL_CLOCK} for line in read_log(run)]


def assert_one_line(done: Done, advice: str) -> None:
    """The command ended with one line that says what to do, and no traceback."""
    assert done.code == 2, done
    assert len(done.errors) == 1, done.err
    assert re.search(advice, done.errors[0]), done.errors[0]
    assert "Traceback" not in done.err


def flip(file: Path, random: Random) -> None:
    """Change one random bit."""
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, random: Random) -> None:
    """Cut the file at a random place."""
    os.truncate(file, random.randrange(file.stat().st_size))


DAMAGES: dict[str, Callable[[Path, Random], None]] = {"flipped bit": flip, "truncation": truncate}


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of this size."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, left: int = 0) -> Path:
    """Fill a disk but for some bytes. Returns the file to delete."""
    file = disk / "ballast"
    with file.open("ab", buffering=0) as ballast:
        while (free := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - left) > 0:
            try:
                ballast.write(b"x" * free)
            except OSError:
                break
    return file
