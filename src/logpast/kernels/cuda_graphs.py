"""Work that comes again and again as one CUDA graph: the host says "again" instead of launching hundreds of kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

WARM_UP = 3  # calls before the capture: they compile kernels and claim the libraries' workspaces


@cache
def _beside(device: int) -> torch.cuda.Stream:
    """Where all that is replayed on a device is captured: for each stream, libraries claim workspaces anew."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage may hold an earlier graph, and to free that during a capture ends the capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Replay:
    """`work`, a function of a batch that works on its CUDA device and tells the host nothing.

    It is called as it is a few times, then captured, then replayed; batches must have one shape. What it returns is
    overwritten by the next call.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        with torch.cuda.device_of(batch[0]):
            if self.calls == 0:
                self.batch = type(batch)(*(part.clone() for part in batch))
                self.graph, self.stream = torch.cuda.CUDAGraph(), _beside(torch.cuda.current_device())
            for kept, new in zip(self.batch, batch, strict=True):
                kept.copy_(new)
            if self.calls < WARM_UP:
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    self.result = self.work(self.batch)
                torch.cuda.current_stream().wait_stream(self.stream)
            elif self.calls == WARM_UP:
                with _no_collection(), torch.cuda.graph(self.graph, stream=self.stream):
                    self.result = self.work(self.batch)
            if self.calls >= WARM_UP:
                self.graph.replay()
            self.calls += 1
            return self.result
