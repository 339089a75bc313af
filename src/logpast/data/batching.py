"""Batches of (history, window, targets), cut from a token store on the model's device.

A stream is one end-of-text token followed by the tokens of a text: position 0 holds end-of-text, position j the j-th
token. A window of m tokens starts at position i·m; its targets are the tokens one position later. Every token is
therefore a target exactly once, and end-of-text never is. Positions outside the stream hold -1, "no token".

With a stride s below m, windows overlap: window i starts at i·s. Only its last s targets are new (all m in the first
window), so every token is still scored once. Except at the start of a stream, it is predicted from at least m − s + 1
tokens of its window.
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
from logpast.recall import RecallForm
from logpast.recall.index import CHUNK, Index, counts_of_targets, occurrences
from logpast.util.errors import UserError
from logpast.util.progress import progress_bar

Streams = Literal["corpus", "document"]


class Batch(NamedTuple):
    """Token ids of B windows; -1 is no token.

    Attributes:
        history: (B, history) int32, the tokens before each window.
        tokens: (B, m) int64, the window.
        targets: (B, m) int64, the tokens to predict.
        counts: (B, m, 2, orders + 1, bins), for models with recall: how many matches there are before each target, and
            how many of them it followed.
        followers: (B, m, orders), for models with recall at the input: what followed the latest matches of the tokens.
    """

    history: Tensor
    tokens: Tensor
    targets: Tensor
    counts: Tensor | None = None
    followers: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The parts that there are, as a model takes them."""
        return tuple(part for part in self if part is not None)

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(_to_device(part, device) for part in self.inputs))

    def split(self, size: int) -> list[Batch]:
        return [Batch(*rows) for rows in zip(*(part.split(size) for part in self.inputs), strict=True)]


class Segments(NamedTuple):
    """Consecutive windows of B streams, for recurrent models; -1 is no token.

    Attributes:
        tokens: (B, n, m) int64, n consecutive windows.
        targets: (B, n, m) int64, the tokens to predict.
        fresh: (B, n) bool, whether the state must be reset before a window.
        counts, followers: (B, n, m, …), for models with recall, as in `Batch`.
    """

    tokens: Tensor
    targets: Tensor
    fresh: Tensor
    counts: Tensor | None = None
    followers: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(part for part in self if part is not None)

    def to(self, device: torch.device | str) -> Segments:
        return Segments(*(_to_device(part, device) for part in self.inputs))

    def split(self, size: int) -> list[Segments]:
        return [Segments(*rows) for rows in zip(*(part.split(size) for part in self.inputs), strict=True)]


