"""Matches of the last tokens of one growing text: the time per token hardly depends on how long the text is.

A table holds the positions of every token, so that only positions with the same last token are compared. Matches of
n = 0 tokens, which are everywhere, are counts by token and lag bin, of which a new token changes a few. The latest
match alone is found by hash chains: from each n-gram a link leads to the latest one before it with the same hash.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from logpast.recall.matching import OWN

MULTIPLIER = 0x9E3779B97F4A7C15  # odd, 64 bits


class Found(NamedTuple):
    """Matches of n ≥ 1 tokens, oldest first.

    Attributes:
        candidates: (F,) the token that followed each.
        lengths: (F,) how many tokens are the same, at most `orders`.
        bins: (F,) lag bin.
    """

    candidates: NDArray[np.int64]
    lengths: NDArray[np.int64]
    bins: NDArray[np.int64]


class Past:
    """An index of one text. A negative id is a missing token, and one with `OWN` added is compared, but no candidate.

    Args:
        ids: the text so far.
        orders: the longest match in tokens.
        edges: the largest lag of each bin.
        vocabulary: number of different tokens.
        linked: whether `latest` is needed. Its hash chains take most of the memory.

    Attributes:
        everywhere: (bins, vocabulary) how often each token occurred, by lag.
        found: matches of the last tokens.
    """

    def __init__(
        self, ids: Sequence[int], orders: int, edges: Sequence[int], vocabulary: int, linked: bool = True
    ) -> None:
        self.orders, self.edges, self._linked = orders, np.array(edges), linked
        self.everywhere = np.zeros((len(edges), vocabulary), np.float32)
        self._pad = np.full(orders + 1, -2)
        self._set(np.asarray(ids, np.int64))
        for row, bounds in zip(self.everywhere, zip([0, *edges[:-1]], edges, strict=True), strict=True):
            nearest, farthest = (max(0, len(ids) - lag) for lag in bounds)
            part = self._ids[farthest + orders + 1 : nearest + orders + 1]
            row += np.bincount(part[_copied(part)], minlength=vocabulary)
        self._totals = self.everywhere.sum(1, dtype=np.int64)

    def _set(self, ids: NDArray[np.int64]) -> None:
        """Index the positions of these ids."""
        capacity = max(1024, len(ids) // 2)
        self._size, self._ids = len(ids), np.concatenate([self._pad, ids, np.empty(capacity, np.int64)])
        self._positions: dict[int, Any] = defaultdict(lambda: array("q"))
        ids = ids & ~OWN
        order = np.argsort(ids, kind="stable")
        tokens, starts = np.unique(ids[order], return_index=True)
        for token, start, stop in zip(tokens.tolist(), starts, [*starts[1:], len(ids)], strict=False):
            self._positions[token] = array("q", order[start:stop].tobytes())
        if self._linked:
            self._link(ids, capacity)

    def _link(self, ids: NDArray[np.int64], capacity: int) -> None:
        """Chain the n-grams of these ids. Number i · orders + n − 1 is the one of n tokens that ends at position i."""
        bits = max(2, self.orders * (len(ids) + capacity)).bit_length() - 1  # one or two n-grams per slot
        self._shift = 64 - bits
        table = np.full((len(ids), self.orders), -1)
        keys, complete = np.zeros(len(ids), np.uint64), np.full(len(ids), True)
        for back in range(self.orders):
            tokens = np.concatenate([np.full(back, -1), ids])[: len(ids)]
            complete &= tokens >= 0
            keys = (keys + tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIER)
            table[:, back] = np.where(complete, (keys >> np.uint64(self._shift)).astype(np.int64), -1)
        slots = table.ravel()
        (numbers,) = np.nonzero(slots >= 0)
        order = np.sort(slots[numbers] << 32 | numbers) & 0xFFFFFFFF  # by slot, then by number
        heads, links = np.full(2**bits, -1, np.int32), np.full(len(slots), -1, np.int32)
        same = slots[order[1:]] == slots[order[:-1]]
        links[order[1:][same]] = order[:-1][same]
        heads[slots[order]] = order  # the last of equal slots stays
        self._heads, self._links = array("i", heads.tobytes()), array("i", links.tobytes())

    def _append_links(self, end: int) -> None:
        """What `_link` does, for the position that was added."""
        key, complete = 0, True
        for back, token in enumerate(self._gram(end, self.orders)[::-1]):
            complete = complete and token >= 0
            if not complete:
                self._links.append(-1)
                continue
            key = (key + token + 1) * MULTIPLIER % 2**64
            slot = key >> self._shift
            self._links.append(self._heads[slot])
            self._heads[slot] = end * self.orders + back

    def _gram(self, end: int, size: int) -> list[int]:
        """The tokens up to this position."""
        last = len(self._pad) + end + 1
        return (self._ids[last - size : last] & ~OWN).tolist()

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self.__dict__.pop("found", None)
        first = len(self._pad)
        if first + self._size == len(self._ids):  # tokens out of reach are dropped now and then
            kept = int(self.edges[-1]) + self.orders
            self._set(self._ids[first + max(0, self._size - kept) :])
        self._ids[first + self._size] = token
        self._positions[token & ~OWN].append(self._size)
        if self._linked:
            self._append_links(self._size)
        self._size += 1
        self._count(0, token, 1)
        for bin_, edge in enumerate(self.edges):  # the token at this lag leaves the bin for the next one
            if (left := self._size - 1 - edge) >= 0:
                moved = self._ids[first + left]
                self._count(bin_, moved, -1)
                if bin_ + 1 < len(self.edges):
                    self._count(bin_ + 1, moved, 1)

    def _count(self, bin_: int, token: int, change: int) -> None:
        if _copied(token):
            self.everywhere[bin_, token] += change
            self._totals[bin_] += change

    @cached_property
    def found(self) -> Found:
        end, first = self._size - 1, len(self._pad)
        token = self._gram(end, 1)[0] if self._size else -1
        if token < 0 or not self.orders:
            return Found(*np.empty((3, 0), np.int64))
        places = np.frombuffer(self._positions[token], np.int64)[:-1]
        places = places[np.searchsorted(places, end - self.edges[-1]) :]
        lengths, alive = np.ones(len(places), np.int64), np.arange(len(places))
        for back in range(1, self.orders):
            now, then = self._ids[first + end - back] & ~OWN, self._ids[first + places[alive] - back] & ~OWN
            alive = alive[(then == now) & (now >= 0)]
            lengths[alive] += 1
        candidates, bins = self._ids[first + 1 + places], np.searchsorted(self.edges, end - places)
        copied = _copied(candidates)
        if not copied.all():
            candidates, lengths, bins = candidates[copied], lengths[copied], bins[copied]
        return Found(candidates, lengths, bins)

    def counts(self) -> NDArray[np.int64]:
        """(orders + 1, bins): the number of matches by length and lag. A match of n tokens is also one of fewer."""
        shape = self.orders + 1, len(self.edges)
        longest = np.bincount(self.found.lengths * shape[1] + self.found.bins, minlength=shape[0] * shape[1]).reshape(
            shape
        )
        counts = longest[::-1].cumsum(0)[::-1]
        counts[0] = self._totals
        return counts

    def latest(self) -> NDArray[np.int64]:
        """(orders,): the token after the latest match of n = 1 … orders tokens; -1 if there is none."""
        followers, end, first = np.full(self.orders, -1), self._size - 1, len(self._pad)
        for back in range(self.orders if self._size else 0):
            gram, number = self._gram(end, back + 1), self._links[end * self.orders + back]
            while (place := number // self.orders) >= max(0, end - int(self.edges[-1])):
                follower = self._ids[first + place + 1]
                if number % self.orders == back and _copied(follower) and self._gram(place, back + 1) == gram:
                    followers[back] = follower
                    break
                number = self._links[number]
        return followers


def _copied(ids: Any) -> Any:
    """Whether each id is a candidate."""
    return (ids >= 0) & (ids < OWN)
