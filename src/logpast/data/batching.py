"""What a model is shown: windows of m tokens with the history before them, cut from a stream.

A stream is one end-of-text token followed by the tokens of a text: position 0 holds end-of-text, position j the
j-th token. Window i starts at position i·m, reads m positions and predicts the m after each of them, so that every
token is predicted exactly once and end-of-text never. Whatever lies outside the stream is -1: "no token".

With a stride s below m windows overlap: window i starts at i·s, and of its m predictions only the last s count, those
of the first window all: still each token once, now, but for the first of a stream, with at least m − s + 1 tokens of
its window in sight.

Tokens lie on the device that the model is on, if they fit, and windows are cut there.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data.store import TokenStore
from logpast.util.errors import UserError

Streams = Literal["corpus", "document"]


class Batch(NamedTuple):
    """Token ids, -1 = none: (B, history) int32, (B, m) and (B, m) int64."""

    history: Tensor
    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*_moved(self, device))

    def split(self, size: int) -> list[Batch]:
        return [Batch(*rows) for rows in _split(self, size)]


class Segments(NamedTuple):
    """Consecutive windows of B streams: ids (B, n, m) int64, what to predict, and (B, n) whether one is the first."""

    tokens: Tensor
    targets: Tensor
    fresh: Tensor

    def to(self, device: torch.device | str) -> Segments:
        return Segments(*_moved(self, device))

    def split(self, size: int) -> list[Segments]:
        return [Segments(*rows) for rows in _split(self, size)]


def _moved(parts: tuple[Tensor, ...], device: torch.device | str) -> list[Tensor]:
    return [_over(part, torch.device(device)) for part in parts]


def _split(parts: tuple[Tensor, ...], size: int) -> zip[tuple[Tensor, ...]]:
    return zip(*(part.split(size) for part in parts), strict=True)


class Windows:
    """All windows of a token store, numbered from 0 in the order of the text.

    Args:
        store: where the tokens are.
        window: m.
        history: how many positions before the window to show with it.
        streams: `corpus` makes the whole store one stream, as the paper does; `document` one per document, so
            that nothing is seen across their borders.
        shift: windows start this many positions earlier, at −shift, m − shift, … (0 ≤ shift ≤ m). One more window
            is counted then, whatever the shift; the first or the last may be left with nothing to predict.
        device: where batches are wanted; they are made on the CPU if the tokens do not fit there.
        stride: how far each window starts after the one before; by default m. Only without a shift.
    """

    def __init__(
        self,
        store: TokenStore,
        window: int,
        history: int,
        streams: Streams = "corpus",
        shift: int = 0,
        device: torch.device | str = "cpu",
        stride: int | None = None,
    ) -> None:
        if not 0 <= shift <= window:
            raise ValueError(f"shift must be from 0 to window ({window}), got {shift}")
        self.stride = window if stride is None else stride
        if not 1 <= self.stride <= window or (shift and self.stride != window):
            raise ValueError(f"stride must be from 1 to window ({window}) and without a shift, got {stride}")
        self.store, self.window, self.history, self.shift = store, window, history, shift
        self.device = torch.device(device)
        if streams == "document":
            self.starts, self.lengths = store.documents.start, store.documents.tokens
        else:
            self.starts, self.lengths = np.zeros(1, np.int64), np.array([len(store)], np.int64)
        extra = 1 if shift else 0
        counts = np.maximum(-(-(self.lengths - window) // self.stride) + 1, self.lengths > 0)
        self.first = np.concatenate([[0], np.cumsum(counts + extra)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The windows of these numbers."""
        return self.cut(self.locate(indices))

    def locate(self, indices: NDArray[np.int64]) -> Tensor:
        """(3, B) on the CPU: where each window's stream begins in the store, its length, the window's start in it."""
        return torch.from_numpy(np.stack(self._locate(indices)))

    def cut(self, located: Tensor) -> Batch:
        """The windows that `locate` found, of this or another shift."""
        tokens, (begin, length, start) = resident(self.store, self.device), located
        size, device = self.history + self.window + 1, tokens.device
        inside = (start > self.history) & (start + self.window <= length)  # the stream has all of it, as of most
        first = torch.where(inside, begin + start - self.history - 1, 0).clamp(max=len(tokens) - min(size, len(tokens)))
        if len(tokens) >= size:
            found = _unsigned(tokens.unfold(0, size, 1)[_over(first, device)])
        else:
            found = torch.empty(len(start), size, dtype=torch.int32, device=device)
        if not inside.all():
            rows = _over((~inside).nonzero().flatten(), device)
            begin, length, start = _over(located[:, ~inside], device).unsqueeze(-1)
            position = start + torch.arange(-self.history, self.window + 1, device=device)
            some = _unsigned(tokens[(begin + position - 1).clamp(0, len(tokens) - 1)])
            found[rows] = torch.where((position >= 1) & (position <= length), some, -1)
        targets = found[:, self.history + 1 :].long()
        if not inside.all():  # what is seen before the first token is the end of a text, which is not to be predicted
            found[rows] = torch.where(position == 0, self.store.tokenizer.eot, found[rows])
        return Batch(found[:, : self.history], found[:, self.history : -1].long(), targets)

    def places(self, index: int) -> slice:
        """Where the tokens that window `index` is the first to predict lie in the store."""
        begin, length, start = map(int, self._locate(index))
        first = max(start, 0) + self.overlap(index)
        return slice(begin + min(first, length), begin + min(start + self.window, length))

    def overlap(self, index: int) -> int:
        """How many of window `index`'s predictions the windows before it have made."""
        *_, start = self._locate(index)
        return self.window - self.stride if start > 0 else 0

    def _locate(self, index: Any) -> tuple[Any, Any, Any]:
        """What `locate` finds, of one window or of an array of them."""
        stream = np.searchsorted(self.first, index, side="right") - 1
        return self.starts[stream], self.lengths[stream], (index - self.first[stream]) * self.stride - self.shift


