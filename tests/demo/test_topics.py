"""Drifting topics and their two optima, against enumeration of all possible segmentations."""

import itertools
import math

import numpy as np
import pytest

from logpast.data import TokenStore
from logpast.data.batching import Windows
from logpast.demo.topics import Topics
from logpast.util.errors import UserError

TINY = [
    Topics(vocabulary=2, concentration=0.7, exponent=1.5, shortest=1, longest=4),
    Topics(vocabulary=3, concentration=1.3, exponent=0.5, shortest=2, longest=5),
    Topics(vocabulary=2, concentration=0.4, exponent=2.0, shortest=3, longest=30),
]
SMALL = Topics(vocabulary=8, concentration=0.5, exponent=2.0, shortest=16, longest=512)


def law_of(source: Topics) -> dict[int, float]:
    """P(duration) for each duration."""
    powers = {n: n**-source.exponent for n in range(source.shortest, source.longest + 1)}
    return {n: power / sum(powers.values()) for n, power in powers.items()}


def in_one_segment(source: Topics, tokens: list[int]) -> float:
    """The Dirichlet-multinomial in closed form."""
    alpha, v = source.concentration, source.vocabulary
    log = math.lgamma(v * alpha) - math.lgamma(v * alpha + len(tokens))
    log += sum(math.lgamma(alpha + tokens.count(x)) - math.lgamma(alpha) for x in range(v))
    return math.exp(log)


def from_a_start(source: Topics, tokens: list[int]) -> float:
    """P(tokens) if a segment begins with the first token: the sum over all segmentations."""
    if not tokens:
        return 1.0
    return sum(
        p * in_one_segment(source, tokens[:n]) * from_a_start(source, tokens[n:]) for n, p in law_of(source).items()
    )


def probability(source: Topics, tokens: list[int]) -> float:
    """P(tokens) from a random start: the sum over all durations and ages of the segment in progress."""
    law = law_of(source)
    mean = sum(n * p for n, p in law.items())
    return sum(
        p / mean * in_one_segment(source, tokens[: n - age]) * from_a_start(source, tokens[n - age :])
        for n, p in law.items()
        for age in range(n)
    )


@pytest.mark.parametrize("source", TINY)
def test_optimum_given_all_is_the_sum_over_all_segmentations(source: Topics) -> None:
    tokens = source.draw(9, seed=0).tokens.tolist()
    ways = [probability(source, tokens[:n]) for n in range(10)]
    np.testing.assert_allclose(source.nats_given_all(tokens), -np.diff(np.log(ways)), rtol=1e-11)


@pytest.mark.parametrize("source", TINY)
@pytest.mark.parametrize(("slots", "window"), [(3, 2), (0, 3), (4, 4), (5, 1)])
def test_optimum_given_recent_is_the_sum_given_what_the_control_sees(source: Topics, slots: int, window: int) -> None:
    """What it sees is taken from the batches that models get."""
    store = TokenStore.in_memory([source.draw(15, seed=1).tokens], source.vocabulary + 1, eot=source.vocabulary)
    windows = Windows(store, window, slots)
    batch = windows.batch(np.arange(len(windows)))
    wanted = []
    for history, tokens, targets in zip(*(part.tolist() for part in batch.inputs), strict=True):
        for j in range(window):
            if targets[j] >= 0:
                view = [x for x in history + tokens[: j + 1] if 0 <= x < source.vocabulary]
                assert len(view) == min(slots + j + 1, len(wanted))
                wanted.append(-math.log(probability(source, [*view, targets[j]]) / probability(source, view)))
    np.testing.assert_allclose(source.nats_given_recent(store.tokens, slots, window), wanted, rtol=1e-11)


@pytest.mark.parametrize("source", TINY)
def test_optimum_given_all_is_a_stationary_distribution(source: Topics) -> None:
    """It sums to 1, and summing over the first token or over the last gives the same."""

    def all_streams(length: int) -> np.ndarray:
        streams = itertools.product(range(source.vocabulary), repeat=length)
        shape = (source.vocabulary,) * length
        return np.exp([-source.nats_given_all(stream).sum() for stream in streams]).reshape(shape)

    longer, shorter = all_streams(6), all_streams(5)
    assert longer.sum() == pytest.approx(1, rel=1e-12)
    np.testing.assert_allclose(longer.sum(axis=0), shorter, rtol=1e-11)
    np.testing.assert_allclose(longer.sum(axis=-1), shorter, rtol=1e-11)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return SMALL.draw(20_000, seed=0).tokens


