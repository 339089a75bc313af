"""The time-local transformer: its timeline has the stated filters, and its two forms agree."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.filters import impulse_response
from logpast.models.baselines.time_local import CHUNK, Timeline, TimeLocalConfig, TimeLocalTransformer
from logpast.util.errors import UserError
from models import helpers
from models.helpers import changed, large

SIZES = helpers.SIZES | {"slots": 6, "spacing": 1.0}
LONG = 2 * CHUNK + 6  # a text of three chunks
SHARPNESS = pytest.mark.parametrize("sharpness", [1, 4, 8])


def model_of(**sizes: float) -> TimeLocalTransformer:
    return large(TimeLocalConfig(**SIZES | sizes))


def text_of(batch: int, length: int, tokens: int = 31) -> Tensor:
    return torch.randint(tokens, (batch, length), generator=torch.Generator().manual_seed(1))


def hidden_of(model: TimeLocalTransformer, text: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """The decoder's output for a text in segments of these lengths, and the integrators after it."""
    state, hidden = model.start(len(text)), []
    for segment in text.split(cuts, dim=1):
        made, state, extra = model.segment(segment, state)
        assert extra.shape == (len(text),)
        assert not extra.any()
        hidden.append(made)
    return torch.cat(hidden, dim=1), state["integrators"]


def nats_of(model: TimeLocalTransformer, text: Tensor, segment: int, fresh: list[bool] | None = None) -> Tensor:
    """The nats (B, n·m) of a text (B, n·m + 1) in segments of this length."""
    tokens, targets = (part.unflatten(1, (-1, segment)) for part in (text[:, :-1], text[:, 1:]))
    new = torch.tensor(fresh or [True] + [False] * (tokens.shape[1] - 1)).expand(tokens.shape[:2])
    nats, _, extra = model(tokens, targets, new, model.start(len(text)))
    assert not extra.any()
    return nats.flatten(1)


def responses(config: TimeLocalConfig, length: int) -> Tensor:
    """(L, length): each entry 1, 2, … tokens after an impulse, from the recurrence."""
    timeline = Timeline(config).double()
    past = torch.zeros(1, config.slots, config.sharpness + 1, 1).double()
    entries = []
    for step in range(length):
        past = timeline.advance(past, torch.full((1, 1, 1, 1), float(step == 0)).double())[-1]
        entries.append(past[0, :, -1, 0])
    return torch.stack(entries, dim=1)


@SHARPNESS
def test_the_impulse_response_is_that_of_the_filter_bank(sharpness: int) -> None:
    config = TimeLocalConfig(slots=12, sharpness=sharpness, spacing=0.5)  # the last peak at 86.5
    ours, lags = responses(config, 1500), np.arange(1, 1501, dtype=np.float64)
    bank = torch.from_numpy(impulse_response(lags, config.peaks, sharpness))
    torch.testing.assert_close(ours, bank / bank.norm(dim=1, keepdim=True), atol=1e-12, rtol=1e-9)


@SHARPNESS
def test_peaks_are_logarithmically_spaced_with_proportional_widths(sharpness: int) -> None:
    config = TimeLocalConfig(slots=12, sharpness=sharpness, spacing=0.5)
    ours, peaks = responses(config, 800), 1.5 ** torch.arange(12)
    assert ((ours.argmax(dim=1) + 1 - peaks).abs() < 1).all()  # one of the whole lags on either side
    width = (ours > ours.amax(dim=1, keepdim=True) / 2).sum(dim=1)[4:] / peaks[4:]  # full, at half maximum
    assert ((width - width[-1]).abs() < 2 / peaks[4:] + 2 / peaks[-1]).all()  # rounded to whole lags at both ends


