"""`Sampling`: how tokens are drawn from a model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sampling:
    """How a token is drawn from logits.

    Args:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw from this many most likely tokens, and from those that are as likely as the last of them.
        top_p: draw from the most likely tokens whose probabilities add up to this.
        allowed: (up to V,) bool, the ids that may be drawn; by default all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    allowed: Tensor | None = None

    def draw(self, logits: Tensor, randoms: Sequence[torch.Generator]) -> list[int]:
        """A token of each row of logits (B, V), by the row's own random numbers."""
        if self.allowed is not None:
            logits = logits[:, : len(self.allowed)].masked_fill(~self.allowed.to(logits.device), -torch.inf)
        if self.temperature < 1e-6:  # dividing by less could overflow
            return logits.argmax(-1).tolist()
        weights = (logits.double() / self.temperature).softmax(-1)
        if self.top_k is not None:
            least = weights.topk(min(self.top_k, weights.shape[1])).values[:, -1:]
            weights = weights.masked_fill(weights < least, 0)
        if self.top_p is not None and self.top_p < 1:
            falling = _descending(weights)
            least = falling.masked_fill(falling.cumsum(-1) - falling >= self.top_p, torch.inf).amin(-1, keepdim=True)
            weights = weights.masked_fill(weights < least, 0)
        sums = weights.cumsum(-1)
        drawn = torch.cat([torch.rand(1, 1, dtype=torch.float64, generator=random) for random in randoms])
        chosen = torch.searchsorted(sums, drawn.to(sums.device) * sums[:, -1:], right=True)  # never one of weight 0
        return chosen[:, 0].tolist()


def _descending(rows: Tensor) -> Tensor:
    """The values of each row, sorted; on a CPU by NumPy, which takes a tenth of PyTorch's time."""
    if rows.is_cuda:
        return rows.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy())).flip(-1)
