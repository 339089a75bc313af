"""The device and machine that code runs on, and the revision of the code."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from logpast.util.errors import UserError
from logpast.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
ONE_THREAD_BELOW = 1_000_000  # parameters; docs/commands.md has the measurements


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA, then Apple's MPS, then the CPU."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    kind = name.split(":")[0]
    if kind not in available:
        raise UserError(f"unknown device {name!r}; use auto, {', '.join(available)}")
    if not available[kind]:
        raise UserError(f"this machine has no {kind} device that PyTorch {torch.__version__} can use; use device=auto")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}; write {kind} or {kind}:0") from None


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, to record with a measurement."""
    facts: dict[str, Any] = {
        "device": device.type,
        "name": _processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        facts |= {"name": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return facts


def thread_count(parameters: int, before: dict[str, Any] | None = None) -> int:
    """How many CPU threads to use for a model of this size.

    Small models get one: a second thread makes their steps at most a third shorter, but several times as long when
    other programs use the cores. A run that is resumed on a CPU keeps the number of its first part, because rounding
    depends on it; `before` is its hardware, from `describe`. OMP_NUM_THREADS or MKL_NUM_THREADS, if set, decide.
    """
    current = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return current
    if before and before.get("device") == "cpu":
        return min(int(before.get("threads", current)), os.cpu_count() or 1)  # early versions did not record it
    return 1 if parameters < ONE_THREAD_BELOW else current


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """PyTorch computes with this many CPU threads, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory_of(device: torch.device) -> float:
    """The most bytes that a run could get: the memory of a GPU, else what this machine has free; inf if not known."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        with open("/proc/meminfo") as file:
            free = {name: 1024 * int(value.split()[0]) for name, value in (line.split(":") for line in file)}
        with open("/proc/self/statm") as file:
            own = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # what this process holds may become free
    except OSError:  # not Linux
        known = getattr(os, "sysconf_names", {})
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if "SC_PHYS_PAGES" in known else math.inf
    return min([free["MemAvailable"] + own, *_memory_limits()]) + free["SwapFree"]


def _memory_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """The memory limits of this process's control groups, such as that of a container."""
    limits = list[float]()
    for line in own.read_text().splitlines() if own.exists() else []:
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):  # version 2, version 1
            name = "memory.limit_in_bytes" if kinds else "memory.max"
            folder = root / kinds / path.lstrip("/")
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no such file, or no limit: "max"
                    limits.append(float((each / name).read_text()))
    return limits


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def revision() -> str:
    """The commit of this code, with "+changes" if files differ from it; without git, the version.

    The environment variable LOGPAST_REVISION overrides it, for a copy of the code without its repository.
    """
    if given := os.environ.get("LOGPAST_REVISION"):
        return given
    try:
        _git("ls-files", "--error-unmatch", "util/environment.py")  # fails if installed inside another repository
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {__version__}"


def code_sha256() -> str:
    """Hash of all Python files of the package: two states with "+changes" have the same revision."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _git(*words: str) -> str:
    words = ("git", "--no-optional-locks", *words)  # or a commit made meanwhile fails
    return subprocess.run(words, cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.strip()
