"""The time-local transformer (Dickson et al. 2025): every layer looks back along a compressed timeline of its input.

Entry i of a layer's timeline is the layer's own input, blurred around τ*_i tokens ago; with u = n/τ*,

    f̃(t, τ*) = g · Σ_{n ≥ 1} (u e^(1−u))^k · x(t − n),        τ*_i = first_peak · (1 + spacing)^(i−1),

filters.py's Φ up to a constant. A token attends to itself and to the L entries; nothing else of the past is visible.

**The recurrence.** Laplace's transform of the past, F(s) = Σ e^(−sn) x(t − n) at s = k/τ*, is a leaky integrator, and
Post's inversion of it is its k-th derivative, f̃ ∝ F⁽ᵏ⁾(s). The classical way takes that derivative by differences
between neighbouring s: far apart, they put the peaks in the wrong place (at 2.45 τ* for k = 8 and spacing 1/3); near,
they cancel (at spacing .05 the terms are 6,300 times their sum). Here each entry carries its derivatives themselves.
With the j-th as E_j = g Σ (e·u)^j e^(−ku) x(t − n), j = 0 … k, a token enters E_0 alone, and p tokens pass by the
binomial theorem:

    E_j ← e^(−kp/τ*) Σ_{i ≤ j} C(j, i) (e·p/τ*)^(j−i) E_i,        f̃ = E_k.

This is exact for any p, and no factor is negative, so float32 is enough. The price is k + 1 vectors per entry where the
classical way has one, and 2k more for all: small k only.

**Two forms.** A segment of one token is a step of the recurrence. A longer one is read in parallel, in pieces of
`CHUNK` tokens: a causal convolution with the impulse response, and the integrators from before, decayed to each place.
Neither the entries (B, T, L, d) nor their keys and values are made. An entry is a fixed weighted sum of few vectors
(the piece's inputs and the integrators before it), and LayerNorm is a linear map but for one number per entry. So those
few are projected to keys and values, queries meet them, the weights turn these products into scores of the entries, and
attention to entries back into shares of the few; the one number comes from inner products between the few.

Where the paper or its public code has something else, or nothing:
- the current token is in no entry (there it is in all), as it is attended to anyway;
- g gives each filter the energy 1 (Σ of squares), so that unrelated inputs come out as large as they went in, and
  LayerNorm's epsilon does not swallow the far entries, as it would averages over thousands of tokens;
- entries have a LayerNorm of their own and share the map to keys and values with the token, as there; a learned vector
  per layer and slot, after LayerNorm, says which entry it is (there attention is by content alone), small at the start;
- entries of which there is nothing yet are zero vectors, seen like others; padding leaves no trace in any layer;
- blocks, final LayerNorm and head are GPT-2's, as in the other systems of this house; there are no positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import gelu_linear
from logpast.memory.naive import embed
from logpast.models.base import Recurrent, RecurrentConfig, State
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype, full_precision, in_autocast

CHUNK = 64  # tokens read at once: fewer project the integrators more often, more make longer rows of scores
MOST_SHARP = 16  # the state grows with it; sharper filters are log_memory's, which has the tokens themselves
FARTHEST = 2**30  # the last peak, in tokens


@dataclass(frozen=True)
class TimeLocalConfig(RecurrentConfig):
    """The time-local transformer."""

    slots: int = 30
    """L, the entries of each layer's timeline"""
    sharpness: int = 4
    """k: larger values give narrower filters and a larger state, k + 1 vectors per entry"""
    spacing: float = 1 / 3
    """c: each peak is 1 + c times as far back as the one before; 30 slots reach 4,200 tokens"""
    first_peak: float = 1.0
    """τ* of the nearest entry, in tokens"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(slots=1, sharpness=1)
        if self.sharpness > MOST_SHARP or self.sharpness % 1:
            raise UserError(f"model.sharpness must be a whole number up to {MOST_SHARP}, got {self.sharpness}")
        if not 0 < self.spacing < math.inf:
            raise UserError(f"model.spacing must be a finite number above 0, got {self.spacing}")
        if not 1 <= self.first_peak < math.inf:
            raise UserError(f"model.first_peak must be at least 1, the token before, got {self.first_peak}")
        if math.log(self.first_peak) + (self.slots - 1) * math.log1p(self.spacing) > math.log(FARTHEST):
            raise UserError(
                f"model.slots ({self.slots}) with model.spacing={self.spacing:.4g} reach back more than "
                f"{FARTHEST:,} tokens; use fewer slots or a smaller spacing"
            )

    @property
    def peaks(self) -> NDArray[np.float64]:
        """(L,): τ*, nearest first."""
        return self.first_peak * (1 + self.spacing) ** np.arange(self.slots, dtype=np.float64)


class Timeline(nn.Module):
    """The recurrence of all layers. It has no parameters: fixed numbers, built anew wherever the module goes.

    `passing[p]` (L, k+1, k+1) is what p tokens do to the integrators, `gain` (L,) how strongly an input enters the
    first of them, and `weights[t]` (L, L(k+1) + CHUNK) of what the entries at a piece's place t consist: of the
    integrators before the piece, all in a row, and of its inputs.
    """

    passing: Tensor
    gain: Tensor
    weights: Tensor

    def __init__(self, config: TimeLocalConfig) -> None:
        super().__init__()
        self.peaks, self.sharpness = config.peaks, int(config.sharpness)
        for name in ("passing", "gain", "weights"):
            self.register_buffer(name, torch.empty(0, dtype=torch.get_default_dtype()), persistent=False)
        self._lay_out()

    def advance(self, past: Tensor, pieces: Tensor) -> list[Tensor]:
        """The integrators (B, L, k+1, d) before the first of `pieces` (B, P, T, d), T ≤ CHUNK, and after each."""
        length = pieces.shape[2]
        entered = self.passing[1 : length + 1, :, :, 0].flip(0) * self.gain[:, None]
        found = [past]
        with full_precision(past.device):
            for entering in torch.einsum("qlj,bpqd->pbljd", entered, pieces).unbind():
                found.append(torch.einsum("lji,blid->bljd", self.passing[length], found[-1]) + entering)
        return found

    def consist_of(self, length: int) -> Tensor:
        """(T, L, L(k+1) + T): the weights that the integrators before and the inputs have in the entries."""
        return self.weights[:length, :, : self.weights.shape[2] - CHUNK + length]

    def squares(self, past: Tensor, inputs: Tensor) -> Tensor:
        """|f̃|² (B, T, L) of all entries, from inner products: the entries themselves would be d times as large."""
        length = inputs.shape[1]
        of_past = self.passing[:length, :, -1]  # (T, L, k+1)
        of_inputs = self.consist_of(length)[..., -length:]  # (T, L, T)
        with full_precision(past.device):
            among_past = torch.einsum("tli,blij->btlj", of_past, past @ past.mT)
            between = torch.einsum("tlq,bliq->btli", of_inputs, torch.einsum("blid,bqd->bliq", past, inputs))
            among_inputs = torch.einsum("tlq,bqr->btlr", of_inputs, inputs @ inputs.mT)
            return ((among_past + 2 * between) * of_past).sum(-1) + (among_inputs * of_inputs).sum(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._lay_out()
        return result

    def _lay_out(self) -> None:
        """Built in float64: a cast of the model must not round it."""
        device, dtype = self.passing.device, accumulation_dtype(self.passing.dtype)
        passing, gain = passing_of(self.peaks, self.sharpness, CHUNK), gain_of(self.peaks, self.sharpness)
        slots, orders = passing.shape[1:3]
        of_past = np.einsum("tli,lm->tlmi", passing[:CHUNK, :, -1], np.eye(slots)).reshape(CHUNK, slots, slots * orders)
        lag = np.maximum(np.arange(CHUNK)[:, None] - np.arange(CHUNK), 0)  # at lag 0 the impulse response is 0
        of_inputs = (passing[..., -1, 0] * gain)[lag].transpose(0, 2, 1)
        weights = np.concatenate([of_past, of_inputs], axis=2)
        self.passing, self.gain, self.weights = (
            torch.from_numpy(table).to(dtype).to(device) for table in (passing, gain, weights)
        )


def passing_of(peaks: NDArray[np.float64], sharpness: int, longest: int) -> NDArray[np.float64]:
    """(longest + 1, L, k+1, k+1): what 0, 1, … tokens do to the integrators; see the module's text."""
    time = np.arange(longest + 1)[:, None, None, None] / peaks[:, None, None]
    order = np.arange(sharpness + 1)
    above = order[:, None] - order  # j − i
    binomial = np.array([[math.comb(int(j), int(i)) for i in order] for j in order], dtype=np.float64)
    return binomial * np.exp(-sharpness * time) * (math.e * time) ** np.maximum(above, 0)


