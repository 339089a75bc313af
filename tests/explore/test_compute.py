"""Losses with and without each part of the past; candidates as `generate` predicts them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logpast.analysis.probes import changed_past, cut_beyond, without_recall
from logpast.data import TokenStore
from logpast.data.batching import Windows
from logpast.evaluation.scoring import score
from logpast.explore.compute import Text, bank_of, choose, closed_memory, details_of, plan, score_text
from logpast.models import LanguageModel, Recurrent, Transformer
from logpast.training.checkpoint import find_checkpoint
from logpast.util.errors import UserError


def model_of(run: Path) -> LanguageModel:
    return find_checkpoint(run).load_model().double().eval()


def text_of(store: TokenStore, tokens: int | None = None, streams: Any = "document") -> Text:
    return Text(store, tokens or len(store), streams, 5, torch.device("cpu"), "float64")


def losses(model: LanguageModel, text: Text) -> np.ndarray:
    return score(model, text.store, model.window, model.history, 5, text.streams, recall=model.config.recall_form)


def no_progress(name: str, done: int) -> None:
    pass


def test_losses_are_those_of_the_model_with_its_past_changed(runs: dict[str, Path], store: TokenStore) -> None:
    model, control, text = model_of(runs["both"]), model_of(runs["control"]), text_of(store)
    found = score_text(model, control, text, no_progress)
    expected = {"model": losses(model, text), "control": losses(control, text)}
    with changed_past(model, nats=without_recall):
        expected["no recall"] = losses(model, text)
    with changed_past(model, ids=cut_beyond(0)):
        expected["no memory"] = losses(model, text)
    with changed_past(model, ids=cut_beyond(0), nats=without_recall):
        expected["neither"] = losses(model, text)
    assert found.keys() == {*expected, "weights"}
    for name, nats in expected.items():
        np.testing.assert_allclose(found[name], nats, rtol=1e-9, err_msg=name)
    assert len({round(float(found[name].mean()), 6) for name in expected}) == 5
    assert found["weights"].shape == (len(store), 1 + 4 * 2)
    np.testing.assert_allclose(found["weights"].sum(1), 1)
    assert 0.5 < found["weights"][:, 0].mean() < 1  # the model's own is the first


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("memory", {"model", "no memory"}),
        ("recall", {"model", "no recall", "weights"}),
        ("control", {"model"}),
        ("xl recall", {"model", "no recall", "no memory", "neither", "weights"}),
    ],
)
def test_series_are_those_that_the_model_has(
    name: str, series: set[str], runs: dict[str, Path], store: TokenStore
) -> None:
    model = model_of(runs[name])
    found = score_text(model, None, text_of(store, tokens=50), no_progress)
    assert found.keys() == series
    assert all(len(values) == 50 for values in found.values())
    assert len(plan(model, None)) == 1 + ("no memory" in series)


def test_closed_state_starts_every_window_anew(runs: dict[str, Path], store: TokenStore) -> None:
    model, text = model_of(runs["xl recall"]), text_of(store, streams="corpus")
    assert isinstance(model, Recurrent)
    found = score_text(model, None, text, no_progress)
    windows = Windows(store, model.window, 0, "corpus", recall=model.config.recall_form)
    batch = windows.batch(np.array([3]))
    with torch.no_grad():
        hidden, _, _ = model.segment(batch.tokens, model.start(1))
        alone = model.own_nats(hidden, batch.targets)[0].numpy()
    np.testing.assert_allclose(found["neither"][windows.targets(3)], alone, rtol=1e-9)
    assert abs(found["no recall"][windows.targets(3)] - alone).max() > 1e-3


def test_memory_of_a_pretrained_model_leaves_the_tokens_in_its_slots(runs: dict[str, Path]) -> None:
    model = model_of(runs["both"])
    history = torch.arange(20)[None]
    assert (closed_memory(model)["ids"](history) == -1).all()
    object.__setattr__(model.config, "sink", True)  # what the config of a pretrained model has
    kept = closed_memory(model)["ids"](history)
    assert kept[0].tolist() == [-1] * 3 + list(range(3, 20))


def test_bank_is_that_of_the_compressed_past(runs: dict[str, Path]) -> None:
    assert bank_of(model_of(runs["control"])) is None
    bank = bank_of(model_of(runs["both"]))
    assert bank is not None
    assert bank.slots == 17


def test_diverged_model_is_one_line(runs: dict[str, Path], store: TokenStore) -> None:
    model = model_of(runs["memory"])
    with torch.no_grad():
        model.table.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="the model"):
        score_text(model, None, text_of(store), no_progress)


def test_chosen_tokens_gain_or_lose_most_in_any_comparison() -> None:
    gains = [np.array([0.1, -5, 0, 2, 0]), np.array([0, 0, 0.3, 0, -0.2])]
    assert choose(gains, 2).tolist() == [1, 3]
    assert choose(gains, 4).tolist() == [1, 2, 3, 4]
    assert choose(gains, 99).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["both", "memory", "recall", "xl recall"])
@pytest.mark.parametrize("streams", ["corpus", "document"])
def test_candidates_are_the_predictions_of_a_stream(
    name: str, streams: Any, runs: dict[str, Path], store: TokenStore
) -> None:
    model, text = model_of(runs[name]), text_of(store, streams=streams)
    second = int(store.documents.start[1])
    tokens = np.array([0, 7, 8, 63, second - 1, second, second + 30, len(store) - 1])
    found = details_of(model, text, tokens, no_progress)
    assert found.tokens is tokens
    assert (found.mixed is not None) == bool(model.config.recall)
    for i, token in enumerate(tokens.tolist()):
        start = int(store.documents.start[store.documents.start <= token][-1]) if streams == "document" else 0
        stream = model.stream(store.tokenizer.eot)
        stream.append(store.tokens[start:token].astype(np.int64))
        expected = stream.logits()[0].log_softmax(-1)[: store.tokenizer.size].exp().topk(5)
        likeliest = found.mixed or found.own
        np.testing.assert_allclose(likeliest.probabilities[i], expected.values.numpy(), rtol=1e-4)
        assert likeliest.ids[i].tolist() == expected.indices.tolist()


def test_attention_of_a_token_is_that_in_its_window(runs: dict[str, Path], store: TokenStore) -> None:
    model, text = model_of(runs["both"]), text_of(store, streams="corpus")
    assert isinstance(model, Transformer)
    found = details_of(model, text, np.array([3, 20, 21, 40]), no_progress).attention
    assert found is not None
    batch = Windows(store, 8, model.history, "corpus", recall=model.config.recall_form).batch(np.array([0, 2, 5]))
    own = model.slot_attention(batch.history, batch.tokens, batch.followers).numpy()
    np.testing.assert_allclose(found, own[[0, 1, 1, 2], [3, 4, 5, 0]], rtol=1e-9)
    assert found.shape == (4, 17)


def test_recurrent_model_has_no_attention_to_slots(runs: dict[str, Path], store: TokenStore) -> None:
    assert details_of(model_of(runs["xl recall"]), text_of(store), np.array([9]), no_progress).attention is None
