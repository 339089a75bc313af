"""Shared by the tests of training."""

from pathlib import Path

import torch
from torch import Tensor

from logpast.models import CompressiveConfig, TransformerXLConfig
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import OptimizerConfig

RECURRENT = TransformerXLConfig(window=8, layers=2, heads=2, width=16, memory=8, segments=2)
COMPRESSIVE = CompressiveConfig(window=8, layers=1, heads=2, width=16, memory=8, compressed=4, rate=2)
WORSENING = OptimizerConfig(learning_rate=3e-3, final_learning_rate=10.0, warmup_steps=5, clip=0)  # loss rises again


def weights(run: Path) -> dict[str, Tensor]:
    """Copies of the latest weights: what is loaded is the file itself, mapped into memory."""
    return {name: value.clone() for name, value in find_checkpoint(run, "latest").weights().items()}


def assert_bit_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
