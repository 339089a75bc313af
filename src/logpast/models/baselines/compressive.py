"""Compressive Transformer (Rae et al. 2019): positions that leave Transformer-XL's cache enter a compressed one.

Each layer attends to [compressed, memory, segment]. The positions that a segment pushes out of the memory are split
into groups of `rate`. Each group becomes one position of the compressed memory, whose oldest positions are dropped.
Attention is relative as in transformer_xl.py, and a compressed position counts as one.

The token loss has no gradient for the compression, which is trained by an extra loss, the attention reconstruction
loss: in each layer the segment attends, by content only, to the old positions and to their compressed form, and the
loss is the squared difference of the results. Its gradient reaches only the compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.models.base import Recurrent, RecurrentConfig, State
from logpast.models.baselines.transformer_xl import XLBlock, causal_mask
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype, in_autocast
from logpast.util.validation import Count, PositiveInt

Compression = Literal["mean", "max", "conv", "dilated", "most_used"]


@dataclass(frozen=True)
class CompressiveConfig(RecurrentConfig):
    """Compressive Transformer."""

    memory: Count = 256
    """positions before the segment that each layer caches uncompressed"""
    compressed: Count = 256
    """compressed positions that each layer keeps before those"""
    rate: PositiveInt = 4
    """c, the number of positions that become one compressed position"""
    compression: Compression = "conv"
    """mean or max of a group, conv (one kernel over a group), dilated (several, which also see the previous group), or
    most_used (of the positions that leave the memory at a time, those that were attended to most)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window % self.rate:
            raise UserError(f"model.window ({self.window}) must be a multiple of model.rate ({self.rate})")


def as_matrix(kernel: nn.Module) -> Tensor:
    """A convolution's weights as a matrix: PyTorch's convolution, compiled, gave NaN in bf16 on a CPU."""
    assert isinstance(kernel, nn.Conv1d)
    return kernel.weight.permute(0, 2, 1).flatten(1)


class Convolution(nn.Module):
    """One kernel over each group of `rate` positions."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(width, width, rate, stride=rate, bias=False)

    def forward(self, old: Tensor) -> Tensor:
        return F.linear(old.unflatten(1, (-1, self.kernel.kernel_size[0])).flatten(2), as_matrix(self.kernel))


class DilatedConvolutions(nn.Module):
    """Kernels over two positions at distances 1, 2, 4, …, each with a residual connection; the output is the last
    position of each group.

    Together they reach back over two groups: the group itself and the previous one.
    """

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        dilations = [2**i for i in range((2 * rate - 1).bit_length())]  # they sum to 2 × rate − 1 or more
        self.kernels = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=each, bias=False) for each in dilations)

    def forward(self, old: Tensor) -> Tensor:
        x = old
        for number, kernel in enumerate(self.kernels):
            earlier = F.pad(x, (0, 0, 2**number, 0))[:, : x.shape[1]]
            x = x + F.gelu(F.linear(torch.cat([earlier, x], dim=-1), as_matrix(kernel)))
        return x[:, self.rate - 1 :: self.rate]


def pool(old: Tensor, rate: int, how: Compression) -> Tensor:
    """The mean or maximum (B, T / rate, d) of each group of positions (B, T, d)."""
    groups = old.unflatten(1, (-1, rate))
    return groups.mean(dim=2) if how == "mean" else groups.amax(dim=2)


def most_used(old: Tensor, usage: Tensor, groups: Tensor, rate: int) -> Tensor:
    """The positions with the highest usage (B, T) among the last `groups` (B,) groups of `old` (B, T, d), as many as
    there are groups.

    They keep their order and are at the end of the T / rate positions.
    """
    count, length = old.shape[1] // rate, old.shape[1]
    best = usage.masked_fill(~_last(length, groups * rate), -torch.inf).topk(count).indices
    chosen = best.masked_fill(~_last(count, groups).flip(1), -1).sort().values  # unused positions go to the front
    return old.gather(1, chosen.clamp(min=0).unsqueeze(-1).expand(-1, -1, old.shape[2]))


def _last(size: int, count: Tensor) -> Tensor:
    """(B, size): whether a position is among the last `count` (B,)."""
    return torch.arange(size, device=count.device) >= size - count.unsqueeze(1)


class CompressiveTransformer(Recurrent):
    Config = CompressiveConfig
    config: CompressiveConfig

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__(config)
        width, heads = config.width, config.heads
        self.biases = nn.Parameter(torch.empty(2, heads, 1, width // heads))  # u and v
        self.blocks = nn.ModuleList(XLBlock(width, heads, config.mlp or 4 * width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        kinds = {"conv": Convolution, "dilated": DilatedConvolutions}
        learned = kinds.get(config.compression) if config.compressed else None
        self.compressions = nn.ModuleList()
        if learned:
            self.compressions.extend(learned(width, config.rate) for _ in self.blocks)
        self.initialise()
        nn.init.normal_(self.biases, std=0.02)

    @property
    def attention_length(self) -> int:
        return self.config.compressed + self.config.memory + self.window

    def start(self, batch: int) -> State:
        config, like = self.config, self.table.weight
        none = torch.zeros(batch, dtype=torch.int64, device=like.device)
        state = {
            "memory": like.new_zeros(batch, config.layers, config.memory, config.width),
            "filled": none,
            "compressed": like.new_zeros(batch, config.layers, config.compressed, config.width),
            "squeezed": none.clone(),
        }
        if config.compression == "most_used":  # the attention that each cached position has received
            state["used"] = like.new_zeros(batch, config.layers, config.memory)
        return state

    def segment(self, tokens: Tensor, state: State, followers: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        filled, squeezed, config = state["filled"], state["squeezed"], self.config
        x = in_autocast(self.embed(tokens, followers))
        length = x.shape[1]
        # Nothing is compressed before the memory is full, so the filled parts of both caches are adjacent.
        visible = causal_mask(length, config.compressed + config.memory, filled + squeezed)
        groups = (filled + length - config.memory).clamp(0, length) // config.rate  # that leave the memory
        kept: list[State] = []
        extra = x.new_zeros(len(x), dtype=accumulation_dtype(x.dtype))
        for number, block in enumerate(self.blocks):
            assert isinstance(block, XLBlock)
            past = torch.cat([state["compressed"][:, number], state["memory"][:, number]], dim=1).to(x.dtype)
            context = torch.cat([past, x], dim=1).detach()
            used = None
            if "used" in state:
                used = attention_received(block, context, length, self.biases, visible)[:, config.compressed :]
                used = used + F.pad(state["used"][:, number], (0, length))
            layer, loss = self._update_memory(number, context, length, groups, used)
            kept.append(layer)
            extra = extra + loss
            x = block(x, past, self.biases, visible)
        after = {name: torch.stack([layer[name] for layer in kept], dim=1).to(state[name].dtype) for name in kept[0]}
        after["filled"] = (filled + length).clamp(max=config.memory)
        after["squeezed"] = (squeezed + groups).clamp(max=config.compressed)
        return self.norm(x), after, extra

    def _update_memory(
        self, number: int, context: Tensor, length: int, groups: Tensor, used: Tensor | None
    ) -> tuple[State, Tensor]:
        """A layer's caches after a segment, and the reconstruction loss (B,).

        Args:
            number: the layer.
            context: (B, K, d), the caches before the segment and the segment's own positions, without gradient.
            length: the segment's length.
            groups: (B,), the number of full groups that leave the memory.
            used: (B, memory + length), the attention that each position has received.
        """
        squeezed, rest = context.tensor_split([self.config.compressed], dim=1)
        whole = length - length % self.config.rate  # only the last segment of a text has a remainder
        old, new, loss = rest[:, length - whole : length], rest[:, :0], context.new_zeros(())
        if self.config.compressed and whole:
            real = _last(whole, groups * self.config.rate)  # incomplete groups are dropped
            old = old.masked_fill(~real.unsqueeze(-1), 0)
            new = self._compress(number, old, groups, None if used is None else used[:, length - whole :])
            if self.compressions and torch.is_grad_enabled():
                block = self.blocks[number]
                assert isinstance(block, XLBlock)
                loss = reconstruction_loss(new, old, groups, context[:, -length:], block, self.biases)
        layer = {
            "memory": rest[:, length:],
            "compressed": torch.cat([squeezed, new.detach()], dim=1)[:, new.shape[1] :],
        }
        if used is not None:
            layer["used"] = used[:, length:]
        return layer, loss

    def _compress(self, number: int, old: Tensor, groups: Tensor, used: Tensor | None) -> Tensor:
        """The compressed form (B, T / rate, d) of a layer's old positions (B, T, d)."""
        how, rate = self.config.compression, self.config.rate
        if used is not None:  # a position was visible to all queries from itself to the end of the segment
            queries = torch.arange(used.shape[1], 0, -1, device=used.device)
            return most_used(old, (used / queries)[:, : old.shape[1]], groups, rate)
        return self.compressions[number](old) if self.compressions else pool(old, rate, how)


