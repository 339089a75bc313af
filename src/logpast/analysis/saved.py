"""A finished analysis, read back from its folder: to draw its page again, or as the control of another model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from logpast.analysis.schema import WAYS, validate
from logpast.data import TokenStore
from logpast.util import schema
from logpast.util.checksums import verify_folder
from logpast.util.errors import UserError

__all__ = ["WAYS", "SavedControl", "folder_of", "is_analysis", "read_analysis", "read_control"]

JSON, PAGE, NATS = "analysis.json", "report.html", "nats.safetensors"


def folder_of(path: Path) -> Path:
    """The folder of an analysis, given that folder or its analysis.json."""
    return path.parent if path.name == JSON else path


def is_analysis(path: Path) -> bool:
    return (folder_of(path) / JSON).is_file()


def read_analysis(path: Path) -> dict[str, Any]:
    """The content of analysis.json, validated: all that the page and the tables show is there."""
    file = folder_of(path) / JSON
    verify_folder(file.parent, "analyze the model again")
    with schema.reading(f"{file} is not a complete analysis", "analyze the model again"):
        result: dict[str, Any] = schema.parse_json(file.read_text(encoding="utf-8"))
        validate(result)
    return result


@dataclass(frozen=True)
class SavedControl:
    """A control whose model is not available, from its own analysis."""

    about: dict[str, Any]
    nats: NDArray[np.float64]
    """of every token of the text"""
    stride: dict[str, Any] | str
    """its results with overlapping windows, or why there are none for this number of tokens"""

    @property
    def window(self) -> int:
        return int(self.about["window"])

    @property
    def history(self) -> int:
        return int(self.about["history"])


def read_control(path: Path, store: TokenStore, settings: dict[str, Any], probed: int) -> SavedControl:
    """A control from its finished analysis, which must be of the same text, scored with the same settings."""
    result, folder = read_analysis(path), folder_of(path)
    data = result["data"]
    if data["tokenizer"] != store.identity["tokenizer"]:
        raise UserError(f"{folder} has another tokenizer than {store.name}; use a control with the same tokenizer")
    if (data["sha256"], data["documents"]) != (store.sha256, len(store.documents)):
        raise UserError(f"{folder} is an analysis of another text than {store.name}; analyze the control on this text")
    for name in ("streams", "precision"):
        if (theirs := result["settings"][name]) != settings[name]:
            raise UserError(f"{folder} was made with {name}={theirs}, not {settings[name]}; use the same for both")
    part = result["stride"]
    stride = part.get("model", part.get("absent"))
    if "model" in part and part["tokens"] != probed:
        stride = (
            f"its analysis scored {part['tokens']:,} tokens with overlapping windows, not {probed:,}; "
            "use the same --limit for both"
        )
    return SavedControl(result["model"], _read_nats(folder / NATS, len(store)), stride)


def _read_nats(file: Path, tokens: int) -> NDArray[np.float64]:
    """The loss of every token of the text."""
    fix = "analyze the control again"
    try:
        with safe_open(file, "numpy") as tensors:
            nats = tensors.get_tensor("model")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}; {fix}") from None
    if nats.dtype.kind != "f" or nats.shape != (tokens,):
        raise UserError(f"{file}: 'model' is {nats.dtype} {nats.shape}, not the nats of {tokens} tokens; {fix}")
    if not np.isfinite(nats).all():
        raise UserError(f"{file}: some nats of 'model' are not finite numbers; {fix}")
    return nats.astype(np.float64)
