import numpy as np
import pytest

from logpast.recall import naive
from logpast.recall.past import Past

EDGES = [2, 7, 40]


@pytest.mark.parametrize("length", [0, 1, 2, 9, 60])
def test_distribution_is_that_of_the_definition(length: int) -> None:
    rng = np.random.default_rng(length)
    stream = rng.integers(-1, 5, length).tolist()
    past = Past(3, EDGES, 5)
    past.push(stream)
    found = naive.followers(stream, 3, EDGES, 5)
    assert np.array_equal(past.look().counts, found.sum(-1))
    weights = rng.random((4, 3))
    shares = weights / np.maximum(found.sum(-1), 1)
    np.testing.assert_allclose(past.look().distribution(weights), np.einsum("nr,nrv->v", shares, found), atol=1e-12)


def test_latest_followers_are_those_of_the_definition() -> None:
    stream = np.random.default_rng(5).integers(-1, 4, 80).tolist()
    past = Past(3, EDGES, 4)
    past.push(stream)
    expected = [naive.latest(stream[: end + 1], 3, EDGES[-1]) for end in range(80)]
    assert past.latest(-2, 80).tolist() == [[-1] * 3] * 2 + expected
    assert past.latest(70, 75).tolist() == expected[70:75]


def test_pushing_one_by_one_is_the_same() -> None:
    stream = np.random.default_rng(3).integers(0, 4, 100).tolist()
    whole, grown = Past(2, EDGES, 4), Past(2, EDGES, 4)
    whole.push(stream)
    for token in stream:
        grown.push([token])
    weights = np.ones((3, 3))
    assert np.array_equal(whole.look().distribution(weights), grown.look().distribution(weights))
