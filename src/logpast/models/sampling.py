"""`Sampling`: how tokens are drawn from a model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import InstanceOf
from torch import Tensor

from logpast.util.errors import UserError
from logpast.util.validation import NonNegativeFloat, PositiveInt, Share, validate_fields


def generators(seed: int, number: int) -> list[np.random.Generator]:
    """The random numbers of this many texts: text i has those of seed + i."""
    return [np.random.default_rng(seed + text) for text in range(number)]


@dataclass(frozen=True, eq=False)
class Sampling:
    """How a token is drawn from logits.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw from this many most likely tokens.
        top_p: draw from the most likely tokens whose probabilities add up to this.
        allowed: (up to V,) bool, the ids that may be drawn; by default all.
    """

    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Share | None = None
    allowed: InstanceOf[Tensor] | None = None

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.allowed is not None and not (self.allowed.dtype == torch.bool and self.allowed.any()):
            raise UserError("allowed must be a bool for each id, true for at least one of them")

    def draw(self, logits: Tensor, randoms: Sequence[np.random.Generator]) -> list[int]:
        """A token of each row of logits (B, V), by the row's own random numbers."""
        if self.allowed is not None:
            logits = logits[:, : len(self.allowed)].masked_fill(~self.allowed.to(logits.device), -torch.inf)
        if self.temperature < 1e-6:  # dividing by less could overflow
            return logits.argmax(-1).tolist()
        weights = (logits.double() / self.temperature).softmax(-1)
        if self.top_k is not None:
            most, ids = weights.topk(min(self.top_k, weights.shape[1]))
            weights = torch.zeros_like(weights).scatter(1, ids, most)
        if self.top_p is not None and self.top_p < 1:
            falling = _descending(weights)
            least = falling.masked_fill(falling.cumsum(-1) - falling >= self.top_p, torch.inf).amin(-1, keepdim=True)
            weights = weights.masked_fill(weights < least, 0)
        sums = weights.cumsum(-1)
        drawn = torch.tensor([[random.random()] for random in randoms], dtype=torch.float64, device=sums.device)
        chosen = torch.searchsorted(sums, drawn * sums[:, -1:], right=True)  # never one of weight 0
        return chosen[:, 0].tolist()


def _descending(rows: Tensor) -> Tensor:
    """The values of each row, sorted; on a CPU by NumPy, which takes a tenth of PyTorch's time."""
    if rows.is_cuda:
        return rows.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy())).flip(-1)
