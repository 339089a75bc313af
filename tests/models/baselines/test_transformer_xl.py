"""Transformer-XL: relative attention, a cache without gradient, and how far back it reaches."""

import math

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import TransformerXL, TransformerXLConfig, build, config_from_dict
from logpast.models.baselines.transformer_xl import RelativeAttention, causal_mask, sinusoids
from logpast.training.recipes import SHIPPED
from logpast.util.errors import UserError
from models.helpers import SIZES, changed, large


def model_of(**sizes: int) -> TransformerXL:
    return large(TransformerXLConfig(**SIZES | sizes))


def nats_of(model: TransformerXL, text: Tensor, fresh: Tensor | None = None) -> Tensor:
    """The nats of a text (B, n·m + 1) in segments of the model's window."""
    tokens, targets = (part.unflatten(1, (-1, model.window)) for part in (text[:, :-1], text[:, 1:]))
    if fresh is None:
        fresh = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        fresh[:, 0] = True
    nats, _, extra = model(tokens, targets, fresh, model.start(len(text)))
    assert not extra.any()
    return nats


def test_relative_attention_equals_a_loop_over_the_formula() -> None:
    torch.manual_seed(0)
    width, heads, length, memory = 8, 2, 3, 4
    attention = RelativeAttention(width, heads).double()
    context, biases = torch.randn(1, memory + length, width).double(), torch.randn(2, heads, 1, 4).double()
    visible = causal_mask(length, memory, torch.tensor([2]))
    ours = attention(context, length, biases, visible)

    queries = attention.query(context)[0].unflatten(-1, (heads, 4))
    keys, values = (part[0].unflatten(-1, (heads, 4)) for part in attention.key_value(context).chunk(2, dim=-1))
    waves = sinusoids(memory + length, context)
    result = torch.zeros(length, heads, 4).double()
    for i in range(length):
        for head in range(heads):
            scores = {}
            for j in range(memory - 2, memory + i + 1):  # two of four cached positions are filled
                distance = memory + i - j
                wave = attention.distance(waves[len(waves) - 1 - distance]).unflatten(-1, (heads, 4))[head]
                query = queries[memory + i, head]
                by_content = (query + biases[0, head, 0]) @ keys[j, head]
                by_distance = (query + biases[1, head, 0]) @ wave
                scores[j] = ((by_content + by_distance) / math.sqrt(4)).item()
            total = sum(math.exp(s) for s in scores.values())
            for j, s in scores.items():
                result[i, head] += math.exp(s) / total * values[j, head]
    torch.testing.assert_close(ours[0], attention.out(result.flatten(1)))


def test_sinusoids_of_known_distances() -> None:
    waves = sinusoids(5, torch.zeros(1, 6))
    assert waves.shape == (5, 6)
    assert waves[-1].tolist() == [0, 0, 0, 1, 1, 1]  # distance 0
    assert waves[0, 0] == pytest.approx(math.sin(4))
    assert waves[1, 5] == pytest.approx(math.cos(3 * 10000 ** (-4 / 6)))


def test_segments_equal_the_whole_text_if_and_only_if_the_cache_holds_all() -> None:
    text = torch.randint(31, (2, 17))
    whole = nats_of(model_of(window=16, memory=16), text).flatten(1)
    torch.testing.assert_close(nats_of(model_of(memory=8), text).flatten(1), whole)
    short = nats_of(model_of(memory=3), text).flatten(1)
    torch.testing.assert_close(short[:, :8], whole[:, :8])
    assert ((short - whole)[:, 8:].abs() > 1e-6).all()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_layer_reaches_one_memory_further_back(layers: int) -> None:
    model = model_of(layers=layers, memory=8)
    text = torch.randint(31, (1, 6 * 8 + 1))
    before = nats_of(model, text)[0]
    for segment in range(6):
        other = changed(text, 8 * segment + 7)  # it is also a target in this segment
        differs = ((nats_of(model, other)[0] - before).abs() > 1e-9).any(dim=1).tolist()
        assert differs == [segment <= number <= segment + layers for number in range(6)]