def test_optimum_falls_with_the_number_of_slots(tokens: np.ndarray) -> None:
    losses = [SMALL.nats_given_recent(tokens, slots, 16).mean() for slots in (0, 10, 40, 160)]
    losses += [SMALL.nats_given_all(tokens).mean(), SMALL.draw(20_000, seed=0).nats.mean()]
    assert all(np.diff(losses) < 0)
    assert losses[2] - losses[4] > 0.005  # the demo is about this difference
    assert losses[0] < math.log(8)


def test_optimum_given_recent_approaches_the_optimum_given_all(tokens: np.ndarray) -> None:
    given_all = SMALL.nats_given_all(tokens[:1500])
    differences = [
        np.abs(SMALL.nats_given_recent(tokens[:1500], slots, 16) - given_all).max() for slots in (80, 320, 1500)
    ]
    assert differences[0] > 100 * differences[1] > 0
    assert differences[2] == 0
    # early windows see the whole past
    early = SMALL.nats_given_recent(tokens[:1500], 41, 16)[:48]
    np.testing.assert_array_equal(early, given_all[:48])


def test_filtering_with_wrong_parameters_has_a_higher_loss(tokens: np.ndarray) -> None:
    right = SMALL.nats_given_all(tokens).mean()
    for wrong in (Topics(8, 1.0, 2.0, 16, 512), Topics(8, 0.5, 1.0, 16, 512), Topics(8, 0.5, 2.0, 32, 512)):
        assert wrong.nats_given_all(tokens).mean() > right


def test_streams_are_stationary() -> None:
    """Over many streams, a segment begins at each position equally often, also at the first ones."""
    source, streams, length = Topics(2, 1.0, 1.5, 4, 60), 4000, 80
    begins = np.array([np.diff(source.draw(length, seed).segments) for seed in range(streams)])
    rate = 1 / (np.arange(1, 61) * source.durations).sum()
    error = math.sqrt(rate * (1 - rate) / streams)
    assert np.abs(begins.mean(axis=0) - rate).max() < 4.5 * error
    # what is left of the first segment follows the equilibrium distribution
    left = 1 + np.where(begins.any(axis=1), begins.argmax(axis=1), length)
    share = np.bincount(left, minlength=61)[1:] / streams
    assert np.abs(share.cumsum() - source.remainders.cumsum()).max() < 1.95 / math.sqrt(streams)  # Kolmogorov, 0.1 %


def test_streams_have_the_requested_length() -> None:
    """Although the first segment may be shorter than `shortest`."""
    assert {len(Topics(shortest=9, longest=9).draw(26, seed).tokens) for seed in range(50)} == {26}


def test_streams_follow_durations_topics_and_seed() -> None:
    drawn = SMALL.draw(50_000, seed=3)
    lengths = np.bincount(drawn.segments)
    assert len(drawn.tokens) == len(drawn.segments) == lengths.sum() == 50_000
    assert drawn.topics.shape == (len(lengths), 8)
    assert lengths[1:-1].min() >= 16
    assert lengths.max() <= 512
    mean = (np.arange(1, 513) * SMALL.durations).sum()
    assert lengths[1:-1].mean() == pytest.approx(mean, rel=0.1)
    longest = int(lengths.argmax())
    share = np.bincount(drawn.tokens[drawn.segments == longest], minlength=8) / lengths.max()
    np.testing.assert_allclose(share, drawn.topics[longest], atol=0.1)
    np.testing.assert_array_equal(drawn.tokens, SMALL.draw(50_000, seed=3).tokens)
    assert (drawn.tokens != SMALL.draw(50_000, seed=4).tokens).mean() > 0.5


def test_difference_between_the_optima_of_the_demo() -> None:
    """With the defaults it is about 0.05 nats for a control with 41 slots and a window of 16."""
    source = Topics()
    tokens = source.draw(20_000, seed=0).tokens
    gap = source.nats_given_recent(tokens, 41, 16).mean() - source.nats_given_all(tokens).mean()
    assert 0.035 < gap < 0.07


@pytest.mark.parametrize("wrong", [{"vocabulary": 1}, {"concentration": 0.0}, {"shortest": 0}, {"longest": 3}])
def test_wrong_parameters_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Topics(**wrong)
