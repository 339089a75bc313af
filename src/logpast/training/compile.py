"""How models are compiled for training. PyTorch itself reuses what it compiled for an earlier run of the same sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config

from logpast.models import LanguageModel, Recurrent
from logpast.training.config import TrainConfig

RECOMPILE_LIMIT = (
    256  # sizes of one function, which all models of a class share; beyond PyTorch's limit, 8, it gives up
)


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    """Whether a run compiles its model; by default on a CUDA device, but not with FSDP."""
    if config.compile is None:
        return device.type == "cuda" and config.strategy != "fsdp"
    return config.compile


def compile_model(model: LanguageModel, device: torch.device) -> LanguageModel:
    """The same model, to be compiled at its first call."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    torch._functorch.config.backward_pass_autocast = "off"  # as without compiling: float32 parts stay float32
    model.compile(**_options(model, device))
    return model


def _options(model: LanguageModel, device: torch.device) -> dict[str, Any]:
    """Combo kernels merge small independent operations, such as casts of weights.

    No padding for recurrent models: with it, PyTorch 2.11 read memory that it had not written, and gradients of
    Transformer-XL + RMT were wrong by factors of 10⁸ at some lengths.
    """
    on_gpu = device.type == "cuda"
    padded = not isinstance(model, Recurrent)
    return {"dynamic": False, "options": {"combo_kernels": on_gpu, "comprehensive_padding": padded}}
