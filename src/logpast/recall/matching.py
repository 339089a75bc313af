"""Comparing the last tokens of a text with its whole past, all at once: for the whole distribution at many positions.

The cost is proportional to the reach, in one pass of comparisons per order. `index` is for positions of which only the
target's probability is needed, `past` for one position of a text that grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Matches(NamedTuple):
    """All tokens of the past (F of them) as candidates for the token after each of the last Q tokens.

    Attributes:
        candidates: (B, F) ids, -1 where there is none.
        component: (B, Q, F) length of the match × number of bins + lag bin. Candidates that are no token, not known yet
            or out of reach have one above all others.
    """

    candidates: Tensor
    component: Tensor


def compare(ids: Tensor, queries: int, orders: int, edges: Sequence[int]) -> Matches:
    """The matches of the last `queries` tokens of ids (B, T), oldest first; a negative id is a missing token."""
    bins, reach, above = len(edges), edges[-1], (orders + 1) * len(edges)
    ids = F.pad(ids[:, max(0, ids.shape[1] - queries - reach - orders) :].int(), (orders, 0), value=-1)
    size = ids.shape[1]
    first = max(orders, size - queries - reach + 1)
    candidates, same, length = ids[:, first:], torch.tensor(True), torch.tensor(0, dtype=torch.int32)
    for back in range(orders):
        now, then = ids[:, size - queries - back : size - back], ids[:, first - 1 - back : size - 1 - back]
        same = same & (now.masked_fill(now < 0, -2).unsqueeze(2) == then.unsqueeze(1))
        length = length + same.int()
    # lags decrease along the candidates and increase along the queries: row i begins `queries − 1 − i` later
    lag = torch.arange(size - first, 1 - queries, -1, device=ids.device)
    bin_ = torch.bucketize(lag, torch.tensor(edges, device=ids.device), out_int32=True)
    bin_ = torch.where((lag < 1) | (lag > reach), above, bin_).unfold(0, size - first, 1).flip(0)
    missing = torch.where(candidates < 0, above, 0).unsqueeze(1)
    return Matches(candidates, (length * bins + bin_ + missing).clamp(max=above))


def count(component: Tensor, orders: int, bins: int) -> Tensor:
    """(B, Q, orders + 1, bins): the number of matches. A match of n tokens is also one of fewer."""
    rows, size = component.shape[:2], (orders + 1) * bins + 1
    numbered = component.flatten(0, 1) + size * torch.arange(rows.numel(), device=component.device).unsqueeze(1)
    longest = torch.bincount(numbered.flatten(), minlength=rows.numel() * size).view(*rows, size)[..., :-1]
    return longest.unflatten(-1, (orders + 1, bins)).flip(-2).cumsum(-2).flip(-2)
