"""One standard decoder: GPT-2, whose sequence begins with a few slots that say what came before the window.

    sequence = [slots of the past (L)] + [tokens of the window (m)]      learned positions over all L + m

What the slots hold is the only thing in which the systems differ (`front`): a compressed past (log_memory.py) or
the preceding tokens themselves (recent.py). With slots = 0 this is GPT-2 and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import add_linear_norm, gelu_linear, self_attention, split_heads
from logpast.memory.naive import embed
from logpast.models.base import LanguageModel, ModelConfig
from logpast.util.errors import UserError
from logpast.util.precision import in_autocast


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """A stateless decoder's sizes; the defaults are GPT-2 Small with the paper's window."""

    slots: int = 53
    """L, the number of places before the window; 0 gives the plain transformer"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(slots=0)


class KeyValueCache:
    """Keys and values of the sequence so far, for generation one token at a time."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old_key, old_value = self.layers[layer]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.layers[layer] = key, value
        return key, value


class Attention(nn.Module):
    """Causal self-attention; the layer `out` is for whoever adds the result to the stream."""

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
        # either the cache was empty, or there is a single query that may see all of it
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
        return mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to what came in."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, mlp)
        self.mlp_out = nn.Linear(mlp, width)

    def forward(
        self, x: Tensor, seen: Tensor, after: nn.LayerNorm, cache: KeyValueCache | None = None, skip: int = 0
    ) -> tuple[Tensor, Tensor]:
        """From the stream and `attention_norm` of it to the stream behind this block and its norm for what comes after.

        Places before `skip` are seen by the others and have no result of their own.
        """
        mixed = self.attention(seen, cache)
        x, seen = add_linear_norm(x[:, skip:], self.attention.out, mixed[:, skip:], self.mlp_norm)
        return add_linear_norm(x, self.mlp_out, gelu_linear(seen, self.mlp_in), after)


def run_blocks(
    blocks: nn.ModuleList, x: Tensor, last: nn.LayerNorm, cache: KeyValueCache | None = None, skip: int = 0
) -> Tensor:
    """The norm `last` of what the blocks make of embeddings (B, T, d), without the first `skip` places.

    A sum and the norm of it are one step (`add_linear_norm`), so each block is told which norm comes after it.
    """
    x = in_autocast(x)  # what runs through the blocks is in their arithmetic, too
    first, *others = [block.get_submodule("attention_norm") for block in blocks]
    seen = first(x)
    for block, after in zip(blocks, [*others, last], strict=True):
        x, seen = block(x, seen, after, cache, skip if after is last else 0)
    return seen


class Transformer(LanguageModel):
    """GPT-2 behind a `front`, which subclasses define. Ids below 0 stand for "no token": a zero vector."""

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

    def front(self, history: Tensor) -> Tensor:
        """Slots (B, L, d) from the token ids (B, history) before the window."""
        raise NotImplementedError

    def forward(self, history: Tensor, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, m, V) of the token after each of the window's; with targets, the nats (B, m) they cost.

        Args:
            history: (B, `self.history`) ids before the window, in the order of the text; -1 where there is none.
            tokens: (B, m') ids of the window, m' ≤ m; -1 is padding.
            targets: (B, m') ids to predict; -1 is not scored and costs 0.
        """
        x = torch.cat([self.front(history), embed(self.table.weight, tokens)], dim=1)
        hidden = self.hidden(x, skip=self.slots)
        return self.logits(hidden) if targets is None else self.nats(hidden, targets)

    def hidden(self, x: Tensor, cache: KeyValueCache | None = None, start: int = 0, skip: int = 0) -> Tensor:
        """The decoder proper, on embeddings (B, T, d) that stand at places `start` … of the sequence.

        The result leaves the first `skip` of them out, and so does the work where they no longer matter.
        """
        x = x + self.positions.weight[start : start + x.shape[1]]
        return run_blocks(self.blocks, x, self.norm, cache, skip)


def load_gpt2(model: Transformer, state: dict[str, Tensor]) -> None:
    """Put the weights of a Hugging Face GPT-2 (its state_dict) into a model of the same sizes with slots = 0."""
    state = {name.removeprefix("transformer."): weight for name, weight in state.items()}
    plain = {"table": "wte", "positions": "wpe", "norm": "ln_f"}
    inside = {
        "attention_norm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp_in": "mlp.c_fc",
        "mlp_out": "mlp.c_proj",
    }
    ours = {}
    for name, parameter in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in plain:
            theirs = f"{plain[module]}.{kind}"
        else:
            _, number, place = module.split(".", 2)
            theirs = f"h.{number}.{inside[place]}.{kind}"
        if theirs not in state:
            raise UserError(f"the GPT-2 weights have no {theirs!r}; is this a GPT-2 state_dict of these sizes?")
        weight = state[theirs]
        # GPT-2 keeps its linear layers transposed; the embeddings it does not
        ours[name] = weight.T if weight.ndim == 2 and module not in plain else weight
        if ours[name].shape != parameter.shape:
            raise UserError(f"{theirs!r} is {tuple(ours[name].shape)}, the model wants {tuple(parameter.shape)}")
    model.load_state_dict(ours)
