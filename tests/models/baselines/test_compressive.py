"""Compressive Transformer: equality with a loop over positions, what each loss trains, how far back it reaches."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import TransformerXL, TransformerXLConfig
from logpast.models.baselines.compressive import (
    Compression,
    CompressiveConfig,
    CompressiveTransformer,
    Convolution,
    DilatedConvolutions,
    attention_received,
    most_used,
    pool,
    reconstruction_loss,
)
from logpast.models.baselines.transformer_xl import XLBlock, causal_mask, sinusoids
from logpast.util.errors import UserError
from models.helpers import enlarge

SIZES: dict[str, Any] = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 31}
CACHES: dict[str, Any] = {"memory": 4, "compressed": 4, "rate": 2}  # 4 + 4 × 2 positions before the segment
ALL: tuple[Compression, ...] = get_args(Compression)
EVERY = pytest.mark.parametrize("compression", ALL)
LEARNED = pytest.mark.parametrize("compression", ["conv", "dilated"])


def model_of(compression: str = "conv", **sizes: Any) -> CompressiveTransformer:
    config = CompressiveConfig(**SIZES | CACHES | {"compression": compression} | sizes)
    return enlarge(CompressiveTransformer(config).double())


def text_of(segments: int, batch: int = 1, window: int = 4) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(30, (batch, segments * window + 1))


def run(model: Any, text: Tensor, fresh: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The nats of a text (B, n·m + 1) in segments of the model's window, the state after it, the extra loss."""
    tokens, targets = (part.unflatten(1, (-1, model.window)) for part in (text[:, :-1], text[:, 1:]))
    if fresh is None:
        fresh = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        fresh[:, 0] = True
    nats, state, extra = model(tokens, targets, fresh, model.start(len(text)))
    return nats, state, extra


def segments_of(model: CompressiveTransformer, text: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, m, d) and (B, n): each segment's hidden states and extra loss."""
    state, outputs, losses = model.start(len(text)), [], []
    for segment in text[:, :-1].split(model.window, dim=1):
        hidden, state, extra = model.segment(segment, state)
        outputs.append(hidden)
        losses.append(extra)
    return torch.stack(outputs, dim=1), torch.stack(losses, dim=1)


# Each compression as a loop over vectors: the reference


