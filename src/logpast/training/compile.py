"""Compiled models, kept from run to run: compiling takes longer than many a run of a comparison."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config

from logpast.models import LanguageModel, Recurrent
from logpast.training.config import TrainConfig

MOST = 16  # models, more than a comparison has
TIMES = 64  # that PyTorch may compile one function, which all models of a kind share; by itself it gives up after 8

_kept: dict[tuple[Any, ...], LanguageModel] = {}
_made = 0


def compile_model(model: LanguageModel, config: TrainConfig, device: torch.device) -> LanguageModel:
    """The model, compiled; or one that an earlier run of the same sizes is done with, which takes over its weights."""
    global _made
    if kept := _kept.pop(_kind(model, config, device), None):
        for weight, new in zip(kept.parameters(), model.parameters(), strict=True):
            weight.data = new.data
        return kept
    if _made == MOST:
        torch.compiler.reset()
        _kept.clear()
        _made = 0
    _made += 1
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, TIMES)
    torch._functorch.config.backward_pass_autocast = "off"  # as it runs: what was in full precision stays so
    model.compile(**_how(model, device))
    return model


def release_model(model: LanguageModel, config: TrainConfig, device: torch.device) -> None:
    """Keep a compiled model that nobody uses any more for the next run, without its weights."""
    for weight in model.parameters():
        weight.data, weight.grad = weight.new_empty(0), None
    _kept[_kind(model, config, device)] = model


def _how(model: LanguageModel, device: torch.device) -> dict[str, Any]:
    """With combo kernels what is small and independent, such as casts of weights, goes together.

    Rows are not padded where a model reads on: PyTorch 2.11 then read what it had not written, and gradients of
    Transformer-XL + RMT were wrong by factors of 10⁸ at some lengths.
    """
    on_gpu = device.type == "cuda"
    padded = not isinstance(model, Recurrent)
    return {"dynamic": False, "options": {"combo_kernels": on_gpu, "comprehensive_padding": padded}}


def _kind(model: LanguageModel, config: TrainConfig, device: torch.device) -> tuple[Any, ...]:
    return type(model), model.config, config.batch_size, config.micro_batch_size, config.precision, device
