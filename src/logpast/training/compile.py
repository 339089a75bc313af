"""Compiled models, reused from run to run: compiling takes longer than many runs of a comparison."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config

from logpast.models import LanguageModel, Recurrent
from logpast.training.config import TrainConfig

MAX_MODELS = 16  # to compile before starting over, more than a comparison has
RECOMPILE_LIMIT = 64  # of each function, which all models of one class share; PyTorch's own limit is 8

_reusable: dict[tuple[Any, ...], LanguageModel] = {}
_compiled = 0


def compile_model(model: LanguageModel, config: TrainConfig, device: torch.device) -> LanguageModel:
    """The model, compiled. If an earlier run has released a model of the same sizes, that one with these weights."""
    global _compiled
    if reused := _reusable.pop(_key(model, config, device), None):
        for weight, new in zip(reused.parameters(), model.parameters(), strict=True):
            weight.data = new.data
        return reused
    if _compiled == MAX_MODELS:
        torch.compiler.reset()
        _reusable.clear()
        _compiled = 0
    _compiled += 1
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    torch._functorch.config.backward_pass_autocast = "off"  # as without compiling: float32 parts stay float32
    model.compile(**_options(model, device))
    return model


def release_model(model: LanguageModel, config: TrainConfig, device: torch.device) -> None:
    """Keep a compiled model, without its weights, for the next run of the same sizes. The caller must not use it."""
    for weight in model.parameters():
        weight.data, weight.grad = weight.new_empty(0), None
    _reusable[_key(model, config, device)] = model


def _options(model: LanguageModel, device: torch.device) -> dict[str, Any]:
    """Combo kernels merge small independent operations, such as casts of weights.

    No padding for recurrent models: with it, PyTorch 2.11 read memory that it had not written, and gradients of
    Transformer-XL + RMT were wrong by factors of 10⁸ at some lengths.
    """
    on_gpu = device.type == "cuda"
    padded = not isinstance(model, Recurrent)
    return {"dynamic": False, "options": {"combo_kernels": on_gpu, "comprehensive_padding": padded}}


def _key(model: LanguageModel, config: TrainConfig, device: torch.device) -> tuple[Any, ...]:
    return type(model), model.config, config.batch_size, config.micro_batch_size, config.precision, device
