"""What can be asked of a model and its past: the past changed in one way at a time, and tokens told apart by kind.

A change is made where the past enters the model, `front`, so that the scorer and the rest of the model stay as they
are. What it does to a window depends on that window alone: results do not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data import TokenStore
from logpast.data.batching import Streams
from logpast.models import Transformer

Change = Callable[[Tensor], Tensor]
Kinds = NDArray[np.int64]

PERMUTATIONS = 64  # and other pasts, that windows are dealt, so that no figure hangs on a single one
FEWEST, BLOCKS = 20, 50  # documents that intervals are made of; runs of windows in their place
NEVER = -1


@contextmanager
def changed_past(model: Transformer, ids: Change | None = None, slots: Change | None = None) -> Iterator[None]:
    """While it lasts the model sees another past: other ids (B, history), or other slots (B, L, d) made of them."""
    front = model.front

    def other(history: Tensor) -> Tensor:
        made = front(ids(history) if ids else history)
        return slots(made) if slots else made

    model.front = other  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.front


def silent(places: list[int]) -> Change:
    """Slots at these places of the sequence become zero vectors, after any LayerNorm; their positions stay."""
    return lambda slots: slots.index_fill(1, torch.tensor(places, device=slots.device), 0)


def cut_beyond(lag: int) -> Change:
    """What lies farther back than `lag` tokens before the window is no token."""

    def change(history: Tensor) -> Tensor:
        lags = torch.arange(history.shape[1], 0, -1, device=history.device)
        return history.masked_fill(lags > lag, -1)

    return change


def random_keys(history: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """By which to order a history: 64 rows, drawn by `seed`."""
    return torch.rand(PERMUTATIONS, history, generator=torch.Generator().manual_seed(seed)).to(device)


def random_pasts(store: TokenStore, history: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Other pasts: 64 stretches of the text, from places drawn by `seed`; at its end it begins anew."""
    starts = np.random.default_rng(seed).integers(len(store), size=(PERMUTATIONS, 1))
    return torch.from_numpy(store.tokens[(starts + np.arange(history)) % len(store)].astype(np.int64)).to(device)


def shuffled_beyond(lag: int, keys: Tensor) -> Change:
    """What lies farther back than `lag` tokens is put into random order; where there is no token there stays none."""

    def change(old: Tensor, key: Tensor) -> Tensor:
        # what is missing lies before all else, and with the lowest key it stays there
        return old.gather(1, key.masked_fill(old < 0, -1).argsort(dim=1, stable=True))

    return _dealt(lag, keys, change)


def replaced_beyond(lag: int, pasts: Tensor) -> Change:
    """What lies farther back than `lag` tokens is that of another past; where there is no token there stays none."""
    return _dealt(lag, pasts, lambda old, other: torch.where(old < 0, old, other.to(old.dtype)))


def _dealt(lag: int, rows: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Farther back than `lag`, a change by one of the rows; the ids of a window's history say by which."""
    far = max(0, rows.shape[1] - lag)

    def changed(ids: Tensor) -> Tensor:
        which = ids.clamp(min=0).sum(dim=1) % PERMUTATIONS
        return torch.cat([change(ids[:, :far], rows[which, :far]), ids[:, far:]], dim=1)

    return changed


def places_in_stream(store: TokenStore, streams: Streams) -> Kinds:
    """Of each token: how many tokens of its stream come before it."""
    place = np.arange(len(store))
    return place - np.repeat(store.documents.start, store.documents.tokens) if streams == "document" else place


def last_seen(tokens: NDArray[np.integer], place: Kinds, window: int) -> Kinds:
    """Of each token: where it last occurred: 0 for in the window before it, else its lag before the window, or NEVER.

    Args:
        tokens: ids in the order of the text.
        place: from `places_in_stream`.
        window: m; windows start at positions 0, m, 2m, … of a stream, whose first token is at position 1.
    """
    order = np.argsort(tokens, kind="stable")
    one, next_one = order[:-1], order[1:]
    begin = np.arange(len(tokens)) - place
    again = (tokens[one] == tokens[next_one]) & (begin[one] == begin[next_one])
    before = np.full(len(tokens), NEVER)
    before[next_one[again]] = place[one[again]]
    start = place // window * window
    return np.where(before == NEVER, NEVER, np.maximum(start - (before + 1), 0))


def doubling(largest: int) -> list[int]:
    """1, 2, 4, … as far as `largest`: where bins on a logarithmic axis begin."""
    return [2**power for power in range(max(0, largest).bit_length())]


def documents_of(store: TokenStore) -> Kinds:
    """Of each token: which document it is of."""
    return np.repeat(np.arange(len(store.documents)), store.documents.tokens)


def groups_of(store: TokenStore, tokens: int, window: int) -> tuple[Kinds, str]:
    """Which tokens are drawn together when intervals are made, and what these groups are.

    Documents if there are at least FEWEST in the first so many tokens, else about BLOCKS runs of whole windows.
    """
    there = int(((store.documents.start < tokens) & (store.documents.tokens > 0)).sum())
    whose = "1 document" if there == 1 else f"{there:,} documents"
    if there >= FEWEST:
        return documents_of(store)[:tokens], whose
    size = window * max(1, -(-tokens // (window * BLOCKS)))
    what = f"{-(-tokens // size):,} blocks of {size:,} tokens in {whose}, which says nothing of others"
    return np.arange(tokens) // size, what
