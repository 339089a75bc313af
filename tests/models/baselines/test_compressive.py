"""Compressive Transformer: a loop over positions makes the same, and its two losses teach each their own weights."""

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
    attention_given,
    lost_by,
    most_used,
    pool,
)
from logpast.models.baselines.transformer_xl import XLBlock, seen_by_each, sinusoids
from logpast.util.errors import UserError

SIZES: dict[str, Any] = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 31}
CACHES: dict[str, Any] = {"memory": 4, "compressed": 4, "rate": 2}  # 4 + 4 × 2 positions before the segment
ALL: tuple[Compression, ...] = get_args(Compression)
EVERY = pytest.mark.parametrize("compression", ALL)
LEARNED = pytest.mark.parametrize("compression", ["conv", "dilated"])


def model_of(compression: str = "conv", **sizes: Any) -> CompressiveTransformer:
    """Larger weights than at initialisation, so that nothing hides behind being small."""
    torch.manual_seed(0)
    config = CompressiveConfig(**SIZES | CACHES | {"compression": compression} | sizes)
    return enlarge(CompressiveTransformer(config).double())


def enlarge(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def text_of(segments: int, batch: int = 1, window: int = 4) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(30, (batch, segments * window + 1))


def read(model: Any, text: Tensor, fresh: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The nats of a text (B, n·m + 1) read in segments of the model's window, the state after it, the extra loss."""
    tokens, targets = (part.unflatten(1, (-1, model.window)) for part in (text[:, :-1], text[:, 1:]))
    if fresh is None:
        fresh = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        fresh[:, 0] = True
    nats, state, extra = model(tokens, targets, fresh, model.start(len(text)))
    return nats, state, extra


def segments_of(model: CompressiveTransformer, text: Tensor) -> tuple[Tensor, Tensor]:
    """(B, n, m, d) and (B, n): each segment's hidden states and extra loss."""
    state, made, lost = model.start(len(text)), [], []
    for segment in text[:, :-1].split(model.window, dim=1):
        hidden, state, extra = model.segment(segment, state)
        made.append(hidden)
        lost.append(extra)
    return torch.stack(made, dim=1), torch.stack(lost, dim=1)


# The compressions, each as a loop over vectors: the definition that all else is compared with.


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
        apart = 1
        for kernel in module.kernels:
            before = [old[i - apart] if i >= apart else torch.zeros_like(old[0]) for i in range(len(old))]
            earlier, here = kernel.weight.unbind(2)
            old = [v + F.gelu(earlier @ b + here @ v) for v, b in zip(old, before, strict=True)]
            apart *= 2
        assert apart >= 2 * rate  # how many positions it sees
        return [old[i + rate - 1] for i in starts]
    assert usage is not None
    order = sorted(range(len(old)), key=lambda i: -usage[i])
    return [old[i] for i in sorted(order[: len(old) // rate])]


@pytest.mark.parametrize("rate", [1, 2, 3, 4])
@EVERY
def test_each_compression_is_its_loop(compression: Compression, rate: int) -> None:
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


def test_most_used_takes_no_position_that_is_not_real() -> None:
    old = torch.arange(8.0).view(1, 8, 1).expand(3, 8, 1)
    usage = torch.tensor([0.9, 0.8, 0.7, 0.1, 0.4, 0.3, 0.2, 0.6]).expand(3, 8)
    kept = most_used(old, usage, torch.tensor([4, 2, 0]), 2)[..., 0]
    assert kept[0].tolist() == [0, 1, 2, 7]
    assert kept[1, 2:].tolist() == [4, 7]


# The whole: a stream read position by position, with lists that hold what is real and nothing else.


class Loop:
    def __init__(self, model: CompressiveTransformer) -> None:
        self.model, self.config = model, model.config
        layers = range(model.config.layers)
        self.memory: list[list[Tensor]] = [[] for _ in layers]
        self.compressed: list[list[Tensor]] = [[] for _ in layers]
        self.attention: list[list[list[float]]] = [[] for _ in layers]  # what each remembered position was given

    def segment(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, lost = list(self.model.table.weight[tokens]), torch.zeros(()).double()
        for number, block in enumerate(self.model.blocks):
            assert isinstance(block, XLBlock)
            attended, given = self._attend(block, self.compressed[number] + self.memory[number] + x, len(x))
            positions = self.memory[number] + x
            self.attention[number] += [[] for _ in x]
            for place, more in enumerate(given[len(self.compressed[number]) :]):
                self.attention[number][place] += more
            lost = lost + self._forget(number, block, positions, x)
            x = [v + a for v, a in zip(x, attended, strict=True)]
            x = [v + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(v)), approximate="tanh")) for v in x]
        return torch.stack([self.model.norm(v) for v in x]), lost

    def _attend(self, block: XLBlock, context: list[Tensor], length: int) -> tuple[list[Tensor], list[list[float]]]:
        heads, attention, result = self.config.heads, block.attention, []
        normed = [block.attention_norm(v) for v in context]
        keys, values = zip(*(attention.key_value(v).chunk(2) for v in normed), strict=True)
        waves = attention.distance(sinusoids(len(context), context[0])).flip(0)  # by distance, 0 first
        given: list[list[float]] = [[] for _ in context]
        for i in range(len(context) - length, len(context)):
            mixed, shares = [], torch.zeros(i + 1).double()
            for head, part in enumerate(torch.arange(self.config.width).chunk(heads)):
                query = attention.query(normed[i])[part]
                u, v = self.model.biases[:, head, 0]
                scores = [(query + u) @ keys[j][part] + (query + v) @ waves[i - j][part] for j in range(i + 1)]
                share = (torch.stack(scores) / math.sqrt(len(part))).softmax(0)
                shares += share.detach() / heads
                mixed.append(sum((share[j] * values[j][part] for j in range(i + 1)), torch.zeros(len(part))))
            result.append(attention.out(torch.cat(mixed)))
            for j in range(i + 1):
                given[j].append(float(shares[j]))
        return result, given

    def _forget(self, number: int, block: XLBlock, positions: list[Tensor], x: list[Tensor]) -> Tensor:
        config = self.config
        leave = max(0, len(positions) - config.memory)
        skipped = leave % config.rate  # what does not fill a group is lost, oldest first
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
        return torch.stack([self._found(block, v, old) - self._found(block, v, new) for v in x]).square().mean()

    def _found(self, block: XLBlock, x: Tensor, places: list[Tensor]) -> Tensor:
        """Attention by content, without distances and without the last projection."""
        attention, mixed = block.attention, []
        keys, values = attention.key_value(block.attention_norm(torch.stack(places))).chunk(2, dim=1)
        for head, part in enumerate(torch.arange(self.config.width).chunk(self.config.heads)):
            query = attention.query(block.attention_norm(x))[part] + self.model.biases[0, head, 0]
            mixed.append((keys[:, part] @ query / math.sqrt(len(part))).softmax(0) @ values[:, part])
        return torch.cat(mixed)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"memory": 7, "rate": 4},  # the first group to leave is not whole
        {"memory": 5, "window": 8},  # and the next stands beside it
        {"memory": 2, "compressed": 3},  # a segment is longer than the memory, and pushes out a part of itself
        {"memory": 0, "compressed": 1},  # and more than the second cache takes
        {"memory": 6, "compressed": 9, "rate": 1},
    ],
    ids=str,
)
@EVERY
def test_it_is_what_a_loop_over_positions_makes(compression: str, sizes: dict[str, int]) -> None:
    model, text = model_of(compression, **sizes), text_of(6)
    hidden, lost = segments_of(model, text)
    loop = Loop(model)
    for number, segment in enumerate(text[0, :-1].split(model.window)):
        theirs, theirs_lost = loop.segment(segment)
        torch.testing.assert_close(hidden[0, number], theirs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lost[0, number], theirs_lost.to(lost.dtype), rtol=1e-9, atol=1e-12)
    assert (lost.sum() > 1e-6) == (compression in ("conv", "dilated"))