def gain_of(peaks: NDArray[np.float64], sharpness: int) -> NDArray[np.float64]:
    """(L,): what gives each impulse response the energy 1. Of far filters, a sample of the lags stands for all."""
    stride = np.maximum(1.0, peaks / 256)[:, None]
    time = np.arange(1, 2049) * stride / peaks[:, None]
    shape = np.exp(sharpness * (np.log(time) + 1 - time))
    return np.asarray(((shape**2).sum(axis=1) * stride[:, 0]) ** -0.5)


class TimelineAttention(nn.Module):
    """Each token attends to itself and to the timeline as it stands before the token."""

    def __init__(self, width: int, heads: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.entry_norm = nn.LayerNorm(width)
        self.slot = nn.Embedding(slots, width)
        self.out = nn.Linear(width, width)

    def forward(self, now: Tensor, inputs: Tensor, past: Tensor, timeline: Timeline) -> Tensor:
        """For a piece's tokens `now` (B, T, d) and what they add to the timeline, `inputs`, after `past`."""
        own = [self._by_head(part) for part in self.query_key_value(now).chunk(3, dim=-1)]
        mixed = self._step(own, past) if now.shape[1] == 1 else self._parallel(own, inputs, past, timeline)
        return self.out(mixed.transpose(1, 2).flatten(2).to(now.dtype))

    def _step(self, own: list[Tensor], past: Tensor) -> Tensor:
        """One token, as the definition has it."""
        query, key, value = own
        entries = self.entry_norm(past[:, :, -1].to(self.slot.weight.dtype)) + self.slot.weight
        keys, values = self._key_value(entries, self.query_key_value.bias)
        return F.scaled_dot_product_attention(query, torch.cat([key, keys], 2), torch.cat([value, values], 2))

    def _parallel(self, own: list[Tensor], inputs: Tensor, past: Tensor, timeline: Timeline) -> Tensor:
        """The same for several tokens at once, without the entries; see the module's text."""
        query, key, value = own
        norm, dtype, device = self.entry_norm, self.slot.weight.dtype, past.device
        weights = timeline.consist_of(inputs.shape[1])
        inputs, past = (part - part.mean(-1, keepdim=True) for part in (inputs, past))
        variance = timeline.squares(past, inputs).clamp(min=0) / past.shape[-1]
        scale = (variance + norm.eps).rsqrt().unsqueeze(1)  # (B, 1, T, L)
        parts = torch.cat([past.flatten(1, 2), inputs], dim=1).to(dtype)
        keys, values = self._key_value(parts * norm.weight)
        slot_keys, slot_values = self._key_value((norm.bias + self.slot.weight).unsqueeze(0), self.query_key_value.bias)

        to_parts, to_slots = query @ keys.mT, query @ slot_keys.mT
        with full_precision(device):
            to_entries = torch.einsum("bhts,tls->bhtl", to_parts.to(weights.dtype), weights) * scale + to_slots
            to_itself = (query.to(weights.dtype) * key).sum(-1, keepdim=True)
            attention = (torch.cat([to_itself, to_entries], dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
            itself, entries = attention[..., :1], attention[..., 1:]
            shares = torch.einsum("bhtl,tls->bhts", entries * scale, weights)
        return itself * value + entries.to(dtype) @ slot_values + shares.to(dtype) @ values

    def _key_value(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, …) of what is not a token, by the tokens' own map."""
        width = x.shape[-1]
        both = F.linear(x, self.query_key_value.weight[width:], None if bias is None else bias[width:])
        key, value = both.chunk(2, dim=-1)
        return self._by_head(key), self._by_head(value)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TimeLocalBlock(nn.Module):
    """GPT-2's block with a timeline."""

    def __init__(self, width: int, heads: int, mlp: int, slots: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = TimelineAttention(width, heads, slots)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp)
        self.mlp_out = nn.Linear(mlp, width)

    def forward(self, x: Tensor, real: Tensor, past: Tensor, timeline: Timeline) -> tuple[Tensor, Tensor]:
        """What it makes of x (B, T, d), and its integrators after it; padding, where not `real`, leaves no trace."""
        mixed, length = [], x.shape[1]
        now, inputs = self.attention_norm(x), x.to(past.dtype) * real.unsqueeze(-1)
        whole = length - length % CHUNK
        for begin, end in ((0, whole), (whole, length)):  # all whole pieces at once, then what is left
            if begin < end:
                pieces = inputs[:, begin:end].unflatten(1, (-1, min(CHUNK, end - begin)))
                *before, past = timeline.advance(past, pieces)
                tokens = now[:, begin:end].reshape(pieces.shape)
                seen = self.attention(
                    tokens.flatten(0, 1), pieces.flatten(0, 1), torch.stack(before, dim=1).flatten(0, 1), timeline
                )
                mixed.append(seen.reshape(now[:, begin:end].shape))
        x = x + torch.cat(mixed, dim=1)
        return x + self.mlp_out(gelu_linear(self.mlp_norm(x), self.mlp_in)), past


class TimeLocalTransformer(Recurrent):
    Config = TimeLocalConfig
    config: TimeLocalConfig

    def __init__(self, config: TimeLocalConfig) -> None:
        super().__init__(config)
        sizes = config.width, config.heads, config.mlp or 4 * config.width, config.slots
        self.timeline = Timeline(config)
        self.blocks = nn.ModuleList(TimeLocalBlock(*sizes) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.initialise()

    @property
    def attention_length(self) -> int:
        return self.config.slots + 1

    @property
    def state_bytes(self) -> int:
        """Of the integrators alone: a token is a step of the recurrence, and no key or value is looked at again."""
        return super().state_bytes - self._pair_bytes * self.window

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """What reads a segment in one block, once for all blocks: that is much already."""
        for block in self.blocks:
            block.compile(*args, **kwargs)

    def start(self, batch: int) -> State:
        config, like = self.config, self.table.weight
        shape = batch, config.layers, config.slots, int(config.sharpness) + 1, config.width
        return {"integrators": like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))}

    def segment(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        """As `Recurrent` has it. One token is a step of the recurrence; more are read in parallel."""
        x = in_autocast(embed(self.table.weight, tokens))
        after = []
        for block, past in zip(self.blocks, state["integrators"].unbind(1), strict=True):
            x, past = block(x, tokens >= 0, past, self.timeline)
            after.append(past)
        return self.norm(x), {"integrators": torch.stack(after, dim=1)}, x.new_zeros(len(x), dtype=torch.float32)
