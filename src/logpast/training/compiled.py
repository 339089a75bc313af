"""Compiled models, kept from run to run: compiling takes longer than many a run of a comparison."""

from __future__ import annotations

from typing import Any

import torch

from logpast.models import LanguageModel
from logpast.training.config import TrainConfig

MOST = 16  # models, more than a comparison has
TIMES = 64  # that PyTorch may compile one function, which all models of a kind share; by itself it gives up after 8

_kept: dict[tuple[Any, ...], LanguageModel] = {}
_made = 0


def compiled(model: LanguageModel, config: TrainConfig, device: torch.device) -> LanguageModel:
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
    model.compile(**_how(device))
    return model


def done_with(model: LanguageModel, config: TrainConfig, device: torch.device) -> None:
    """Keep a compiled model that nobody uses any more for the next run, without its weights."""
    for weight in model.parameters():
        weight.data, weight.grad = weight.new_empty(0), None
    _kept[_kind(model, config, device)] = model


def _how(device: torch.device) -> dict[str, Any]:
    """With combo kernels what is small and independent, such as casts of weights, goes together."""
    return {"dynamic": False, "options": {"combo_kernels": device.type == "cuda"}}


def _kind(model: LanguageModel, config: TrainConfig, device: torch.device) -> tuple[Any, ...]:
    return type(model), model.config, config.batch_size, config.micro_batch_size, config.precision, device
