"""What all models share: a table of token embeddings, which is also the head, and the loss.

There are two kinds. A stateless model (decoder.py and its subclasses) takes batches of (history, window, targets), in
any order. A recurrent model (`Recurrent`) takes consecutive segments of a text and carries a state from each segment to
the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.dispatch import token_losses
from logpast.kernels.ops import HAS_TRITON
from logpast.memory.naive import embed
from logpast.recall import Recall, RecallForm
from logpast.util.errors import UserError
from logpast.util.validation import Count, PositiveInt, Share, validate_fields

if TYPE_CHECKING:
    from logpast.models.stream import Stream

State = dict[str, Tensor]  # the batch is the first dimension of each


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's sizes; the defaults are GPT-2 Small with the paper's window."""

    window: PositiveInt = 256
    """m, the number of most recent tokens, seen uncompressed; of a recurrent model, the length of a segment"""
    layers: PositiveInt = 12
    """number of transformer blocks"""
    heads: PositiveInt = 12
    """attention heads in each block"""
    width: PositiveInt = 768
    """d, the size of the embeddings"""
    mlp: PositiveInt | None = None
    """width of the MLP in each block; by default 4 × width"""
    vocabulary: PositiveInt | None = None
    """rows of the embedding table; by default the tokenizer's size, rounded up to a multiple of 64"""
    recall: Count = 0
    """how many tokens back to look up what followed the last tokens before, to mix it into predictions; 0: no recall"""
    recall_orders: Count = RecallForm.orders
    """the longest match that recall distinguishes, in tokens"""
    recall_bins: PositiveInt = RecallForm.bins
    """log-spaced ranges of lags that recall distinguishes"""
    recall_input: bool = True
    """also add embeddings of the tokens that followed the latest matches to the model's input"""
    recall_limit: Share = 1.0
    """at most this much of each prediction comes from recall's copies; 1: no limit"""

    def __post_init__(self) -> None:
        validate_fields(self, "model.")
        if self.width % self.heads:
            raise UserError(f"model.width ({self.width}) must be a multiple of model.heads ({self.heads})")

    @property
    def recall_form(self) -> RecallForm | None:
        if not self.recall:
            return None
        return RecallForm(
            self.recall, self.recall_orders, self.recall_bins, self.recall_input and self.recall_orders > 0
        )


class Recomputable(nn.Module):
    """A block of a model. With gradient checkpointing, which transformers switches on, its activations are computed
    again in the backward pass instead of being kept.
    """

    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(super().__call__, *args)
        return super().__call__(*args)