@SHARPNESS
def test_filters_have_the_same_shape_stretched(sharpness: int) -> None:
    ours = responses(TimeLocalConfig(slots=8, sharpness=sharpness, spacing=1.0), 400)
    ours = ours / ours[torch.arange(8), 2 ** torch.arange(8) - 1].unsqueeze(1)  # 1 at their peaks 1, 2, 4, …
    for near, far in pairwise(ours):
        torch.testing.assert_close(far[1::2], near[:200], atol=1e-12, rtol=1e-9)  # at the same t/τ*


def test_thirty_slots_reach_thousands_of_tokens() -> None:
    assert 4000 < TimeLocalConfig().peaks[-1] < 4300


def test_entries_of_unrelated_inputs_are_as_large_as_the_inputs() -> None:
    """Otherwise LayerNorm's epsilon would dominate far entries."""
    torch.manual_seed(0)
    timeline = Timeline(TimeLocalConfig(slots=20))  # the last peak at 236
    past = torch.zeros(1, 20, 5, 512)
    for inputs in (0.02 * torch.randn(1, 64 * 32, 512)).split(64, dim=1):
        past = timeline.advance(past, inputs.unsqueeze(1))[-1]
    assert ((past[0, :, -1].std(dim=-1) / 0.02 - 1).abs() < 0.15).all()


@pytest.mark.parametrize("length", [1, 2, 11])
def test_a_layer_equals_a_loop_over_the_definition(length: int) -> None:
    """Entries summed lag by lag, LayerNorm, keys and values for each, attention to the token and them."""
    model = model_of(layers=1, heads=2)
    block, config, text = model.blocks[0], model.config, text_of(2, 9 + length)
    attention, x = block.attention, model.table.weight[text]
    lags = np.arange(1, 1001, dtype=np.float64)
    bank = torch.from_numpy(impulse_response(lags, config.peaks, config.sharpness))
    bank = bank / bank.norm(dim=1, keepdim=True)
    expected = []
    for t in range(9, 9 + length):
        entries = torch.stack([sum(bank[i, n - 1] * x[:, t - n] for n in range(1, t + 1)) for i in range(6)], dim=1)
        entries = attention.entry_norm(entries) + attention.slot.weight
        token = block.attention_norm(x[:, t : t + 1])
        maps = zip(attention.query_key_value.weight.chunk(3), attention.query_key_value.bias.chunk(3), strict=True)
        sources = token, torch.cat([token, entries], dim=1), torch.cat([token, entries], dim=1)
        query, key, value = (F.linear(s, *m).unflatten(-1, (2, 8)) for s, m in zip(sources, maps, strict=True))
        weights = (torch.einsum("bqhe,bkhe->bhqk", query, key) / math.sqrt(8)).softmax(-1)
        mixed = attention.out(torch.einsum("bhqk,bkhe->bqhe", weights, value).flatten(2))
        after = x[:, t : t + 1] + mixed
        after = after + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(after)), approximate="tanh"))
        expected.append(model.norm(after))
    hidden, _ = hidden_of(model, text, [9, length])
    torch.testing.assert_close(hidden[:, 9:], torch.cat(expected, dim=1), atol=1e-10, rtol=1e-10)


@SHARPNESS
def test_the_parallel_form_equals_the_recurrence_with_gradients(sharpness: int) -> None:
    model, text = model_of(sharpness=sharpness, window=LONG), text_of(2, LONG)
    results = []
    for cuts in ([LONG], [1] * LONG):
        hidden, after = hidden_of(model, text, cuts)
        direction = torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)
        loss = (hidden * direction).sum() + after.square().mean()
        results.append((hidden, after, torch.autograd.grad(loss, list(model.parameters()))))
    for ours, theirs in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-8)
    for which in (0, 1):
        torch.testing.assert_close(results[0][which], results[1][which], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    "cuts", [[1] * LONG, [LONG - 1, 1], [1, LONG - 1], [CHUNK, CHUNK, 6], [CHUNK - 1, 2, CHUNK + 5]]
)
def test_nats_do_not_depend_on_the_segments(cuts: list[int]) -> None:
    model, text = model_of(), text_of(2, LONG + 1)
    whole, cut = (model.nats(hidden_of(model, text[:, :-1], each)[0], text[:, 1:]) for each in ([LONG], cuts))
    torch.testing.assert_close(cut, whole, atol=1e-11, rtol=1e-11)


