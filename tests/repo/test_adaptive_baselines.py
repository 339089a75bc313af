"""benchmarks/adaptive_baselines.py: recall within attention, continuous cache, dynamic evaluation: as defined."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import adaptive_baselines as baselines
from benchmarks.adaptive_baselines import Array, Setting

from logpast.data import TokenStore
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.models import RecentConfig, Transformer, build
from logpast.recall import Recall, RecallForm, naive
from logpast.training.config import TrainConfig
from logpast.training.loop import train

PAST = 11
RATES = {"rate": 0.01, "decay": 0.1, "epsilon": 0.5}


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    model = build(RecentConfig(slots=3, window=4, layers=2, heads=2, width=8, vocabulary=13)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert isinstance(model, Transformer)
    return model


def text(changed_from: int = 50) -> TokenStore:
    """50 tokens in two documents; those from a position on can be others."""
    ids = np.random.default_rng(0).integers(0, 6, 50)
    ids[changed_from:] = (ids[changed_from:] + 1) % 6
    return TokenStore.in_memory([ids[:21], ids[21:]], size=13, eot=12)


def plain(model: Transformer, store: TokenStore) -> Array:
    return score(model, store, model.window, model.history, batch_size=3)


def cached(model: Transformer, store: TokenStore, setting: Setting) -> Array:
    nats, (probability,) = baselines.cache_scores(model, baselines.windows_of(model, store, 3), [setting], PAST)
    return baselines.mix(nats, probability, weight=0.3)


def adapted(model: Transformer, store: TokenStore, rule: str, **changes: float) -> Array:
    squares = [torch.full_like(weight, 0.04) for weight in model.parameters()] if rule == "RMS" else None
    return baselines.dynamic_evaluation(model, baselines.windows_of(model, store, 1), squares, RATES | changes)


def recalled(model: Transformer, store: TokenStore, within_attention: bool) -> Array:
    torch.manual_seed(1)
    recall = Recall(8, RecallForm(20, orders=2, bins=2)).double()
    torch.nn.init.normal_(recall.weight)
    batches = baselines.windows_of(model, store, 3, recall=recall.form)
    losses = [baselines.recall_losses(model, recall, batch, within_attention) for batch in batches]
    return torch.cat(losses).detach().numpy()


def test_counts_within_attention_are_those_of_the_visible_tokens(model: Transformer) -> None:
    form = RecallForm(20, orders=2, bins=2)
    (batch,) = baselines.windows_of(model, text(), 100)
    found = baselines.counts_within_attention(model, batch, form)
    for row, place in np.ndindex(*batch.targets.shape):
        if (target := int(batch.targets[row, place])) >= 0:
            visible = [*batch.history[row].tolist(), *batch.tokens[row, : place + 1].tolist(), target]
            assert np.array_equal(found[row, place], naive.counts(visible, form.orders, form.edges)[-1])


@pytest.mark.parametrize("normalised", [True, False])
def test_cache_equals_its_definition_token_by_token(model: Transformer, normalised: bool) -> None:
    store, theta = text(), 0.7
    states: list[Array] = []
    model.norm.register_forward_hook(lambda _, __, output: states.extend(output.detach().flatten(0, 1)[-4:].numpy()))
    alone = score(model, store, model.window, model.history, batch_size=1)
    expected = []
    for t, token in enumerate(store.tokens):
        before = range(max(0, t - PAST), t)
        size = {i: np.linalg.norm(states[i]) if normalised else 1 for i in (*before, t)}
        weight = {i: math.exp(theta * states[t] @ states[i] / (size[t] * size[i])) for i in before}
        found = sum(weight[i] for i in before if store.tokens[i] == token) / (sum(weight.values()) or 1)
        expected.append(-math.log(0.7 * math.exp(-alone[t]) + 0.3 * found) if t else alone[t])
    ours = cached(model, store, {"normalised": normalised, "theta": theta})
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


@pytest.mark.parametrize("rule", ["SGD", "RMS"])
def test_dynamic_evaluation_equals_its_rule_window_by_window(model: Transformer, rule: str) -> None:
    store = text()
    ours = adapted(model, store, rule)
    start = [weight.detach().clone() for weight in model.parameters()]
    for number in range(3):
        here = slice(4 * number, 4 * number + 4)
        nats = plain(model, store)[here]
        np.testing.assert_allclose(ours[here], nats, rtol=1e-10)
        batch = list(baselines.windows_of(model, store, 1))[number]
        model.zero_grad()
        model(*batch.inputs).mean().backward()
        with torch.no_grad():
            for weight, begin in zip(model.parameters(), start, strict=True):
                assert weight.grad is not None
                # all roots of MS are 0.2, so RMS divides by 0.2 + 0.5 · 0.2 and pulls all weights alike
                step = 0.01 * weight.grad / (0.3 if rule == "RMS" else 1)
                weight.add_(0.1 * (begin - weight) - step)


@pytest.mark.parametrize("rule", ["SGD", "RMS"])
def test_dynamic_evaluation_at_rate_zero_is_plain_scoring_and_restores_the_model(model: Transformer, rule: str) -> None:
    store = text()
    before = plain(model, store)
    np.testing.assert_allclose(adapted(model, store, rule, rate=0.0), before, rtol=1e-12)
    assert abs(adapted(model, store, rule) - before).max() > 1e-3
    if rule == "RMS":  # the pull ends at the trained weights, not beyond them
        np.testing.assert_allclose(adapted(model, store, rule, decay=5.0), adapted(model, store, rule, decay=1.0))
    np.testing.assert_array_equal(plain(model, store), before)


def test_no_loss_depends_on_later_tokens(model: Transformer) -> None:
    methods = {
        "cache": lambda store: cached(model, store, {"normalised": True, "theta": 2.0}),
        "recall": lambda store: recalled(model, store, within_attention=False),
        "recall within attention": lambda store: recalled(model, store, within_attention=True),
        "SGD": lambda store: adapted(model, store, "SGD"),
        "RMS": lambda store: adapted(model, store, "RMS"),
    }
    for name, losses in methods.items():
        ours, others = losses(text()), losses(text(changed_from=30))
        np.testing.assert_allclose(ours[:30], others[:30], rtol=1e-12, err_msg=name)
        assert (ours[30:] != others[30:]).all(), name


def test_mean_squares_are_those_of_single_windows(model: Transformer) -> None:
    windows = list(baselines.windows_of(model, text(), 1))[:-1]  # the last one is shorter
    store = TokenStore.in_memory([text().tokens[:48]], size=13, eot=12)
    expected = torch.zeros_like(model.table.weight)
    for batch in windows:
        model.zero_grad()
        model(*batch.inputs).mean().backward()
        assert model.table.weight.grad is not None
        expected += model.table.weight.grad.square() / len(windows)
    torch.testing.assert_close(baselines.mean_squares(model, store, len(windows))[0], expected)


def test_search_finds_a_minimum_off_the_axes_even_where_the_start_diverges(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(setting: Setting) -> float:
        x, y = setting["x"], setting["y"]
        return math.nan if x + y > -1 else (x - y) ** 2 + 0.1 * (x + y + 4) ** 2

    found = baselines.search(loss, {"x": range(-4, 5), "y": range(-4, 5)})
    assert found["chosen"] == {"x": -2, "y": -2, "nats": 0}
    assert len(found["trials"]) == len({(trial["x"], trial["y"]) for trial in found["trials"]}) < 81
    assert "'x': -2" in capsys.readouterr().out


def test_plain_row_equals_eval_and_all_methods_are_written(
    train_config: TrainConfig, control_config: RecentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(replace(train_config, model=control_config, steps=4))
    text, out = str(train_config.data.train), tmp_path / "new" / "table.json"
    options = ["--validation", text, "--test", text, "--selection", "16", "--statistics", "2", "--past", "20"]
    options += ["--gate_steps", "3"]
    monkeypatch.setattr(sys, "argv", ["", "--checkpoint", str(train_config.run), *options, "--out", str(out)])
    grids = {"SGD": {"rate": [0.1], "decay": [0.0]}, "RMS": {"rate": [1e-4], "epsilon": [1.0], "decay": [0.0]}}
    monkeypatch.setattr(baselines, "GRIDS", grids)
    baselines.main()
    report = json.loads(out.read_text())
    expected = evaluate(train_config.run, text, streams="corpus", quiet=True)
    row, *others = report["rows"]
    assert row["nats_per_token"] == pytest.approx(expected["nats"] / expected["tokens"], rel=1e-12)
    assert report["selected"]["cache"]["plain"] == pytest.approx(row["nats_per_token"], rel=1e-6)
    names = ["cache", "recall", "recall within attention", "dynamic evaluation, SGD", "dynamic evaluation, RMS"]
    assert [each["method"] for each in others] == names
    assert others[0]["state_bytes"] == 20 * (16 + 1) * 4
    for each in others:
        difference = each["nats_per_token"] - row["nats_per_token"]
        assert each["minus_plain"]["nats_per_token"] == pytest.approx(difference, abs=1e-9)


def test_row_leaves_tokens_with_equals_out() -> None:
    store = TokenStore.in_memory([[0, 1, 2, 1]], size=4, eot=3)
    losses, alone = np.array([1.0, 9.0, 2.0, 9.0]), np.array([2.0, 5.0, 4.0, 5.0])
    row = baselines.row_of(losses[:3], alone[:3], store, np.array([False, True, False, False]))
    assert (row["tokens"], row["tokens_without_equals"]) == (3, 2)
    assert (row["nats_per_token"], row["nats_per_token_without_equals"]) == (4.0, 1.5)
    assert row["minus_plain"]["nats_per_token"] == pytest.approx(1 / 3)
    assert row["minus_plain_without_equals"] == -1.5
