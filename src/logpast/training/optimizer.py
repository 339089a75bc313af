"""AdamW and its learning-rate schedule, as in the paper, and which parameters are trained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from logpast.training.config import OptimizerConfig
from logpast.util.errors import UserError, suggest


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Turn off the gradients of the parameters that `TrainConfig.freeze` names.

    A pattern matches parameters and whole modules. Patterns that start with ! are exceptions to the others, or, if
    there are no others, to all parameters.
    """
    if not patterns:
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a shared one goes by each of its names
    exceptions = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    chosen = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    frozen, kept = (set().union(*(_matching(each, parameters) for each in group)) for group in (chosen, exceptions))
    for name in frozen - kept:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"freeze={' '.join(patterns)} leaves no parameter to train; name fewer")


def _matching(pattern: str, names: Iterable[str]) -> set[str]:
    """The names of the parameters that a pattern matches, or whose module it matches."""
    found = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    if not found:
        modules = list(dict.fromkeys(name.partition(".")[0] for name in names))
        raise UserError(f"freeze: no parameter is called {pattern!r}; {suggest(pattern, modules)}")
    return found


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on biases and LayerNorm gains.

    A parameter of two or more dimensions counts as a matrix. That includes learned positions, Transformer-XL's u and v
    and RMT's memory tokens.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"  # a CUDA graph may replay the step, so the rate must be in a tensor
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(float(config.learning_rate), device=device) if on_gpu else config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cuda", "cpu"),
        capturable=on_gpu,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """The learning rate of a step from 0 to total − 1: linear warm-up, then cosine decay to the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.final_learning_rate + cosine * (config.learning_rate - config.final_learning_rate)
