"""Scoring: the loss of every token of a text under a model, each token once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data.batching import Batch, Segments, Streams, Windows
from logpast.data.store import TokenStore
from logpast.kernels.cuda_graphs import Replay
from logpast.models import State
from logpast.recall import RecallForm
from logpast.util.precision import accumulation_dtype

Indices = NDArray[np.int64]


@torch.inference_mode()
def score(
    model: Any,
    store: TokenStore,
    window: int,
    history: int,
    batch_size: int = 16,
    streams: Streams = "corpus",
    device: torch.device | str = "cpu",
    limit: int | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
    stride: int | None = None,
    recall: RecallForm | None = None,
    shape: tuple[int, ...] = (),
) -> NDArray[np.float64]:
    """The loss of every token of the store in nats, in text order.

    Args:
        model: a function of (history, tokens, targets) that gives the loss of each target. A recurrent model
            (`Recurrent`) processes each stream from start to end, up to `batch_size` streams in parallel.
        store: the text.
        window: m, the model's window.
        history: number of tokens before each window that the model takes.
        batch_size: windows at a time; changes the speed and not the result.
        streams: one stream for the whole `corpus`, or one per `document`.
        device: the model's device.
        limit: score at least this many tokens, then stop at the end of a window.
        share: (rank, ranks): score only every `ranks`-th batch, from number `rank` on; the other losses are zero.
        progress: called with the number of tokens done.
        stride: below `window`, windows overlap, and each scores only the tokens that no earlier window has scored.
            Not for recurrent models.
        recall: of a model with recall, its form (`model.config.recall_form`).
        shape: of what the model gives for each target, if that is not one loss.
    """
    recurrent = hasattr(model, "segment")
    if recurrent and stride not in (None, window):
        raise ValueError("a recurrent model processes each token once: its windows cannot overlap (stride)")
    windows = Windows(store, window, history, streams, device=device, stride=stride, recall=recall)
    count = len(windows)
    if limit is not None:  # targets are in text order, so the first window that reaches the limit is found by bisection
        reached = bisect_left(range(count), limit, key=lambda index: windows.targets(index).stop)
        count = min(count, reached + 1)
    rank, ranks = share
    nats = np.zeros((len(store) if count == len(windows) else windows.targets(count - 1).stop, *shape))
    training, done = model.training, 0
    model.eval()
    cuda_graphs = torch.device(device).type == "cuda" and ranks == 1
    groups = _stream_groups(windows, count, batch_size) if recurrent else _window_groups(count, batch_size)
    scorer = RecurrentScorer(model, cuda_graphs) if recurrent else None
    for batches in islice(groups, rank, None, ranks):
        for number, indices in enumerate(batches):
            batch = windows.batch(indices).to(device)
            losses = scorer(batch, fresh=number == 0) if scorer else model(*batch.inputs)
            for index, row in zip(indices, losses.cpu().to(accumulation_dtype(losses.dtype)).numpy(), strict=True):
                position = windows.targets(int(index))
                nats[position] = row[windows.overlap(int(index)) :][: position.stop - position.start]
                done += position.stop - position.start
            if progress:
                progress(done)
    model.train(training)
    return nats


class RecurrentScorer:
    """Scores parallel streams with a recurrent model: each call takes the next window of every stream.

    Streams that have ended must be the last rows; they are left out of later calls. With `cuda_graphs`, a segment runs
    as one CUDA graph instead of hundreds of small kernels. A graph has a fixed number of rows, so ended streams stay as
    padding until they are half of the rows, and graphs are kept for later streams.
    """

    def __init__(self, model: Any, cuda_graphs: bool = False) -> None:
        self.model, self.cuda_graphs = model, cuda_graphs
        self.by_rows: dict[int, tuple[Callable[[Segments], Tensor], State]] = {}
        self.state: State = {}

    def __call__(self, batch: Batch, fresh: bool) -> Tensor:
        """The loss of each target; `fresh` if all streams start with this window."""
        count, before = len(batch.tokens), self.state
        enough = [rows for rows in self.by_rows if count <= rows < 2 * count] if self.cuda_graphs else []
        rows = min(enough, default=count)
        run, self.state = self._for(rows)
        if not fresh and self.state is not before:
            for name, value in self.state.items():
                value.copy_(before[name][:rows])
        padding = [part.new_full((rows - count, *part.shape[1:]), -1) for part in batch.inputs[1:]]
        parts = zip(batch.inputs[1:], padding, strict=True)
        tokens, targets, *recalled = (torch.cat([part, more]).unsqueeze(1) for part, more in parts)
        return run(Segments(tokens, targets, torch.full((rows, 1), fresh, device=tokens.device), *recalled))[:count, 0]

    def _for(self, rows: int) -> tuple[Callable[[Segments], Tensor], State]:
        """The function that processes a segment of so many rows, and the state that it updates."""
        if rows not in self.by_rows:
            if not self.cuda_graphs:
                self.by_rows.clear()  # only graphs are expensive to make
            state = {name: value.clone() for name, value in self.model.start(rows).items()}
            run = partial(_segment_losses, self.model, state)
            self.by_rows[rows] = Replay(run) if self.cuda_graphs else run, state
        return self.by_rows[rows]


def _segment_losses(model: Any, state: State, batch: Segments) -> Tensor:
    """The losses of a segment. The state is updated in place."""
    losses, after, _ = model(*batch[:3], state, *batch[3:])
    for name, value in state.items():
        value.copy_(after[name])
    assert isinstance(losses, Tensor)
    return losses


def _window_groups(count: int, batch_size: int) -> Iterator[list[Indices]]:
    """Batches of independent windows, each a group of its own."""
    for first in range(0, count, batch_size):
        yield [np.arange(first, min(first + batch_size, count))]


def _stream_groups(windows: Windows, count: int, batch_size: int) -> Iterator[list[Indices]]:
    """Groups of streams, longest first. A group is a list of batches: all first windows, all second windows, …"""
    lengths = np.diff(np.minimum(windows.first, count))
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        yield [windows.first[group[lengths[group] > i]] + i for i in range(int(lengths[group[0]]))]
