"""Counts of matches for every token of a text, made once by sorting: the reach of the past costs nothing in training.

How often a token followed the last n tokens before is how often the (n + 1)-gram that ends with it occurred before. So
all that is needed is, for each position, the number of earlier positions with the same n-gram, n = 1 … orders + 1, by
lag. Positions are sorted by n-gram; earlier occurrences within a lag are then neighbours, found by binary search.
n-grams are numbered exactly, by the number of the (n − 1)-gram before and the last token: there are no hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SUCCESS = 64  # tokens over which a pilot form averages how often recall was right
CHUNK = 2**24  # positions that are sorted at once, which bounds the memory needed


def occurrences(tokens: Tensor, streams: Tensor, orders: int, edges: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(T, orders, bins): the number of earlier positions in the same stream where the same n-gram ends, by lag.

    Args:
        tokens: (T,) ids; an n-gram with a negative id has no matches.
        streams: (T,) number of each token's stream. Streams are contiguous.
        orders: n = 1 … orders.
        edges: bin r holds the lags above edges[r − 1] up to edges[r].
    """
    widest = max(edge - before for edge, before in zip(edges, [0, *edges[:-1]], strict=True))
    dtype = torch.int16 if min(widest, len(tokens)) < 2**15 else torch.int32
    found = torch.zeros(len(tokens), orders, len(edges), dtype=dtype, device=tokens.device)
    latest = torch.full((len(tokens), orders), -1, dtype=torch.int32, device=tokens.device)
    step = max(CHUNK, 4 * (edges[-1] + orders))
    for first in range(0, len(tokens), step):
        begin = max(0, first - edges[-1] - orders)
        part = slice(begin, first + step)
        _count(tokens[part], streams[part], edges, found[first : first + step], first - begin, latest[first : first + step])
    return found, latest


def _count(tokens: Tensor, streams: Tensor, edges: Sequence[int], found: Tensor, skip: int, latest: Tensor) -> None:
    """Fill `found` for all tokens but the first `skip`, which only precede them."""
    size, vocabulary = len(tokens), int(tokens.max()) + 2
    valid, gram = tokens >= 0, streams - streams[0]
    ids = tokens.long().clamp(min=-1) + 1
    for order in range(found.shape[1]):
        if order:  # the (n − 1)-gram that ends one position earlier, in the same stream
            valid = valid & torch.roll(valid, 1) & (streams == torch.roll(streams, 1))
            valid[0] = False
            gram = torch.roll(gram, 1)
        keys, position = torch.where(valid, gram * vocabulary + ids, -1).sort(stable=True)
        group = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).cumsum(0)])
        gram = torch.empty_like(group).index_copy_(0, position, group)
        place, start = group * size + position, group * size  # increasing: groups, and positions within them
        rank = torch.arange(size, device=tokens.device)
        nearer = rank
        for bin_, edge in enumerate(edges):
            first = torch.searchsorted(place, torch.maximum(place - edge, start))
            number = torch.where(keys >= 0, nearer - first, 0).to(found.dtype)
            inside = position >= skip
            found[:, order, bin_].index_copy_(0, position[inside] - skip, number[inside])
            nearer = first
        before = torch.roll(position, 1)
        close = (rank > 0) & (torch.roll(group, 1) == group) & (position - before <= edges[-1]) & (keys >= 0) & inside
        latest[:, order].index_copy_(0, position[close] - skip, tokens[before[close] + 1].to(latest.dtype))


def success(found: Tensor, edges: Sequence[int]) -> Tensor:
    """(T, orders): the mean share of the matches that were right, over the last tokens, for n = 0 … orders − 1."""
    matches = torch.empty(found.shape[:2], device=found.device)
    matches[:, 0] = torch.arange(len(found), device=found.device).clamp(max=edges[-1])
    matches[1:, 1:] = found[:-1, :-1].sum(-1)
    matches[0, 1:] = 0
    share = (found.sum(-1) / matches.clamp(min=1)).double().cumsum(0)
    mean = share / SUCCESS
    mean[SUCCESS:] -= share[:-SUCCESS] / SUCCESS
    return mean.half()