def compressed_by_loop(
    compression: str, old: list[Tensor], rate: int, module: Any = None, usage: list[float] | None = None
) -> list[Tensor]:
    starts = range(0, len(old), rate)
    if compression == "mean":
        return [sum(old[i + 1 : i + rate], old[i]) / rate for i in starts]
    if compression == "max":
        return [torch.stack([max(v[d] for v in old[i : i + rate]) for d in range(len(old[0]))]) for i in starts]
    if compression == "conv":
        weight = module.kernel.weight  # (to, from, tap)
        taps = range(rate)
        return [torch.stack([weight[..., tap] @ old[i + tap] for tap in taps]).sum(0) for i in starts]
    if compression == "dilated":
        dilation = 1
        for kernel in module.kernels:
            before = [old[i - dilation] if i >= dilation else torch.zeros_like(old[0]) for i in range(len(old))]
            earlier, here = kernel.weight.unbind(2)
            old = [v + F.gelu(earlier @ b + here @ v) for v, b in zip(old, before, strict=True)]
            dilation *= 2
        assert dilation >= 2 * rate  # the number of positions it sees
        return [old[i + rate - 1] for i in starts]
    assert usage is not None
    order = sorted(range(len(old)), key=lambda i: -usage[i])
    return [old[i] for i in sorted(order[: len(old) // rate])]


@pytest.mark.parametrize("rate", [1, 2, 3, 4])
@EVERY
def test_each_compression_equals_its_loop(compression: Compression, rate: int) -> None:
    torch.manual_seed(rate)
    old, usage = torch.randn(2, 12, 8).double(), torch.rand(2, 12).double()
    module: Any = None
    if compression in ("conv", "dilated"):
        module = enlarge({"conv": Convolution, "dilated": DilatedConvolutions}[compression](8, rate).double())
        ours = module(old)
    elif compression == "most_used":
        ours = most_used(old, usage, torch.tensor([12 // rate, 12 // rate]), rate)
    else:
        ours = pool(old, rate, compression)
    for row in range(2):
        theirs = compressed_by_loop(compression, list(old[row]), rate, module, usage[row].tolist())
        torch.testing.assert_close(ours[row], torch.stack(theirs))


def test_most_used_takes_only_real_positions() -> None:
    old = torch.arange(8.0).view(1, 8, 1).expand(3, 8, 1)
    usage = torch.tensor([0.9, 0.8, 0.7, 0.1, 0.4, 0.3, 0.2, 0.6]).expand(3, 8)
    kept = most_used(old, usage, torch.tensor([4, 2, 0]), 2)[..., 0]
    assert kept[0].tolist() == [0, 1, 2, 7]
    assert kept[1, 2:].tolist() == [4, 7]


# The whole model position by position, with caches that are lists of real positions


class Loop:
    def __init__(self, model: CompressiveTransformer) -> None:
        self.model, self.config = model, model.config
        layers = range(model.config.layers)
        self.memory: list[list[Tensor]] = [[] for _ in layers]
        self.compressed: list[list[Tensor]] = [[] for _ in layers]
        self.attention: list[list[list[float]]] = [[] for _ in layers]  # what each cached position has received

    def segment(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, loss = list(self.model.table.weight[tokens]), torch.zeros(()).double()
        for number, block in enumerate(self.model.blocks):
            assert isinstance(block, XLBlock)
            attended, received = self._attend(block, self.compressed[number] + self.memory[number] + x, len(x))
            positions = self.memory[number] + x
            self.attention[number] += [[] for _ in x]
            for position, more in enumerate(received[len(self.compressed[number]) :]):
                self.attention[number][position] += more
            loss = loss + self._update_memory(number, block, positions, x)
            x = [v + a for v, a in zip(x, attended, strict=True)]
            x = [v + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(v)), approximate="tanh")) for v in x]
        return torch.stack([self.model.norm(v) for v in x]), loss

    def _attend(self, block: XLBlock, context: list[Tensor], length: int) -> tuple[list[Tensor], list[list[float]]]:
        heads, attention, result = self.config.heads, block.attention, []
        normed = [block.attention_norm(v) for v in context]
        keys, values = zip(*(attention.key_value(v).chunk(2) for v in normed), strict=True)
        waves = attention.distance(sinusoids(len(context), context[0])).flip(0)  # by distance, 0 first
        received: list[list[float]] = [[] for _ in context]
        for i in range(len(context) - length, len(context)):
            mixed, weights = [], torch.zeros(i + 1).double()
            for head, part in enumerate(torch.arange(self.config.width).chunk(heads)):
                query = attention.query(normed[i])[part]
                u, v = self.model.biases[:, head, 0]
                scores = [(query + u) @ keys[j][part] + (query + v) @ waves[i - j][part] for j in range(i + 1)]
                weight = (torch.stack(scores) / math.sqrt(len(part))).softmax(0)
                weights += weight.detach() / heads
                mixed.append(sum((weight[j] * values[j][part] for j in range(i + 1)), torch.zeros(len(part))))
            result.append(attention.out(torch.cat(mixed)))
            for j in range(i + 1):
                received[j].append(float(weights[j]))
        return result, received

    def _update_memory(self, number: int, block: XLBlock, positions: list[Tensor], x: list[Tensor]) -> Tensor:
        config = self.config
        leave = max(0, len(positions) - config.memory)
        skipped = leave % config.rate  # an incomplete group is dropped, oldest first
        usage = [sum(all_) / len(all_) for all_ in self.attention[number][skipped:leave]]
        old = positions[skipped:leave]
        self.memory[number], self.attention[number] = positions[leave:], self.attention[number][leave:]
        if not old:
            return torch.zeros(())
        module = self.model.compressions[number] if self.model.compressions else None
        new = compressed_by_loop(config.compression, old, config.rate, module, usage)
        everything = self.compressed[number] + new
        self.compressed[number] = everything[max(0, len(everything) - config.compressed) :]
        if module is None:
            return torch.zeros(())
        difference = [self.content_attention(block, v, old) - self.content_attention(block, v, new) for v in x]
        return torch.stack(difference).square().mean()

    def content_attention(self, block: XLBlock, x: Tensor, past: list[Tensor]) -> Tensor:
        """Attention by content, without distances and without the output layer."""
        attention, mixed = block.attention, []
        keys, values = attention.key_value(block.attention_norm(torch.stack(past))).chunk(2, dim=1)
        for head, part in enumerate(torch.arange(self.config.width).chunk(self.config.heads)):
            query = attention.query(block.attention_norm(x))[part] + self.model.biases[0, head, 0]
            mixed.append((keys[:, part] @ query / math.sqrt(len(part))).softmax(0) @ values[:, part])
        return torch.cat(mixed)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"memory": 7, "rate": 4},  # the first group that leaves the memory is incomplete
        {"memory": 5, "window": 8},  # the same, and a full group leaves with it
        {"memory": 2, "compressed": 3},  # a segment is longer than the memory and pushes out a part of itself
        {"memory": 0, "compressed": 1},  # more leaves than the compressed memory holds
        {"memory": 6, "compressed": 9, "rate": 1},
    ],
    ids=str,
)
@EVERY
def test_the_model_equals_a_loop_over_positions(compression: str, sizes: dict[str, int]) -> None:
    model, text = model_of(compression, **sizes), text_of(6)
    hidden, losses = segments_of(model, text)
    loop = Loop(model)
    for number, segment in enumerate(text[0, :-1].split(model.window)):
        expected, loss = loop.segment(segment)
        torch.testing.assert_close(hidden[0, number], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(losses[0, number], loss.to(losses.dtype), rtol=1e-9, atol=1e-12)
    assert (losses.sum() > 1e-6) == (compression in ("conv", "dilated"))


def test_attention_received_is_the_attention_of_the_block() -> None:
    """With one head, values weighted by the attention they receive are the sum of the queries' results."""
    model = model_of(heads=1)
    block = model.blocks[0]
    assert isinstance(block, XLBlock)
    attention = block.attention
    context, visible = torch.randn(2, 9, 8).double(), causal_mask(4, 5, torch.tensor([5, 2]))
    received = attention_received(block, context, 4, model.biases, visible)
    normed = block.attention_norm(context)
    value = attention.key_value(normed).chunk(2, dim=-1)[1]
    result = attention(normed, 4, model.biases, visible).sum(dim=1)
    torch.testing.assert_close(
        F.linear((received[:, None] @ value)[:, 0], attention.out.weight), result - 4 * attention.out.bias
    )


def test_the_reconstruction_loss_counts_only_real_groups() -> None:
    model = model_of()
    block = model.blocks[0]
    assert isinstance(block, XLBlock)
    new, old, x = (torch.randn(3, size, 8).double() for size in (4, 8, 5))
    loss = reconstruction_loss(new, old, torch.tensor([0, 1, 4]), x, block, model.biases)
    last = reconstruction_loss(new[1:2, -1:], old[1:2, -2:], torch.tensor([1]), x[1:2], block, model.biases)
    assert loss[0] == 0
    torch.testing.assert_close(loss[1:2], last)
    attention = Loop(model).content_attention
    wanted, found = (torch.stack([attention(block, v, list(past[2])) for v in x[2]]) for past in (old, new))
    torch.testing.assert_close(loss[2], (wanted - found).square().mean())


# Settings with which it equals another model


@pytest.mark.parametrize("compression", ["mean", "max", "most_used", "conv", "dilated"])
def test_at_rate_one_it_is_transformer_xl_with_a_longer_memory(compression: str) -> None:
    model = model_of(compression, memory=6, compressed=9, rate=1)
    for module in model.compressions:
        for weight in module.parameters():  # the identity, or nothing added
            torch.nn.init.dirac_(weight) if compression == "conv" else torch.nn.init.zeros_(weight)
    longer = TransformerXL(TransformerXLConfig(**SIZES, memory=15)).double()
    longer.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("compressions")})
    text = text_of(8, batch=2)
    fresh = torch.zeros(2, 8, dtype=torch.bool)
    fresh[:, 0] = fresh[1, 3] = True  # rows need not have the same position in their text
    torch.testing.assert_close(run(model, text, fresh)[0], run(longer, text, fresh)[0], rtol=1e-11, atol=0)


