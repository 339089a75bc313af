"""A finished analysis (`logpast analyze`), read again: to draw its page, or as another model's control."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from logpast.data import TokenStore
from logpast.ledger import row as ledger
from logpast.util.errors import UserError

FORMAT = "logpast analysis 1"
JSON, PAGE, NATS = "analysis.json", "report.html", "nats.safetensors"

#: how the past is changed beyond a lag
WAYS = ("cut", "replaced", "shuffled")
#: what a page wants to know of a control, and of its overlapping windows
ABOUT = ("system", "run", "step", "parameters", "window", "slots", "history")
STRIDE = ("stride", "cost", "nats", "increase", "interval", "ppl_token")


def folder_of(path: Path) -> Path:
    """Of an analysis: this, or that of its analysis.json."""
    return path.parent if path.name == JSON else path


def is_analysis(path: Path) -> bool:
    return (folder_of(path) / JSON).is_file()


def read_analysis(path: Path) -> dict[str, Any]:
    """What stands in a finished analysis: its folder, or its analysis.json."""
    finished = folder_of(path) / JSON
    with ledger.reading(f"{finished} is not an analysis that can be read", "analyze the model anew"):
        result: dict[str, Any] = ledger.parse_json(finished.read_text(encoding="utf-8"))
        if result["format"] != FORMAT:
            raise ValueError(f"it says {result['format']!r}, not {FORMAT!r}")
    return result


@dataclass(frozen=True)
class Kept:
    """A model that may be gone, by what its own analysis has kept of it."""

    about: dict[str, Any]
    nats: NDArray[np.float64]
    """of every token of the text"""
    stride: dict[str, Any] | str
    """its part of overlapping windows, if they were of as many tokens; else why there is none"""

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
        if result["data"]["tokenizer"] != store.identity["tokenizer"]:
            raise UserError(
                f"{folder} is of a model with another tokenizer than {store.name} has; compare like with like"
            )
        if (result["data"]["sha256"], result["data"]["documents"]) != (store.sha256, len(store.documents)):
            raise UserError(f"{folder} is of another text than {store.name}; analyze the control on that, too")
        for name in ("streams", "precision"):
            if (theirs := result["settings"][name]) != settings[name]:
                raise UserError(f"{folder} was made with {name}={theirs}, now it is {settings[name]}; make them alike")
        part, about, tensors = result["stride"], result["model"], load_file(folder / NATS)
        stride = _stride(part, some)
        # all that the page will want, when the work is done
        missing = [name for name in ABOUT if about.get(name) is None]
        missing += [f"stride.{name}" for name in STRIDE if isinstance(stride, dict) and name not in stride]
        if missing or "model" not in tensors:
            raise ValueError(f"no {', '.join(missing)} in {JSON}" if missing else f"no tensor 'model' in {NATS}")
        nats, kept = tensors["model"], Kept(about, tensors["model"].astype(np.float64), stride)
        if kept.window < 1 or kept.history < 0:
            raise ValueError(f"its window is {kept.window}, its history {kept.history}")
        if nats.dtype.kind != "f" or nats.shape != (len(store),):
            raise ValueError(f"it has {nats.dtype} {nats.shape}, not the nats of {len(store)} tokens")
        if not np.isfinite(kept.nats).all():
            raise ValueError("not all of its nats are numbers")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{folder} does not hold what a control needs ({error}); analyze the control anew") from None
    return kept


def _stride(part: dict[str, Any], some: int) -> dict[str, Any] | str:
    if "model" not in part:
        return str(part["absent"])
    if part["tokens"] != some:
        return f"its analysis scored {part['tokens']:,} tokens so, not {some:,}; give both the same --limit"
    own: dict[str, Any] = part["model"]
    return own