def test_the_attention_that_is_counted_is_the_attention_that_is_paid() -> None:
    """With one head, values weighted by what they were given are what all queries got together."""
    model = model_of(heads=1)
    block = model.blocks[0]
    assert isinstance(block, XLBlock)
    attention = block.attention
    context, visible = torch.randn(2, 9, 8).double(), seen_by_each(4, 5, torch.tensor([5, 2]))
    given = attention_given(block, context, 4, model.biases, visible)
    normed = block.attention_norm(context)
    value = attention.key_value(normed).chunk(2, dim=-1)[1]
    got = attention(normed, 4, model.biases, visible).sum(dim=1)
    torch.testing.assert_close(
        F.linear((given[:, None] @ value)[:, 0], attention.out.weight), got - 4 * attention.out.bias
    )


def test_what_is_lost_counts_real_groups_alone() -> None:
    model = model_of()
    block = model.blocks[0]
    assert isinstance(block, XLBlock)
    new, old, x = (torch.randn(3, size, 8).double() for size in (4, 8, 5))
    lost = lost_by(new, old, torch.tensor([0, 1, 4]), x, block, model.biases)
    last = lost_by(new[1:2, -1:], old[1:2, -2:], torch.tensor([1]), x[1:2], block, model.biases)
    assert lost[0] == 0
    torch.testing.assert_close(lost[1:2], last)
    loop = Loop(model)
    wanted, found = (torch.stack([loop._found(block, v, list(places[2])) for v in x[2]]) for places in (old, new))
    torch.testing.assert_close(lost[2], (wanted - found).square().mean())


