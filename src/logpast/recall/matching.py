"""Comparing the last tokens of a text with its whole past, all at once: for the whole distribution, and for generation.

The cost is proportional to the reach, but it is one pass of comparisons per order: fast on a GPU, and fast enough on a
CPU for one position. `index` is for many positions, of which only the target's probability is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
    ids = ids[:, max(0, ids.shape[1] - queries - edges[-1] - orders) :]
    size, position = ids.shape[1], torch.arange(ids.shape[1], device=ids.device)
    first = max(0, size - queries - edges[-1] + 1)
    own, candidate = position[size - queries :], position[first:]
    lag = own.unsqueeze(1) + 1 - candidate
    same = torch.ones(len(ids), queries, len(candidate), dtype=torch.bool, device=ids.device)
    length = torch.zeros_like(same, dtype=torch.int64)
    for back in range(orders):
        now = torch.where(own >= back, ids[:, (own - back).clamp(min=0)], -1)
        then = torch.where(candidate > back, ids[:, (candidate - 1 - back).clamp(min=0)], -1)
        same = same & (now.unsqueeze(2) == then.unsqueeze(1)) & (now >= 0).unsqueeze(2)
        length += same
    bins = torch.bucketize(lag, torch.tensor(edges, device=ids.device))
    outside = (lag < 1) | (lag > edges[-1]) | (ids[:, first:] < 0).unsqueeze(1)
    return Matches(ids[:, first:], (length * len(edges) + bins).masked_fill(outside, (orders + 1) * len(edges)))


def count(component: Tensor, orders: int, bins: int) -> Tensor:
    """(B, Q, orders + 1, bins): the number of matches. A match of n tokens is also one of fewer."""
    longest = torch.zeros(*component.shape[:2], (orders + 1) * bins + 1, device=component.device)
    longest.scatter_add_(2, component, torch.ones_like(component, dtype=longest.dtype))
    return longest[..., :-1].unflatten(-1, (orders + 1, bins)).flip(-2).cumsum(-2).flip(-2)


def latest(ids: Tensor, orders: int, reach: int) -> Tensor:
    """(B, orders): the token after the latest match of the last n tokens of ids (B, T); -1 if there is none."""
    candidates, length = compare(ids, 1, orders, [reach])  # with one lag bin, components are lengths
    order = torch.arange(1, orders + 1, device=ids.device).unsqueeze(1)
    matched = (order <= length) & (length <= orders)  # (B, orders, F)
    last = torch.where(matched, torch.arange(matched.shape[2], device=ids.device), -1).amax(-1)
    return torch.where(last >= 0, candidates.gather(1, last.clamp(min=0)), -1)
