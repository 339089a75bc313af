"""Recurrent memory, alone and with Transformer-XL's cache: attention, dependence on the past, gradients."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.memory.naive import embed
from logpast.models.base import Recurrent, State
from logpast.models.baselines.recurrent_memory import (
    RecurrentMemoryConfig,
    RecurrentMemoryTransformer,
    TransformerXLRecurrentMemory,
    TransformerXLRecurrentMemoryConfig,
)
from logpast.models.baselines.transformer_xl import sinusoids
from logpast.util.errors import UserError
from models import helpers
from models.helpers import large

WINDOW, MEMORY = 8, 3
SIZES = helpers.SIZES | {"window": WINDOW, "memory_tokens": MEMORY}


def alone(**sizes: int) -> Recurrent:
    return large(RecurrentMemoryConfig(**SIZES | sizes))


def with_cache(**sizes: int) -> Recurrent:
    return large(TransformerXLRecurrentMemoryConfig(**SIZES | {"memory": WINDOW} | sizes))


Make = Callable[..., Recurrent]
BOTH = pytest.mark.parametrize("make", [alone, with_cache])


def text_of(segments: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Ids below 30; tests use 30 for a token that occurs nowhere else."""
    return torch.randint(30, (batch, segments * WINDOW + 1), generator=torch.Generator().manual_seed(seed))


