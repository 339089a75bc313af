"""Recurrent Memory Transformer (Bulatov et al. 2022): a few vectors carry information from segment to segment.

    sequence = [memory (n)] + [tokens of the segment (m)] + [memory (n)]
                read                                         write

The same n vectors are at both ends. Tokens attend to the first copy. The second copy attends to the whole segment, and
the decoder's output for it is the memory of the next segment. In training, gradients flow through the memory across the
segments of a step.

- The memory positions of one end attend to each other in both directions; only tokens are causal, as in the paper.
- The memory is taken after the final LayerNorm. The paper's blocks end with a LayerNorm; ours begin with one, and the
  residual stream grows with depth, so without the final LayerNorm the memory would grow with every segment.
- The first memory is learned. Its initial scale is that of GPT-2's embeddings.
- A segment shorter than m must be the last of a text: the memory after it is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logpast.kernels.dispatch import split_heads
from logpast.models.base import Recurrent, RecurrentConfig, State
from logpast.models.baselines.transformer_xl import (
    RelativeAttention,
    TransformerXL,
    TransformerXLConfig,
    relative_shift,
)
from logpast.models.decoder import Attention, Block, KeyValueCache, run_blocks
from logpast.util.precision import accumulation_dtype, in_autocast
from logpast.util.validation import PositiveInt


@dataclass(frozen=True)
class RecurrentMemoryConfig(RecurrentConfig):
    """Recurrent Memory Transformer."""

    segments: PositiveInt = 4
    """consecutive segments in a training step; gradients flow across them through the memory"""
    memory_tokens: PositiveInt = 10
    """n, the number of vectors that are carried from segment to segment"""


class MemoryAttention(Attention):
    """Self-attention that is causal for tokens and bidirectional within the memory at each end."""

    def __init__(self, width: int, heads: int, memory_tokens: int) -> None:
        super().__init__(width, heads)
        self.memory_tokens = memory_tokens

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Computed explicitly: with PyTorch's attention, compiled gradients were NaN on a GPU at some lengths."""
        query, key, value = split_heads(self.query_key_value(x), self.heads)
        scores = query @ key.mT
        scores = scores.to(accumulation_dtype(scores.dtype)) * query.shape[-1] ** -0.5
        visible = segment_mask(self.memory_tokens, x.shape[1] - 2 * self.memory_tokens, x.device)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)


class MemoryBlock(Block):
    """GPT-2's block with memory at both ends of the sequence."""

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

    def segment(self, tokens: Tensor, state: State, followers: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        n, length = self.config.memory_tokens, tokens.shape[1]
        memory = state["memory_tokens"]
        read, own, write = self.positions.weight.split([n, self.window, n])  # the last n, however short the segment
        x = torch.cat([memory, self.embed(tokens, followers), memory], dim=1)
        x = x + torch.cat([read, own[:length], write])
        hidden = run_blocks(self.blocks, x, self.norm, skip=n)
        after = {"memory_tokens": hidden[:, length:].to(memory.dtype)}
        return hidden[:, :length], after, x.new_zeros(len(x), dtype=torch.float32)


@dataclass(frozen=True)
class TransformerXLRecurrentMemoryConfig(TransformerXLConfig):
    """Transformer-XL with the memory of the Recurrent Memory Transformer."""

    segments: PositiveInt = 4
    """consecutive segments in a training step; gradients flow across them through the memory tokens"""
    memory_tokens: PositiveInt = 10
    """n, the number of vectors that are carried from segment to segment"""


class MemoryRelativeAttention(RelativeAttention):
    """Relative attention in which later positions, which memory positions may see, count as distance 0."""

    def shift(self, scores: Tensor) -> Tensor:
        length, size = scores.shape[-2:]
        position = torch.arange(size, device=scores.device)
        later = position > position[size - length :].unsqueeze(1)
        return torch.where(later, scores[..., -1:], relative_shift(scores))


class TransformerXLRecurrentMemory(TransformerXL):
    """Transformer-XL's cache and recurrent memory.

        context = [cache (up to `memory`)] + [memory (n)] + [tokens of the segment] + [memory (n)]

    Distances are counted along the context, as in the paper's code: a cached token is n positions farther away than in
    the text. The paper does not say what is cached or what memory positions attend to. Here only tokens are cached, so
    `memory` means the same as in Transformer-XL, and earlier memory tokens act only through the recurrence, which has a
    gradient. Memory positions do not attend to the cache, the default of the authors' code: the previous segment's
    memory has attended to those tokens.
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
        return self.memory_length + self.config.memory_tokens + self.window

    def start(self, batch: int) -> State:
        return super().start(batch) | {"memory_tokens": self.first_memory.expand(batch, -1, -1)}

    def segment(self, tokens: Tensor, state: State, followers: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        memory, filled = state["memory_tokens"], state["filled"]
        x = in_autocast(torch.cat([memory, self.embed(tokens, followers), memory], dim=1))
        n, length = memory.shape[1], tokens.shape[1]
        own = segment_mask(n, length, filled.device).expand(len(filled), 1, -1, -1)
        visible = torch.cat([cache_mask(n, length, state["memory"].shape[2], filled), own], dim=-1)
        x, after = self.run_blocks(x, state, visible, cached=slice(n, n + length))
        hidden = self.norm(x[:, n:])
        after["memory_tokens"] = hidden[:, length:].to(memory.dtype)
        return hidden[:, :length], after, x.new_zeros(len(x), dtype=torch.float32)


def cache_mask(n: int, length: int, memory: int, filled: Tensor) -> Tensor:
    """(B, 1, n + length + n, memory): tokens see the filled part of the cache, memory positions none of it."""
    position = torch.arange(n + length + n, device=filled.device).unsqueeze(1)
    real = torch.arange(memory, device=filled.device) >= memory - filled.view(-1, 1, 1, 1)
    return (n <= position) & (position < n + length) & real


def segment_mask(n: int, length: int, device: torch.device) -> Tensor:
    """(P, P), P = n + length + n: a token sees up to itself, a memory position up to the end of its block."""
    position = torch.arange(n + length + n, device=device)
    last = torch.where(position < n, n - 1, torch.where(position < n + length, position, n + length + n - 1))
    return position <= last.unsqueeze(1)