@torch.no_grad()
def attention_received(block: XLBlock, context: Tensor, length: int, biases: Tensor, visible: Tensor) -> Tensor:
    """(B, K): the attention to each position of the context (B, K, d), summed over its last `length` positions and
    averaged over heads.

    The block computes the same weights, but does not return them.
    """
    attention, context = block.attention, block.attention_norm(context)
    key = attention.split_heads(attention.key_value(context).chunk(2, dim=-1)[0])
    return attention.attention_weights(context, key, length, biases, visible).mean(dim=1).sum(dim=1)


def reconstruction_loss(new: Tensor, old: Tensor, groups: Tensor, x: Tensor, block: XLBlock, biases: Tensor) -> Tensor:
    """(B,): mean squared difference of the attention of x (B, T, d) to old positions and to their compressed form.

    Only the last `groups` (B,) groups are real; the loss is 0 where there are none. Gradients reach only `new`.
    """
    any_real = groups > 0
    some = torch.where(any_real, groups, new.shape[1])  # attention to no position would be NaN
    found = content_attention(x, new, _last(new.shape[1], some), block, biases)
    wanted = content_attention(x, old, _last(old.shape[1], some * (old.shape[1] // new.shape[1])), block, biases)
    dtype = accumulation_dtype(x.dtype)
    return torch.where(any_real, (found.to(dtype) - wanted.to(dtype)).square().mean(dim=(1, 2, 3)), 0)


def content_attention(x: Tensor, past: Tensor, real: Tensor, block: XLBlock, biases: Tensor) -> Tensor:
    """A block's attention (B, heads, T, d / heads) to the real (B, K) positions of `past` (B, K, d), without their
    distances; its parameters get no gradient.
    """
    attention = block.attention
    query = attention.split_heads(_frozen(attention.query, _frozen(block.attention_norm, x)))
    both = _frozen(attention.key_value, _frozen(block.attention_norm, past))
    key, value = (attention.split_heads(part) for part in both.chunk(2, dim=-1))
    scores = (query + biases[0].detach()) @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~real[:, None, None], -torch.inf)
    return scores.softmax(dim=-1, dtype=accumulation_dtype(scores.dtype)).to(value.dtype) @ value


def _frozen(layer: nn.Linear | nn.LayerNorm, x: Tensor) -> Tensor:
    """layer(x), without gradients for the layer's parameters."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    return F.linear(x, weight, bias)
