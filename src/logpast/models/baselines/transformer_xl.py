"""Transformer-XL (Dai et al. 2019): each layer also attends to its own inputs in earlier segments.

A layer's inputs at the last `memory` positions are cached without gradient and precede the segment's. Cached positions
move, so attention uses relative positions: with q, k the query and key of positions i and j, r the projected sinusoid
of the distance i − j, and two biases u and v that all layers share,

    score = ((q + u)·k + (q + v)·r) / √(d per head)

The blocks are GPT-2's, with LayerNorm first, as in the other models of this package; the paper has LayerNorm last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import gelu_linear
from logpast.models.base import Recomputable, Recurrent, RecurrentConfig, State
from logpast.util.precision import accumulation_dtype, in_autocast
from logpast.util.validation import Count


@dataclass(frozen=True)
class TransformerXLConfig(RecurrentConfig):
    """Transformer-XL."""

    memory: Count = 256
    """positions before the segment that each layer caches in training"""
    memory_when_scoring: Count | None = None
    """the same for scoring and generation; by default as in training"""


class RelativeAttention(nn.Module):
    """Causal attention with relative positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.distance = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, context: Tensor, length: int, biases: Tensor, visible: Tensor) -> Tensor:
        """The last `length` positions of the context (B, K, d) attend to the `visible` (B, 1, length, K) ones."""
        key, value = (self.split_heads(part) for part in self.key_value(context).chunk(2, dim=-1))
        weights = self.attention_weights(context, key, length, biases, visible)
        return self.out((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))

    def attention_weights(self, context: Tensor, key: Tensor, length: int, biases: Tensor, visible: Tensor) -> Tensor:
        """(B, heads, length, K), which sum to 1 over K.

        Computed explicitly: with PyTorch's memory-efficient attention, losses became NaN on a GPU.
        """
        size = context.shape[1]
        query = self.split_heads(self.query(context[:, size - length :]))
        distances = self.split_heads(self.distance(sinusoids(size, context)).unsqueeze(0))
        to_content, to_distance = biases
        by_content = (query + to_content) @ key.mT
        by_distance = self.shift((query + to_distance) @ distances.mT)
        dtype = accumulation_dtype(by_content.dtype)
        scores = (by_content.to(dtype) + by_distance.to(dtype)) * query.shape[-1] ** -0.5
        return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)

    def shift(self, scores: Tensor) -> Tensor:
        """Scores (…, T, K) by distance, farthest first, as scores by key."""
        return relative_shift(scores)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, heads, T, d per head)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def sinusoids(size: int, like: Tensor) -> Tensor:
    """(size, d): sine and cosine of the distances size − 1 … 0 at frequencies 10000^(−2i/d)."""
    width = like.shape[-1]
    distance = torch.arange(size - 1, -1, -1, device=like.device, dtype=torch.float32)
    frequency = 10000 ** -(torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].to(like.dtype)


def relative_shift(scores: Tensor) -> Tensor:
    """Scores (…, T, K) by distance, farthest first, as scores by key: each row is shifted until distance 0 is at its
    own position.

    Entries after a row's own position are meaningless; the causal mask hides them.
    """
    *batch, length, size = scores.shape
    padded = F.pad(scores, (1, 0)).reshape(*batch, size + 1, length)
    return padded[..., 1:, :].reshape(*batch, length, size)


class XLBlock(Recomputable):
    """GPT-2's block with a memory of earlier segments."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = RelativeAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp)
        self.mlp_out = nn.Linear(mlp, width)

    def forward(self, x: Tensor, memory: Tensor, biases: Tensor, visible: Tensor) -> Tensor:
        context = self.attention_norm(torch.cat([memory, x], dim=1))
        x = x + self.attention(context, x.shape[1], biases, visible)
        return x + self.mlp_out(gelu_linear(self.mlp_norm(x), self.mlp_in))


class TransformerXL(Recurrent):
    Config = TransformerXLConfig
    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        width, heads = config.width, config.heads
        self.biases = nn.Parameter(torch.empty(2, heads, 1, width // heads))  # u and v
        self.blocks = nn.ModuleList(XLBlock(width, heads, config.mlp or 4 * width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.initialise()
        nn.init.normal_(self.biases, std=0.02)

    @property
    def memory_length(self) -> int:
        """Positions that each layer caches; scoring may use another number than training."""
        config = self.config
        if self.training or config.memory_when_scoring is None:
            return config.memory
        return config.memory_when_scoring

    @property
    def attention_length(self) -> int:
        return self.memory_length + self.window

    def start(self, batch: int) -> State:
        like = self.table.weight
        memory = like.new_zeros(batch, self.config.layers, self.memory_length, self.config.width)
        return {"memory": memory, "filled": torch.zeros(batch, dtype=torch.int64, device=like.device)}

    def segment(self, tokens: Tensor, state: State, followers: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        x = in_autocast(self.embed(tokens, followers))
        visible = causal_mask(x.shape[1], state["memory"].shape[2], state["filled"])
        x, after = self.run_blocks(x, state, visible)
        return self.norm(x), after, x.new_zeros(len(x), dtype=torch.float32)

    def run_blocks(self, x: Tensor, state: State, visible: Tensor, cached: slice = slice(None)) -> tuple[Tensor, State]:
        """The blocks' output for x (B, T, d), and the state after it; the positions `cached` of x enter the memory."""
        memory, filled, kept = state["memory"], state["filled"], []
        for number, block in enumerate(self.blocks):
            past, new = memory[:, number].to(x.dtype), x[:, cached]
            kept.append(torch.cat([past, new], dim=1)[:, new.shape[1] :].detach())
            x = block(x, past, self.biases, visible)
        filled = (filled + new.shape[1]).clamp(max=memory.shape[2])
        return x, {"memory": torch.stack(kept, dim=1).to(memory.dtype), "filled": filled}


def causal_mask(length: int, memory: int, filled: Tensor) -> Tensor:
    """(B, 1, length, memory + length): each position sees the `filled` (B,) part of the memory and up to itself."""
    position = torch.arange(memory + length, device=filled.device)
    causal = position <= memory + torch.arange(length, device=filled.device).unsqueeze(1)
    real = position >= memory - filled.unsqueeze(1)
    return (causal & real.unsqueeze(1)).unsqueeze(1)
