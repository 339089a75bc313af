"""Scoring: the loss of every token, each once, for any batch size."""

import gc
import math
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logpast.data import TokenStore
from logpast.data.batching import Segments
from logpast.evaluation import scoring
from logpast.evaluation.scoring import RecurrentScorer, score
from logpast.filters import FilterBank
from logpast.models import SYSTEMS, LogMemoryConfig, RecentConfig, Recurrent, Transformer, TransformerXLConfig, build
from logpast.models.decoder import run_blocks

SIZES = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 13}
CONFIGS = {
    "log_memory": LogMemoryConfig(slots=13, sharpness=10, **SIZES),
    "recent": RecentConfig(slots=3, **SIZES),
    "plain": RecentConfig(slots=0, **SIZES),
}


def model_of(name: str) -> Transformer:
    torch.manual_seed(0)
    model = build(CONFIGS[name]).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def store_of(lengths: list[int], seed: int = 0) -> TokenStore:
    ids = np.random.default_rng(seed).integers(0, 12, sum(lengths))
    return TokenStore.in_memory(np.split(ids, np.cumsum(lengths)[:-1]), size=13, eot=12)


@torch.no_grad()
def brute_force(model: Transformer, stream: list[int], stride: int | None = None) -> list[float]:
    """Token by token from the definition: no batches, no padding; only the transformer's blocks are shared."""
    table, m, slots = model.table.weight, model.window, model.slots
    nats = []
    for target in range(1, len(stream)):
        start = 0
        while start + m < target:  # the first window with this target
            start += stride or m
        before = stream[:start]
        front = torch.zeros(slots, table.shape[1], dtype=table.dtype)
        if isinstance(model.config, LogMemoryConfig):
            bank = FilterBank(slots=slots, sharpness=model.config.sharpness)
            for i in range(slots):
                for lag in range(1, min(len(before), bank.horizon) + 1):
                    front[slots - 1 - i] += bank.weights[i, lag - 1] * table[before[-lag]]
            front = torch.nn.functional.layer_norm(
                front, front.shape[1:], model.memory.norm.weight, model.memory.norm.bias, 1e-5
            )
        else:
            for lag in range(1, min(len(before), slots) + 1):
                front[slots - lag] = table[before[-lag]]
        x = torch.cat([front, table[stream[start:target]]]) + model.positions.weight[: slots + target - start]
        logits = table @ run_blocks(model.blocks, x.unsqueeze(0), model.norm)[0, -1]
        nats.append(float(torch.logsumexp(logits, 0) - logits[stream[target]]))
    return nats


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("streams", ["corpus", "document"])
def test_losses_equal_brute_force(name: str, streams: str) -> None:
    model, store = model_of(name), store_of([17, 5, 1, 22])
    documents = np.split(store.tokens, store.documents.start[1:]) if streams == "document" else [store.tokens]
    expected = [nat for document in documents for nat in brute_force(model, [12, *map(int, document)])]
    ours = score(model, store, model.window, model.history, 3, streams)  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("streams", ["corpus", "document"])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_losses_of_overlapping_windows_equal_brute_force(name: str, streams: str, stride: int) -> None:
    model, store = model_of(name), store_of([17, 5, 1, 22])
    documents = np.split(store.tokens, store.documents.start[1:]) if streams == "document" else [store.tokens]
    expected = [nat for document in documents for nat in brute_force(model, [12, *map(int, document)], stride)]
    ours = score(model, store, model.window, model.history, 3, streams, stride=stride)  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-13)
    again = score(model, store, model.window, model.history, 7, streams, stride=stride)  # type: ignore[arg-type]
    np.testing.assert_allclose(again, ours, rtol=1e-12, atol=1e-13)
    some = score(model, store, model.window, model.history, 3, streams, limit=20, stride=stride)  # type: ignore[arg-type]
    assert 20 <= len(some) < 20 + model.window
    np.testing.assert_allclose(some, ours[: len(some)], rtol=1e-12, atol=1e-13)


def test_a_recurrent_model_cannot_have_overlapping_windows() -> None:
    model = build(TransformerXLConfig(memory=3, **SIZES))
    with pytest.raises(ValueError, match="stride"):
        score(model, store_of([9]), 4, 0, stride=2)