_residents: WeakKeyDictionary[TokenStore, dict[torch.device, Tensor]] = WeakKeyDictionary()


def resident(store: TokenStore, device: torch.device) -> Tensor:
    """The store's tokens on a device, put there once; on the CPU, mapped from their file, if they take too much room.

    The type is the signed one of the same size: torch has few operations for the others.
    """
    here = _residents.setdefault(store, {})
    if device not in here:
        signed = store.tokens.view(f"i{store.tokens.dtype.itemsize}")
        fits = device.type != "cuda" or signed.nbytes < torch.cuda.mem_get_info(device)[0] / 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to is as it should be
            here[device] = torch.from_numpy(signed).to(device if fits else "cpu")
    return here[device]


def _over(tensor: Tensor, device: torch.device) -> Tensor:
    """To a device, without waiting for it where that is safe: MPS may copy what has been overwritten meanwhile."""
    return tensor.to(device, non_blocking=device.type != "mps")


def _unsigned(ids: Tensor) -> Tensor:
    wide = ids.to(torch.int32)
    return wide & 0xFFFF if ids.dtype == torch.int16 else wide


class _Dealer:
    """What deals out a text's windows: which they are, epoch by epoch, and where batches are made."""

    def __init__(
        self,
        store: TokenStore,
        window: int,
        history: int,
        batch_size: int,
        seed: int,
        streams: Streams,
        jitter: bool,
        device: torch.device | str,
    ) -> None:
        if len(store) < window:
            raise UserError(f"{store.name} has {len(store)} tokens, less than one window of {window}; use more text")
        self.window, self.batch_size, self.seed, self.jitter = window, batch_size, seed, jitter
        self.device = resident(store, torch.device(device)).device
        self._windows = lru_cache(maxsize=2)(lambda shift: Windows(store, window, history, streams, shift, device))
        self.count = len(self._windows(int(jitter)))  # windows of an epoch: the same for every shift above 0

    def _shift(self, random: np.random.Generator) -> int:
        return 1 + int(random.integers(self.window)) if self.jitter else 0


class Batches(_Dealer):
    """The endless sequence of training batches: a pure function of seed and step, so resuming needs no state.

    Epoch after epoch, all windows are shuffled and dealt out once; a batch may span the border of two epochs.

    Args:
        jitter: draw a new phase of the windows for each epoch instead of starting at 0, m, 2m, … in all.
    """

    def __init__(
        self,
        store: TokenStore,
        window: int,
        history: int,
        batch_size: int,
        seed: int,
        streams: Streams = "corpus",
        jitter: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(store, window, history, batch_size, seed, streams, jitter, device)
        self._order = lru_cache(maxsize=2)(self._shuffle)
        self.windows_per_epoch = self.count

    def at(self, step: int, part: slice = slice(None)) -> Batch:
        """Batch number `step`, counted from 0, or only the rows `part` of it (one rank's share)."""
        first = step * self.batch_size
        rows = np.arange(first, first + self.batch_size)[part]
        epochs, places = rows // self.windows_per_epoch, rows % self.windows_per_epoch
        pieces = list[Tensor]()
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            shift, order = self._order(epoch)
            windows = self._windows(shift)
            pieces.append(windows.locate(order[places[epochs == epoch]]))
        return windows.cut(torch.cat(pieces, dim=1))

    def _shuffle(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.windows_per_epoch)
        return self._shift(random), order


class Lanes(_Dealer):
    """The endless sequence of training batches for a system that reads on: a function of the step alone.

    The text's windows are dealt to B lanes, each a stretch of it, and read in order; at the end of an epoch all lanes
    begin again. A state is to be forgotten where a lane begins, and, with streams by document, where a document does.

    Args:
        segments: windows of a lane in each batch.
        jitter: as in `Batches`.
    """

    def __init__(
        self,
        store: TokenStore,
        window: int,
        batch_size: int,
        segments: int,
        seed: int,
        streams: Streams = "corpus",
        jitter: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(store, window, 0, batch_size, seed, streams, jitter, device)
        self.segments = segments
        self.lane = -(-self.count // batch_size)  # windows in each; the last may have fewer
        self.steps_per_epoch = -(-self.lane // segments)
        self.windows_per_epoch = self.steps_per_epoch * batch_size  # in rows of a batch, as `Batches` counts

    def at(self, step: int, part: slice = slice(None)) -> Segments:
        """Batch number `step`, counted from 0, or only the rows `part` of it (one rank's share)."""
        epoch, step = divmod(step, self.steps_per_epoch)
        windows = self._windows(self._shift(np.random.default_rng([self.seed, epoch])))
        rows = np.arange(self.batch_size)[part, None]
        place = step * self.segments + np.arange(self.segments)  # in the lane
        number = rows * self.lane + place
        there = (place < self.lane) & (number < len(windows))
        located = windows.locate(np.where(there, number, 0).ravel())
        fresh = torch.from_numpy(place == 0) | (located[2] <= 0).view(number.shape)
        located[:, torch.from_numpy(~there.ravel())] = torch.tensor([[0], [0], [2]])  # beyond the end of no text
        _, tokens, targets = windows.cut(located)
        shape = (*number.shape, windows.window)
        return Segments(tokens.view(shape), targets.view(shape), fresh.to(tokens.device))
