"""The definition of a match, on an example that was worked out by hand."""

from logpast.recall import naive
from logpast.recall.matching import OWN

# a b a c a b: after the last b, "b" was followed by a (lag 4) and "a b" by a; everything before is a match of n = 0
STREAM = [0, 1, 0, 2, 0, 1]


def test_followers_of_the_last_tokens_by_lag() -> None:
    found = naive.distribution(STREAM, orders=2, edges=[3, 6], vocabulary=3)
    assert found[0].tolist() == [[1, 1, 1], [2, 1, 0]]  # lags 1 to 3: b, a, c; 4 to 6: a, b, a
    assert found[1].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert found[2].tolist() == [[0, 0, 0], [1, 0, 0]]


def test_the_latest_follower_by_order() -> None:
    assert naive.latest(STREAM, 3, 6) == [0, 0, -1]
    assert naive.latest(STREAM[:5], 2, 6) == [2, -1]
    assert naive.latest(STREAM, 2, 3) == [-1, -1]  # the match is at lag 4
    assert naive.latest([-1, 0, -1], 1, 9) == [-1]


def test_lags_beyond_the_last_edge_do_not_count() -> None:
    assert naive.distribution(STREAM, 1, [3], 3)[1].sum() == 0


def test_a_missing_token_matches_nothing_and_is_no_candidate() -> None:
    assert naive.distribution([-1, 0, -1], 1, [9], 1).tolist() == [[[1]], [[0]]]


def test_an_own_token_matches_as_any_other_but_is_no_candidate() -> None:
    own = [token + OWN * (at in (2, 4)) for at, token in enumerate(STREAM)]  # the first a after b, and the last a
    found = naive.distribution(own, 2, [3, 6], 3)
    assert found[0].tolist() == [[0, 1, 1], [1, 1, 0]]
    assert found[1:].sum() == 0
    assert naive.latest(own, 2, 6) == [-1, -1]
    own = [token + OWN * (at == 5) for at, token in enumerate(STREAM)]
    assert naive.latest(own, 2, 6) == [0, 0]


def test_counts_are_the_followers_of_each_prefix() -> None:
    counts = naive.counts([*STREAM, 0], 2, [3, 6])
    assert counts[-1, 0].tolist() == [[3, 3], [0, 1], [0, 1]]
    assert counts[-1, 1].tolist() == [[1, 2], [0, 1], [0, 1]]
    assert counts[0].sum() == 0
