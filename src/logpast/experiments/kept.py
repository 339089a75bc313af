"""A finished analysis (`logpast analyze`), read again: to draw its page, or as another model's control."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from logpast.data import TokenStore
from logpast.errors import UserError

FORMAT = "logpast analysis 1"
JSON, PAGE, NATS = "analysis.json", "report.html", "nats.safetensors"


def folder_of(path: Path) -> Path:
    """Of an analysis: this, or that of its analysis.json."""
    return path.parent if path.name == JSON else path


def is_analysis(path: Path) -> bool:
    return (folder_of(path) / JSON).is_file()


def read_analysis(path: Path) -> dict[str, Any]:
    """What stands in a finished analysis: its folder, or its analysis.json."""
    finished = folder_of(path) / JSON
    try:
        result: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        if result["format"] != FORMAT:
            raise ValueError(f"it says {result['format']!r}, not {FORMAT!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{finished} is not an analysis that can be read ({error}); analyze the model anew") from None
    return result


@dataclass(frozen=True)
class Kept:
    """A model that may be gone, by what its own analysis has kept of it."""

    about: dict[str, Any]
    nats: NDArray[np.float64]
    """of every token of the text"""
    stride: dict[str, Any] | None
    """its part of overlapping windows, if they were of as many tokens"""

    @property
    def window(self) -> int:
        return int(self.about["window"])

    @property
    def history(self) -> int:
        return int(self.about["history"])


def kept_of(path: Path, store: TokenStore, settings: dict[str, Any], some: int) -> Kept:
    """From a finished analysis of the same text, made in the same way."""
    result, folder = read_analysis(path), folder_of(path)
    try:
        if any(result["data"][name] != store.identity[name] for name in ("sha256", "tokenizer")):
            raise UserError(f"{folder} is of another text than {store.name}; analyze the control on that, too")
        for name in ("streams", "precision"):
            if (theirs := result["settings"][name]) != settings[name]:
                raise UserError(f"{folder} was made with {name}={theirs}, now it is {settings[name]}; make them alike")
        part = result["stride"]
        stride = part.get("model") if part.get("tokens") == some else None
        kept = Kept(result["model"], load_file(folder / NATS)["model"].astype(np.float64), stride)
        if len(kept.nats) != len(store) or min(kept.window, kept.history) < 0:
            raise ValueError(f"it has {len(kept.nats)} of {len(store)} tokens")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{folder} does not hold what a control needs ({error}); analyze the control anew") from None
    return kept