class Windows:
    """All windows of a token store, numbered from 0 in text order.

    Args:
        store: the tokens.
        window: m, the number of tokens in a window.
        history: the number of tokens to give before each window.
        streams: `corpus` makes the whole store one stream, as in the paper; `document` makes one stream per document,
            so that no history crosses a document boundary.
        shift: windows start this many positions earlier, at −shift, m − shift, … (0 ≤ shift ≤ m). Any shift above 0
            adds one window; the first or the last window may then have no targets.
        device: the device of the batches. If the tokens do not fit there, batches are on the CPU.
        stride: distance between the starts of two windows; by default m. Needs shift 0.
        recall: which matches to count for each target.
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
        recall: RecallForm | None = None,
    ) -> None:
        if not 0 <= shift <= window:
            raise ValueError(f"shift must be from 0 to window ({window}), got {shift}")
        self.stride = window if stride is None else stride
        if not 1 <= self.stride <= window or (shift and self.stride != window):
            raise ValueError(f"stride must be from 1 to window ({window}), and shift must be 0, got {stride}")
        self.store, self.window, self.history, self.shift = store, window, history, shift
        self.device, self.streams, self.recall = torch.device(device), streams, recall
        if streams == "document":
            self.starts, self.lengths = store.documents.start, store.documents.tokens
        else:
            self.starts, self.lengths = np.zeros(1, np.int64), np.array([len(store)], np.int64)
        extra = 1 if shift else 0
        counts = np.maximum(-(-(self.lengths - window) // self.stride) + 1, self.lengths > 0)
        self.first = np.concatenate([[0], np.cumsum(counts + extra)])  # number of each stream's first window

    def __len__(self) -> int:
        return int(self.first[-1])

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The windows with these numbers."""
        return self.cut(self.locate(indices))

    def locate(self, indices: NDArray[np.int64]) -> Tensor:
        """(3, B) on the CPU: the start of each window's stream in the store, its length, and the window's position."""
        return torch.from_numpy(np.stack(self._locate(indices)))

    def cut(self, located: Tensor) -> Batch:
        """The windows at the positions that `locate` gives, for this or another shift."""
        tokens, (begin, length, start) = _tokens_on(self.store, self.device), located
        size, device = self.history + self.window + 1, tokens.device
        # Most windows and their histories lie inside their stream: each is one slice of the store.
        inside = (start > self.history) & (start + self.window <= length)
        first = torch.where(inside, begin + start - self.history - 1, 0).clamp(max=len(tokens) - min(size, len(tokens)))
        if len(tokens) >= size:
            ids = _unsigned(tokens.unfold(0, size, 1)[_to_device(first, device)])
        else:
            ids = torch.empty(len(start), size, dtype=torch.int32, device=device)
        if not inside.all():
            rows = _to_device((~inside).nonzero().flatten(), device)
            begin, length, start = _to_device(located[:, ~inside], device).unsqueeze(-1)
            position = start + torch.arange(-self.history, self.window + 1, device=device)
            found = _unsigned(tokens[(begin + position - 1).clamp(0, len(tokens) - 1)])
            ids[rows] = torch.where((position >= 1) & (position <= length), found, -1)
        targets = ids[:, self.history + 1 :].long()
        if not inside.all():  # only now: end-of-text is an input, never a target
            ids[rows] = torch.where(position == 0, self.store.tokenizer.eot, ids[rows])
        recalled = self._recalled(located, device, self.recall) if self.recall else ()
        return Batch(ids[:, : self.history], ids[:, self.history : -1].long(), targets, *recalled)

    def _recalled(self, located: Tensor, device: torch.device, form: RecallForm) -> tuple[Tensor, ...]:
        """Counts, and followers if the form has them: see `Batch`."""
        table, followers = _index_on(self.store, self.device, self.streams, form)
        begin, length, start = _to_device(located, device).unsqueeze(-1)
        before = start + torch.arange(self.window, device=device)  # tokens of the stream before each target
        counts = counts_of_targets(table, (begin + before).clamp(0, len(table) - 1), before, form.edges)
        counts = counts * ((before >= 0) & (before < length))[..., None, None, None]
        if not form.input:
            return (counts,)
        seen = ((before > 0) & (before <= length)).unsqueeze(-1)
        return counts, torch.where(seen, followers[(begin + before - 1).clamp(0, len(table) - 1)], -1)

    def targets(self, index: int) -> slice:
        """The positions in the store of the tokens that window `index` is the first to predict."""
        begin, length, start = map(int, self._locate(index))
        first = max(start, 0) + self.overlap(index)
        return slice(begin + min(first, length), begin + min(start + self.window, length))

    def overlap(self, index: int) -> int:
        """How many targets of window `index` are also targets of an earlier window."""
        *_, start = self._locate(index)
        return self.window - self.stride if start > 0 else 0

    def _locate(self, index: Any) -> tuple[Any, Any, Any]:
        """The same as `locate`, for one window or an array of windows."""
        stream = np.searchsorted(self.first, index, side="right") - 1
        return self.starts[stream], self.lengths[stream], (index - self.first[stream]) * self.stride - self.shift


_device_tokens: WeakKeyDictionary[TokenStore, dict[torch.device, Tensor]] = WeakKeyDictionary()


def _tokens_on(store: TokenStore, device: torch.device) -> Tensor:
    """The store's tokens on a device, copied once. If they would take too much GPU memory, they stay on the CPU.

    The dtype is the signed integer of the same size, because torch supports few operations on unsigned integers.
    """
    copies = _device_tokens.setdefault(store, {})
    if device not in copies:
        signed = store.tokens.view(f"i{store.tokens.dtype.itemsize}")
        fits = device.type != "cuda" or signed.nbytes < torch.cuda.mem_get_info(device)[0] / 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory map is read-only on purpose
            copies[device] = torch.from_numpy(signed).to(device if fits else "cpu")
    return copies[device]


_indices: WeakKeyDictionary[TokenStore, dict[Any, Index]] = WeakKeyDictionary()


def _index_on(store: TokenStore, device: torch.device, streams: Streams, form: RecallForm) -> Index:
    """What recall needs of all tokens, found once, on the device of the tokens."""
    copies, key = _indices.setdefault(store, {}), (device, streams, form)
    if key not in copies:
        tokens = _tokens_on(store, device)
        stream = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        if streams == "document":
            starts = torch.from_numpy(store.documents.start[store.documents.tokens > 0])
            stream[starts.to(tokens.device)] = 1
            stream = stream.cumsum(0)
        with progress_bar("finding matches for recall", len(tokens), visible=len(tokens) > CHUNK) as progress:
            followers = form.orders if form.input else 0
            copies[key] = occurrences(
                _unsigned(tokens), stream, form.orders + 1, form.edges, followers, progress.update
            )
    return copies[key]