@EVERY
def test_without_compressed_memory_it_is_transformer_xl(compression: str) -> None:
    model = model_of(compression, compressed=0)
    plain = TransformerXL(TransformerXLConfig(**SIZES, memory=4)).double()
    plain.load_state_dict(model.state_dict())
    text = text_of(6, batch=2)
    nats, _, extra = run(model, text)
    assert torch.equal(nats, run(plain, text)[0])
    assert not extra.any()


@EVERY
def test_segments_equal_the_whole_text_until_positions_are_compressed(compression: str) -> None:
    text = text_of(4)
    whole = run(model_of(compression, window=16), text)[0].flatten()
    cut = run(model_of(compression, memory=8), text)[0].flatten()
    torch.testing.assert_close(cut[:12], whole[:12])
    assert ((cut - whole)[12:].abs() > 1e-6).all()


# Which loss trains which parameters


@LEARNED
def test_the_reconstruction_loss_trains_only_the_compressions(compression: str) -> None:
    model = model_of(compression, layers=3)
    _, _, extra = run(model, text_of(6, batch=2))
    assert extra.shape == (2,)
    assert (extra > 1e-6).all()
    extra.sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("compressions."):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 1e-9, name
        else:
            assert parameter.grad is None or not parameter.grad.any(), name


@LEARNED
def test_the_token_loss_trains_all_but_the_compressions(compression: str) -> None:
    model = model_of(compression)
    run(model, text_of(6, batch=2))[0].sum().backward()
    for name, parameter in model.named_parameters():
        trained = parameter.grad is not None and bool(parameter.grad.any())
        assert trained != name.startswith("compressions."), name


