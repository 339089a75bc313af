"""AdamW and its schedule, as the paper states them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from logpast.training.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Weight decay on matrices only: gains and biases are left alone.

    What has more dimensions than one counts as a matrix: learned positions, Transformer-XL's u and v, RMT's memory.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"  # there a CUDA graph may replay the step, with the rate in a tensor
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
    """The rate of step 0 … total − 1: up in a line over the warm-up, down along a cosine to the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    through = (step - config.warmup_steps) / max(1, total - 1 - config.warmup_steps)
    height = 0.5 * (1 + math.cos(math.pi * min(1.0, through)))
    return config.final_learning_rate + height * (config.learning_rate - config.final_learning_rate)