def _to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy without waiting, except to MPS, where the source could be overwritten before it is copied."""
    device = torch.device(device)
    return tensor.to(device, non_blocking=device.type != "mps")


def _unsigned(ids: Tensor) -> Tensor:
    """int32 ids from the signed integers of `_tokens_on`."""
    wide = ids.to(torch.int32)
    return wide & 0xFFFF if ids.dtype == torch.int16 else wide


class _TrainingBatches:
    """What `Batches` and `Lanes` share: the windows of each epoch and the device of the batches."""

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
        recall: RecallForm | None,
    ) -> None:
        if len(store) < window:
            raise UserError(f"{store.name} has {len(store)} tokens, less than one window of {window}; use more text")
        self.window, self.batch_size, self.seed, self.jitter = window, batch_size, seed, jitter
        self.device = _tokens_on(store, torch.device(device)).device
        self._windows = lru_cache(maxsize=2)(
            lambda shift: Windows(store, window, history, streams, shift, device, recall=recall)
        )
        self.count = len(self._windows(int(jitter)))  # windows per epoch: the same for every shift above 0

    def _shift(self, random: np.random.Generator) -> int:
        return 1 + int(random.integers(self.window)) if self.jitter else 0


class Batches(_TrainingBatches):
    """The endless sequence of training batches: a pure function of seed and step, so resuming needs no state.

    In each epoch every window occurs once, in random order. A batch may contain windows of two epochs.

    Args:
        jitter: shift the windows by a random number of positions in each epoch; by default they always start at
            0, m, 2m, …
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
        recall: RecallForm | None = None,
    ) -> None:
        super().__init__(store, window, history, batch_size, seed, streams, jitter, device, recall)
        self._order = lru_cache(maxsize=2)(self._shuffle)
        self.windows_per_epoch = self.count

    def at(self, step: int, part: slice = slice(None)) -> Batch:
        """Batch number `step`, counted from 0, or only the rows `part` of it (the share of one rank)."""
        first = step * self.batch_size
        rows = np.arange(first, first + self.batch_size)[part]
        epochs, positions = rows // self.windows_per_epoch, rows % self.windows_per_epoch
        located = list[Tensor]()
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            shift, order = self._order(epoch)
            windows = self._windows(shift)
            located.append(windows.locate(order[positions[epochs == epoch]]))
        return windows.cut(torch.cat(located, dim=1))

    def _shuffle(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        """The shift of the windows and their order in an epoch."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.windows_per_epoch)
        return self._shift(random), order


class Lanes(_TrainingBatches):
    """The endless sequence of training batches for a recurrent model: a pure function of seed and step.

    The text is cut into B contiguous parts, the lanes, one per row of a batch. Each step gives the next windows of
    every lane; after an epoch all lanes start again. The state must be reset where a lane starts and, if streams are
    documents, where a document starts: there `fresh` is true.

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
        recall: RecallForm | None = None,
    ) -> None:
        super().__init__(store, window, 0, batch_size, seed, streams, jitter, device, recall)
        self.segments = segments
        self.lane_length = -(-self.count // batch_size)  # in windows; the last lane may have fewer
        self.steps_per_epoch = -(-self.lane_length // segments)
        self.windows_per_epoch = self.steps_per_epoch * batch_size  # in rows of a batch, as in `Batches`

    def at(self, step: int, part: slice = slice(None)) -> Segments:
        """Batch number `step`, counted from 0, or only the rows `part` of it (the share of one rank)."""
        epoch, step = divmod(step, self.steps_per_epoch)
        windows = self._windows(self._shift(np.random.default_rng([self.seed, epoch])))
        lanes = np.arange(self.batch_size)[part, None]
        position = step * self.segments + np.arange(self.segments)  # in the lane
        index = lanes * self.lane_length + position
        exists = (position < self.lane_length) & (index < len(windows))
        located = windows.locate(np.where(exists, index, 0).ravel())
        fresh = torch.from_numpy(position == 0) | (located[2] <= 0).view(index.shape)
        # Past the end of a lane: a window behind the end of an empty stream holds no token.
        located[:, torch.from_numpy(~exists.ravel())] = torch.tensor([[0], [0], [2]])
        _, *parts = windows.cut(located).inputs
        tokens, targets, *recalled = (part.view(*index.shape, *part.shape[1:]) for part in parts)
        return Segments(tokens, targets, fresh.to(tokens.device), *recalled)
