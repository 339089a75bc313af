"""A GPT-2 decoder with extra input positions (slots) before the window, which represent the history.

    sequence = [slots (L)] + [tokens of the window (m)]      learned position embeddings over all L + m

Subclasses define what the slots hold (`make_slots`): the compressed history (log_memory.py) or the last L tokens of it
(recent.py). With slots = 0 this is plain GPT-2.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import add_linear_norm, gelu_linear, self_attention, split_heads
from logpast.models.base import LanguageModel, ModelConfig, Recomputable
from logpast.util.precision import in_autocast
from logpast.util.validation import Count


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """A stateless decoder's sizes; the defaults are GPT-2 Small with the paper's window."""

    slots: Count = 53
    """L, the number of positions before the window; 0 gives the plain transformer"""


class KeyValueCache:
    """Keys and values of the sequence so far, for generation one token at a time."""

    def __init__(self) -> None:
        self.layers: dict[Any, tuple[Tensor, Tensor]] = {}  # by module, or as a subclass of Transformer needs

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.layers[layer] = key, value
        return key, value


class Attention(nn.Module):
    """Causal self-attention without its output layer `out`, which the block fuses with the residual sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if cache is None:
            return self_attention(x, self.query_key_value, self.heads)
        query, key, value = split_heads(self.query_key_value(in_autocast(x)), self.heads)
        key, value = cache.extend(self, key, value)
        # either the cache was empty, or there is a single query, which attends to all of it
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
        return mixed.transpose(1, 2).flatten(2)


class Block(Recomputable):
    """Attention and MLP, each with a LayerNorm before it and a residual connection."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp)
        self.mlp_out = nn.Linear(mlp, width)

    def forward(
        self, x: Tensor, normed: Tensor, next_norm: nn.LayerNorm, cache: KeyValueCache | None = None, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The block's output and `next_norm` of it, from its input x and `attention_norm` of x.

        The first `skip` positions are attended to, but the output leaves them out.
        """
        mixed = self.attention(normed, cache)
        x, normed = add_linear_norm(x[:, skip:], self.attention.out, mixed[:, skip:], self.mlp_norm)
        return add_linear_norm(x, self.mlp_out, gelu_linear(normed, self.mlp_in), next_norm)


def run_blocks(
    blocks: nn.ModuleList, x: Tensor, last: nn.LayerNorm, cache: KeyValueCache | None = None, skip: int = 0
) -> Tensor:
    """The blocks' output for embeddings (B, T, d) after the norm `last`, without the first `skip` positions.

    `add_linear_norm` fuses a residual sum with the norm after it, so each block takes the norm of the next one.
    """
    x = in_autocast(x)  # the residual stream has the same type as the products
    first, *others = [block.get_submodule("attention_norm") for block in blocks]
    normed = first(x)
    for block, next_norm in zip(blocks, [*others, last], strict=True):
        x, normed = block(x, normed, next_norm, cache, skip if next_norm is last else 0)
    return normed


class Transformer(LanguageModel):
    """GPT-2 with slots before the window, which subclasses define in `make_slots`.

    An id below 0 means "no token" and is embedded as a zero vector.
    """

    Config: ClassVar[type[ModelConfig]] = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        width = config.width
        self.slots = config.slots
        self.positions = nn.Embedding(config.slots + config.window, width)
        self.blocks = nn.ModuleList(Block(width, config.heads, config.mlp or 4 * width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.initialise()

    @property
    def attention_length(self) -> int:
        return self.slots + self.window

    def make_slots(self, history: Tensor) -> Tensor:
        """Slots (B, L, d) from the token ids (B, history) before the window."""
        raise NotImplementedError

    def forward(
        self,
        history: Tensor,
        tokens: Tensor,
        targets: Tensor | None = None,
        counts: Tensor | None = None,
        followers: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, m', V) of the token after each token of the window; with targets, their loss (B, m') in nats.

        Args:
            history: (B, `self.history`) ids before the window, in the order of the text; -1 where there is none.
            tokens: (B, m') ids of the window, m' ≤ m; -1 is padding.
            targets: (B, m') ids to predict; the loss is 0 where the target is -1.
            counts, followers: (B, m', …) for recall, from the batch. Logits are those before recall's mixture.
        """
        hidden = self.encode(history, tokens, followers)
        return self.logits(hidden) if targets is None else self.nats(hidden, targets, counts)

    def encode(self, history: Tensor, tokens: Tensor, followers: Tensor | None = None) -> Tensor:
        """The decoder's output (B, m', d) for the tokens of the window, which recall's gates and the head take."""
        return self.hidden(self._sequence(history, tokens, followers), skip=self.slots)

    def _sequence(self, history: Tensor, tokens: Tensor, followers: Tensor | None) -> Tensor:
        return torch.cat([self.make_slots(history), self.embed(tokens, followers)], dim=1)

    @torch.no_grad()
    def slot_attention(self, history: Tensor, tokens: Tensor, followers: Tensor | None = None) -> Tensor:
        """(B, m', L): the attention of each token of the window to each slot, nearest slot first; the mean over all
        blocks and heads. Queries and keys are computed a second time, next to the usual forward pass.
        """
        found, length = list[Tensor](), self.slots + tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)

        def attend(module: nn.Module, given: tuple[Any, ...]) -> None:
            assert isinstance(module, Attention)
            query, key, _ = split_heads(module.query_key_value(in_autocast(given[0])), module.heads)
            scores = (query @ key.mT / math.sqrt(query.shape[-1])).float().masked_fill(later, -torch.inf)
            found.append(scores.softmax(-1)[:, :, self.slots :, : self.slots].mean(1))

        layers = [module for module in self.modules() if isinstance(module, Attention)]
        hooks = [layer.register_forward_pre_hook(attend) for layer in layers]
        try:
            self.encode(history, tokens, followers)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(found).mean(0).flip(-1)

    def hidden(self, x: Tensor, cache: KeyValueCache | None = None, start: int = 0, skip: int = 0) -> Tensor:
        """The decoder's output for embeddings (B, T, d) at positions `start` … of the sequence.

        The output leaves out the first `skip` of them; the last block does not compute them.
        """
        x = x + self.positions.weight[start : start + x.shape[1]]
        return run_blocks(self.blocks, x, self.norm, cache, skip)


GPT2_MODULES = {
    "wte": "table",
    "wpe": "positions",
    "ln_f": "norm",
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp_in",
    "mlp.c_proj": "mlp_out",
}


def rename_gpt2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Hugging Face GPT-2 (its state_dict) as our models name and store them.

    Attention masks are left out, and the head, which is the embedding table.
    """
    found = {}
    for name, weight in state.items():
        parts = re.fullmatch(r"(?:transformer\.)?(?:h\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if parts and (module := GPT2_MODULES.get(parts[2])):
            block = f"blocks.{parts[1]}." if parts[1] else ""
            # GPT-2 stores the weights of its linear layers transposed, but not its embeddings
            found[f"{block}{module}.{parts[3]}"] = weight.T if block and weight.ndim == 2 else weight
    return found
