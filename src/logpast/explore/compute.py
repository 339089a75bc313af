"""What the explorer shows of a text: the losses of every token, and of some tokens candidates and attention.

Every token is scored by the model as it is, and with its past closed in the ways that it has one. Without recall,
copies are not mixed in. Without memory, nothing of the compressed past enters the slots, or the state of a recurrent
model is new in every window. A control scores the text, too. What recall finds for a token is not kept: the page looks
it up in the text again, and needs only the weights of recall's components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.analysis.probes import Change, changed_past, cut_beyond
from logpast.data import TokenStore
from logpast.data.batching import Batch, Streams, Windows
from logpast.evaluation.evaluate import arithmetic
from logpast.evaluation.scoring import score
from logpast.filters import FilterBank
from logpast.models import LanguageModel, LogMemoryConfig, Recurrent, Transformer
from logpast.util.errors import UserError

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Progress = Callable[[str, int], None]

CANDIDATES = 5  # the most likely tokens of the model, and of the mixture
AT_ONCE = 2**24  # probabilities that are computed together, which bounds the memory needed


@dataclass(frozen=True)
class Text:
    """The text that is scored, and how: the first `tokens` of a store."""

    store: TokenStore
    tokens: int
    streams: Streams
    batch_size: int
    device: torch.device
    precision: str


class Likeliest(NamedTuple):
    """The most likely tokens at some places: (D, CANDIDATES) ids, and their probabilities."""

    ids: Indices
    probabilities: Array


class Details(NamedTuple):
    """What is computed for some tokens only.

    Attributes:
        tokens: (D,) which tokens, in the order of the text.
        own: what the model predicts there before recall is mixed in.
        mixed: what it predicts with recall; None without recall.
        attention: (D, L) to each slot, nearest first, the mean over layers and heads; None without slots.
    """

    tokens: Indices
    own: Likeliest
    mixed: Likeliest | None
    attention: Array | None


def bank_of(model: LanguageModel) -> FilterBank | None:
    """The filters of a model whose slots hold a compressed past."""
    config = model.config
    return config.bank if isinstance(config, LogMemoryConfig) and config.slots else None


def closed_memory(model: LanguageModel) -> dict[str, Change]:
    """The change of the past that closes the memory, for `changed_past`; none if the model has no memory.

    In the slots of a pretrained model the compressed past is added to single tokens, which stay.
    """
    if isinstance(model, Recurrent):
        return {"fresh": torch.ones_like}
    if not isinstance(model, Transformer) or bank_of(model) is None:
        return {}
    return {"ids": cut_beyond(model.config.slots if hasattr(model.config, "sink") else 0)}


def plan(model: LanguageModel, control: LanguageModel | None) -> dict[str, tuple[LanguageModel, dict[str, Change]]]:
    """How often the text is scored: each time by a model, with a change of its past."""
    passes: dict[str, tuple[LanguageModel, dict[str, Change]]] = {"the model": (model, {})}
    if closed := closed_memory(model):
        passes["without memory"] = model, closed
    if control is not None:
        passes["the control"] = control, {}
    return passes


#: what a pass gives: nats, and if it is the model with recall also those without recall
SERIES = {
    "the model": ("model", "no recall"),
    "without memory": ("no memory", "neither"),
    "the control": ("control", ""),
}


def score_text(model: LanguageModel, control: LanguageModel | None, text: Text, progress: Progress) -> dict[str, Array]:
    """Nats of every token, by name: `model`, and as far as there is such a part `no recall`, `no memory`, `neither`
    and `control`. With recall also `weights` (tokens, 1 + components): those of the mixture, the model's first.
    """
    form, found = model.config.recall_form, dict[str, Array]()
    for title, (one, change) in plan(model, control).items():
        name, without_recall = SERIES[title]
        if form is None or one is not model:
            found[name] = _score(title, one, change, (), text, progress)
            continue
        shape = (3 + (form.orders + 1) * len(form.edges),)
        several = _score(title, one, change | {"nats": _with_and_without_recall}, shape, text, progress)
        found[name], found[without_recall] = several[:, 0], several[:, 1]
        found.setdefault("weights", several[:, 2:])
    return found


def _score(
    title: str, model: LanguageModel, change: dict[str, Change], shape: tuple[int, ...], text: Text, progress: Progress
) -> Array:
    """What the model, with this change of its past, computes of every token."""
    with changed_past(model, **change), arithmetic(model, text.device, text.precision):
        found = score(
            model, text.store, model.window, model.history, text.batch_size, text.streams, text.device, text.tokens,
            progress=partial(progress, title), recall=model.config.recall_form, shape=shape,
        )[: text.tokens]  # fmt: skip
    if not np.isfinite(found).all():
        raise UserError(f"some losses of {title} are not finite: its training diverged; use an earlier checkpoint")
    return found


def _with_and_without_recall(model: LanguageModel, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """(…, 3 + components): nats with recall and without, and the weights of the mixture, the model's first."""
    own = model.own_nats(hidden, targets)
    weights = model.recall.log_weights(hidden, counts.select(-3, 0)).exp()
    return torch.cat([model.recall(hidden, own, counts).unsqueeze(-1), own.unsqueeze(-1), weights], dim=-1)


