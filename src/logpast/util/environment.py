"""The device and machine that code runs on, and the revision of the code."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from logpast.util.errors import UserError
from logpast.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]


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
    return subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.strip()
