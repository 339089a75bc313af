"""Recall as it is defined, by brute force; `index` and `matching` are tested against this module.

To predict the token after s_1 … s_p, recall looks at every earlier position p − t (t ≥ 1, the lag) where the last n
tokens were the same, n = 0, 1, …, `orders`. The token that followed there, s_(p − t + 1), is a candidate. Matches are
counted by order n and by lag: bin r holds the lags above `edges[r − 1]` (0 for the first bin) up to `edges[r]`.
A negative id is a missing token: it equals nothing and is no candidate. One with `OWN` added equals others, but is no
candidate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from logpast.recall.matching import OWN


def distribution(stream: Sequence[int], orders: int, edges: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    """(orders + 1, bins, vocabulary): how often each token followed the last n tokens of the stream, by lag."""
    p = len(stream)  # the stream is s_1 … s_p: s_i is stream[i - 1]
    found = np.zeros((orders + 1, len(edges), vocabulary), np.int64)
    tokens = [token & ~OWN for token in stream]
    for t in range(1, min(p, edges[-1]) + 1):
        follower, r = stream[p - t], int(np.searchsorted(edges, t))
        for n in range(orders + 1):
            if p - t - n < 0:
                break
            same = all(tokens[p - t - j - 1] == tokens[p - j - 1] >= 0 for j in range(n))
            if same and 0 <= follower < OWN:
                found[n, r, follower] += 1
    return found


def latest(stream: Sequence[int], orders: int, reach: int) -> list[int]:
    """The token that followed the latest match of the last n tokens, n = 1 … orders; -1 if there is none."""
    found, p, tokens = [], len(stream), [token & ~OWN for token in stream]
    for n in range(1, orders + 1):
        last, lags = tokens[p - n :], range(1, min(reach, p - n) + 1)
        same = [p - t for t in lags if tokens[p - t - n : p - t] == last and min(last) >= 0 and stream[p - t] < OWN]
        found.append(stream[same[0]] if p >= n and same else -1)
    return found


def counts(stream: Sequence[int], orders: int, edges: Sequence[int]) -> NDArray[np.int64]:
    """(tokens, 2, orders + 1, bins): for each token of a stream, how many matches there were before it, and how many of
    them were followed by this very token.
    """
    vocabulary = max(stream, default=0) + 1
    result = np.zeros((len(stream), 2, orders + 1, len(edges)), np.int64)
    for i, token in enumerate(stream):
        found = distribution(stream[:i], orders, edges, vocabulary)
        if token >= 0:
            result[i] = found.sum(-1), found[..., token]
    return result