@pytest.mark.parametrize("compression", ["mean", "max", "most_used"])
def test_compressions_without_parameters_have_no_extra_loss(compression: str) -> None:
    model = model_of(compression)
    assert not [name for name, _ in model.named_parameters() if "compress" in name]
    assert run(model, text_of(6))[2].tolist() == [0]


@LEARNED
def test_the_extra_loss_is_zero_with_finite_gradients_before_anything_is_compressed(compression: str) -> None:
    model = model_of(compression)
    text = text_of(5, batch=2)
    fresh = torch.zeros(2, 5, dtype=torch.bool)
    fresh[0, 0] = fresh[1] = True  # row 1 never fills its memory
    extra = run(model, text, fresh)[2]
    assert extra[0] > 0
    assert extra[1] == 0
    extra.sum().backward()
    for module in model.compressions:
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())
    torch.testing.assert_close(extra[:1], run(model, text[:1])[2])


@LEARNED
def test_the_extra_loss_is_not_computed_without_gradients(compression: str) -> None:
    model, text = model_of(compression), text_of(6)
    with torch.no_grad():
        nats, state, extra = run(model, text)
    assert not extra.any()
    again, after, _ = run(model, text)
    torch.testing.assert_close(nats, again, rtol=1e-12, atol=0)  # other kernels may run without gradients
    torch.testing.assert_close(state, after, rtol=1e-12, atol=1e-12)
    assert not any(value.requires_grad for value in after.values())


# What the output depends on


@pytest.mark.parametrize("layers", [1, 2])
@EVERY
def test_each_layer_reaches_both_caches_further_back(compression: str, layers: int) -> None:
    """One layer attends to 4 + 4 × 2 positions before its segment, three segments; the layer below adds three more."""
    model = model_of(compression, layers=layers)
    text = text_of(10)
    with torch.no_grad():
        before = segments_of(model, text)[0][0]
        for position in range(40):
            other = text.clone()
            other[0, position] = 30
            difference = (segments_of(model, other)[0][0] - before).abs().amax(dim=(1, 2))
            first = position // 4
            last = first + 3 * layers
            assert not difference[:first].any()
            assert not difference[last + 1 :].any()
            if compression == "most_used":  # a position that is little used may be dropped
                assert (difference[first : min(first + 2, 10)] > 1e-9).all()
            else:
                assert (difference[first : last + 1] > 1e-9).all(), position


def test_positions_that_most_used_keeps_reach_as_far_as_with_other_compressions() -> None:
    """Half of the positions are kept."""
    model, text = model_of("most_used", layers=1), text_of(10)
    with torch.no_grad():
        before, reached = segments_of(model, text)[0][0], 0
        for position in range(24, 28):
            other = text.clone()
            other[0, position] = 30
            reached += bool((segments_of(model, other)[0][0] - before)[9].abs().max() > 1e-9)
    assert 2 <= reached <= 4


@EVERY
def test_a_token_changes_no_output_before_it(compression: str) -> None:
    model, text = model_of(compression), text_of(6)
    before = segments_of(model, text)[0].flatten(1, 2)[0]
    for position in (13, 18, 22):
        other = text.clone()
        other[0, position] = 30
        difference = (segments_of(model, other)[0].flatten(1, 2)[0] - before).abs().amax(dim=1)
        assert (difference[:position] == 0).all()
        assert (difference[position:] > 1e-9).all()


