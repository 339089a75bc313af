"""Small models and inputs that the tests of several models share."""

from typing import Any

import torch
from torch import Tensor, nn

from logpast.models import LanguageModel, LogMemoryConfig, ModelConfig, RecentConfig, build

VOCABULARY = 31
SIZES: dict[str, Any] = {"window": 8, "layers": 2, "heads": 2, "width": 16, "vocabulary": VOCABULARY}
MEMORY = LogMemoryConfig(slots=17, sharpness=20, normalize="area", **SIZES)  # horizon 16
CONTROL = RecentConfig(slots=5, **SIZES)


def enlarge(module: nn.Module) -> Any:
    """Larger random weights than at initialisation, where many effects are too small to see."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def large(config: ModelConfig) -> Any:
    """A model in float64 with large weights."""
    return enlarge(build(config).double())


def inputs(model: LanguageModel, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """History, window and targets of a stateless model."""
    torch.manual_seed(1)
    sizes = model.history, model.window, model.window
    return tuple(torch.randint(VOCABULARY, (batch, size)) for size in sizes)  # type: ignore[return-value]


def changed(ids: Tensor, position: int) -> Tensor:
    """Ids (B, T) with another token at one position."""
    other = ids.clone()
    other[:, position] = (other[:, position] + 1) % VOCABULARY
    return other
