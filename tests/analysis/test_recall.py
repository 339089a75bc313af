"""The part of analysis.json about recall, against scores of models whose gates are changed by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from logpast.analysis import probes
from logpast.analysis.analyze import analyze
from logpast.analysis.recall import Mixture, _gate
from logpast.analysis.schema import validate
from logpast.data import TokenStore, open_tokens
from logpast.evaluation.scoring import score
from logpast.recall import RecallForm
from logpast.training.checkpoint import find_checkpoint

PROBED = 205


@pytest.fixture
def part(result_recall: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result_recall["recall"]
    return found


@pytest.fixture
def losses(done_recall: Path) -> dict[str, np.ndarray]:
    return {name: each.astype(float) for name, each in load_file(done_recall / "nats.safetensors").items()}


def score_without(run: Path, store: TokenStore, components: list[int]) -> np.ndarray:
    """Losses of a model in which these components, counted from 1, are never chosen."""
    model = find_checkpoint(run).load_model()
    with torch.no_grad():
        model.recall.bias[components] = -1e9
    return score(model, store, model.window, model.history, recall=model.config.recall_form)


def test_gain_is_over_the_same_model_without_copies(
    part: dict[str, Any], losses: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore
) -> None:
    own = score_without(runs["recall"], store, list(range(1, 7)))
    np.testing.assert_allclose(losses["without recall"], own, atol=1e-5)
    gain = own - losses["model"]
    assert abs(gain).mean() > 0.01
    found = part["gain"]
    assert found["all"]["gain"]["nats"] == [pytest.approx(gain.mean(), abs=1e-5)]
    low, high = found["all"]["gain"]["interval"][0]
    assert low < gain.mean() < high
    for i, (first, last) in enumerate(zip(found["position"]["from"], found["position"]["to"], strict=True)):
        here = (np.arange(len(gain)) % 8 >= first) & (np.arange(len(gain)) % 8 <= last)
        assert found["position"]["gain"]["nats"][i] == pytest.approx(gain[here].mean(), abs=1e-5)
    never = [i for i, token in enumerate(store.tokens) if token not in store.tokens[:i]]
    assert found["by_lag"]["from"][0] == -1
    assert found["by_lag"]["gain"]["nats"][0] == pytest.approx(gain[never].mean(), abs=1e-5)
    assert "documents" not in found  # all of them are in-vocabulary


@pytest.mark.usefixtures("no_plots")
def test_tokens_with_equals_signs_and_documents_that_are_not_in_vocabulary(
    runs: dict[str, Path], books: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text((books / "0.txt").read_text())
    (texts / "b.txt").write_text("= ÄÖÜ =\n" * 12)
    result = analyze(runs["recall"], str(texts), out=tmp_path / "out", limit=100, finest=1, device="cpu")
    nats = load_file(tmp_path / "out" / "nats.safetensors")
    gain = (nats["without recall"] - nats["model"]).astype(float)
    tokenizer = find_checkpoint(runs["recall"]).load_tokenizer()
    store = open_tokens(str(texts), tokenizer)
    equals = np.array(["=" in tokenizer.decode([int(token)]) for token in store.tokens])
    second = np.arange(len(store)) >= store.documents.start[1]
    assert equals.sum() == 24
    for name, kind in (("equals", equals), ("documents", second)):
        table = result["recall"]["gain"][name]
        assert table["tokens"] == [(~kind).sum(), kind.sum()]
        assert table["gain"]["nats"] == pytest.approx([gain[~kind].mean(), gain[kind].mean()], abs=1e-5)


def test_weights_of_orders_and_lags(
    part: dict[str, Any], losses: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore
) -> None:
    components = part["components"]
    assert part["tokens"] == PROBED
    assert (components["by_lag"]["from"], components["by_lag"]["to"]) == ([1, 9], [8, 32])
    for name in ("weight", "share"):
        cells = np.array(components[name])
        assert cells.shape == (3, 2)
        assert components["own"][name] + cells.sum() == pytest.approx(1, abs=1e-5)
        assert components["by_order"][name] == pytest.approx(cells.sum(axis=1).tolist(), abs=1e-6)
        assert components["by_lag"][name] == pytest.approx(cells.sum(axis=0).tolist(), abs=1e-6)
    whole = losses["model"][:PROBED]
    dropped = [("by_order", 0, [1, 2]), ("by_order", 1, [3, 4]), ("by_lag", 1, [2, 4, 6])]
    for name, row, several in dropped:
        increase = score_without(runs["recall"], store, several)[:PROBED] - whole
        assert components[name]["increase"][row] == pytest.approx(increase.mean(), abs=1e-5)
        assert abs(increase).max() > 1e-3
    stream = store.tokens[:PROBED].tolist()
    repeated = [stream[i] in stream[max(0, i - 32) : i] for i in range(PROBED - 1)]  # the last token had occurred
    assert components["by_order"]["matched"][1] == pytest.approx(sum(repeated) / PROBED, abs=1e-6)


def test_shares_of_the_targets_probability() -> None:
    mixed = Mixture(np.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]), np.array([[0.1, 0.3, 0.9], [0.5, 0.0, 0.5]]))
    np.testing.assert_allclose(mixed.shares, [[0.25, 0.75, 0], [0.25, 0, 0.75]])
    np.testing.assert_allclose(mixed.increase_without([1]), np.log([0.2 / 0.1, 0.4 / 0.5]))
    np.testing.assert_allclose(mixed.increase_without([1, 2]), np.log([0.2 / 0.1, 0.4 / 0.5]))


def test_gate_that_is_closed_or_open_and_its_calibration() -> None:
    copied = np.array([0.0, 0.05, 0.25, 0.25, 0.995])
    weights = np.stack([1 - copied, copied / 2, copied / 2], axis=1)
    probabilities = np.array([[0.1, 0, 0], [0.1, 0, 0], [0.1, 0.3, 0.3], [0.1, 0.3, 0.0], [0.1, 0.1, 0.1]])
    gate = _gate(Mixture(weights, probabilities), RecallForm(8, orders=1, bins=1), np.arange(5), 1.0)
    assert (gate["closed"], gate["open"]) == (0.2, 0.2)
    assert gate["weight"] == pytest.approx(copied.mean())
    calibration = gate["calibration"]
    assert (calibration["from"], calibration["to"]) == ([0, 0.01, 0.2, 0.99], [0.01, 0.1, 0.3, 1])
    assert calibration["tokens"] == [1, 1, 2, 1]
    assert calibration["weight"] == pytest.approx([0, 0.05, 0.25, 0.995])
    assert calibration["share"] == pytest.approx([0, 0, (0.075 / 0.15 + 0.0375 / 0.1125) / 2, 0.995])
    assert calibration["held"] == [0, 0, 0.5, 1]  # n = 0 does not count
    half = _gate(Mixture(weights, probabilities), RecallForm(8, orders=1, bins=1), np.arange(5), 0.25)
    assert half["open"] == pytest.approx(0.6)  # of a model that allows no more than 0.25


def test_passages_that_recall_helped_and_hurt_most(
    part: dict[str, Any], losses: dict[str, np.ndarray], store: TokenStore
) -> None:
    gain = (losses["without recall"] - losses["model"])[:PROBED]
    order, tokenizer = np.argsort(gain), store.load_tokenizer()
    found = part["passages"]
    for name, expected in (("gained", order[::-1][:10]), ("lost", order[:10])):
        assert [each["gain"] for each in found[name]] == pytest.approx(gain[expected].tolist(), abs=1e-5)
        for each in found[name]:
            first = max(each["at"] - 24, *(start for start in store.documents.start.tolist() if start <= each["at"]), 0)
            assert each["before"] == tokenizer.decode(store.tokens[first : each["at"]].tolist())
            assert each["token"] == tokenizer.decode([int(store.tokens[each["at"]])])
            assert 0 < each["largest"] <= each["weight"] <= 1
            assert each["order"] in range(3)
            assert each["lag_bin"] in range(2)


@pytest.mark.usefixtures("no_plots")
def test_recurrent_model_with_recall(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = analyze(runs["xl recall"], str(store.path), out=out, limit=60, streams="document", device="cpu")
    model = find_checkpoint(runs["xl recall"]).load_model()
    with torch.no_grad():
        model.recall.bias[1:] = -1e9
    own = score(model, store, 8, 0, streams="document", recall=model.config.recall_form)
    np.testing.assert_allclose(load_file(out / "nats.safetensors")["without recall"], own, atol=1e-5)
    assert np.shape(result["recall"]["components"]["weight"]) == (2, 2)
    validate(json.loads((out / "analysis.json").read_text()))


def test_loss_is_that_of_the_mixture_of_the_components(runs: dict[str, Path], store: TokenStore) -> None:
    model = find_checkpoint(runs["recall"]).load_model()
    form, how = model.config.recall_form, (store, model.window, model.history)
    with probes.changed_past(model, nats=probes.recall_components):
        weights, probabilities = score(model, *how, recall=form, shape=(2, 7)).transpose(1, 0, 2)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    mixed = -np.log((weights * probabilities).sum(axis=1))
    np.testing.assert_allclose(mixed, score(model, *how, recall=form), atol=1e-5)


def test_model_without_recall_has_no_such_part(result: dict[str, Any], nats: dict[str, np.ndarray]) -> None:
    assert "recall" not in result
    assert "recall" not in result["model"]
    assert not [name for name in nats if "recall" in name]


def test_nats_have_one_loss_per_token(losses: dict[str, np.ndarray]) -> None:
    assert "recall" not in losses  # weights, not losses
    assert {each.ndim for each in losses.values()} == {1}
