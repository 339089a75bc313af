"""Hands odd inputs to the product as a user would, and checks what comes back.

An input is either accepted, or refused in one line that names the file. Anything else is a `Fault`: another exception,
seconds of work, gigabytes of memory, a file written outside the named folder or left half written, a network
connection, another process.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.font_manager
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from logpast.data import load_tokenizer
from logpast.util.errors import UserError

SECONDS = 20.0  # for one input, on a busy machine
MEMORY = 4 << 30  # bytes that one input may allocate
LINE = 4000  # characters of a message
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
OTHERS = ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")


class Fault(AssertionError):
    """What must not happen, whatever the input."""


class Hang(BaseException):
    """Raised in the product when time is up: no `except Exception` catches it."""


class Target(NamedTuple):
    """A kind of input."""

    inputs: SearchStrategy[Any]
    place: Callable[[Any], Callable[[], object]]
    """writes an input to its files and returns the call of the product that reads them"""
    folder: Path
    """the only folder that the call may write to"""
    named: str = ""
    """what each refusal names: a file"""


@dataclass
class Counts:
    """What became of the inputs of a target."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def add(self, accepted: bool, seconds: float) -> None:
        self.inputs += 1
        self.accepted += accepted
        self.refused += not accepted
        self.seconds = time.monotonic() - self._started
        self.slowest = max(self.slowest, seconds)

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in vars(self).items() if not name.startswith("_")}


def run(target: Target, count: int, number: int = 0, report: Callable[[Counts], None] = lambda counts: None) -> Counts:
    """Give a target this many inputs. hypothesis shows the smallest input of each fault that it finds.

    Args:
        target: the target.
        count: number of inputs.
        number: seed of the inputs.
        report: called after each input.
    """
    warm_up()
    counts = Counts()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check_each(value: Any) -> None:
        check(target, value, counts)
        report(counts)

    check_each()
    return counts


def warm_up() -> None:
    """Libraries make folders for their caches, and lists of fonts, when they are first used."""
    load_tokenizer("gpt2")
    matplotlib.get_configdir()
    matplotlib.get_cachedir()
    with torch.device("meta"):
        torch.nn.Embedding(1, 1)


def check(target: Target, value: Any, counts: Counts) -> None:
    """Give the product one input. A Fault if it is neither accepted nor refused as it should be."""
    call = target.place(value)
    before, started = _files(target.folder), time.monotonic()
    message = refusal(call, target.folder)
    counts.add(message is None, time.monotonic() - started)
    after = _files(target.folder)
    if message is not None:
        if len(message) > LINE or not message.isprintable():
            raise Fault(f"the refusal is not one line: {message[:LINE]!r}")
        if target.named not in message:
            raise Fault(f"the refusal does not name {target.named}: {message}")
        if after != before:
            raise Fault(f"a refused input changed files: {sorted(before.items() ^ after.items())[:4]}")
    if unfinished := [name for name in after if name.endswith(".unfinished")]:
        raise Fault(f"left half written: {unfinished[0]}")


def refusal(call: Callable[[], object], folder: Path) -> str | None:
    """The message with which the product refuses an input; None if it accepts it."""
    error_output = io.StringIO()
    try:
        with _watched(folder), redirect_stdout(io.StringIO()), redirect_stderr(error_output):
            call()
    except UserError as error:
        return str(error)
    except OSError as error:  # the command line reports those of files, as here
        if error.filename is None:
            raise Fault(f"{type(error).__name__}: {error}") from error
        return f"{error.filename}: {error.strerror}"
    except SystemExit as stop:
        if stop.code in (0, None):
            return None
        *before, last = error_output.getvalue().removesuffix("\n").split("\n")  # progress and warnings, then the error
        if not last.startswith("logpast: ") or any(
            "logpast: " in line.replace("logpast: warning", "") for line in before
        ):
            raise Fault(f"exit {stop.code} with {[*before, last][-9:]}") from stop
        return last
    except Fault:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{str(error)[:200]!r} in {Path(at.filename).name}, line {at.lineno}"
        raise Fault(f"{type(error).__name__}: {problem}") from error
    return None


class _Watch:
    """What the running input may not do; an audit hook cannot be removed, so there is one for the whole process."""

    folder: str | None = None
    problems: list[str]


def _audit(event: str, details: tuple[Any, ...]) -> None:
    if _Watch.folder is None:
        return
    if event in OTHERS:
        _Watch.problems.append(f"{event} {details!r:.200}")
    elif event in CHANGES or (event == "open" and _writes(details)):
        paths = (
            details[:2] if event in ("os.rename", "os.link") else details[1:2] if event == "os.symlink" else details[:1]
        )
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike) and not _is_below(os.fsdecode(path), _Watch.folder):
                _Watch.problems.append(f"{event} {os.fsdecode(path)!r}")


def _writes(details: tuple[Any, ...]) -> bool:
    _, mode, flags = details
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _is_below(path: str, folder: str) -> bool:
    absolute = os.path.abspath(path)
    return absolute == os.devnull or absolute == folder or absolute.startswith(folder + os.sep)


sys.addaudithook(_audit)


@contextmanager
def _watched(folder: Path) -> Iterator[None]:
    """Watch time, memory and what is written while an input is read."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, _hang)
    _Watch.problems, _Watch.folder = [], str(folder.absolute())
    resource.setrlimit(resource.RLIMIT_DATA, (_allocated() + MEMORY, limit[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 0.5)  # again and again: a destructor may swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limit)
        _Watch.folder = None
        if _Watch.problems:
            raise Fault(f"not in the named folder: {_Watch.problems[0]}")


def _hang(number: int, frame: Any) -> None:
    raise Hang(f"more than {SECONDS:.0f} seconds")


def _allocated() -> int:
    """Bytes of private memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> size and time of change, of all that is below a folder."""
    found = dict[str, tuple[int, int]]()
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            status = entry.stat(follow_symlinks=False)
            found[entry.name] = (0, 0) if entry.is_dir(follow_symlinks=False) else (status.st_size, status.st_mtime_ns)
            if entry.is_dir(follow_symlinks=False):
                found |= {f"{entry.name}/{name}": each for name, each in _files(Path(entry.path)).items()}
    return found