def in_segments(text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, targets = (part.unflatten(1, (-1, WINDOW)) for part in (text[:, :-1], text[:, 1:]))
    fresh = torch.zeros(tokens.shape[:2], dtype=torch.bool)
    fresh[:, 0] = True
    return tokens, targets, fresh


def nats_of(model: Recurrent, text: Tensor, fresh: Tensor | None = None) -> Tensor:
    """The nats (B, n, m) of a text (B, n·m + 1)."""
    tokens, targets, first = in_segments(text)
    nats, _, extra = model(tokens, targets, first if fresh is None else fresh, model.start(len(text)))
    assert extra.shape == (len(text),)
    assert not extra.any()
    return nats


def changed(text: Tensor, position: int) -> Tensor:
    other = text.clone()
    other[:, position] = (other[:, position] + 1) % 30
    return other


# One segment, in loops: the reference


def by_head(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(-1, (heads, -1))


def naive_attention(attention: nn.Module, biases: Tensor | None, rows: Tensor, i: int, seen: list[int]) -> Tensor:
    """The attention of position i to the positions `seen`, score by score."""
    heads = attention.heads
    if biases is None:
        queries, keys, values = (by_head(part, heads) for part in attention.query_key_value(rows).chunk(3, dim=-1))
    else:
        queries = by_head(attention.query(rows), heads)
        keys, values = (by_head(part, heads) for part in attention.key_value(rows).chunk(2, dim=-1))
    size = queries.shape[-1]
    result = torch.zeros(heads, size).double()
    for head in range(heads):
        query, scores = queries[i, head], []
        for j in seen:
            if biases is None:
                scores.append(query @ keys[j, head] / math.sqrt(size))
                continue
            wave = sinusoids(len(rows), rows)[len(rows) - 1 - max(0, i - j)]
            by_content = (query + biases[0, head, 0]) @ keys[j, head]
            by_distance = (query + biases[1, head, 0]) @ by_head(attention.distance(wave), heads)[head]
            scores.append((by_content + by_distance) / math.sqrt(size))
        total = sum(score.exp() for score in scores)
        for j, own in zip(seen, scores, strict=True):
            result[head] += own.exp() / total * values[j, head]
    return attention.out(result.flatten())


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def naive_segment(model: Recurrent, x: Tensor, cache: list[Tensor], length: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(output of the tokens, next memory, each layer's inputs) for memory, tokens and memory (P, d) after a cache."""
    biases = getattr(model, "biases", None)
    end, held, inputs = MEMORY + length, len(cache[0]), []
    for block, past in zip(model.blocks, cache, strict=True):
        inputs.append(x)
        rows, outputs = block.attention_norm(torch.cat([past, x])), []
        for position in range(len(x)):
            if position < MEMORY:
                seen = [held + j for j in range(MEMORY)]  # the first memory positions see each other
            elif position < end:
                seen = [*range(held), *(held + j for j in range(position + 1))]  # tokens: the cache, up to themselves
            else:
                seen = [held + j for j in range(len(x))]  # the last memory positions: the whole segment
            y = x[position] + naive_attention(block.attention, biases, rows, held + position, seen)
            outputs.append(y + block.mlp_out(gelu(block.mlp_in(block.mlp_norm(y)))))
        x = torch.stack(outputs)
    hidden = model.norm(x)
    return hidden[MEMORY:end], hidden[end:], inputs


@torch.no_grad()
@pytest.mark.parametrize("length", [WINDOW, 3, 1])
def test_a_segment_equals_the_loop(length: int) -> None:
    model = alone()
    tokens, memory = text_of(1)[0, :length], torch.randn(MEMORY, 16).double()
    hidden, after, _ = model.segment(tokens[None], {"memory_tokens": memory[None]})
    table, positions = model.table.weight, model.positions.weight
    rows = [memory[i] + positions[i] for i in range(MEMORY)]
    rows += [table[token] + positions[MEMORY + i] for i, token in enumerate(tokens)]
    rows += [memory[i] + positions[MEMORY + WINDOW + i] for i in range(MEMORY)]
    expected, written, _ = naive_segment(model, torch.stack(rows), [torch.empty(0, 16).double()] * 2, length)
    torch.testing.assert_close(hidden[0], expected)
    torch.testing.assert_close(after["memory_tokens"][0], written)


@torch.no_grad()
@pytest.mark.parametrize("length", [WINDOW, 3])
def test_a_segment_with_a_cache_equals_the_loop(length: int) -> None:
    model = with_cache(memory=5)
    tokens, memory = text_of(1)[0, :length], torch.randn(MEMORY, 16).double()
    held = torch.randn(1, 2, 5, 16).double()
    state = {"memory": held, "filled": torch.tensor([4]), "memory_tokens": memory[None]}
    hidden, after, _ = model.segment(tokens[None], state)
    rows = torch.cat([memory, model.table.weight[tokens], memory])
    cache = [held[0, layer, 1:] for layer in range(2)]  # one position of five is not filled yet
    expected, written, inputs = naive_segment(model, rows, cache, length)
    torch.testing.assert_close(hidden[0], expected)
    torch.testing.assert_close(after["memory_tokens"][0], written)
    for layer in range(2):  # the last five tokens are cached, and nothing of the memory
        kept = torch.cat([held[0, layer], inputs[layer][MEMORY : MEMORY + length]])[-5:]
        torch.testing.assert_close(after["memory"][0, layer], kept)
    assert after["filled"].tolist() == [5]


# What the output depends on


@BOTH
def test_a_token_changes_no_nats_before_it(make: Make) -> None:
    model, text = make(), text_of(3)
    for position in (5, 8, 13, 23):
        difference = (nats_of(model, text) - nats_of(model, changed(text, position))).flatten()
        assert (difference[: position - 1] == 0).all()
        assert (difference[position - 1 :] != 0).all()  # from where it is the target, in all later segments


@torch.no_grad()
def test_tokens_do_not_attend_to_the_memory_after_them() -> None:
    model, tokens = alone(), text_of(1)[:, :-1]
    hidden, after, _ = model.segment(tokens, model.start(1))
    model.positions.weight[MEMORY + WINDOW :] *= -1
    still, otherwise, _ = model.segment(tokens, model.start(1))
    assert torch.equal(hidden, still)
    assert (after["memory_tokens"] - otherwise["memory_tokens"]).abs().min() > 1e-6


@BOTH
def test_one_memory_token_carries_information_and_a_fresh_segment_ignores_it(make: Make) -> None:
    model, text = make(memory_tokens=1), text_of(2)
    other = changed(text, 3)
    assert ((nats_of(model, text) - nats_of(model, other))[0, 1].abs() > 1e-9).all()
    fresh = torch.ones(1, 2, dtype=torch.bool)
    assert torch.equal(nats_of(model, text, fresh)[0, 1], nats_of(model, other, fresh)[0, 1])
    torch.testing.assert_close(nats_of(model, text, fresh)[:, 1:], nats_of(model, text[:, WINDOW:]))


def test_a_fresh_segment_resets_only_its_own_row() -> None:
    for model in (alone(), with_cache()):
        text = text_of(2, batch=2)
        together = nats_of(model, text, torch.tensor([[True, False], [True, True]]))
        torch.testing.assert_close(together[:1], nats_of(model, text[:1]))
        torch.testing.assert_close(together[1:, 1:], nats_of(model, text[1:, WINDOW:]))


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_the_cache_reaches_one_memory_per_layer_and_memory_tokens_any_distance(layers: int) -> None:
    """Each is tested alone: the other is reset before every segment."""
    model, text = with_cache(layers=layers), text_of(6)

    def hidden(text: Tensor, cut: tuple[str, ...]) -> Tensor:
        outputs, state = [], model.start(1)
        for segment in in_segments(text)[0].unbind(1):
            state |= {name: value for name, value in model.start(1).items() if name in cut}
            result, state, _ = model.segment(segment, state)
            outputs.append(result[0])
        return torch.stack(outputs)

    for cut, reach in ((), 6), (("memory", "filled"), 6), (("memory_tokens",), layers):
        difference = hidden(text, cut) - hidden(changed(text, WINDOW + 7), cut)
        differs = (difference.abs() > 1e-9).flatten(1).any(dim=1).tolist()
        assert differs == [1 <= number <= 1 + reach for number in range(6)], cut


@BOTH
def test_a_short_segment_gives_the_first_outputs_of_a_full_one(make: Make) -> None:
    model, text = make(), text_of(2)
    _, state, _ = model.segment(text[:, :WINDOW], model.start(1))
    tokens = text[:, WINDOW : 2 * WINDOW]
    whole, _, _ = model.segment(tokens, state)
    for length in range(1, WINDOW):
        short, _, _ = model.segment(tokens[:, :length], state)
        torch.testing.assert_close(short, whole[:, :length])
        padded, _, _ = model.segment(tokens.where(torch.arange(WINDOW) < length, -1), state)
        torch.testing.assert_close(padded[:, :length], short)


@BOTH
def test_the_state_keeps_its_shape_and_type(make: Make) -> None:
    for model in (make(), make().float()):
        begin = model.start(2)
        for length in (WINDOW, 3):
            _, after, extra = model.segment(text_of(1, batch=2)[:, :length], begin)
            assert {n: (v.shape, v.dtype) for n, v in after.items()} == {
                n: (v.shape, v.dtype) for n, v in begin.items()
            }
            assert extra.tolist() == [0, 0]


@BOTH
def test_autocast_applies_to_the_blocks_but_not_to_the_state(make: Make) -> None:
    model, text, dtypes = make().float(), text_of(2, batch=2), []
    exact = nats_of(model, text)
    for block in model.blocks:
        block.register_forward_hook(
            lambda block, given, output: dtypes.append((output[0] if isinstance(output, tuple) else output).dtype)
        )
    with torch.autocast("cpu", torch.bfloat16):
        _, state, _ = model.segment(text[:, :WINDOW], model.start(2))
        rough = nats_of(model, text)
    assert set(dtypes) == {torch.bfloat16}
    assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())
    assert (rough - exact).abs().mean() < 0.05 * exact.mean()


# Gradients


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recurrent], Tensor]:
    """A table for the inputs only: the model's own is also the head, where every row has a gradient."""

    def separate_table(model: Recurrent) -> Tensor:
        table = model.table.weight.detach().clone().requires_grad_()
        monkeypatch.setattr(model, "embed", lambda ids, _: embed(table, ids))
        return table

    return separate_table


def once_in_the_first_segment() -> Tensor:
    text = text_of(3)
    text[0, 2] = 30
    return text


@BOTH
def test_a_loss_has_a_gradient_for_a_token_two_segments_before(
    make: Make, inputs: Callable[[Recurrent], Tensor]
) -> None:
    model, text = make(segments=3), once_in_the_first_segment()
    table = inputs(model)
    (gradient,) = torch.autograd.grad(nats_of(model, text)[0, 2].sum(), table)
    assert gradient[30].abs().min() > 1e-9


@BOTH
@pytest.mark.parametrize("cut", [1, 2])
def test_a_loss_has_no_gradient_for_a_token_of_an_earlier_call(
    make: Make, cut: int, inputs: Callable[[Recurrent], Tensor]
) -> None:
    model = make(segments=3)
    table = inputs(model)
    tokens, targets, fresh = in_segments(once_in_the_first_segment())
    _, state, _ = model(tokens[:, :cut], targets[:, :cut], fresh[:, :cut], model.start(1))
    nats, _, _ = model(tokens[:, cut:], targets[:, cut:], fresh[:, cut:], state)
    gradient, first = torch.autograd.grad(nats[0, -1].sum(), (table, model.first_memory))
    assert gradient[30].abs().sum() == 0
    assert first.abs().sum() == 0
    assert gradient[tokens[0, 2, 0]].abs().sum() > 0


def test_the_gradient_through_the_memory_equals_finite_differences(inputs: Callable[[Recurrent], Tensor]) -> None:
    model, text = alone(segments=3), once_in_the_first_segment()
    table = inputs(model)
    (gradient,) = torch.autograd.grad(nats_of(model, text)[0, 2].sum(), table)
    direction = torch.randn(16).double()
    sides = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            table[30] += step * direction
            sides.append(nats_of(model, text)[0, 2].sum())
    torch.testing.assert_close(gradient[30] @ direction, (sides[0] - sides[1]) / 2e-5, rtol=1e-6, atol=1e-9)


def test_the_cache_has_no_gradient(inputs: Callable[[Recurrent], Tensor]) -> None:
    model, text = with_cache(), once_in_the_first_segment()
    table = inputs(model)
    _, state, _ = model.segment(text[:, :WINDOW], model.start(1))
    hidden, _, _ = model.segment(
        text[:, WINDOW : 2 * WINDOW], state | {"memory_tokens": state["memory_tokens"].detach()}
    )
    (gradient,) = torch.autograd.grad(hidden.square().sum(), table)
    assert gradient[30].abs().sum() == 0


@BOTH
def test_the_first_memory_has_a_gradient_only_where_a_text_begins(make: Make) -> None:
    model = make()
    tokens, targets, fresh = in_segments(text_of(2, batch=2))
    carried: State = {name: torch.ones_like(value) for name, value in model.start(2).items()}
    for begins in (True, False):
        fresh[:] = False
        fresh[1, 1] = begins
        nats, _, _ = model(tokens, targets, fresh, carried)
        (gradient,) = torch.autograd.grad(nats.sum(), model.first_memory)
        assert ((gradient.abs() > 1e-9) == begins).all()


@BOTH
def test_every_parameter_has_a_gradient(make: Make) -> None:
    model = make()
    nats_of(model, text_of(2, batch=2)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name
    if make is alone:
        assert (model.positions.weight.grad.abs().sum(dim=1) > 0).all()  # also of the last memory positions


@pytest.mark.parametrize(
    ("system", "config"),
    [
        (RecurrentMemoryTransformer, RecurrentMemoryConfig),
        (TransformerXLRecurrentMemory, partial(TransformerXLRecurrentMemoryConfig, memory=2)),
    ],
)
def test_training_uses_the_memory(system: Make, config: Callable[..., Any]) -> None:
    """A target in the third segment is the first token of the first one, one of eight: log 8 nats by chance.

    One layer with a cache of one segment reaches back only to the second.
    """
    torch.manual_seed(0)
    model = system(config(window=2, layers=1, heads=2, width=32, vocabulary=16, memory_tokens=2))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.1)  # corresponds to 0.02 at GPT-2's width
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fresh = torch.tensor([[True, False, False]]).expand(32, -1)
    for _ in range(150):
        tokens, targets = torch.randint(8, (32, 3, 2)), torch.full((32, 3, 2), -1)
        targets[:, 2, 0] = tokens[:, 0, 0]
        nats, _, _ = model(tokens, targets, fresh, model.start(32))
        loss = nats.sum() / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * math.log(8)


# Scoring and sizes


@BOTH
@pytest.mark.parametrize("streams", ["document", "corpus"])
def test_nats_do_not_depend_on_the_batch(make: Make, streams: str) -> None:
    random = np.random.default_rng(0)
    store = TokenStore.in_memory([random.integers(0, 30, n) for n in (50, 7, 33, 1, 90)], 31, 30)
    model = make()
    one, two, seven = (score(model, store, WINDOW, 0, size, streams) for size in (1, 2, 7))  # type: ignore[arg-type]
    np.testing.assert_allclose(two, one, rtol=1e-12)
    np.testing.assert_allclose(seven, one, rtol=1e-12)
    text = torch.tensor([[30, *store.tokens[:48].tolist()]])
    np.testing.assert_allclose(one[:48], nats_of(model, text).flatten().detach().numpy(), rtol=1e-9)


def test_memory_when_scoring_may_be_longer() -> None:
    random = np.random.default_rng(0)
    store = TokenStore.in_memory([random.integers(0, 30, 100)], 31, 30)
    longer = with_cache(memory_when_scoring=24)
    assert longer.attention_length == 8 + MEMORY + WINDOW
    np.testing.assert_allclose(score(longer, store, WINDOW, 0), score(with_cache(memory=24), store, WINDOW, 0))
    assert longer.eval().attention_length == 24 + MEMORY + WINDOW
    assert alone().attention_length == MEMORY + WINDOW


@pytest.mark.parametrize(
    ("system", "config"),
    [
        (RecurrentMemoryTransformer, RecurrentMemoryConfig(vocabulary=50304)),
        (TransformerXLRecurrentMemory, TransformerXLRecurrentMemoryConfig(vocabulary=50304, mlp=2688)),
    ],
)
def test_standard_sizes_have_the_expected_number_of_parameters(
    system: type, config: RecurrentMemoryConfig | TransformerXLRecurrentMemoryConfig
) -> None:
    with torch.device("meta"):
        model = system(config)
    assert abs(model.parameter_count() / 123.9e6 - 1) < 0.02
    assert config.segments == 4
    assert config.memory_tokens == 10


def test_initial_weights_are_gpt2s() -> None:
    torch.manual_seed(0)
    sizes = {"window": 40, "layers": 8, "heads": 4, "width": 256, "vocabulary": 2000, "memory_tokens": 10}
    for model in (
        RecurrentMemoryTransformer(RecurrentMemoryConfig(**sizes)),
        TransformerXLRecurrentMemory(TransformerXLRecurrentMemoryConfig(**sizes)),
    ):
        block = model.blocks[3]
        for weight in (model.table.weight, model.first_memory, block.mlp_in.weight):
            assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
        for weight in (block.attention.out.weight, block.mlp_out.weight):
            assert float(weight.detach().std()) == pytest.approx(0.02 / 16**0.5, rel=0.05)
        assert len(model.first_memory.unique(dim=0)) == 10
        assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("config", [RecurrentMemoryConfig, TransformerXLRecurrentMemoryConfig])
@pytest.mark.parametrize(("name", "value"), [("memory_tokens", 0), ("segments", 0), ("window", 0), ("mlp", 0)])
def test_illegal_sizes_are_refused_by_name(config: type, name: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"model\.{name}"):
        config(**SIZES | {name: value})


@pytest.mark.parametrize("name", ["memory", "memory_when_scoring"])
def test_an_illegal_cache_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"model\.{name}"):
        TransformerXLRecurrentMemoryConfig(**SIZES | {name: -1})


def test_only_tokens_fill_the_cache() -> None:
    sizes = {"window": 4, "layers": 1, "heads": 2, "width": 8, "vocabulary": 16}
    model = TransformerXLRecurrentMemory(TransformerXLRecurrentMemoryConfig(memory=10, memory_tokens=2, **sizes))
    state = model.start(1)
    for filled in (4, 8, 10):
        _, state, _ = model.segment(torch.randint(16, (1, 4)), state)
        assert state["filled"].tolist() == [filled]
