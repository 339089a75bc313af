"""Tests of logpast.recall.Recall."""

import numpy as np
import pytest
import torch

from logpast.memory.naive import embed
from logpast.recall import Recall, RecallForm, index, matching, naive


@pytest.fixture
def recall() -> Recall:
    torch.manual_seed(0)
    recall = Recall(8, RecallForm(reach=40, orders=2, bins=3)).double()
    torch.nn.init.normal_(recall.weight)
    torch.nn.init.normal_(recall.bias)
    return recall


def test_edges_are_log_spaced_and_end_at_the_reach() -> None:
    assert RecallForm(8192).edges == [64, 323, 1625, 8192]
    assert RecallForm(8192, bins=1).edges == [8192]
    assert RecallForm(3, bins=4).edges == [1, 2, 3]


@pytest.mark.parametrize("limit", [1, 0.3])
@pytest.mark.parametrize("at_once", [1, 200, 10**6])
def test_log_probabilities_are_those_of_the_definition_and_sum_to_one(
    recall: Recall, limit: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "COMPARISONS", at_once)
    recall.limit = limit
    ids, edges, orders = np.random.default_rng(0).integers(-1, 6, (2, 60)), recall.form.edges, recall.form.orders
    hidden, own = torch.randn(2, 7, 8).double(), torch.randn(2, 7, 6).double().log_softmax(-1)
    mixed = recall.log_probs(hidden, own, torch.from_numpy(ids))
    torch.testing.assert_close(mixed.exp().sum(-1), torch.ones(2, 7).double(), rtol=0, atol=1e-12)
    for row, query in np.ndindex(2, 7):
        found = naive.distribution(ids[row, : 54 + query].tolist(), orders, edges, 6)
        matches = torch.from_numpy(found.sum(-1))
        weights = recall.log_weights(hidden[row, query], matches).exp()
        share = torch.from_numpy(found).double() / matches.clamp(min=1).unsqueeze(-1)
        expected = weights[0] * own[row, query].exp() + weights[1:] @ share.flatten(0, 1)
        torch.testing.assert_close(mixed[row, query], expected.log())
        assert limit == 1 or weights[1:].sum() < limit + 1e-9


@pytest.mark.parametrize("limit", [1, 0.3])
def test_the_loss_of_each_target_is_that_of_the_whole_mixture(recall: Recall, limit: float) -> None:
    recall.limit = limit
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 6, (2, 60)))
    ids[1, :9] = -1  # padding
    hidden, own = torch.randn(2, 60, 8).double(), torch.randn(2, 60, 6).double().log_softmax(-1)
    mixed = recall.log_probs(hidden, own, ids)[:, 9:-1].gather(2, ids[:, 10:, None]).squeeze(2)
    nats = -own[:, 9:-1].gather(2, ids[:, 10:, None]).squeeze(2)
    torch.testing.assert_close(recall(hidden[:, 9:-1], nats, recall.count(ids)[:, 10:]), -mixed)


def test_a_limit_leaves_smaller_weights_as_they_are(recall: Recall) -> None:
    hidden, matches = torch.randn(200, 8).double(), torch.randint(0, 3, (200, 3, len(recall.form.edges)))
    free = recall.log_weights(hidden, matches)
    recall.limit = 0.6
    bounded = recall.log_weights(hidden, matches)
    below = free[:, 1:].exp().sum(-1) <= 0.6
    assert 0 < below.sum() < 200
    torch.testing.assert_close(bounded[below], free[below])
    torch.testing.assert_close(bounded[~below, 1:].exp().sum(-1), torch.full((int((~below).sum()),), 0.6).double())


def test_without_matches_the_model_is_unchanged(recall: Recall) -> None:
    hidden, nats = torch.randn(3, 8).double(), torch.rand(3).double()
    counts = torch.zeros(3, 2, 3, len(recall.form.edges), dtype=torch.int16)
    torch.testing.assert_close(recall(hidden, nats, counts), nats)


@pytest.mark.parametrize(("pretrained", "least", "most"), [(True, 0.6, 0.05), (False, 0.2, 0.1)])
def test_gates_of_a_trained_model_start_open_for_long_matches(pretrained: bool, least: float, most: float) -> None:
    recall = Recall(8, RecallForm(64, orders=8), pretrained=pretrained)
    for length, low, high in ((8, least, 1.0), (1, 0.0, most)):
        ids = torch.tensor([[*range(length), 40, *range(10, 20), *range(length)]])
        mixed = recall.log_probs(torch.zeros(1, 1, 8), torch.full((1, 1, 50), 0.02).log(), ids)
        assert low < mixed[0, 0, 40].detach().exp() < high


def test_followers_add_nothing_at_first_then_a_map_of_their_embeddings() -> None:
    recall, table = Recall(3, RecallForm(9, orders=2, input=True)), torch.randn(5, 3)
    followers = embed(table, torch.tensor([[4, -1], [0, 2], [-1, -1]]))
    assert not recall.embed(followers).any()
    torch.nn.init.normal_(recall.input.weight)
    first, second = recall.input.weight.split(3, dim=1)
    expected = torch.stack([first @ table[4], first @ table[0] + second @ table[2], torch.zeros(3)])
    torch.testing.assert_close(recall.embed(followers), expected)


def test_gradients_are_finite_without_matches_and_with_an_impossible_target(recall: Recall) -> None:
    hidden = torch.randn(2, 8).double().requires_grad_()
    counts = torch.zeros(2, 2, 3, len(recall.form.edges), dtype=torch.int16)
    counts[1, 0] = 5  # matches, but none followed by the target
    recall(hidden, torch.tensor([3.0, 900.0]).double(), counts).sum().backward()
    assert hidden.grad is not None
    assert all(bool(p.grad.isfinite().all()) for p in [hidden, *recall.parameters()] if p.grad is not None)


def test_the_index_of_a_text_gives_the_same_counts(recall: Recall) -> None:
    stream = np.random.default_rng(1).integers(0, 4, 80)
    form = recall.form
    streams = torch.zeros(80, dtype=torch.long)
    table = index.occurrences(torch.from_numpy(stream), streams, form.orders + 1, form.edges).counts
    expected = naive.counts(stream.tolist(), form.orders, form.edges)
    assert np.array_equal(table.numpy(), expected[:, 1])
    assert np.array_equal(table[:-1, : form.orders].numpy(), expected[1:, 0, 1:])
