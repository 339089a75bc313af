"""The time-local transformer (Dickson et al. 2025): every layer attends to a compressed timeline of its input.

Entry i of a layer's timeline is a weighted average of the layer's inputs around τ*_i tokens ago; with u = n/τ*,

    f̃(t, τ*) = g · Σ_{n ≥ 1} (u e^(1−u))^k · x(t − n),        τ*_i = first_peak · (1 + spacing)^(i−1),

filters.py's Φ up to a constant factor. A token attends only to itself and to the L entries.

**The recurrence.** The Laplace transform of the past, F(s) = Σ e^(−sn) x(t − n) at s = k/τ*, is a leaky integrator, and
Post's inversion formula is its k-th derivative, f̃ ∝ F⁽ᵏ⁾(s). The usual method approximates that derivative by finite
differences between neighbouring s. With wide spacing, this shifts the peaks (to 2.45 τ* for k = 8 and spacing 1/3);
with narrow spacing, the differences cancel (at spacing .05 the terms are 6,300 times their sum). Here each entry stores
its derivatives. With the j-th as E_j = g Σ (e·u)^j e^(−ku) x(t − n), j = 0 … k, a token is added to E_0 only, and the
binomial theorem gives the effect of p tokens:

    E_j ← e^(−kp/τ*) Σ_{i ≤ j} C(j, i) (e·p/τ*)^(j−i) E_i,        f̃ = E_k.

This is exact for any p, and no factor is negative, so float32 is enough. It needs k + 1 vectors per entry. The usual
method needs one per entry and 2k more in total, so this one suits small k.

**Two forms.** A segment of one token is a step of the recurrence. A longer one is processed in parallel, in chunks of
`CHUNK` tokens: a causal convolution with the impulse response, plus the decayed integrators from before the chunk.
Neither the entries (B, T, L, d) nor their keys and values are computed. An entry is a fixed weighted sum of a few
source vectors (the chunk's inputs and the integrators before it), and LayerNorm is linear except for one scale per
entry. So the sources are projected to keys and values and multiplied with the queries; the fixed weights turn these
products into the scores of the entries, and the attention to entries into attention to the sources. The scale comes
from inner products between the sources.

Differences from the paper or its public code ("theirs"), and choices where they say nothing:
- No entry contains the current token, because it is attended to anyway; all of theirs do.
- g gives each filter unit energy (sum of squares), so that the entries of unrelated inputs are as large as the inputs.
  An average over thousands of tokens would be small compared with LayerNorm's epsilon.
- Entries have their own LayerNorm and share the projection to keys and values with the token, as theirs do. A learned
  vector per layer and slot, added after LayerNorm, identifies the entry; their attention is by content only.
- Entries without any input yet are zero vectors and are attended to. Padding is in no entry of any layer.
- Blocks, final LayerNorm and head are GPT-2's, as in the other models of this package. There are no positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Le, Lt
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import gelu_linear
from logpast.models.base import Recomputable, Recurrent, RecurrentConfig, State
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype, full_precision, in_autocast
from logpast.util.validation import PositiveFloat, PositiveInt

CHUNK = 64  # tokens per chunk: with fewer the integrators are projected more often, with more the scores are larger
Sharpness = Annotated[int, Ge(1), Le(16)]  # the state grows with k; for sharper filters use log_memory
FARTHEST = 2**30  # the last peak, in tokens


@dataclass(frozen=True)
class TimeLocalConfig(RecurrentConfig):
    """The time-local transformer."""

    slots: PositiveInt = 30
    """L, the number of entries of each layer's timeline"""
    sharpness: Sharpness = 4
    """k: larger values give narrower filters and a larger state (k + 1 vectors per entry)"""
    spacing: PositiveFloat = 1 / 3
    """c: each peak is 1 + c times as far back as the one before; 30 slots reach 4,200 tokens"""
    first_peak: Annotated[float, Ge(1), Lt(math.inf)] = 1.0
    """τ* of the nearest entry, in tokens"""

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """The recurrence, shared by all layers. It has no parameters, only constants, which are rebuilt in full precision
    whenever the module is moved or cast.

    `transition[p]` (L, k+1, k+1) is the effect of p tokens on the integrators and `gain` (L,) the factor with which an
    input is added to the first of them. `weights[t]` (L, L(k+1) + CHUNK) are the weights of the sources in the entries
    at position t of a chunk: of all integrators before the chunk, and of its inputs.
    """

    transition: Tensor
    gain: Tensor
    weights: Tensor

    def __init__(self, config: TimeLocalConfig) -> None:
        super().__init__()
        self.peaks, self.sharpness = config.peaks, int(config.sharpness)
        for name in ("transition", "gain", "weights"):
            self.register_buffer(name, torch.empty(0, dtype=torch.get_default_dtype()), persistent=False)
        self.build_constants()

    def advance(self, past: Tensor, chunks: Tensor) -> list[Tensor]:
        """The integrators (B, L, k+1, d) before the first of the `chunks` (B, P, T, d), T ≤ CHUNK, and after each."""
        length = chunks.shape[2]
        response = self.transition[1 : length + 1, :, :, 0].flip(0) * self.gain[:, None]
        found = [past]
        with full_precision(past.device):
            for added in torch.einsum("qlj,bpqd->pbljd", response, chunks).unbind():
                found.append(torch.einsum("lji,blid->bljd", self.transition[length], found[-1]) + added)
        return found

    def source_weights(self, length: int) -> Tensor:
        """(T, L, L(k+1) + T): the weights of the integrators before a chunk and of its inputs in the entries."""
        return self.weights[:length, :, : self.weights.shape[2] - CHUNK + length]

    def squared_norms(self, past: Tensor, inputs: Tensor) -> Tensor:
        """|f̃|² (B, T, L) of all entries, from inner products: the entries would be d times as large."""
        length = inputs.shape[1]
        of_past = self.transition[:length, :, -1]  # (T, L, k+1)
        of_inputs = self.source_weights(length)[..., -length:]  # (T, L, T)
        with full_precision(past.device):
            among_past = torch.einsum("tli,blij->btlj", of_past, past @ past.mT)
            between = torch.einsum("tlq,bliq->btli", of_inputs, torch.einsum("blid,bqd->bliq", past, inputs))
            among_inputs = torch.einsum("tlq,bqr->btlr", of_inputs, inputs @ inputs.mT)
            return ((among_past + 2 * between) * of_past).sum(-1) + (among_inputs * of_inputs).sum(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.build_constants()
        return result

    def build_constants(self) -> None:
        """Computed in float64: a cast of the model must not round the constants."""
        device, dtype = self.transition.device, accumulation_dtype(self.transition.dtype)
        transition, gain = transition_of(self.peaks, self.sharpness, CHUNK), gain_of(self.peaks, self.sharpness)
        slots, orders = transition.shape[1:3]
        of_past = np.einsum("tli,lm->tlmi", transition[:CHUNK, :, -1], np.eye(slots))
        of_past = of_past.reshape(CHUNK, slots, slots * orders)
        lag = np.maximum(np.arange(CHUNK)[:, None] - np.arange(CHUNK), 0)  # at lag 0 the impulse response is 0
        of_inputs = (transition[..., -1, 0] * gain)[lag].transpose(0, 2, 1)
        weights = np.concatenate([of_past, of_inputs], axis=2)
        self.transition, self.gain, self.weights = (
            torch.from_numpy(constant).to(dtype).to(device) for constant in (transition, gain, weights)
        )


def transition_of(peaks: NDArray[np.float64], sharpness: int, longest: int) -> NDArray[np.float64]:
    """(longest + 1, L, k+1, k+1): the effect of 0, 1, … tokens on the integrators; see the module docstring."""
    time = np.arange(longest + 1)[:, None, None, None] / peaks[:, None, None]
    order = np.arange(sharpness + 1)
    above = order[:, None] - order  # j − i
    binomial = np.array([[math.comb(int(j), int(i)) for i in order] for j in order], dtype=np.float64)
    return binomial * np.exp(-sharpness * time) * (math.e * time) ** np.maximum(above, 0)


def gain_of(peaks: NDArray[np.float64], sharpness: int) -> NDArray[np.float64]:
    """(L,): the factor that gives each impulse response unit energy; far filters are sampled at every n-th lag."""
    stride = np.maximum(1.0, peaks / 256)[:, None]
    time = np.arange(1, 2049) * stride / peaks[:, None]
    shape = np.exp(sharpness * (np.log(time) + 1 - time))
    return np.asarray(((shape**2).sum(axis=1) * stride[:, 0]) ** -0.5)


class TimelineAttention(nn.Module):
    """Each token attends to itself and to the timeline of the tokens before it."""

    def __init__(self, width: int, heads: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.entry_norm = nn.LayerNorm(width)
        self.slot = nn.Embedding(slots, width)
        self.out = nn.Linear(width, width)

    def forward(self, now: Tensor, inputs: Tensor, past: Tensor, timeline: Timeline) -> Tensor:
        """For a chunk: normed tokens `now` (B, T, d), their `inputs` to the timeline, and the integrators `past`."""
        own = [self._split_heads(part) for part in self.query_key_value(now).chunk(3, dim=-1)]
        mixed = self._step(own, past) if now.shape[1] == 1 else self._parallel(own, inputs, past, timeline)
        return self.out(mixed.transpose(1, 2).flatten(2).to(now.dtype))

    def _step(self, own: list[Tensor], past: Tensor) -> Tensor:
        """One token, as in the definition."""
        query, key, value = own
        entries = self.entry_norm(past[:, :, -1].to(self.slot.weight.dtype)) + self.slot.weight
        keys, values = self._key_value(entries, self.query_key_value.bias)
        return F.scaled_dot_product_attention(query, torch.cat([key, keys], 2), torch.cat([value, values], 2))

    def _parallel(self, own: list[Tensor], inputs: Tensor, past: Tensor, timeline: Timeline) -> Tensor:
        """The same for several tokens at once, without computing the entries; see the module docstring."""
        query, key, value = own
        norm, dtype, device = self.entry_norm, self.slot.weight.dtype, past.device
        weights = timeline.source_weights(inputs.shape[1])
        inputs, past = (part - part.mean(-1, keepdim=True) for part in (inputs, past))
        variance = timeline.squared_norms(past, inputs).clamp(min=0) / past.shape[-1]
        scale = (variance + norm.eps).rsqrt().unsqueeze(1)  # (B, 1, T, L)
        sources = torch.cat([past.flatten(1, 2), inputs], dim=1).to(dtype)
        keys, values = self._key_value(sources * norm.weight)
        slot_keys, slot_values = self._key_value((norm.bias + self.slot.weight).unsqueeze(0), self.query_key_value.bias)

        to_sources, to_slots = query @ keys.mT, query @ slot_keys.mT
        with full_precision(device):
            to_entries = torch.einsum("bhts,tls->bhtl", to_sources.to(weights.dtype), weights) * scale + to_slots
            to_itself = (query.to(weights.dtype) * key).sum(-1, keepdim=True)
            attention = (torch.cat([to_itself, to_entries], dim=-1) * query.shape[-1] ** -0.5).softmax(-1)
            itself, entries = attention[..., :1], attention[..., 1:]
            from_sources = torch.einsum("bhtl,tls->bhts", entries * scale, weights)
        return itself * value + entries.to(dtype) @ slot_values + from_sources.to(dtype) @ values

    def _key_value(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, heads, …) of entries or their sources, with the tokens' projection."""
        width = x.shape[-1]
        both = F.linear(x, self.query_key_value.weight[width:], None if bias is None else bias[width:])
        key, value = both.chunk(2, dim=-1)
        return self._split_heads(key), self._split_heads(value)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TimeLocalBlock(Recomputable):
    """GPT-2's block with attention to a timeline."""

    def __init__(self, width: int, heads: int, mlp: int, slots: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = TimelineAttention(width, heads, slots)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp)
        self.mlp_out = nn.Linear(mlp, width)

    def forward(self, x: Tensor, real: Tensor, past: Tensor, timeline: Timeline) -> tuple[Tensor, Tensor]:
        """The output for x (B, T, d) and the integrators after it; padding, where not `real`, is no input to them."""
        mixed, length = [], x.shape[1]
        now, inputs = self.attention_norm(x), x.to(past.dtype) * real.unsqueeze(-1)
        whole = length - length % CHUNK
        for begin, end in ((0, whole), (whole, length)):  # all full chunks at once, then the rest
            if begin < end:
                chunks = inputs[:, begin:end].unflatten(1, (-1, min(CHUNK, end - begin)))
                *before, past = timeline.advance(past, chunks)
                tokens = now[:, begin:end].reshape(chunks.shape)
                attended = self.attention(
                    tokens.flatten(0, 1), chunks.flatten(0, 1), torch.stack(before, dim=1).flatten(0, 1), timeline
                )
                mixed.append(attended.reshape(now[:, begin:end].shape))
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
        """Bytes of the integrators: a token is a step of the recurrence, so no keys and values are kept."""
        return super().state_bytes - self._pair_bytes * self.window

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each block on its own: the whole segment takes too long to compile."""
        for block in self.blocks:
            block.compile(*args, **kwargs)

    def start(self, batch: int) -> State:
        config, like = self.config, self.table.weight
        shape = batch, config.layers, config.slots, int(config.sharpness) + 1, config.width
        return {"integrators": like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))}

    def segment(self, tokens: Tensor, state: State, followers: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        """One token is a step of the recurrence; more are processed in parallel."""
        x = in_autocast(self.embed(tokens, followers))
        after = []
        for block, past in zip(self.blocks, state["integrators"].unbind(1), strict=True):
            x, past = block(x, tokens >= 0, past, self.timeline)
            after.append(past)
        return self.norm(x), {"integrators": torch.stack(after, dim=1)}, x.new_zeros(len(x), dtype=torch.float32)
