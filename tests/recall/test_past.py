"""The index of a growing text finds what the definition finds."""

import numpy as np
import pytest

from logpast.recall import naive
from logpast.recall.matching import OWN
from logpast.recall.past import Past


@pytest.mark.parametrize("edges", [[3], [1, 4, 9], [2, 7, 20, 60]])
@pytest.mark.parametrize(("orders", "known"), [(0, 0), (1, 5), (4, 0), (4, 70)])
def test_matches_are_those_of_the_definition(edges: list[int], orders: int, known: int) -> None:
    """However many of the tokens are there at the start."""
    random = np.random.default_rng(0)
    stream = [-1, *(random.integers(0, 3, 89) + OWN * random.integers(0, 2, 89)).tolist()]
    past = Past(stream[:known], orders, edges, 3)
    for end in range(known, len(stream) + 1):
        expected, found = naive.distribution(stream[:end], orders, edges, 3), np.zeros((orders + 1, len(edges), 3), int)
        found[0] = past.everywhere
        for candidate, length, lag_bin in zip(*past.found, strict=True):
            found[1 : length + 1, lag_bin, candidate] += 1
        assert np.array_equal(found, expected)
        assert np.array_equal(past.counts(), expected.sum(-1))
        assert past.latest().tolist() == naive.latest(stream[:end], orders, edges[-1])
        if end < len(stream):
            past.append(stream[end])


def test_tokens_out_of_reach_are_dropped() -> None:
    """Matches stay those of the definition, and the memory bounded."""
    stream = np.random.default_rng(0).integers(0, 5, 5000).tolist()
    past = Past([], 2, [3, 30], 5)
    for token in stream:
        past.append(token)
    assert len(past._ids) < 2000
    assert sum(map(len, past._positions.values())) < 2000
    expected = naive.distribution(stream, 2, [3, 30], 5)
    assert np.array_equal(past.counts(), expected.sum(-1))
    assert past.latest().tolist() == naive.latest(stream, 2, 30)


def test_one_token_a_million_times() -> None:
    past = Past(np.zeros(10**6, np.int64), 4, [64, 10**6], 2)
    past.append(0)
    assert past.counts().tolist() == [[64, 10**6 - 64], *([64, 10**6 - 63 - n] for n in range(1, 5))]
    assert past.latest().tolist() == [0] * 4


def test_collisions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of which all n-grams have the same value."""
    monkeypatch.setattr("logpast.recall.past.MULTIPLIER", 0)
    stream = [-1, *np.random.default_rng(0).integers(0, 3, 200).tolist()]
    past = Past(stream[:50], 4, [3, 30], 3)
    for end in range(50, len(stream)):
        assert past.latest().tolist() == naive.latest(stream[:end], 4, 30)
        past.append(stream[end])
    assert set(past._heads[1:]) == {-1}
