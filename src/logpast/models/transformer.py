"""One standard decoder: GPT-2, whose sequence begins with a few slots that say what came before the window.

    sequence = [slots of the past (L)] + [tokens of the window (m)]      learned positions over all L + m

What the slots hold is the only thing in which the systems differ (`front`): a compressed past (log_memory.py) or
the preceding tokens themselves (recent.py). With slots = 0 this is GPT-2 and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.errors import UserError
from logpast.memory import HAS_TRITON
from logpast.memory.naive import accumulation_dtype, embed

if HAS_TRITON:
    from logpast.models import head

SCORED_AT_ONCE = 2048  # tokens whose logits are held at a time when there is no gradient to keep


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder's sizes; the defaults are GPT-2 Small with the paper's window."""

    slots: int = 53
    """L, the number of places before the window; 0 gives the plain transformer"""
    window: int = 256
    """m, the number of most recent tokens that are seen as they are"""
    layers: int = 12
    """number of transformer blocks"""
    heads: int = 12
    """attention heads in each block"""
    width: int = 768
    """d, the size of the embeddings; the MLP is four times as wide"""
    vocabulary: int | None = None
    """rows of the embedding table; by default the tokenizer's size, rounded up to a multiple of 64"""

    def __post_init__(self) -> None:
        for name, least in (("slots", 0), ("window", 1), ("layers", 1), ("heads", 1), ("width", 1)):
            if getattr(self, name) < least:
                raise UserError(f"model.{name} must be at least {least}, got {getattr(self, name)}")
        if self.vocabulary is not None and self.vocabulary < 1:
            raise UserError(f"model.vocabulary must be at least 1, got {self.vocabulary}")
        if self.width % self.heads:
            raise UserError(f"model.width ({self.width}) must be a multiple of model.heads ({self.heads})")


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
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, skip: int = 0) -> Tensor:
        """Places before `skip` are seen by the others and have no result of their own."""
        by_head = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = by_head.unbind()
        if cache is not None:
            key, value = cache.extend(self, key, value)
        # with a cache there is either nothing in it yet, or a single query that may see all of it
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
        return self.out(mixed.transpose(1, 2).flatten(2)[:, skip:])


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, skip: int = 0) -> Tensor:
        x = x[:, skip:] + self.attention(self.attention_norm(x), cache, skip)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class Transformer(nn.Module):
    """GPT-2 behind a `front`, which subclasses define. Ids below 0 stand for "no token": a zero vector."""

    Config: ClassVar[type[TransformerConfig]] = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise UserError("model.vocabulary is not set; it comes from the tokenizer unless you give a number")
        self.config = config
        self.slots, self.window = config.slots, config.window
        self.table = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.slots + config.window, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.apply(_initialise)
        for name, weight in self.named_parameters():  # the residual stream adds up 2 × layers of these
            if name.endswith(("attention.out.weight", "mlp_out.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers))

    @property
    def history(self) -> int:
        """How many tokens before the window the front wants to see."""
        raise NotImplementedError

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
        if torch.is_autocast_enabled(x.device.type):  # what runs through the blocks is in their arithmetic, too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks:
            x = block(x, cache, skip if block is self.blocks[-1] else 0)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table.weight)

    def nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        rows, wanted = hidden.flatten(0, 1), targets.flatten()
        if HAS_TRITON and torch.is_grad_enabled() and rows.is_cuda and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else rows.dtype
            return head.nats(rows.to(dtype), self.table.weight.to(dtype), wanted).view_as(targets)
        size = len(rows) if torch.is_grad_enabled() else SCORED_AT_ONCE
        costs = []
        for some, theirs in zip(rows.split(size), wanted.split(size), strict=True):
            logits = self.logits(some)
            costs.append(
                F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), theirs, ignore_index=-1, reduction="none")
            )
        return torch.cat(costs).view_as(targets)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


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