def test_a_token_changes_no_nats_before_it() -> None:
    model, text = model_of(), torch.randint(31, (1, 25))
    difference = (nats_of(model, text) - nats_of(model, changed(text, 13))).flatten()
    assert (difference[:12] == 0).all()
    assert (difference[12:] != 0).all()


def test_the_memory_has_no_gradient() -> None:
    """Segment 2 depends on a token that occurs only in segment 1, but its loss has no gradient for that token."""
    model, text = model_of(), torch.randint(30, (1, 17))
    text[0, 3] = 30
    hidden = []
    state = model.start(1)
    for segment in (text[:, :8], text[:, 8:16]):
        made, state, _ = model.segment(segment, state)
        hidden.append(made)
    (through,) = torch.autograd.grad(hidden[1].square().sum(), model.table.weight)
    assert through[30].abs().sum() == 0
    assert through[text[0, 9]].abs().sum() > 0


def test_a_fresh_segment_ignores_the_memory() -> None:
    model, text = model_of(), torch.randint(31, (2, 17))
    fresh = torch.tensor([[True, False], [True, True]])
    together = nats_of(model, text, fresh)
    torch.testing.assert_close(together[1, 1:], nats_of(model, text[1:, 8:])[0])
    torch.testing.assert_close(together[0], nats_of(model, text[:1])[0])
    assert (together[0, 1] - nats_of(model, text[:1, 8:])[0, 0]).abs().min() > 1e-6


def test_every_parameter_has_a_gradient() -> None:
    model = model_of()
    nats_of(model, torch.randint(31, (2, 17))).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("streams", ["document", "corpus"])
def test_nats_do_not_depend_on_the_batch(streams: str) -> None:
    random = np.random.default_rng(0)
    store = TokenStore.in_memory([random.integers(0, 30, n) for n in (50, 7, 33, 1, 90)], 31, 30)
    model = model_of(memory=8)
    one, two, seven = (score(model, store, 8, 0, size, streams) for size in (1, 2, 7))  # type: ignore[arg-type]
    np.testing.assert_allclose(two, one, rtol=1e-12)
    np.testing.assert_allclose(seven, one, rtol=1e-12)
    text = torch.tensor([[30, *store.tokens[:48].tolist()]])
    np.testing.assert_allclose(one[:48], nats_of(model, text).flatten().detach().numpy(), rtol=1e-9)


def test_memory_when_scoring_may_be_longer() -> None:
    random = np.random.default_rng(0)
    store = TokenStore.in_memory([random.integers(0, 30, 100)], 31, 30)
    trained, longer = model_of(memory=8), model_of(memory=8, memory_when_scoring=24)
    assert longer.attention_length == 16
    short, long = (score(model, store, 8, 0) for model in (trained, longer))
    np.testing.assert_allclose(long[:16], short[:16])
    assert (abs(long - short)[16:] > 1e-9).all()
    np.testing.assert_allclose(long, score(model_of(memory=24), store, 8, 0))
    assert longer.training
    assert longer.eval().attention_length == 32


def test_standard_sizes_have_the_expected_number_of_parameters() -> None:
    with torch.device("meta"):
        standard = build(TransformerXLConfig(mlp=2688), tokens=50257)
        recipe = yaml.safe_load((SHIPPED / "transformer-xl-base.yaml").read_text())
        base = build(config_from_dict(recipe["model"]), tokens=50257)
    assert abs(standard.parameter_count() / 123.9e6 - 1) < 0.02
    assert abs(base.parameter_count() / 151e6 - 1) < 0.02  # Transformer-XL base, with its larger vocabulary


@pytest.mark.parametrize(("name", "value"), [("memory", -1), ("memory_when_scoring", -1), ("segments", 0), ("mlp", 0)])
def test_illegal_sizes_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"model\.{name}"):
        TransformerXLConfig(**SIZES | {name: value})