class LanguageModel(nn.Module):
    """Embedding table, head and loss; subclasses add the `blocks` between them."""

    Config: ClassVar[type[ModelConfig]] = ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocabulary is None:
            raise UserError("model.vocabulary is not set; give a number, or pass the tokenizer's size to build()")
        self.config = config
        self.window = config.window
        self.table = nn.Embedding(config.vocabulary, config.width)

    @property
    def history(self) -> int:
        """The number of tokens before the window that the model takes as input."""
        return 0

    @property
    def attention_length(self) -> int:
        """The most positions that a token attends to, itself included."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes to keep of a text to continue it: keys and values of the attended positions in float32, and the ids
        of the history at 4 bytes each.
        """
        return self._pair_bytes * self.attention_length + 4 * self.history + self._recall_bytes

    @property
    def _recall_bytes(self) -> int:
        """Bytes of the ids that recall looks back at, beyond those of the history."""
        return 4 * max(0, self.config.recall - self.history)

    @property
    def _pair_bytes(self) -> int:
        """Bytes of the keys and values of one position, in all blocks."""
        return 2 * 4 * self.config.layers * self.config.width

    def initialise(self) -> None:
        """GPT-2's initial weights; call it when all modules exist."""
        self.apply(_initialise)
        for name, weight in self.named_parameters():  # the residual stream is a sum of 2 × layers of their outputs
            if name.endswith(("attention.out.weight", "mlp_out.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers))
        if form := self.config.recall_form:
            self.recall = Recall(self.config.width, form, self.config.recall_limit, pretrained=False)

    def embed(self, tokens: Tensor, followers: Tensor | None = None) -> Tensor:
        """(…, d) embeddings of ids; with recall also of their followers (…, orders). An id below 0 adds nothing."""
        x = self._embed(tokens)
        return x if followers is None else x + self.recall.embed(self._embed(followers)).to(x.dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        return embed(self.table.weight, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table.weight)

    def nats(self, hidden: Tensor, targets: Tensor, counts: Tensor | None = None) -> Tensor:
        """The loss of each target in nats; 0 where the target is -1. With recall it needs the counts of a `Batch`.

        With recall this is the loss of the mixture, whose gradient trains the gates. The rest of the model gets the
        gradient of its own loss: from the mixture's it would learn little where copies are right, and end up worse.
        """
        own = self.own_nats(hidden, targets)
        if not self.config.recall:
            return own
        mixed: Tensor = self.recall(hidden, own.detach(), counts).masked_fill(targets < 0, 0)
        return mixed + (own - own.detach())

    def own_nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The same before recall is mixed in."""
        return token_losses(hidden.flatten(0, 1), self.table.weight, targets.flatten()).view_as(targets)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`nn.Module.compile`, with a workaround for slow compilation."""
        if HAS_TRITON and torch.__version__ < "2.13":
            # older versions inline all that precedes an unknown operator, which doubles the code with every block
            from torch._inductor.lowering import FALLBACK_ALLOW_LIST

            FALLBACK_ALLOW_LIST.update(f"logpast::{name}" for name in torch.ops.logpast)
        self._compile(*args, **kwargs)

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the whole model; subclasses with a repeated part compile that part."""
        super().compile(*args, **kwargs)

    def stream(self, first: int | None = None, batch: int = 1) -> Stream:
        """A `Stream`: texts of any length, for this model to continue.

        Args:
            first: the id that every text starts with: end-of-text. A pretrained model with a memory knows its own.
            batch: number of texts.
        """
        from logpast.models.stream import Stream

        first = getattr(self.config, "first_token", None) if first is None else first
        if first is None:
            raise UserError("stream needs first, the id that every text starts with: tokenizer.eot")
        return Stream(self, first, batch)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Sizes of a model that carries a state from segment to segment."""

    segments: PositiveInt = 1
    """consecutive segments in a training step; gradients flow across them if the model allows it"""


class Recurrent(LanguageModel):
    """A model that processes a text segment by segment."""

    config: RecurrentConfig

    def start(self, batch: int) -> State:
        """The state at the beginning of a text."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes to keep of a text to continue it: keys and values of the segment in float32, and the state."""
        return self._pair_bytes * self.config.window + self.carried_bytes + self._recall_bytes

    @property
    def carried_bytes(self) -> int:
        """Bytes of the state alone."""
        return sum(value.numel() * value.element_size() for value in self.start(1).values())

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile `segment`, which is called once per segment."""
        self.segment = torch.compile(self.segment, *args, **kwargs)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a compiled model is not compiled, as with any module."""
        return {name: value for name, value in super().__getstate__().items() if name != "segment"}

    def segment(self, tokens: Tensor, state: State, followers: Tensor | None = None) -> tuple[Tensor, State, Tensor]:
        """The decoder's output (B, T, d) for a segment's ids (B, T), the state after it, and an extra loss (B,).

        `followers` (B, T, orders) are those of the ids, for recall.
        """
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        fresh: Tensor,
        state: State,
        counts: Tensor | None = None,
        followers: Tensor | None = None,
    ) -> tuple[Tensor, State, Tensor]:
        """The nats of consecutive segments, the state after the last without gradient, and an extra loss (B,).

        Args:
            tokens: (B, n, m) ids; -1 is padding at the end of a text.
            targets: (B, n, m) ids to predict; the loss is 0 where the target is -1.
            fresh: (B, n), whether a segment is the first of a text: it starts from `start`, not from the last state.
            state: from `start`, or from the previous call.
            counts, followers: (B, n, m, …) for recall, from the batch.
        """
        nats, extra = [], torch.zeros(len(tokens), device=tokens.device)
        for i in range(tokens.shape[1]):
            followed = [] if followers is None else [followers[:, i]]
            hidden, state, more = self.segment(tokens[:, i], self.reset(state, fresh[:, i]), *followed)
            nats.append(self.nats(hidden, targets[:, i], None if counts is None else counts[:, i]))
            extra = extra + more
        return torch.stack(nats, dim=1), {name: value.detach() for name, value in state.items()}, extra

    def reset(self, state: State, fresh: Tensor) -> State:
        """The state, set to `start` in the rows (B,) where a text begins."""
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
