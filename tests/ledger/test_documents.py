"""Scores over seeds and documents: means, spreads, intervals, in-vocabulary documents."""

import math
from typing import Any

import pytest

from logpast.ledger.documents import (
    Estimate,
    difference,
    documents,
    estimate_difference,
    in_vocabulary_perplexity,
    name_seeds,
    spread,
    validate_documents,
    values,
)


def scores(nats: list[Any], unseen: list[int] | None = None, times: int = 1) -> dict[str, Any]:
    """Scores of three documents, each `times` times."""
    columns = {"nats": nats * times, "tokens": [100, 100, 200] * times} | ({"unseen": unseen * times} if unseen else {})
    return {"ppl_token": None if None in nats else math.exp(sum(nats) / 400), "by_document": columns}


OLD = {"ppl_token": 20.0}  # of a version without documents


def test_null_is_infinity() -> None:
    assert values({0: OLD, 1: {"ppl_token": None}}, "ppl_token") == [20.0, math.inf]


def test_spread_has_a_deviation_only_for_several_finite_values() -> None:
    assert spread([1.0], 2) == "1.00"
    assert spread([1.0, 3.0], 1, "+") == "+2.0 ± 1.4"
    assert spread([1.0, math.inf], 1) == "inf"


def test_an_estimate_as_text_has_mean_deviation_interval_and_seeds() -> None:
    estimate = Estimate([1.0, 3.0], (0.5, 2.5), " (seed 0, 1)")
    assert estimate.mean == 2
    assert estimate.text("+.1f") == "+2.0 ± 1.4 [+0.5, +2.5] (seed 0, 1)"


def test_in_vocabulary_documents_have_at_most_one_percent_of_unseen_tokens() -> None:
    of = documents({0: OLD}, {0: scores([1, 1, 1]), 1: scores([1, 1, 1], [2, 1, 2])})
    assert of.tokens.tolist() == [100, 100, 200]
    assert of.in_vocabulary.tolist() == [False, True, True]
    assert of.has_both_kinds
    assert not documents({0: scores([1, 1, 1], [0, 0, 1])}).has_both_kinds  # there are no others
    assert not documents({0: scores([1, 1, 1], [9, 9, 0])}).has_both_kinds  # only one
    assert not documents({0: OLD}).has_both_kinds


def test_in_vocabulary_perplexity_leaves_out_seeds_without_documents() -> None:
    seeds = {0: scores([900, 110, 240], [2, 1, 2]), 1: OLD, 2: scores([1, None, 1], [2, 1, 2])}
    assert in_vocabulary_perplexity(seeds, documents(seeds)) == {0: pytest.approx(math.exp(350 / 300))}
    assert in_vocabulary_perplexity({0: OLD}, documents({0: OLD})) == {}
    assert (documents(seeds).counted, documents({0: OLD}).counted) == (True, False)


def test_differences_are_between_equal_seeds() -> None:
    ours = {0: scores([110, 110, 220]), 1: scores([80, 80, 160]), 2: OLD}
    theirs = {0: scores([100, 100, 200]), 1: scores([100, 100, 200]), 3: scores([1, 1, 1])}
    of = documents(ours)
    found = estimate_difference(ours, theirs, of)
    assert found
    assert found.seeds == pytest.approx([0.1, -0.2])
    assert found.interval is None
    assert difference(ours, theirs, of) == "-0.0500 ± 0.2121 (seed 0, 1)"
    assert estimate_difference({5: OLD}, theirs, of) is None
    assert difference({5: OLD}, theirs, of) == ""


@pytest.mark.parametrize(("times", "interval"), [(4, ""), (5, " [+0.1333, +0.1889]")])
def test_differences_on_in_vocabulary_documents(times: int, interval: str) -> None:
    """Two of three documents are: eight are too few for an interval, ten are not."""
    ours, theirs = ({0: scores(nats, [2, 1, 2], times=times)} for nats in ([100, 110, 240], [900, 100, 200]))
    assert difference(ours, theirs, documents(ours), in_vocabulary=True) == f"+0.1667{interval}"


def test_too_few_documents_for_an_interval() -> None:
    assert documents({0: scores([1, 1, 1], times=3)}).too_few
    assert not documents({0: scores([1, 1, 1], times=4)}).too_few
    assert not documents({0: OLD}).too_few  # not known


def test_seeds_are_named_if_some_are_missing() -> None:
    assert name_seeds([0, 2], {0: OLD, 1: OLD, 2: OLD}) == " (seed 0, 2)"
    assert name_seeds([0], {0: OLD}) == ""


def test_documents_of_another_text_are_reported() -> None:
    of = documents({0: scores([1, 1, 1])})
    validate_documents(scores([2, 2, 2]), of)
    other = scores([1, 1, 1])
    other["by_document"]["tokens"] = [200, 100, 100]
    with pytest.raises(ValueError, match="by_document"):
        validate_documents(other, of)


def test_documents_with_an_infinite_loss_are_valid() -> None:
    validate_documents(scores([1, None, 1]))