def choose(gains: list[Array], number: int) -> Indices:
    """The tokens with the largest gains and losses in any of the comparisons, in the order of the text."""
    size = np.max(np.abs(gains), axis=0)
    return np.sort(np.argsort(-size, kind="stable")[:number])


@torch.no_grad()
def details_of(model: LanguageModel, text: Text, tokens: Indices, progress: Progress) -> Details:
    """Candidates and attention of these tokens, which are in the order of the text."""
    form, slots = model.config.recall_form, model.config.slots if isinstance(model, Transformer) else 0
    windows = Windows(text.store, model.window, model.history, text.streams, device=text.device, recall=form)
    stream = np.searchsorted(windows.starts, tokens, side="right") - 1
    position = tokens - windows.starts[stream]
    window, column = windows.first[stream] + position // model.window, position % model.window
    own, mixed, attention = list[Likeliest](), list[Likeliest](), np.zeros((len(tokens), slots))
    size, rows = text.store.tokenizer.size, max(1, AT_ONCE // model.table.num_embeddings)
    with arithmetic(model, text.device, text.precision):
        for numbers, batch, hidden in _hidden_states(model, windows, np.unique(window), text.batch_size):
            first, last = np.searchsorted(window, [numbers[0], numbers[-1] + 1]).tolist()
            at = np.searchsorted(numbers, window[first:last]), column[first:last]
            if slots:
                assert isinstance(model, Transformer)
                found = model.slot_attention(batch.history, batch.tokens, batch.followers)
                attention[first:last] = found[at].cpu()
            states = hidden[at].unsqueeze(1)
            for begin in range(first, last, rows):
                chosen = slice(begin, min(begin + rows, last))
                some = states[chosen.start - first : chosen.stop - first]
                log_probs = model.logits(some).float().log_softmax(-1)
                own.append(_likeliest(log_probs, size))
                if form:
                    starts = windows.starts[stream[chosen]]
                    past = _pasts(text.store, tokens[chosen], starts, form.reach + form.orders).to(text.device)
                    mixed.append(_likeliest(model.recall.log_probs(some, log_probs, past), size))
            progress("details", last)
    return Details(tokens, _joined(own), _joined(mixed) if form else None, attention if slots else None)


def _hidden_states(
    model: LanguageModel, windows: Windows, numbers: Indices, batch_size: int
) -> Iterator[tuple[Indices, Batch, Tensor]]:
    """The decoder's output for these windows, in their order. A recurrent model processes all windows before them."""
    if not isinstance(model, Recurrent):
        assert isinstance(model, Transformer)
        for some in np.split(numbers, range(batch_size, len(numbers), batch_size)):
            batch = windows.batch(some).to(windows.device)
            yield some, batch, model.encode(batch.history, batch.tokens, batch.followers)
        return
    wanted = set(numbers.tolist())
    for first, end in zip(windows.first, windows.first[1:], strict=False):
        inside = [number for number in range(first, end) if number in wanted]
        state = model.start(1)
        for number in range(first, max(inside, default=-1) + 1):
            batch = windows.batch(np.array([number])).to(windows.device)
            hidden, state, _ = model.segment(batch.tokens, state, batch.followers)
            if number in wanted:
                yield np.array([number]), batch, hidden


def _pasts(store: TokenStore, tokens: Indices, starts: Indices, length: int) -> Tensor:
    """(N, length): the ids before each token, -1 before the start of its stream."""
    places = tokens[:, None] + np.arange(-length, 0)
    found = store.tokens[np.maximum(places, 0)].astype(np.int64)
    return torch.from_numpy(np.where(places >= starts[:, None], found, -1))


def _likeliest(log_probs: Tensor, size: int) -> Likeliest:
    """The most likely tokens of (N, 1, V), among those that the tokenizer has."""
    values, ids = log_probs[:, 0, :size].topk(min(CANDIDATES, size))
    return Likeliest(ids.cpu().numpy(), values.exp().double().cpu().numpy())


def _joined(parts: list[Likeliest]) -> Likeliest:
    return Likeliest(*map(np.concatenate, zip(*parts, strict=True)))
