"""Any model + any token store -> the nats of every token, each exactly once, and the figures made of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from logpast.data.batching import Batch, Segments, Streams, Windows
from logpast.data.store import TokenStore
from logpast.evaluation import metrics
from logpast.kernels.cuda_graphs import Replay
from logpast.models import State
from logpast.util.precision import accumulation_dtype

KEPT = 2000  # documents at most whose nats stand beside the figures


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
) -> NDArray[np.float64]:
    """The nats of every token of the store, in its order.

    Args:
        model: called with (history, tokens, targets), gives the nats of the targets; a recurrent one (`Recurrent`)
            reads each stream from its beginning to its end, up to `batch_size` streams side by side.
        window: the model's m.
        history: how many tokens before each window the model wants to see.
        batch_size: windows at a time; changes the speed and not the result.
        streams: one stream for the whole `corpus`, or one per `document`.
        device: where the model is.
        limit: stop after the window in which the so-many-th token lies.
        share: (rank, of how many): score only every n-th batch and leave zeros elsewhere.
        progress: called with how many tokens are done.
        stride: below `window`, overlapping windows, of which only what the ones before did not predict is scored; not
            for a recurrent model, which reads each token once.
    """
    recurrent = hasattr(model, "segment")
    if recurrent and stride not in (None, window):
        raise ValueError("a recurrent model reads each token once: it cannot be scored by overlapping windows")
    windows = Windows(store, window, history, streams, device=device, stride=stride)
    count = len(windows)
    if limit is not None:  # windows predict the text in order, so the first that reaches the limit can be searched
        reached = bisect_left(range(count), limit, key=lambda index: windows.places(index).stop)
        count = min(count, reached + 1)
    rank, ranks = share
    nats = np.zeros(len(store) if count == len(windows) else windows.places(count - 1).stop)
    training, done = model.training, 0
    model.eval()
    alone_on_gpu = torch.device(device).type == "cuda" and ranks == 1
    groups = _streams(windows, count, batch_size) if recurrent else _rows(count, batch_size)
    reading = RecurrentScorer(model, alone_on_gpu) if recurrent else None
    for batches in islice(groups, rank, None, ranks):
        for number, indices in enumerate(batches):
            batch = windows.batch(indices).to(device)
            costs = reading(batch, fresh=number == 0) if reading else model(*batch)
            for index, row in zip(indices, costs.cpu().to(accumulation_dtype(costs.dtype)).numpy(), strict=True):
                place = windows.places(int(index))
                nats[place] = row[windows.overlap(int(index)) :][: place.stop - place.start]
                done += place.stop - place.start
            if progress:
                progress(done)
    model.train(training)
    return nats


class RecurrentScorer:
    """A recurrent model on its way through streams side by side: called with the next window of each, gives its nats.

    The streams that end must be the last of them. A segment is hundreds of small kernels, so on a GPU it is `replayed`
    as one CUDA graph. That has one shape, so rows of streams that ended stay until they are half of all; and what was
    made for a number of rows is kept for other streams.
    """

    def __init__(self, model: Any, replayed: bool = False) -> None:
        self.model, self.replayed = model, replayed
        self.made: dict[int, tuple[Callable[[Segments], Tensor], State]] = {}
        self.state: State = {}

    def __call__(self, batch: Batch, fresh: bool) -> Tensor:
        count, before = len(batch.tokens), self.state
        enough = [rows for rows in self.made if count <= rows < 2 * count] if self.replayed else []
        rows = min(enough, default=count)
        read, self.state = self._for(rows)
        if not fresh and self.state is not before:
            for name, value in self.state.items():
                value.copy_(before[name][:rows])
        tokens, targets = (F.pad(ids, (0, 0, 0, rows - count), value=-1).unsqueeze(1) for ids in batch[1:])
        return read(Segments(tokens, targets, torch.full((rows, 1), fresh, device=tokens.device)))[:count, 0]

    def _for(self, rows: int) -> tuple[Callable[[Segments], Tensor], State]:
        if rows not in self.made:
            if not self.replayed:
                self.made.clear()  # nothing is gained by keeping it
            state = {name: value.clone() for name, value in self.model.start(rows).items()}
            read = partial(_read_on, self.model, state)
            self.made[rows] = Replay(read) if self.replayed else read, state
        return self.made[rows]


def _read_on(model: Any, state: State, batch: Segments) -> Tensor:
    """The nats of a segment; the state becomes that after it."""
    costs, after, _ = model(*batch, state)
    for name, value in state.items():
        value.copy_(after[name])
    assert isinstance(costs, Tensor)
    return costs


Indices = NDArray[np.int64]


def _rows(count: int, batch_size: int) -> Iterator[list[Indices]]:
    """Windows in batches, each a group of its own: they have nothing to do with each other."""
    for first in range(0, count, batch_size):
        yield [np.arange(first, min(first + batch_size, count))]


def _streams(windows: Windows, count: int, batch_size: int) -> Iterator[list[Indices]]:
    """Streams in groups, longest first; of each group the first windows of all, then the second ones, and so on."""
    lengths = np.diff(np.minimum(windows.first, count))
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        yield [windows.first[group[lengths[group] > i]] + i for i in range(int(lengths[group[0]]))]


def compute_metrics(nats: NDArray[np.float64], store: TokenStore, span: slice = slice(None)) -> dict[str, Any]:
    """All figures for the tokens in `span`, with 95 % intervals over documents where there are several.

    Each document's nats stand with them, so that other models' can be set beside them, document by document.
    """
    chosen, documents = nats[span], store.documents
    result = metrics.summary(math.fsum(chosen), len(chosen), store.counts)
    result["documents"] = len(documents.start)
    if len(documents.start) > 1:
        summed, tokens = per_document(nats, store, span)
        words_eos = documents.words + documents.lines
        units = {"token": tokens, "word": documents.words, "word_eos": words_eos, "byte": documents.bytes}
        intervals = metrics.bootstrap(summed, units)
        in_bits = [bound / math.log(2) for bound in intervals.pop("byte")]
        in_ppl = {f"ppl_{unit}": [metrics.perplexity(bound, 1) for bound in both] for unit, both in intervals.items()}
        result["interval"] = in_ppl | {"bits_per_byte": in_bits}
        if len(documents.start) <= KEPT:
            result["by_document"] = {"nats": [round(float(n), 3) for n in summed], "tokens": tokens.tolist()}
    return result


def per_document(
    nats: NDArray[np.float64], store: TokenStore, span: slice = slice(None)
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Of each document: the nats of its tokens that lie in the span, and how many those are."""
    start, stop, _ = span.indices(len(store))
    first = np.clip(store.documents.start, start, stop)
    last = np.clip(store.documents.start + store.documents.tokens, start, stop)
    return np.array([nats[a:b].sum() for a, b in zip(first, last, strict=True)]), last - first