# Where theory says that another model makes the same.


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
    fresh[:, 0] = fresh[1, 3] = True  # rows need not be equally far
    torch.testing.assert_close(read(model, text, fresh)[0], read(longer, text, fresh)[0], rtol=1e-11, atol=0)


@EVERY
def test_without_a_second_cache_it_is_transformer_xl(compression: str) -> None:
    model = model_of(compression, compressed=0)
    plain = TransformerXL(TransformerXLConfig(**SIZES, memory=4)).double()
    plain.load_state_dict(model.state_dict())
    text = text_of(6, batch=2)
    nats, _, extra = read(model, text)
    assert torch.equal(nats, read(plain, text)[0])
    assert not extra.any()


@EVERY
def test_a_cut_does_not_matter_while_the_memory_holds_all(compression: str) -> None:
    """And does from the segment on that sees compressed places."""
    text = text_of(4)
    whole = read(model_of(compression, window=16), text)[0].flatten()
    cut = read(model_of(compression, memory=8), text)[0].flatten()
    torch.testing.assert_close(cut[:12], whole[:12])
    assert ((cut - whole)[12:].abs() > 1e-6).all()


# Each loss teaches its own weights.


@LEARNED
def test_the_reconstruction_teaches_the_compressions_of_all_layers_and_nothing_else(compression: str) -> None:
    model = model_of(compression, layers=3)
    _, _, extra = read(model, text_of(6, batch=2))
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
def test_the_tokens_cost_teaches_all_but_the_compressions(compression: str) -> None:
    model = model_of(compression)
    read(model, text_of(6, batch=2))[0].sum().backward()
    for name, parameter in model.named_parameters():
        taught = parameter.grad is not None and bool(parameter.grad.any())
        assert taught != name.startswith("compressions."), name


@pytest.mark.parametrize("compression", ["mean", "max", "most_used"])
def test_what_has_no_weights_has_no_extra_loss(compression: str) -> None:
    model = model_of(compression)
    assert not [name for name, _ in model.named_parameters() if "compress" in name]
    assert read(model, text_of(6))[2].tolist() == [0]


@LEARNED
def test_before_anything_was_compressed_there_is_no_loss_and_its_gradient_is_a_number(compression: str) -> None:
    model = model_of(compression)
    text = text_of(5, batch=2)
    fresh = torch.zeros(2, 5, dtype=torch.bool)
    fresh[0, 0] = fresh[1] = True  # row 1 never fills its memory
    extra = read(model, text, fresh)[2]
    assert extra[0] > 0
    assert extra[1] == 0
    extra.sum().backward()
    for module in model.compressions:
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())
    torch.testing.assert_close(extra[:1], read(model, text[:1])[2])


@LEARNED
def test_nothing_is_computed_for_the_extra_loss_without_gradients(compression: str) -> None:
    model, text = model_of(compression), text_of(6)
    with torch.no_grad():
        nats, state, extra = read(model, text)
    assert not extra.any()
    again, after, _ = read(model, text)
    torch.testing.assert_close(nats, again, rtol=1e-12, atol=0)  # other kernels may run without gradients
    torch.testing.assert_close(state, after, rtol=1e-12, atol=1e-12)
    assert not any(value.requires_grad for value in after.values())


# What went wrong in this field: a memory that reaches too far, or not at all, or sees the future.


@pytest.mark.parametrize("layers", [1, 2])
@EVERY
def test_reach_is_both_caches_a_layer(compression: str, layers: int) -> None:
    """One layer sees 4 + 4 × 2 positions before its segment, three segments; the layer below was given three more."""
    model = model_of(compression, layers=layers)
    text = text_of(10)
    with torch.no_grad():
        before = segments_of(model, text)[0][0]
        for place in range(40):
            other = text.clone()
            other[0, place] = 30
            moved = (segments_of(model, other)[0][0] - before).abs().amax(dim=(1, 2))
            first = place // 4
            last = first + 3 * layers
            assert not moved[:first].any()
            assert not moved[last + 1 :].any()
            if compression == "most_used":  # a position may be forgotten, or be too little used to be kept
                assert (moved[first : min(first + 2, 10)] > 1e-9).all()
            else:
                assert (moved[first : last + 1] > 1e-9).all(), place


