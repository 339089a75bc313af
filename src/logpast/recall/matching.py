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
    """Every token of the past as a candidate for the token after each of the last Q tokens; F is the longest past.

    Attributes:
        candidates: (B, F) ids, -1 where there is none.
        length: (B, Q, F) how many of the last tokens equal those before the candidate, at most `orders`.
        bin: (Q, F) lag bin of the candidate.
        within: (B, Q, F) whether the candidate is a token, known and within the reach.
    """

    candidates: Tensor
    length: Tensor
    bin: Tensor
    within: Tensor


def compare(ids: Tensor, queries: int, orders: int, edges: Sequence[int]) -> Matches:
    """The matches of the last `queries` tokens of ids (B, T), oldest first; a negative id is a missing token."""
    ids = ids[:, max(0, ids.shape[1] - queries - edges[-1] - orders) :]
    size = ids.shape[1]
    first = max(0, size - queries - edges[-1] + 1)
    position = torch.arange(size, device=ids.device)
    own, candidate = position[size - queries :], position[first:]
    lag = own.unsqueeze(1) + 1 - candidate
    same = torch.ones(len(ids), queries, len(candidate), dtype=torch.bool, device=ids.device)
    length = torch.zeros_like(same, dtype=torch.int64)
    for back in range(orders):
        now = torch.where(own >= back, ids[:, (own - back).clamp(min=0)], -1)
        then = torch.where(candidate > back, ids[:, (candidate - 1 - back).clamp(min=0)], -1)
        same = same & (now.unsqueeze(2) == then.unsqueeze(1)) & (now >= 0).unsqueeze(2)
        length += same
    within = ((lag >= 1) & (lag <= edges[-1])) & (ids[:, first:] >= 0).unsqueeze(1)
    return Matches(ids[:, first:], length, torch.bucketize(lag, torch.tensor(edges, device=ids.device)), within)


def latest(ids: Tensor, orders: int, reach: int) -> Tensor:
    """(B, orders): the token after the latest match of the last n tokens of ids (B, T); -1 if there is none."""
    matches = compare(ids, 1, orders, [reach])
    order = torch.arange(1, orders + 1, device=ids.device).unsqueeze(1)
    matched = (matches.length >= order) & matches.within  # (B, orders, F)
    last = torch.where(matched, torch.arange(matched.shape[2], device=ids.device), -1).amax(-1)
    return torch.where(last >= 0, matches.candidates.gather(1, last.clamp(min=0)), -1)
