"""Recurrent Memory Transformer (Bulatov et al. 2022): a few vectors carry the past from segment to segment.

    sequence = [memory (n)] + [tokens of the segment (m)] + [memory (n)]
                read                                         write

The same n vectors stand at both ends. Tokens read the first; the last see the whole segment, and what the decoder makes
of them is the next segment's memory. In training, gradients flow back through it over the segments of a step.

- A memory place sees all of its own end, before and after it: causality binds only the tokens, as in the paper.
- What is carried on is taken after the final LayerNorm. The paper's blocks end with one; ours begin with one, and what
  runs between them grows with depth, so that a memory from before it would grow with every segment.
- The first memory is learned, and begins as small as GPT-2's embeddings.
- What a short segment writes is meant for the end of a text: nothing is read after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logpast.memory.naive import embed
from logpast.models.base import Recurrent, RecurrentConfig, State
from logpast.models.baselines.transformer_xl import RelativeAttention, TransformerXL, TransformerXLConfig, by_place
from logpast.models.decoder import Attention, Block, KeyValueCache, run_blocks
from logpast.util.precision import accumulation_dtype, in_autocast


@dataclass(frozen=True)
class RecurrentMemoryConfig(RecurrentConfig):
    """Recurrent Memory Transformer."""

    segments: int = 4
    """consecutive segments in a training step, across which gradients flow through the memory"""
    memory_tokens: int = 10
    """n, the vectors that are carried from segment to segment"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(memory_tokens=1)


class MemoryAttention(Attention):
    """Causal self-attention, but for the memory at both ends, which sees all of its own end."""

    def __init__(self, width: int, heads: int, memory_tokens: int) -> None:
        super().__init__(width, heads)
        self.memory_tokens = memory_tokens

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Spelled out: with PyTorch's own attention, compiled gradients were NaN on a GPU at some lengths."""
        by_head = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = by_head.unbind()
        scores = query @ key.mT
        scores = scores.to(accumulation_dtype(scores.dtype)) * query.shape[-1] ** -0.5
        seen = segment_seen(self.memory_tokens, x.shape[1] - 2 * self.memory_tokens, x.device)
        shares = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return (shares.to(value.dtype) @ value).transpose(1, 2).flatten(2)


class MemoryBlock(Block):
    """GPT-2's block between two memories."""

    def __init__(self, width: int, heads: int, mlp: int, memory_tokens: int) -> None:
        super().__init__(width, heads, mlp)
        self.attention = MemoryAttention(width, heads, memory_tokens)


class RecurrentMemoryTransformer(Recurrent):
    Config = RecurrentMemoryConfig
    config: RecurrentMemoryConfig

    def __init__(self, config: RecurrentMemoryConfig) -> None:
        super().__init__(config)
        width, heads, n = config.width, config.heads, config.memory_tokens
        self.first_memory = nn.Parameter(torch.empty(n, width))
        self.positions = nn.Embedding(n + config.window + n, width)
        self.blocks = nn.ModuleList(MemoryBlock(width, heads, config.mlp or 4 * width, n) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.initialise()
        nn.init.normal_(self.first_memory, std=0.02)

    @property
    def attention_length(self) -> int:
        return self.config.memory_tokens + self.window

    def start(self, batch: int) -> State:
        return {"memory_tokens": self.first_memory.expand(batch, -1, -1)}

    def segment(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        n, length = self.config.memory_tokens, tokens.shape[1]
        memory = state["memory_tokens"]
        read, own, write = self.positions.weight.split([n, self.window, n])  # however long, it is written at the end
        x = torch.cat([memory, embed(self.table.weight, tokens), memory], dim=1)
        x = x + torch.cat([read, own[:length], write])
        hidden = run_blocks(self.blocks, x, self.norm, skip=n)
        after = {"memory_tokens": hidden[:, length:].to(memory.dtype)}
        return hidden[:, :length], after, x.new_zeros(len(x), dtype=torch.float32)


@dataclass(frozen=True)
class TransformerXLRecurrentMemoryConfig(TransformerXLConfig):
    """Transformer-XL with the memory of the Recurrent Memory Transformer."""

    segments: int = 4
    """consecutive segments in a training step, across which gradients flow through the memory tokens"""
    memory_tokens: int = 10
    """n, the vectors that are carried from segment to segment"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(memory_tokens=1)


class MemoryRelativeAttention(RelativeAttention):
    """Attention by distance in which some places see later ones: those count as being at distance 0."""

    def of_distances(self, scores: Tensor) -> Tensor:
        length, size = scores.shape[-2:]
        place = torch.arange(size, device=scores.device)
        later = place > place[size - length :].unsqueeze(1)
        return torch.where(later, scores[..., -1:], by_place(scores))


class TransformerXLRecurrentMemory(TransformerXL):
    """Both together.

        context = [cache (up to `memory`)] + [memory (n)] + [tokens of the segment] + [memory (n)]

    Distances are counted along it, as the paper's code does: a cached token is n places farther than it was in the
    text. Where the paper is silent: only tokens are cached, so that `memory` counts what it counts in Transformer-XL,
    and the past memory has one way into the present, the one with a gradient; and memory places do not see the cache,
    the default of the authors' code: they have met those tokens in the segment before.
    """

    Config = TransformerXLRecurrentMemoryConfig
    config: TransformerXLRecurrentMemoryConfig

    def __init__(self, config: TransformerXLRecurrentMemoryConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.attention = MemoryRelativeAttention(config.width, config.heads)
        self.first_memory = nn.Parameter(torch.empty(config.memory_tokens, config.width))
        self.initialise()
        nn.init.normal_(self.first_memory, std=0.02)

    @property
    def attention_length(self) -> int:
        return self.remembered + self.config.memory_tokens + self.window

    def start(self, batch: int) -> State:
        return super().start(batch) | {"memory_tokens": self.first_memory.expand(batch, -1, -1)}

    def segment(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        memory, filled = state["memory_tokens"], state["filled"]
        x = in_autocast(torch.cat([memory, embed(self.table.weight, tokens), memory], dim=1))
        n, length = memory.shape[1], tokens.shape[1]
        seen = segment_seen(n, length, filled.device).expand(len(filled), 1, -1, -1)
        visible = torch.cat([cache_seen(n, length, state["memory"].shape[2], filled), seen], dim=-1)
        x, after = self.through(x, state, visible, own=slice(n, n + length))
        hidden = self.norm(x[:, n:])
        after["memory_tokens"] = hidden[:, length:].to(memory.dtype)
        return hidden[:, :length], after, x.new_zeros(len(x), dtype=torch.float32)


def cache_seen(n: int, length: int, remembered: int, filled: Tensor) -> Tensor:
    """(B, 1, n + length + n, remembered): tokens see what the cache really holds, memory places nothing of it."""
    place = torch.arange(n + length + n, device=filled.device).unsqueeze(1)
    real = torch.arange(remembered, device=filled.device) >= remembered - filled.view(-1, 1, 1, 1)
    return (n <= place) & (place < n + length) & real


def segment_seen(n: int, length: int, device: torch.device) -> Tensor:
    """(P, P), P = n + length + n: a token sees up to itself, a memory place up to the end of its block."""
    place = torch.arange(n + length + n, device=device)
    last = torch.where(place < n, n - 1, torch.where(place < n + length, place, n + length + n - 1))
    return place <= last.unsqueeze(1)
