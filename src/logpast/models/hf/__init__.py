"""Our models as Hugging Face models. Importing this package registers them with transformers' Auto classes.

This is the only package that imports transformers, which is an optional dependency.
"""

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


_transformers = require("transformers")

from logpast.models.hf.configuration import LogPastConfig  # noqa: E402  after a clear error if transformers is missing
from logpast.models.hf.modeling import LogPastForCausalLM  # noqa: E402

_transformers.AutoConfig.register(LogPastConfig.model_type, LogPastConfig, exist_ok=True)
_transformers.AutoModelForCausalLM.register(LogPastConfig, LogPastForCausalLM, exist_ok=True)

__all__ = ["LogPastConfig", "LogPastForCausalLM", "require"]
