"""Tests of logpast.recall.Recall."""

import numpy as np
import pytest
import torch

from logpast.recall import Past, Recall, RecallForm, index, naive


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


def test_probabilities_sum_to_one_and_the_loss_of_a_target_is_that_of_the_mixture(recall: Recall) -> None:
    stream = np.random.default_rng(0).integers(0, 6, 50).tolist()
    edges, orders = recall.form.edges, recall.form.orders
    past = Past(orders, edges, 6)
    past.push(stream)
    hidden, logits = torch.randn(8).double(), torch.randn(6).double()
    mixed = recall.mix(hidden, logits, past.look())
    assert float(mixed.exp().sum()) == pytest.approx(1, abs=1e-12)
    for target in range(6):
        counts = torch.from_numpy(naive.counts([*stream, target], orders, edges)[-1])
        loss = recall(hidden, -logits.log_softmax(0)[target], counts)
        assert loss.item() == pytest.approx(-mixed[target].item(), abs=1e-12)


def test_without_matches_the_model_is_unchanged(recall: Recall) -> None:
    hidden, nats = torch.randn(3, 8).double(), torch.rand(3).double()
    counts = torch.zeros(3, 2, 3, len(recall.form.edges), dtype=torch.int16)
    torch.testing.assert_close(recall(hidden, nats, counts), nats)


def test_followers_add_nothing_at_first_then_a_map_of_their_embeddings() -> None:
    recall, table = Recall(3, RecallForm(9, orders=2, input=True)), torch.randn(5, 3)
    followers = torch.tensor([[4, -1], [0, 2], [-1, -1]])
    assert not recall.embed(table, followers).any()
    torch.nn.init.normal_(recall.input.weight)
    first, second = recall.input.weight.split(3, dim=1)
    expected = torch.stack([first @ table[4], first @ table[0] + second @ table[2], torch.zeros(3)])
    torch.testing.assert_close(recall.embed(table, followers), expected)


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
