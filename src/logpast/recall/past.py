"""A growing past, for generation: what followed the last tokens before, as a distribution over the whole vocabulary.

It keeps the ids, the positions of each id (4 bytes a token each) and, for n = 0, how often each id occurs in each lag
bin. Positions that match the last n tokens are those that match the last n − 1 and have the right token before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Past:
    """The tokens of one stream so far.

    Args:
        orders: the longest match, in tokens.
        edges: bin r holds the lags above edges[r − 1] up to edges[r].
        vocabulary: number of ids.
    """

    def __init__(self, orders: int, edges: Sequence[int], vocabulary: int) -> None:
        self.orders, self.edges = orders, list(edges)
        self.ids = array("i")
        self.positions: dict[int, array[int]] = {}
        self.unigrams = np.zeros((len(self.edges), vocabulary))
        self.totals = np.zeros(len(self.edges), np.int64)  # sums of the unigrams

    def __len__(self) -> int:
        return len(self.ids)

    def push(self, ids: Sequence[int]) -> None:
        """Append tokens. A negative id is a missing token."""
        before = len(self.ids)
        self.ids.extend(ids)
        for position, token in enumerate(ids, before):
            self.positions.setdefault(token, array("i")).append(position)
        every = np.frombuffer(self.ids, np.int32)
        for bin_, edge in enumerate([0, *self.edges]):  # tokens that have moved beyond the edge, into the next bin
            moved = every[max(0, before - edge) : max(0, len(every) - edge)]
            moved = moved[moved >= 0]
            if bin_:
                np.subtract.at(self.unigrams[bin_ - 1], moved, 1)
                self.totals[bin_ - 1] -= len(moved)
            if bin_ < len(self.edges):
                np.add.at(self.unigrams[bin_], moved, 1)
                self.totals[bin_] += len(moved)

    def look(self) -> Matches:
        """What followed the last tokens before."""
        ids, last = np.frombuffer(self.ids, np.int32), len(self) - 1
        counts, followers = [self.totals], []
        for ends in self._ends(last):
            follower = ids[ends + 1]
            first = np.searchsorted(ends, [last - edge for edge in (0, *self.edges)])  # of each bin: ends are sorted
            lag_bin = np.repeat(np.arange(len(self.edges))[::-1], -np.diff(first)[::-1])
            real = follower >= 0
            followers.append((follower[real], lag_bin[real]))
            counts.append(np.bincount(lag_bin[real], minlength=len(self.edges)))
        return Matches(np.stack(counts), self.unigrams, followers)

    def latest(self, start: int, stop: int) -> NDArray[np.int32]:
        """(positions, orders): the token after the latest match of the last n tokens at positions start … stop − 1; -1
        if there is none.
        """
        ids, found = np.frombuffer(self.ids, np.int32), np.full((stop - start, self.orders), -1, np.int32)
        for position in range(max(start, 0), stop):
            for n, ends in enumerate(self._ends(position)):
                if len(ends):
                    found[position - start, n] = ids[ends[-1] + 1]
        return found

    def _ends(self, position: int) -> Iterator[NDArray[np.int32]]:
        """For n = 1 … orders, the earlier positions where the n tokens that end at `position` end, in text order."""
        ids, ends = np.frombuffer(self.ids, np.int32), np.zeros(0, np.int32)
        for n in range(self.orders):
            token = int(ids[position - n]) if n <= position else -1
            if n == 0 and token >= 0:
                same = np.frombuffer(self.positions[token], np.int32)
                first, own = np.searchsorted(same, [position - self.edges[-1], position])
                ends = same[first:own]
            elif n:
                ends = ends[ends >= n] if token >= 0 else ends[:0]
                ends = ends[ids[ends - n] == token]
            yield ends


class Matches(NamedTuple):
    """The matches of the last tokens of a past, until the next token is pushed.

    Attributes:
        counts: (orders + 1, bins) number of matches of the last n tokens, for n = 0 … orders.
        unigrams: (bins, V) for n = 0, how often each id followed.
        followers: for n = 1 … orders, the ids that followed and their lag bins.
    """

    counts: NDArray[np.int64]
    unigrams: NDArray[np.float64]
    followers: list[tuple[NDArray[np.int32], NDArray[np.int64]]]

    def distribution(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """(V,): the sum of the components' distributions, each multiplied by its weight (orders + 1, bins)."""
        shares = weights / np.maximum(self.counts, 1)
        result: NDArray[np.float64] = shares[0] @ self.unigrams
        for (followers, bins), share in zip(self.followers, shares[1:], strict=True):
            np.add.at(result, followers, share[bins])
        return result
