"""Compressive Transformer: what Transformer-XL's cache forgets is kept at a lower rate in a second one.

Each layer attends to [compressed, memory, segment]. The positions that a segment pushes out of the memory are cut into
groups of `rate`, and each group becomes one place of the second cache, whose own oldest places are forgotten. Attention
goes by distance as in transformer_xl.py, and a compressed place counts as one place.

The cost of the tokens does not teach the compression. It learns to keep what attention would have found: for each layer
the segment attends, by content alone, to the old positions and to what became of them, and the squared difference is
the extra loss. All but the compression is held still there, so this loss in turn teaches nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.memory.naive import embed
from logpast.models.base import Recurrent, RecurrentConfig, State
from logpast.models.baselines.transformer_xl import XLBlock, seen_by_each
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype, in_autocast

Compression = Literal["mean", "max", "conv", "dilated", "most_used"]


@dataclass(frozen=True)
class CompressiveConfig(RecurrentConfig):
    """Compressive Transformer."""

    memory: int = 256
    """positions before the segment that each layer remembers as they are"""
    compressed: int = 256
    """places before those in which each layer keeps older positions compressed"""
    rate: int = 4
    """c, how many positions become one compressed place"""
    compression: Compression = "conv"
    """mean or max of a group, conv (one kernel over a group), dilated (several, which also see the group before), or
    most_used (of what leaves at a time, the positions that were attended to most)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(memory=0, compressed=0, rate=1)
        if self.window % self.rate:
            raise UserError(f"model.window ({self.window}) must be a multiple of model.rate ({self.rate})")


def as_product(kernel: nn.Module) -> Tensor:
    """A convolution's weights for its positions side by side: compiled, the library's own gave NaN in bf16 on a CPU."""
    assert isinstance(kernel, nn.Conv1d)
    return kernel.weight.permute(0, 2, 1).flatten(1)


