"""How a model's past is changed, one way at a time, and how tokens are grouped.

A change is made where the past enters the model: in `make_slots`, or for recall in `nats`; the rest stays as it is.
What it does to a window depends on that window alone, so results do not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data import TokenStore
from logpast.data.batching import Streams
from logpast.models import LanguageModel, Recurrent, Transformer

Change = Callable[..., Tensor]
Kinds = NDArray[np.int64]

PERMUTATIONS = 64  # random orders, and replacement pasts: enough that no result depends on a single one
NEVER = -1


@contextmanager
def changed_past(
    model: LanguageModel,
    ids: Change | None = None,
    slots: Change | None = None,
    nats: Change | None = None,
    fresh: Change | None = None,
) -> Iterator[None]:
    """Within this context, the ids of the history (B, history) or the slots (B, L, d) made of them are changed, or what
    the model computes of its last hidden states: `nats` is a function of the model and the arguments of its `nats`.
    Of a recurrent model, `fresh` changes which rows (B,) start with a new state.
    """
    changed: dict[str, Callable[..., Any]] = {"nats": partial(nats, model)} if nats else {}
    if isinstance(model, Recurrent) and fresh:
        reset = model.reset
        changed["reset"] = lambda state, begins: reset(state, fresh(begins))
    if isinstance(model, Transformer):
        make_slots = model.make_slots

        def changed_slots(history: Tensor) -> Tensor:
            made = make_slots(ids(history) if ids else history)
            return slots(made) if slots else made

        changed["make_slots"] = changed_slots
    for name, function in changed.items():
        setattr(model, name, function)
    try:
        yield
    finally:
        for name in changed:
            delattr(model, name)


def without_recall(model: LanguageModel, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """The model's own loss, before recall is mixed in. What recall adds to the input stays."""
    return model.own_nats(hidden, targets)


def recall_components(model: LanguageModel, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """(…, 2, 1 + components): the weight of each component, the model's first, and its probability of the target."""
    matches, hits = counts.unbind(-3)
    weights = model.recall.log_weights(hidden, matches).exp()
    copied = (hits.to(weights.dtype) / matches.clamp(min=1)).flatten(-2)
    own = model.own_nats(hidden, targets).neg().exp().unsqueeze(-1)
    return torch.stack([weights, torch.cat([own, copied], dim=-1)], dim=-2)


def zero_slots(positions: list[int]) -> Change:
    """Set the slots at these positions of the sequence to zero, after any LayerNorm; position embeddings stay."""
    return lambda slots: slots.index_fill(1, torch.tensor(positions, device=slots.device), 0)


def cut_beyond(lag: int) -> Change:
    """Remove the tokens farther back than `lag` before the window."""

    def change(history: Tensor) -> Tensor:
        lags = torch.arange(history.shape[1], 0, -1, device=history.device)
        return history.masked_fill(lags > lag, -1)

    return change


def random_keys(history: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Random sort keys of a history's tokens, one row per order (64, history)."""
    return torch.rand(PERMUTATIONS, history, generator=torch.Generator().manual_seed(seed)).to(device)


def random_pasts(store: TokenStore, history: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Replacement pasts (64, history): stretches of the text from random positions; its end continues at its start."""
    starts = np.random.default_rng(seed).integers(len(store), size=(PERMUTATIONS, 1))
    return torch.from_numpy(store.tokens[(starts + np.arange(history)) % len(store)].astype(np.int64)).to(device)


def shuffled_beyond(lag: int, keys: Tensor) -> Change:
    """Shuffle the tokens farther back than `lag`; where there is no token, there is still none."""

    def change(old: Tensor, key: Tensor) -> Tensor:
        # missing tokens come first, and with the lowest key they stay there
        return old.gather(1, key.masked_fill(old < 0, -1).argsort(dim=1, stable=True))

    return _change_beyond(lag, keys, change)


def replaced_beyond(lag: int, pasts: Tensor) -> Change:
    """Replace the tokens farther back than `lag` by those of another past; where there is no token, there is still
    none."""
    return _change_beyond(lag, pasts, lambda old, other: torch.where(old < 0, old, other.to(old.dtype)))


def _change_beyond(lag: int, rows: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Change what is farther back than `lag` by one of the rows, which the ids of the window's history choose."""
    far = max(0, rows.shape[1] - lag)

    def changed(ids: Tensor) -> Tensor:
        which = ids.clamp(min=0).sum(dim=1) % PERMUTATIONS
        return torch.cat([change(ids[:, :far], rows[which, :far]), ids[:, far:]], dim=1)

    return changed


def positions_in_stream(store: TokenStore, streams: Streams) -> Kinds:
    """For each token, the number of tokens before it in its stream."""
    position = np.arange(len(store))
    return position - np.repeat(store.documents.start, store.documents.tokens) if streams == "document" else position


def last_seen(tokens: NDArray[np.integer], position: Kinds, window: int) -> Kinds:
    """Where each token last occurred: 0 if in its window, else the lag before the window, or NEVER.

    Args:
        tokens: ids in the order of the text.
        position: from `positions_in_stream`.
        window: m; windows start at positions 0, m, 2m, … of a stream, whose first token is at position 1.
    """
    order = np.argsort(tokens, kind="stable")
    one, next_one = order[:-1], order[1:]
    stream = np.arange(len(tokens)) - position
    again = (tokens[one] == tokens[next_one]) & (stream[one] == stream[next_one])
    before = np.full(len(tokens), NEVER)
    before[next_one[again]] = position[one[again]]
    start = position // window * window
    return np.where(before == NEVER, NEVER, np.maximum(start - (before + 1), 0))


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, … up to `largest`: where bins on a logarithmic axis begin."""
    return [2**power for power in range(max(0, largest).bit_length())]


def document_of_token(store: TokenStore) -> Kinds:
    """For each token, the number of its document."""
    return np.repeat(np.arange(len(store.documents)), store.documents.tokens)
