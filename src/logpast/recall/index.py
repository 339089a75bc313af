"""Matches of every position of a text, found once by sorting: the reach of the past costs nothing in training.

How often a token followed the last n tokens before is how often the (n + 1)-gram that ends with it occurred before. So
all that is needed is, for each position, the number of earlier positions with the same n-gram, n = 1 … orders + 1, by
lag. Positions are sorted by n-gram; earlier occurrences within a lag are then neighbours, found by binary search.
n-grams are numbered exactly, by the number of the (n − 1)-gram before and the last token: there are no hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**22  # positions that are sorted at once, which bounds the memory needed


class Index(NamedTuple):
    """Earlier occurrences of the n-gram that ends at each position, n = 1 … orders.

    Attributes:
        counts: (T, orders, bins) how many there are, by lag.
        followers: (T, up to orders) the token after the latest of them; -1 if there is none.
    """

    counts: Tensor
    followers: Tensor


def occurrences(
    tokens: Tensor,
    streams: Tensor,
    orders: int,
    edges: Sequence[int],
    followers: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Index:
    """Earlier occurrences of the n-gram that ends at each position, in the same stream.

    Args:
        tokens: (T,) ids; an n-gram with a negative id has no matches.
        streams: (T,) number of each token's stream. Streams are contiguous.
        orders: n = 1 … orders.
        edges: bin r holds the lags above edges[r − 1] up to edges[r].
        followers: find the tokens that followed for n = 1 … followers.
        progress: called with the number of tokens done.
    """
    widest = max(edge - before for edge, before in zip(edges, [0, *edges[:-1]], strict=True))
    dtype = torch.int16 if min(widest, len(tokens)) < 2**15 else torch.int32
    counts = torch.zeros(len(tokens), orders, len(edges), dtype=dtype, device=tokens.device)
    index = Index(counts, torch.full((len(tokens), followers), -1, dtype=torch.int32, device=tokens.device))
    step = max(CHUNK, 4 * (edges[-1] + orders))
    for first in range(0, len(tokens), step):
        begin = max(0, first - edges[-1] - orders)
        part = slice(begin, first + step)
        done = Index(*(table[first : first + step] for table in index))
        _fill(done, tokens[part], streams[part], edges, first - begin)
        progress(min(first + step, len(tokens)))
    return index


def counts_of_targets(table: Tensor, target: Tensor, before: Tensor, edges: Sequence[int]) -> Tensor:
    """(…, 2, orders + 1, bins): how many matches there are before each target, and how many of them it followed.

    Args:
        table: (T, orders + 1, bins) counts of `occurrences`.
        target: (…) positions in the table.
        before: (…) how many tokens the stream has before each target.
        edges: as in `occurrences`.
    """
    matches = table[(target - 1).clamp(min=0)][..., :-1, :] * (before > 0)[..., None, None]
    bounds = torch.tensor([0, *edges]).to(table.device, non_blocking=table.device.type != "mps")
    everywhere = before.unsqueeze(-1).clamp(min=0).clamp(max=bounds).diff(dim=-1).unsqueeze(-2)  # n = 0
    return torch.stack([torch.cat([everywhere.to(table.dtype), matches], dim=-2), table[target]], dim=-3)


def _fill(index: Index, tokens: Tensor, streams: Tensor, edges: Sequence[int], skip: int) -> None:
    """Fill the index of all tokens but the first `skip`, which only precede them."""
    size, vocabulary = len(tokens), int(tokens.max()) + 2
    valid, gram = tokens >= 0, streams - streams[0]
    ids = tokens.long().clamp(min=-1) + 1
    for order in range(index.counts.shape[1]):
        if order:  # the (n − 1)-gram that ends one position earlier, in the same stream
            valid = valid & torch.roll(valid, 1) & (streams == torch.roll(streams, 1))
            valid[0] = False
            gram = torch.roll(gram, 1)
        keys, position = torch.where(valid, gram * vocabulary + ids, -1).sort(stable=True)
        group = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).cumsum(0)])
        gram = torch.empty_like(group).index_copy_(0, position, group)
        place, start = group * size + position, group * size  # increasing: groups, and positions within them
        rank = torch.arange(size, device=tokens.device)
        wanted = position >= skip
        nearer = rank
        for bin_, edge in enumerate(edges):
            first = torch.searchsorted(place, torch.maximum(place - edge, start))
            number = torch.where(keys >= 0, nearer - first, 0).to(index.counts.dtype)
            index.counts[:, order, bin_].index_copy_(0, position[wanted] - skip, number[wanted])
            nearer = first
        if order < index.followers.shape[1]:
            has_match = wanted & (keys >= 0) & (first < rank)
            follower = tokens[torch.roll(position, 1)[has_match] + 1]
            index.followers[:, order].index_copy_(0, position[has_match] - skip, follower.to(index.followers.dtype))
