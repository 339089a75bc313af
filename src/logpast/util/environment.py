"""What we run on, and at which revision of the code."""

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
    """Enough to know later on which machine a figure was measured."""
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
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def revision() -> str:
    """The commit that this code is at, with "+changes" if files differ from it; the version where there is no git.

    A copy without its repository can be told by the environment variable LOGPAST_REVISION.
    """
    if told := os.environ.get("LOGPAST_REVISION"):
        return told
    here = Path(__file__).resolve().parent
    try:
        _git(here, "ls-files", "--error-unmatch", "environment.py")  # a copy installed inside some other repository
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {__version__}"


def code_sha256() -> str:
    """Of this code to the byte: a revision says only that files differ from it."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).resolve().parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
