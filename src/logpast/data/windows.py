"""What a model is shown: windows of m tokens with the history before them, cut from a stream.

A stream is one end-of-text token followed by the tokens of a text: position 0 holds end-of-text, position j the
j-th token. Window i starts at position i·m, reads m positions and predicts the m after each of them, so that every
token is predicted exactly once and end-of-text never. Whatever lies outside the stream is -1: "no token".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data.tokens import TokenStore
from logpast.errors import UserError

Streams = Literal["corpus", "document"]


class Batch(NamedTuple):
    """Three int64 tensors of token ids, -1 = none: (B, history), (B, m), (B, m)."""

    history: Tensor
    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Without waiting where that is safe: Apple's MPS may copy what has been overwritten meanwhile."""
        return Batch(*(part.to(device, non_blocking=torch.device(device).type != "mps") for part in self))

    def split(self, size: int) -> list[Batch]:
        return [Batch(*parts) for parts in zip(*(part.split(size) for part in self), strict=True)]


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
    """

    def __init__(
        self, store: TokenStore, window: int, history: int, streams: Streams = "corpus", shift: int = 0
    ) -> None:
        if not 0 <= shift <= window:
            raise ValueError(f"shift must be from 0 to window ({window}), got {shift}")
        self.store, self.window, self.history, self.shift = store, window, history, shift
        if streams == "document":
            self.starts, self.lengths = store.documents.start, store.documents.tokens
        else:
            self.starts, self.lengths = np.zeros(1, np.int64), np.array([len(store)], np.int64)
        extra = 1 if shift else 0
        self.first = np.concatenate([[0], np.cumsum(-(-self.lengths // window) + extra)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The windows of these numbers."""
        span = np.full((len(indices), self.history + self.window + 1), -1, np.int64)
        targets = np.full((len(indices), self.window), -1, np.int64)
        for row, index in enumerate(indices):
            stream, start = self._locate(int(index))
            begin, length = int(self.starts[stream]), int(self.lengths[stream])
            left, right = max(start - self.history, 1), min(start + self.window, length) + 1
            offset = self.history - start  # from a position in the stream to a column of the span
            if left < right:
                span[row, left + offset : right + offset] = self.store.tokens[begin + left - 1 : begin + right - 1]
                goal = max(start, 0) + 1
                if goal < right:
                    targets[row, goal - start - 1 : right - start - 1] = span[row, goal + offset : right + offset]
            if start - self.history <= 0 <= start + self.window:
                span[row, offset] = self.store.tokenizer.eot
        return Batch(
            torch.from_numpy(span[:, : self.history]),
            torch.from_numpy(span[:, self.history : -1]),
            torch.from_numpy(targets),
        )

    def places(self, index: int) -> slice:
        """Where the tokens that window `index` predicts lie in the store."""
        stream, start = self._locate(index)
        begin, length = int(self.starts[stream]), int(self.lengths[stream])
        return slice(begin + min(max(start, 0), length), begin + min(start + self.window, length))

    def _locate(self, index: int) -> tuple[int, int]:
        stream = int(np.searchsorted(self.first, index, side="right")) - 1
        return stream, (index - int(self.first[stream])) * self.window - self.shift


class Batches:
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
    ) -> None:
        if len(store) < window:
            raise UserError(f"{store.name} has {len(store)} tokens, less than one window of {window}; use more text")
        self.batch_size, self.seed, self.jitter = batch_size, seed, jitter
        self._windows = lru_cache(maxsize=2)(lambda shift: Windows(store, window, history, streams, shift))
        self._order = lru_cache(maxsize=2)(self._shuffle)
        self.window = window
        self.windows_per_epoch = len(self._windows(int(jitter)))  # the same for every shift above 0

    def at(self, step: int, part: slice = slice(None)) -> Batch:
        """Batch number `step`, counted from 0, or only the rows `part` of it (one rank's share)."""
        first = step * self.batch_size
        rows = np.arange(first, first + self.batch_size)[part]
        epochs, places = rows // self.windows_per_epoch, rows % self.windows_per_epoch
        pieces = []
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            shift, order = self._order(epoch)
            windows = self._windows(shift)
            chosen = order[places[epochs == epoch]]
            pieces.append(windows.batch(chosen))
        return pieces[0] if len(pieces) == 1 else Batch(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def _shuffle(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.windows_per_epoch)
        shift = 1 + int(random.integers(self.window)) if self.jitter else 0
        return shift, order