def test_the_state_has_the_same_size_after_any_segment() -> None:
    model = model_of(sharpness=3)
    for length in (1, 5, 100):
        assert hidden_of(model, text_of(2, length), [length])[1].shape == (2, 2, 6, 4, 16)
    state = 4 * 2 * 6 * 4 * 16  # bytes of float32; no keys and values are kept
    assert TimeLocalTransformer(model.config).state_bytes == state
    assert model.attention_length == 7


def test_a_token_changes_no_nats_before_it() -> None:
    model, text = model_of(), text_of(1, LONG + 1)
    for position in (13, CHUNK, LONG - 3):
        difference = (nats_of(model, text, LONG) - nats_of(model, changed(text, position), LONG)).flatten()
        assert (difference[: position - 1] == 0).all()
        assert (difference[position - 1 :] != 0).all()


def test_the_effect_of_a_token_fades_beyond_the_last_peak() -> None:
    model = model_of(layers=1, slots=7, window=50)  # peaks at 1, 2, … 64
    text = text_of(1, 2000)
    text[:, -1] = 0
    last = hidden_of(model, text, [50] * 40)[0][0, -1]
    effect = {}
    for lag in (1, 10, 64, 130, 300, 640, 1900):
        other = hidden_of(model, changed(text, -1 - lag), [50] * 40)[0][0, -1]
        effect[lag] = (other - last).abs().max().item()
    assert min(effect[lag] for lag in (1, 10, 64, 130)) > 1e-4
    assert 1e-4 > effect[300] > 1e-9
    assert 1e-9 > effect[640]
    assert effect[1900] < 1e-14


def test_a_fresh_segment_ignores_the_state() -> None:
    model, text = model_of(), text_of(2, 25)
    alone = nats_of(model, text[:, 8:17], 8)
    torch.testing.assert_close(nats_of(model, text, 8, [True, True, False])[:, 8:16], alone)
    assert ((nats_of(model, text, 8)[:, 8:16] - alone).abs() > 1e-6).all()


