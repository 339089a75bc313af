"""Sizes, loss and state of all models."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import (
    SYSTEMS,
    LanguageModel,
    LogMemoryConfig,
    ModelConfig,
    RecentConfig,
    Recurrent,
    RecurrentConfig,
    State,
    TransformerXLConfig,
    build,
)
from logpast.util.errors import UserError
from models.helpers import CONTROL, MEMORY, SIZES, inputs, large

STATELESS = pytest.mark.parametrize("config", [MEMORY, CONTROL], ids=["log_memory", "recent"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 0), ("layers", 0), ("heads", 3), ("width", 15), ("mlp", 0), ("vocabulary", 0), ("recall_limit", 0.0)],
)
def test_illegal_sizes_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"model\.{name}"):
        dataclasses.replace(ModelConfig(**SIZES), **{name: value})


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.vocabulary"):
        build(RecentConfig())


@STATELESS
def test_nats_are_cross_entropy_and_ignore_padding(config: ModelConfig) -> None:
    model = large(config)
    history, tokens, targets = inputs(model)
    targets[1, 4:] = -1
    expected = -model(history, tokens).log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected[targets < 0] = 0
    torch.testing.assert_close(model(history, tokens, targets), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(history, tokens, targets), expected)


def test_initial_weights_are_gpt2s() -> None:
    torch.manual_seed(0)
    model = build(RecentConfig(slots=3, window=40, layers=8, heads=4, width=256, vocabulary=2000))
    block = model.blocks[3]
    for weight in (
        model.table.weight,
        model.positions.weight,
        block.attention.query_key_value.weight,
        block.mlp_in.weight,
    ):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    for weight in (block.attention.out.weight, block.mlp_out.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02 / 16**0.5, rel=0.03)
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm.weight" in name)


def test_state_bytes_of_a_stateless_model_count_keys_values_and_history() -> None:
    model = build(LogMemoryConfig(slots=17, **SIZES))
    assert model.state_bytes == 2 * 4 * 2 * 16 * (17 + 8) + 4 * 16  # pairs of 2 layers and width 16, ids


def test_state_bytes_of_a_recurrent_model_count_keys_values_and_state() -> None:
    model = build(TransformerXLConfig(memory=5, **SIZES))
    assert model.state_bytes == 2 * 4 * 2 * 16 * 8 + 4 * 2 * 5 * 16 + 8  # keys and values, memory, its filled length


class Counter(Recurrent):
    """Its state counts segments; its output and extra loss are that count."""

    def __init__(self) -> None:
        super().__init__(RecurrentConfig(**SIZES))

    def start(self, batch: int) -> State:
        return {"count": torch.zeros(batch, 1)}

    def segment(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        count = state["count"] + 1
        return count[:, :, None].expand(*tokens.shape, 16), {"count": count}, count[:, 0]


def test_a_fresh_segment_starts_from_the_initial_state() -> None:
    tokens = torch.zeros(2, 3, 8, dtype=torch.int64)
    fresh = torch.tensor([[True, False, False], [False, False, True]])
    nats, state, extra = Counter()(tokens, tokens, fresh, {"count": torch.full((2, 1), 7.0, requires_grad=True)})
    assert nats.shape == (2, 3, 8)
    assert state["count"].tolist() == [[3], [1]]
    assert not state["count"].requires_grad
    assert extra.tolist() == [1 + 2 + 3, 8 + 9 + 1]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_model_has_the_common_interface(system: str) -> None:
    model = build(SYSTEMS[system].Config(**SIZES))
    assert isinstance(model, LanguageModel)
    assert model.config.window == model.window == 8
    assert model.attention_length > 0
    assert model.state_bytes > 0
    assert model.parameter_count() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config", [MEMORY, CONTROL, TransformerXLConfig(memory=4, **SIZES)])
def test_recall_leaves_all_other_initial_weights_as_they_are(config: ModelConfig) -> None:
    weights = []
    for reach in (0, 50):
        torch.manual_seed(0)
        weights.append(build(dataclasses.replace(config, recall=reach)).state_dict())
    plain, recalling = weights
    assert {name.split(".")[0] for name in recalling.keys() - plain.keys()} == {"recall"}
    assert all(torch.equal(plain[name], recalling[name]) for name in plain)
    assert len(recalling["recall.bias"][1:].unique()) == 1  # gates that are trained from the start start alike


@pytest.mark.parametrize("system", SYSTEMS)
def test_with_recall_losses_do_not_depend_on_later_tokens_or_the_batch_size(system: str) -> None:
    model = build(SYSTEMS[system].Config(recall=60, **SIZES)).double()
    for parameter in model.recall.parameters():
        torch.nn.init.normal_(parameter)
    text = np.random.default_rng(0).integers(0, 5, 100)
    changed = np.concatenate([text[:71], (text[71:] + 1) % 5])
    stores = [TokenStore.in_memory([ids], 6, 5) for ids in (text, changed)]
    form = model.config.recall_form
    losses, after = (score(model, store, 8, model.history, recall=form) for store in stores)
    np.testing.assert_allclose(after[:71], losses[:71], rtol=1e-12)
    assert not np.allclose(after[71:], losses[71:])
    np.testing.assert_allclose(score(model, stores[0], 8, model.history, 3, recall=form), losses, rtol=1e-10)


def test_state_bytes_count_what_recall_keeps() -> None:
    plain, recalling = (build(dataclasses.replace(CONTROL, recall=reach)) for reach in (0, 50))
    assert recalling.state_bytes - plain.state_bytes == 4 * (50 - plain.history)


def test_with_recall_the_models_own_loss_trains_the_model_and_the_mixture_the_gates() -> None:
    model = build(dataclasses.replace(CONTROL, recall=30)).double()
    torch.nn.init.zeros_(model.recall.weight)  # the gates then depend on no hidden state
    hidden, targets = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True), torch.randint(20, (2, 5))
    counts = torch.randint(3, (2, 5, 1, 5, 4)) * torch.tensor([2, 1]).view(2, 1, 1)
    nats, own = model.nats(hidden, targets, counts), model.own_nats(hidden, targets)
    assert torch.equal(nats, model.recall(hidden, own, counts))
    of_nats, of_own = (torch.autograd.grad(each.sum(), [hidden, model.table.weight]) for each in (nats, own))
    torch.testing.assert_close(of_nats, of_own)
    gates = [model.recall.bias, model.recall.confidence]
    mixture = model.recall(hidden, model.own_nats(hidden, targets), counts)
    of_nats, of_mixture = (
        torch.autograd.grad(each.sum(), gates) for each in (model.nats(hidden, targets, counts), mixture)
    )
    torch.testing.assert_close(of_nats, of_mixture)
    assert not torch.equal(nats, own)