def test_most_used_reaches_through_what_it_keeps() -> None:
    """Half of the positions are kept, and those that are reach as far as with any other compression."""
    model, text = model_of("most_used", layers=1), text_of(10)
    with torch.no_grad():
        before, reached = segments_of(model, text)[0][0], 0
        for place in range(24, 28):
            other = text.clone()
            other[0, place] = 30
            reached += bool((segments_of(model, other)[0][0] - before)[9].abs().max() > 1e-9)
    assert 2 <= reached <= 4


@EVERY
def test_nothing_after_a_token_moves_it(compression: str) -> None:
    model, text = model_of(compression), text_of(6)
    before = segments_of(model, text)[0].flatten(1, 2)[0]
    for place in (13, 18, 22):
        other = text.clone()
        other[0, place] = 30
        moved = (segments_of(model, other)[0].flatten(1, 2)[0] - before).abs().amax(dim=1)
        assert (moved[:place] == 0).all()
        assert (moved[place:] > 1e-9).all()


@EVERY
def test_a_fresh_segment_forgets_everything(compression: str) -> None:
    model, text = model_of(compression), text_of(8, batch=2)
    fresh = torch.zeros(2, 8, dtype=torch.bool)
    fresh[:, 0] = fresh[1, 5] = True
    together, state, _ = read(model, text, fresh)
    torch.testing.assert_close(together[0], read(model, text[:1])[0][0])
    alone, alone_state, _ = read(model, text[1:, 20:])
    torch.testing.assert_close(together[1, 5:], alone[0])
    assert (together[1, 5] - read(model, text[1:])[0][0, 5]).abs().min() > 1e-6
    for name, value in alone_state.items():
        torch.testing.assert_close(state[name][1:], value)


@EVERY
def test_what_is_not_real_is_never_seen(compression: str) -> None:
    """Any numbers may stand in the places that were never filled."""
    model, text = model_of(compression, window=8, memory=13, compressed=6), text_of(6, window=8)
    one, other = model.start(1), model.start(1)
    other = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in other.items()}
    for segment in text[:, :-1].split(8, dim=1):
        (hidden, one, lost), (theirs, other, theirs_lost) = model.segment(segment, one), model.segment(segment, other)
        assert torch.equal(hidden, theirs)
        assert torch.equal(lost, theirs_lost)
    assert one["filled"].tolist() == [13]
    assert one["squeezed"].tolist() == [6]
    assert torch.equal(one["compressed"], other["compressed"])


@EVERY
def test_a_segment_that_grows_is_the_beginning_of_the_whole_one(compression: str) -> None:
    """As in writing: each length is read from the state that the segment began with."""
    model, text = model_of(compression, memory=3, rate=2), text_of(6)
    state = model.start(1)
    shapes = {name: (value.shape, value.dtype) for name, value in state.items()}
    for segment in text[:, :-1].split(4, dim=1):
        hidden, after, _ = model.segment(segment, state)
        for length in range(1, 4):
            part, there, _ = model.segment(segment[:, :length], state)
            torch.testing.assert_close(part, hidden[:, :length])
            assert {name: (value.shape, value.dtype) for name, value in there.items()} == shapes
            model.segment(segment, there)  # of no meaning, and no error
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
    np.testing.assert_allclose(one[:48], read(model, text)[0].flatten().detach().numpy(), rtol=1e-9)


@LEARNED
def test_training_lowers_both_losses(compression: str) -> None:
    torch.manual_seed(0)
    model = CompressiveTransformer(CompressiveConfig(**SIZES | CACHES | {"compression": compression, "width": 16}))
    pattern = torch.randint(30, (4, 12)).repeat(1, 5)[:, :49]  # each row says again what it said 12 tokens ago
    untaught = [weight.detach().clone() for module in model.compressions for weight in module.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        nats, _, extra = read(model, pattern)
        losses.append(nats.mean().item())
        optimizer.zero_grad()
        (nats.mean() + extra.mean()).backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    taught = read(model, pattern)[2].mean().item()
    weights = [weight for module in model.compressions for weight in module.parameters()]
    with torch.no_grad():  # what the same network loses with the compressions as they were
        for weight, before in zip(weights, untaught, strict=True):
            weight.copy_(before)
    assert taught < 0.5 * read(model, pattern)[2].mean().item()


def test_sizes() -> None:
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
    with pytest.raises(UserError, match=name):
        CompressiveConfig(**SIZES | CACHES | {name: value})
