"""Hugging Face `transformers`: the only package that imports it, and only when something is used."""

from __future__ import annotations

import importlib
from typing import Any

from logpast.util.errors import UserError


def require(package: str) -> Any:
    """Import `transformers` or `peft`, which the extra `hf` installs."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"{package} is not installed; pip install 'logpast[hf]'") from None