@EVERY
def test_a_fresh_segment_ignores_both_caches(compression: str) -> None:
    model, text = model_of(compression), text_of(8, batch=2)
    fresh = torch.zeros(2, 8, dtype=torch.bool)
    fresh[:, 0] = fresh[1, 5] = True
    together, state, _ = run(model, text, fresh)
    torch.testing.assert_close(together[0], run(model, text[:1])[0][0])
    alone, alone_state, _ = run(model, text[1:, 20:])
    torch.testing.assert_close(together[1, 5:], alone[0])
    assert (together[1, 5] - run(model, text[1:])[0][0, 5]).abs().min() > 1e-6
    for name, value in alone_state.items():
        torch.testing.assert_close(state[name][1:], value)


@EVERY
def test_unfilled_positions_of_the_caches_are_never_attended_to(compression: str) -> None:
    """They may hold any numbers."""
    model, text = model_of(compression, window=8, memory=13, compressed=6), text_of(6, window=8)
    one, other = model.start(1), model.start(1)
    other = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in other.items()}
    for segment in text[:, :-1].split(8, dim=1):
        hidden, one, loss = model.segment(segment, one)
        other_hidden, other, other_loss = model.segment(segment, other)
        assert torch.equal(hidden, other_hidden)
        assert torch.equal(loss, other_loss)
    assert one["filled"].tolist() == [13]
    assert one["squeezed"].tolist() == [6]
    assert torch.equal(one["compressed"], other["compressed"])


@EVERY
def test_a_short_segment_gives_the_first_outputs_of_a_full_one(compression: str) -> None:
    """As in generation, where each length starts from the state before the segment."""
    model, text = model_of(compression, memory=3, rate=2), text_of(6)
    state = model.start(1)
    shapes = {name: (value.shape, value.dtype) for name, value in state.items()}
    for segment in text[:, :-1].split(4, dim=1):
        hidden, after, _ = model.segment(segment, state)
        for length in range(1, 4):
            part, short, _ = model.segment(segment[:, :length], state)
            torch.testing.assert_close(part, hidden[:, :length])
            assert {name: (value.shape, value.dtype) for name, value in short.items()} == shapes
            model.segment(segment, short)  # meaningless, but no error
        state = after


@pytest.mark.parametrize("streams", ["document", "corpus"])
@EVERY
def test_nats_do_not_depend_on_the_batch(compression: str, streams: Any) -> None:
    random = np.random.default_rng(0)
    store = TokenStore.in_memory([random.integers(0, 30, n) for n in (50, 7, 33, 1, 90)], 31, 30)
    model = model_of(compression)
    one, two, seven = (score(model, store, 4, 0, size, streams) for size in (1, 2, 7))
    np.testing.assert_allclose(two, one, rtol=1e-12)
    np.testing.assert_allclose(seven, one, rtol=1e-12)
    text = torch.tensor([[30, *store.tokens[:48].tolist()]])
    np.testing.assert_allclose(one[:48], run(model, text)[0].flatten().detach().numpy(), rtol=1e-9)


@LEARNED
def test_training_lowers_both_losses(compression: str) -> None:
    torch.manual_seed(0)
    model = CompressiveTransformer(CompressiveConfig(**SIZES | CACHES | {"compression": compression, "width": 16}))
    pattern = torch.randint(30, (4, 12)).repeat(1, 5)[:, :49]  # each row repeats its tokens after 12
    untrained = [weight.detach().clone() for module in model.compressions for weight in module.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        nats, _, extra = run(model, pattern)
        losses.append(nats.mean().item())
        optimizer.zero_grad()
        (nats.mean() + extra.mean()).backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    trained = run(model, pattern)[2].mean().item()
    weights = [weight for module in model.compressions for weight in module.parameters()]
    with torch.no_grad():  # the same network with the initial compressions
        for weight, before in zip(weights, untrained, strict=True):
            weight.copy_(before)
    assert trained < 0.5 * run(model, pattern)[2].mean().item()


def test_the_standard_size_has_the_expected_number_of_parameters() -> None:
    with torch.device("meta"):
        standard = CompressiveTransformer(CompressiveConfig(mlp=1152, vocabulary=50304))
    assert abs(standard.parameter_count() / 123.9e6 - 1) < 0.02
    assert standard.attention_length == 768
    assert sum(p.numel() for p in standard.compressions.parameters()) == 12 * 4 * 768**2


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory", -1), ("compressed", -1), ("rate", 0), ("rate", 3), ("window", 5), ("compression", "min")],
)
def test_illegal_sizes_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"model\.{name}"):
        CompressiveConfig(**SIZES | CACHES | {name: value})
