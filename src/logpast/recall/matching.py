"""Comparing the last tokens of a text with its whole past, all at once: for the whole distribution at many positions.

The cost is proportional to the reach, in one pass of comparisons per order, which a GPU hardly notices. `index` is for
positions of which only the target's probability is needed, `past` for one position of a growing text on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

OWN = 2**30  # added to the id of a token that is compared as any other, but never copied
COMPARISONS = 2**24  # made at once, which bounds the memory needed


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
    """The matches of the last `queries` tokens of ids (B, T), oldest first; a negative id is a missing token, and one
    with `OWN` added is no candidate.
    """
    bins, reach, above = len(edges), edges[-1], (orders + 1) * len(edges)
    ids = F.pad(ids[:, max(0, ids.shape[1] - queries - reach - orders) :].int(), (orders, 0), value=-1)
    size = ids.shape[1]
    first = max(orders, size - queries - reach + 1)
    candidates, ids = ids[:, first:], ids & ~OWN
    candidates = candidates.masked_fill(candidates >= OWN, -1)
    same, length = torch.tensor(True), torch.tensor(0, dtype=torch.int32)
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
    number = component.long()
    longest = torch.zeros(*rows, size, dtype=torch.int64, device=component.device)
    longest.scatter_add_(2, number, torch.ones_like(number))  # bincount would make the CPU wait for the GPU
    return longest[..., :-1].unflatten(-1, (orders + 1, bins)).flip(-2).cumsum(-2).flip(-2)


def latest(ids: Tensor, queries: int, orders: int, reach: int) -> Tensor:
    """(B, queries, orders): the token after the latest match of the last n = 1 … orders tokens; -1 if there is none.

    Of each of the last `queries` tokens of ids (B, T), as in `compare`.
    """
    found = list[Tensor]()
    for numbers, known in parts(ids, queries, reach):
        candidates, length = compare(known, len(numbers), orders, [reach])
        place = torch.arange(1, candidates.shape[1] + 1, dtype=torch.int32, device=ids.device)
        last = [(place * ((length >= n) & (length <= orders))).amax(2) for n in range(1, orders + 1)]  # above: no match
        followers = F.pad(candidates, (1, 0), value=-1).gather(1, torch.cat(last, 1).long())
        found.append(followers.unflatten(1, (orders, -1)).mT)
    return torch.cat(found, 1)


def parts(ids: Tensor, queries: int, reach: int) -> Iterator[tuple[range, Tensor]]:
    """The last `queries` positions in groups that are compared at once: which they are, and the ids up to them."""
    step = max(1, COMPARISONS // (len(ids) * min(ids.shape[1], reach)))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        yield range(first, last), ids[:, : ids.shape[1] - queries + last]