@pytest.mark.parametrize("system", [name for name, kind in SYSTEMS.items() if issubclass(kind, Recurrent)])
def test_padding_for_cuda_graphs_does_not_change_losses(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended streams stay as padding, because a CUDA graph has one shape. Graphs themselves are tested on a GPU."""
    torch.manual_seed(0)
    model = build(SYSTEMS[system].Config(**SIZES)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    store = store_of([30, 3, 17, 1, 9, 40, 5, 22, 6, 11, 30, 2])
    graphs, rows = [], []

    def replay(run: Callable[[Segments], torch.Tensor]) -> Callable[[Segments], torch.Tensor]:
        def graph(batch: Segments) -> torch.Tensor:
            rows.append(len(batch.tokens))
            return run(batch)

        graphs.append(graph)
        return graph

    plain = score(model, store, 4, 0, 6, "document")
    monkeypatch.setattr(scoring, "Replay", replay)
    monkeypatch.setattr(scoring, "RecurrentScorer", lambda model, _: RecurrentScorer(model, cuda_graphs=True))
    padded = score(model, store, 4, 0, 6, "document")
    assert sorted(set(rows)) == [1, 3, 6]
    assert len(graphs) == 3  # shared by two groups of streams
    np.testing.assert_allclose(padded, plain, rtol=1e-12)


def test_the_state_of_recurrent_models_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for garbage collection: on a GPU it takes gigabytes."""
    scorers = []

    class Tracked(RecurrentScorer):
        def __init__(self, model: Recurrent, cuda_graphs: bool) -> None:
            super().__init__(model, cuda_graphs)
            scorers.append(weakref.ref(self))

    monkeypatch.setattr(scoring, "RecurrentScorer", Tracked)
    gc.disable()
    try:
        score(build(TransformerXLConfig(memory=3, **SIZES)), store_of([9, 5, 3]), 4, 0, 2, "document")
        assert [scorer() for scorer in scorers] == [None]
    finally:
        gc.enable()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch_sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    streams=st.sampled_from(["corpus", "document"]),
    name=st.sampled_from(list(CONFIGS)),
)
@settings(deadline=None, max_examples=40)
def test_losses_do_not_depend_on_the_batch_size(
    lengths: list[int], batch_sizes: tuple[int, int], streams: str, name: str
) -> None:
    model, store = model_of(name), store_of(lengths)
    first, second = (score(model, store, model.window, model.history, b, streams) for b in batch_sizes)  # type: ignore[arg-type]
    assert len(first) == len(store)
    assert (first > 0).all()
    np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-13)


def test_float32_losses_agree_to_1e_6_between_batch_sizes() -> None:
    model, store = model_of("log_memory").float(), store_of([500])
    totals = [math.fsum(score(model, store, 4, model.history, size)) for size in (1, 7, 64)]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-6)


def test_ranks_score_different_batches() -> None:
    model, store = model_of("log_memory"), store_of([103])
    whole = score(model, store, 4, model.history, 5)
    parts = [score(model, store, 4, model.history, 5, share=(rank, 3)) for rank in range(3)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)
    assert all((part > 0).sum() < len(store) for part in parts)


@pytest.mark.parametrize(("limit", "scored"), [(1, 4), (4, 4), (5, 8), (101, 103), (999, 103)])
def test_limit_stops_at_the_end_of_a_window(limit: int, scored: int) -> None:
    model, store = model_of("recent"), store_of([103])
    whole = score(model, store, 4, model.history)
    some = score(model, store, 4, model.history, limit=limit)
    np.testing.assert_allclose(some, whole[:scored], rtol=1e-12)


def test_limit_counts_tokens_of_short_documents() -> None:
    model, store = model_of("recent"), store_of([3] * 20)
    some = score(model, store, 4, model.history, streams="document", limit=31)
    np.testing.assert_allclose(some, score(model, store, 4, model.history, streams="document")[:33], rtol=1e-12)


def test_scoring_restores_training_mode() -> None:
    model = model_of("recent")
    for mode in (True, False):
        model.train(mode)
        score(model, store_of([9]), 4, model.history)
        assert model.training is mode
