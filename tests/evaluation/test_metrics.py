"""Metrics as pure functions of losses and counts."""

import math

import numpy as np
import pytest

from logpast.data import TokenStore
from logpast.data.store import Counts
from logpast.evaluation import metrics
from logpast.filters import paper_horizon
from logpast.util.errors import UserError

WIKITEXT = Counts(tokens=286_221, words=241_211, lines=4_358, bytes=1_290_590, documents=60)


def store_of(lengths: list[int]) -> TokenStore:
    return TokenStore.in_memory([[0] * length for length in lengths], size=2, eot=1)


def interval_of(nats: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    intervals = metrics.bootstrap(nats, {"token": tokens})
    assert intervals
    return intervals["token"]


def test_metrics_of_wikitext() -> None:
    nats = math.log(15.28) * WIKITEXT.tokens
    result = metrics.summary(nats, WIKITEXT.tokens, WIKITEXT)
    assert result["ppl_token"] == pytest.approx(15.28)
    assert result["ppl_word_eos"] == pytest.approx(24.0, abs=0.01)  # Transformer-XL's published 24.0
    assert result["words_eos"] == 245_569
    assert result["unscored"] == 0


@pytest.mark.parametrize(
    ("slots", "scored", "unscored", "ratio"), [(53, 270_336, 15_885, 1.1207), (41, 282_880, 3_341, 1.1727)]
)
def test_paper_accounting_on_wikitext(slots: int, scored: int, unscored: int, ratio: float) -> None:
    horizon = paper_horizon(slots)
    span = metrics.paper_span(WIKITEXT.tokens, 256, horizon)
    assert (span.start, span.stop) == (horizon, horizon + scored)
    result = metrics.summary(3.0 * scored, scored, WIKITEXT)
    assert result["tokens"] == scored
    assert result["unscored"] == unscored
    assert math.log(result["ppl_word"]) / math.log(result["ppl_token"]) == pytest.approx(ratio, abs=5e-5)


def test_paper_accounting_needs_enough_text() -> None:
    with pytest.raises(UserError, match="5000 tokens"):
        metrics.paper_span(5_000, 256, 8192)


def test_perplexity_overflows_to_infinity_and_is_nan_without_units() -> None:
    assert metrics.perplexity(1e9, 1) == math.inf
    assert math.isnan(metrics.perplexity(1.0, 0))


def test_bootstrap_intervals_have_their_coverage() -> None:
    """200 corpora of 40 documents from one distribution: about 95 % of the 95 % intervals must contain its mean."""
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        tokens = random.integers(50, 150, 40)
        nats = random.normal(3.0, 0.3, 40) * tokens
        low, high = interval_of(nats, tokens)
        hits += low < 3.0 < high
    assert 180 <= hits <= 197


def test_paired_difference_is_more_sensitive_than_separate_intervals() -> None:
    """A small constant gain among large differences between documents."""
    random = np.random.default_rng(0)
    tokens = random.integers(50, 150, 60)
    theirs = random.normal(3.0, 0.5, 60) * tokens
    ours = theirs - 0.02 * tokens + random.normal(0, 0.01, 60) * tokens
    result = metrics.paired_difference(ours, theirs, tokens)
    assert result["nats_per_token"] == pytest.approx(-0.02, abs=0.005)
    assert result["interval"][1] < 0
    assert result["documents_better"] > 50
    separate = [interval_of(nats, tokens) for nats in (ours, theirs)]
    assert separate[0][1] > separate[1][0]
    assert metrics.paired_difference(ours, ours, tokens)["interval"] == [0, 0]


def test_documents_without_scored_tokens_are_not_compared() -> None:
    tokens = np.array([10, 0, 30, 20])
    ours, theirs = np.array([1.0, 0.0, 2.0, 9.0]), np.array([2.0, 0.0, 3.0, 3.0])
    result = metrics.paired_difference(ours, theirs, tokens)
    assert (result["documents_better"], result["documents"]) == (2, 3)
    assert result == metrics.paired_difference(*(each[tokens > 0] for each in (ours, theirs, tokens)))


def test_means_and_intervals_by_kind() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    kinds, groups = np.array([0, 1, 0, 1, 1, 3]), np.array([0, 0, 1, 1, 3, 3])  # no kind 2, no group 2
    result = metrics.by_kind(values, kinds, 4, groups)
    assert result["tokens"] == [2, 3, 0, 1]
    assert result["nats"][:2] == [2.5, 26 / 3]
    assert math.isnan(result["nats"][2])
    assert result["interval"] == [None] * 4  # three groups
    groups, kinds = np.arange(10).repeat(2), np.array([0, 1] * 9 + [0, 0])
    low, high = metrics.by_kind(np.arange(20.0), kinds, 2, groups)["interval"]
    assert low is not None
    assert high is None  # nine of the ten groups have kind 1


@pytest.mark.parametrize(("documents", "given"), [(1, False), (2, False), (9, False), (10, True)])
def test_fewer_than_ten_documents_have_no_interval(documents: int, given: bool) -> None:
    """An interval over two documents would be their range."""
    store = store_of([5] * documents)
    nats = np.random.default_rng(0).exponential(1.0, len(store))
    assert (metrics.compute_metrics(nats, store)["interval"] is not None) == given
    sums, tokens = metrics.per_document(nats, store)
    found = metrics.paired_difference(sums, sums + 1, tokens)
    assert found["documents"] == documents
    assert (found["interval"] is not None) == given


def test_documents_without_scored_tokens_do_not_count_for_an_interval() -> None:
    tokens = np.array([5] * 9 + [0] * 4)
    assert metrics.paired_difference(tokens * 1.0, tokens * 2.0, tokens)["interval"] is None


def test_intervals_by_kind_equal_bootstrap_intervals() -> None:
    random = np.random.default_rng(0)
    groups, values = np.repeat(np.arange(30), 20), random.exponential(1.0, 600)
    (interval,) = metrics.by_kind(values, np.zeros(600, int), 1, groups)["interval"]
    sums, tokens = np.bincount(groups, values), np.bincount(groups)
    assert interval == pytest.approx(interval_of(sums, tokens))


def test_metrics_and_intervals_of_a_text() -> None:
    store = store_of([30, 10, 20] * 4)
    nats = np.random.default_rng(0).exponential(1.0, 240)
    result = metrics.compute_metrics(nats, store)
    assert result["nats"] == pytest.approx(nats.sum())
    assert result["tokens"] == 240
    assert result["unscored"] == 0
    assert result["words_eos"] == 252
    assert result["ppl_token"] == pytest.approx(math.exp(nats.sum() / 240))
    assert result["bits_per_byte"] == pytest.approx(nats.sum() / 240 / math.log(2))
    for name, (low, high) in result["interval"].items():
        assert low < result[name] < high
    assert result["by_document"]["tokens"] == [30, 10, 20] * 4
    assert result["by_document"]["nats"][:3] == pytest.approx(
        [nats[:30].sum(), nats[30:40].sum(), nats[40:60].sum()], abs=1e-3
    )
    assert "by_document" not in metrics.compute_metrics(nats[:30], store_of([30]))
    many = store_of([1] * (metrics.MAX_DOCUMENTS + 1))
    assert "by_document" not in metrics.compute_metrics(np.ones(len(many)), many)


def test_losses_per_document_within_a_span() -> None:
    store = store_of([30, 10, 20])
    nats = np.arange(60.0)
    sums, counts = metrics.per_document(nats, store, slice(25, 45))
    assert counts.tolist() == [5, 10, 5]
    assert sums.tolist() == [nats[25:30].sum(), nats[30:40].sum(), nats[40:45].sum()]
