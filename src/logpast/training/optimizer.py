"""AdamW and its learning-rate schedule, as in the paper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from logpast.training.config import OptimizerConfig


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
        lr=torch.tensor(config.learning_rate, device=device) if on_gpu else config.learning_rate,
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