@pytest.mark.parametrize("segment", [1, 8])
def test_padding_is_no_input(segment: int) -> None:
    """Before a text it changes nothing. After a text it only lets time pass."""
    model, text = model_of(), text_of(2, 16)
    hidden, after = hidden_of(model, text, [segment] * (16 // segment))
    padding = torch.full((2, 8), -1)
    late, late_after = hidden_of(model, torch.cat([padding, text], dim=1), [segment] * (24 // segment))
    torch.testing.assert_close(late[:, 8:], hidden)
    torch.testing.assert_close(late_after, after)
    early, early_after = hidden_of(model, torch.cat([text, padding], dim=1), [segment] * (24 // segment))
    torch.testing.assert_close(early[:, :16], hidden)
    torch.testing.assert_close(early_after, torch.einsum("lji,bnlid->bnljd", model.timeline.transition[8], after))


@pytest.mark.parametrize("segment", [1, 24])
def test_every_parameter_has_a_gradient(segment: int) -> None:
    model, text = model_of(segments=24 // segment), text_of(2, 25)
    nats_of(model, text, segment).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.any(), name
    assert all(block.attention.slot.weight.grad.any(dim=1).all() for block in model.blocks)
    assert nats_of(TimeLocalTransformer(model.config), text, 24).isfinite().all()  # as initialised


@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_cross_segments_within_a_call_but_not_calls(layers: int) -> None:
    """Token 30 occurs only in the first of three segments, and is never a target."""
    model, text = model_of(layers=layers, segments=3), text_of(1, 25, tokens=30)
    tokens, targets = (part.unflatten(1, (3, 8)).clone() for part in (text[:, :-1], text[:, 1:]))
    tokens[0, 0, 3] = 30
    fresh = torch.tensor([[True, False, False]])
    nats = model(tokens, targets, fresh, model.start(1))[0][0, 2]
    (in_one_call,) = torch.autograd.grad(nats.sum(), model.table.weight)
    _, state, _ = model(tokens[:, :2], targets[:, :2], fresh[:, :2], model.start(1))
    in_two = model(tokens[:, 2:], targets[:, 2:], fresh[:, 2:], state)[0][0, 0]
    torch.testing.assert_close(in_two, nats)
    (in_two_calls,) = torch.autograd.grad(in_two.sum(), model.table.weight)
    hidden = model.segment(tokens[:, 2], state)[0][0]  # a row of the head has a gradient from any loss
    as_head = model.logits(hidden).softmax(-1)[:, 30] @ hidden
    torch.testing.assert_close(in_two_calls[30], as_head)
    assert (in_one_call[30] - as_head).abs().max() > 1e-6


def test_nats_do_not_depend_on_the_batch_size() -> None:
    model = model_of(window=5)
    random = np.random.default_rng(0)
    store = TokenStore.in_memory([random.integers(30, size=size) for size in (23, 4, 17, 1, 40, 5)], size=31, eot=30)
    for streams in ("document", "corpus"):
        first, *others = (score(model, store, 5, 0, batch_size=size, streams=streams) for size in (1, 2, 7))
        assert (first > 0).all()
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-12)


@pytest.mark.parametrize(("sharpness", "cut"), [(8, 500), (16, 500), (16, 1)])
def test_float32_is_accurate_enough(sharpness: int, cut: int) -> None:
    model, text = model_of(sharpness=sharpness, slots=24, spacing=1 / 3, heads=4), text_of(1, 1500)  # to 747 tokens
    with torch.no_grad():
        exact, exact_after = hidden_of(model, text, [500] * 3)
        model.float()
        hidden, after = hidden_of(model, text, [cut] * (1500 // cut))
    assert after.dtype == torch.float32
    torch.testing.assert_close(hidden.double(), exact, atol=1e-4, rtol=0)
    error = (after - exact_after).norm(dim=-1) / exact_after.norm(dim=-1)
    assert error.max() < 1e-4


def test_under_autocast_the_timeline_is_float32() -> None:
    model, text = model_of().float(), text_of(2, 150)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, after = hidden_of(model, text, [75, 1, 74])
    assert hidden.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    inputs = model.table.weight[text].to(torch.bfloat16).double()  # of the first layer
    past = model.double().start(2)["integrators"][:, 0]
    for some in inputs.split(50, dim=1):
        past = model.timeline.advance(past, some.unsqueeze(1))[-1]
    torch.testing.assert_close(after[:, 0].double(), past, atol=1e-5, rtol=1e-5)


def test_the_filters_are_no_parameters_and_are_never_rounded() -> None:
    model = model_of()
    assert not any("timeline" in name for name in model.state_dict())
    before = model.timeline.weights.clone()
    assert model.bfloat16().timeline.weights.dtype == torch.float32
    assert model.segment(text_of(1, 5), model.start(1))[1]["integrators"].dtype == torch.float32
    assert torch.equal(model.double().timeline.weights, before)


def test_the_standard_size_has_as_many_parameters_as_gpt2() -> None:
    with torch.device("meta"):
        model = TimeLocalTransformer(TimeLocalConfig(vocabulary=50304))
    assert model.parameter_count() == pytest.approx(123.9e6, rel=0.02)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0),
        ("slots", 1000),
        ("sharpness", 0),
        ("sharpness", 2.5),
        ("sharpness", 17),
        ("spacing", 0.0),
        ("spacing", math.inf),
        ("spacing", math.nan),
        ("first_peak", 0.5),
        ("first_peak", math.nan),
        ("segments", 0),
        ("width", 15),
    ],
)
def test_illegal_sizes_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"model\.{name}"):
        TimeLocalConfig(**SIZES | {name: value})