class Convolution(nn.Module):
    """One kernel over each group of `rate` positions."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(width, width, rate, stride=rate, bias=False)

    def forward(self, old: Tensor) -> Tensor:
        return F.linear(old.unflatten(1, (-1, self.kernel.kernel_size[0])).flatten(2), as_product(self.kernel))


class DilatedConvolutions(nn.Module):
    """Kernels over two positions that lie 1, 2, 4, … apart, each added to what came in; the groups' last places stay.

    Together they reach back over two groups: a group's own positions and those of the group before.
    """

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        dilations = [2**i for i in range((2 * rate - 1).bit_length())]  # they sum to 2 × rate − 1 or more
        self.kernels = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=apart, bias=False) for apart in dilations)

    def forward(self, old: Tensor) -> Tensor:
        x = old
        for number, kernel in enumerate(self.kernels):
            earlier = F.pad(x, (0, 0, 2**number, 0))[:, : x.shape[1]]
            x = x + F.gelu(F.linear(torch.cat([earlier, x], dim=-1), as_product(kernel)))
        return x[:, self.rate - 1 :: self.rate]


def pool(old: Tensor, rate: int, how: Compression) -> Tensor:
    """The mean or maximum (B, T / rate, d) of each group of positions (B, T, d)."""
    groups = old.unflatten(1, (-1, rate))
    return groups.mean(dim=2) if how == "mean" else groups.amax(dim=2)


def most_used(old: Tensor, usage: Tensor, groups: Tensor, rate: int) -> Tensor:
    """From the last `groups` (B,) of old positions (B, T, d), one a group, but those with the highest usage (B, T).

    They stay in the order of time and stand at the end of the T / rate places.
    """
    count, length = old.shape[1] // rate, old.shape[1]
    best = usage.masked_fill(~_last(length, groups * rate), -torch.inf).topk(count).indices
    chosen = best.masked_fill(~_last(count, groups).flip(1), -1).sort().values  # what is not real goes to the front
    return old.gather(1, chosen.clamp(min=0).unsqueeze(-1).expand(-1, -1, old.shape[2]))


def _last(size: int, count: Tensor) -> Tensor:
    """(B, size): whether a place is among the last `count` (B,)."""
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
        if config.compression == "most_used":  # the attention that each remembered position got so far
            state["used"] = like.new_zeros(batch, config.layers, config.memory)
        return state

    def segment(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        filled, squeezed, config = state["filled"], state["squeezed"], self.config
        x = in_autocast(embed(self.table.weight, tokens))
        length = x.shape[1]
        # Nothing is compressed before the memory is full, so the real places of both caches lie side by side.
        visible = seen_by_each(length, config.compressed + config.memory, filled + squeezed)
        groups = (filled + length - config.memory).clamp(0, length) // config.rate  # of real positions that leave
        kept: list[State] = []
        extra = x.new_zeros(len(x), dtype=accumulation_dtype(x.dtype))
        for number, block in enumerate(self.blocks):
            assert isinstance(block, XLBlock)
            past = torch.cat([state["compressed"][:, number], state["memory"][:, number]], dim=1).to(x.dtype)
            context = torch.cat([past, x], dim=1).detach()
            used = None
            if "used" in state:
                used = attention_given(block, context, length, self.biases, visible)[:, config.compressed :]
                used = used + F.pad(state["used"][:, number], (0, length))
            layer, lost = self._remember(number, context, length, groups, used)
            kept.append(layer)
            extra = extra + lost
            x = block(x, past, self.biases, visible)
        after = {name: torch.stack([layer[name] for layer in kept], dim=1).to(state[name].dtype) for name in kept[0]}
        after["filled"] = (filled + length).clamp(max=config.memory)
        after["squeezed"] = (squeezed + groups).clamp(max=config.compressed)
        return self.norm(x), after, extra

    def _remember(
        self, number: int, context: Tensor, length: int, groups: Tensor, used: Tensor | None
    ) -> tuple[State, Tensor]:
        """A layer's caches after a segment, and what the compression lost (B,).

        Args:
            context: (B, K, d), the caches before it and its own positions, without gradient.
            groups: (B,), how many groups of real positions leave the memory.
            used: (B, memory + length), the attention that its places were given so far.
        """
        squeezed, rest = context.tensor_split([self.config.compressed], dim=1)
        whole = length - length % self.config.rate  # only a stream's last segment has a remainder
        old, new, lost = rest[:, length - whole : length], rest[:, :0], context.new_zeros(())
        if self.config.compressed and whole:
            real = _last(whole, groups * self.config.rate)  # a group that is not wholly real is left out
            old = old.masked_fill(~real.unsqueeze(-1), 0)
            new = self._compress(number, old, groups, None if used is None else used[:, length - whole :])
            if self.compressions and torch.is_grad_enabled():
                block = self.blocks[number]
                assert isinstance(block, XLBlock)
                lost = lost_by(new, old, groups, context[:, -length:], block, self.biases)
        layer = {
            "memory": rest[:, length:],
            "compressed": torch.cat([squeezed, new.detach()], dim=1)[:, new.shape[1] :],
        }
        if used is not None:
            layer["used"] = used[:, length:]
        return layer, lost

    def _compress(self, number: int, old: Tensor, groups: Tensor, used: Tensor | None) -> Tensor:
        """What becomes (B, T / rate, d) of old positions (B, T, d) in a layer."""
        how, rate = self.config.compression, self.config.rate
        if used is not None:  # a place was seen by as many queries as there are places from it to the segment's end
            queries = torch.arange(used.shape[1], 0, -1, device=used.device)
            return most_used(old, (used / queries)[:, : old.shape[1]], groups, rate)
        return self.compressions[number](old) if self.compressions else pool(old, rate, how)


@torch.no_grad()
def attention_given(block: XLBlock, context: Tensor, length: int, biases: Tensor, visible: Tensor) -> Tensor:
    """The attention that each place of the context (B, K, d) is given by its last `length`: their sum, the heads' mean.

    The block's own attention computes the same and keeps it to itself.
    """
    attention, context = block.attention, block.attention_norm(context)
    key = attention._by_head(attention.key_value(context).chunk(2, dim=-1)[0])
    return attention.shares(context, key, length, biases, visible).mean(dim=1).sum(dim=1)


def lost_by(new: Tensor, old: Tensor, groups: Tensor, x: Tensor, block: XLBlock, biases: Tensor) -> Tensor:
    """The mean squared difference (B,) between what x (B, T, d) finds in the old positions and in the compressed ones.

    Only the last `groups` (B,) are real; where there are none, nothing is lost. Gradients reach `new` alone.
    """
    there = groups > 0
    some = torch.where(there, groups, new.shape[1])  # attention to nothing would not be a number
    found = found_by_content(x, new, _last(new.shape[1], some), block, biases)
    wanted = found_by_content(x, old, _last(old.shape[1], some * (old.shape[1] // new.shape[1])), block, biases)
    dtype = accumulation_dtype(x.dtype)
    return torch.where(there, (found.to(dtype) - wanted.to(dtype)).square().mean(dim=(1, 2, 3)), 0)


def found_by_content(x: Tensor, places: Tensor, real: Tensor, block: XLBlock, biases: Tensor) -> Tensor:
    """What a block's attention makes (B, heads, T, d / heads) of real (B, K) places (B, K, d) wherever they stand."""
    attention = block.attention
    query = attention._by_head(_still(attention.query, _still(block.attention_norm, x)))
    both = _still(attention.key_value, _still(block.attention_norm, places))
    key, value = (attention._by_head(part) for part in both.chunk(2, dim=-1))
    scores = (query + biases[0].detach()) @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~real[:, None, None], -torch.inf)
    return scores.softmax(dim=-1, dtype=accumulation_dtype(scores.dtype)).to(value.dtype) @ value


def _still(layer: nn.Linear | nn.LayerNorm, x: Tensor) -> Tensor:
    """What a layer makes of x, with weights that are not taught by it."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    return F.linear(x, weight, bias)
