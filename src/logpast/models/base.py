"""What all systems share: a table of token embeddings that is also the head, and what a token costs.

There are two kinds. A stateless one (transformer.py and the systems on it) is shown a window and the history before it:
windows may come in any order. A recurrent one (`Recurrent`) is shown consecutive segments of a text and carries a state
from each to the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import token_losses
from logpast.kernels.ops import HAS_TRITON
from logpast.util.errors import UserError
from logpast.util.validation import validate_fields

State = dict[str, Tensor]  # the batch is the first dimension of each


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes; the defaults are GPT-2 Small with the paper's window."""

    window: int = 256
    """m, the number of most recent tokens that are seen as they are; of a recurrent system, the length of a segment"""
    layers: int = 12
    """number of transformer blocks"""
    heads: int = 12
    """attention heads in each block"""
    width: int = 768
    """d, the size of the embeddings"""
    mlp: int | None = None
    """width of the MLP in each block; by default four times the embeddings'"""
    vocabulary: int | None = None
    """rows of the embedding table; by default the tokenizer's size, rounded up to a multiple of 64"""

    def __post_init__(self) -> None:
        validate_fields(self, "model.")
        self._at_least(window=1, layers=1, heads=1, width=1)
        for name in ("mlp", "vocabulary"):
            if getattr(self, name) is not None:
                self._at_least(**{name: 1})
        if self.width % self.heads:
            raise UserError(f"model.width ({self.width}) must be a multiple of model.heads ({self.heads})")

    def _at_least(self, **bounds: int) -> None:
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise UserError(f"model.{name} must be at least {least}, got {getattr(self, name)}")


class LanguageModel(nn.Module):
    """Table, head and costs; subclasses add `blocks` in between."""

    Config: ClassVar[type[ModelConfig]] = ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise UserError("model.vocabulary is not set; it comes from the tokenizer unless you give a number")
        self.config = config
        self.window = config.window
        self.table = nn.Embedding(config.vocabulary, config.width)

    @property
    def history(self) -> int:
        """How many tokens before the window it wants to be shown with it."""
        return 0

    @property
    def attention_length(self) -> int:
        """The most places that a token attends to, itself included."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """What must be kept of a stream to go on with it, in float32: keys and values of all places in sight, and the
        ids of the history, 4 bytes each.
        """
        return self._pair_bytes * self.attention_length + 4 * self.history

    @property
    def _pair_bytes(self) -> int:
        """Of the keys and values of one place, in all blocks."""
        return 2 * 4 * self.config.layers * self.config.width

    def initialise(self) -> None:
        """Weights as GPT-2 has them at the start; called when all modules are there."""
        self.apply(_initialise)
        for name, weight in self.named_parameters():  # the residual stream adds up 2 × layers of these
            if name.endswith(("attention.out.weight", "mlp_out.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table.weight)

    def nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target in nats; -1 is not scored and counts 0."""
        return token_losses(hidden.flatten(0, 1), self.table.weight, targets.flatten()).view_as(targets)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As any module's, but quick."""
        if HAS_TRITON and torch.__version__ < "2.13":
            # which would spell out all that leads to an operator it does not know: twice as much with every block
            from torch._inductor.lowering import FALLBACK_ALLOW_LIST

            FALLBACK_ALLOW_LIST.update(f"logpast::{name}" for name in torch.ops.logpast)
        self._compile(*args, **kwargs)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """The whole of it; where the same comes again and again, subclasses compile that."""
        super().compile(*args, **kwargs)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Sizes of a system that carries a state from segment to segment."""

    segments: int = 1
    """consecutive segments in a training step, across which gradients flow where the system is made for it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(segments=1)


class Recurrent(LanguageModel):
    """A system that reads a text segment by segment."""

    config: RecurrentConfig

    def start(self, batch: int) -> State:
        """The state before anything was read."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """What must be kept of a stream to go on with it, in float32: keys and values of the segment, and the state."""
        state = sum(value.numel() * value.element_size() for value in self.start(1).values())
        return self._pair_bytes * self.config.window + state

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """What reads a segment, once for all segments."""
        self.segment = torch.compile(self.segment, *args, **kwargs)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a compiled system is not compiled, as with any module."""
        return {name: value for name, value in super().__getstate__().items() if name != "segment"}

    def segment(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        """What the decoder makes (B, T, d) of a segment's ids (B, T), the state after it, and an extra loss (B,)."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, targets: Tensor, fresh: Tensor, state: State) -> tuple[Tensor, State, Tensor]:
        """The nats of consecutive segments, the state after the last, without gradient, and an extra loss to train on.

        Args:
            tokens: (B, n, m) ids; -1 is padding, after which the stream ends.
            targets: (B, n, m) ids to predict; -1 is not scored and costs 0.
            fresh: (B, n), whether a segment is a stream's first, before which nothing was read.
            state: from `start`, or from the call before.
        """
        costs, extra = [], torch.zeros(len(tokens), device=tokens.device)
        for some, theirs, new in zip(tokens.unbind(1), targets.unbind(1), fresh.unbind(1), strict=True):
            hidden, state, more = self.segment(some, self.reset(state, new))
            costs.append(self.nats(hidden, theirs))
            extra = extra + more
        return torch.stack(costs, dim=1), {name: value.detach() for name, value in state.items()}, extra

    def reset(self, state: State, fresh: Tensor) -> State:
        """Forget where a stream begins."""
        begin = self.start(len(fresh))
        return {
            name: torch.where(fresh.view(-1, *[1] * (value.ndim - 1)), begin[name].to(value.dtype), value)
            for name, value in state.items()
        }


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
