"""Repeated work as one CUDA graph: the host replays the graph instead of launching hundreds of kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

WARM_UP = 3  # calls before the capture, which compile kernels and allocate the libraries' workspaces


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream per device for all captures: libraries allocate workspaces for every new stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _gc_off() -> Iterator[None]:
    """Without garbage collection, which may free an earlier graph: that would end a capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Replay:
    """Calls a function of a batch, captures it at call `WARM_UP` + 1, and replays the capture from then on.

    Args:
        function: runs on the batch's CUDA device and never waits for the GPU. All batches must have the same shape.

    The next call overwrites what a call returned.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        with torch.cuda.device_of(batch[0]):
            if self.calls == 0:
                self.batch = type(batch)(*(part.clone() for part in batch if part is not None))
                self.graph, self.stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
            for static, new in zip(self.batch, batch, strict=True):
                if new is not None:
                    static.copy_(new)
            if self.calls < WARM_UP:
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    self.result = self.function(self.batch)
                torch.cuda.current_stream().wait_stream(self.stream)
            elif self.calls == WARM_UP:
                with _gc_off(), torch.cuda.graph(self.graph, stream=self.stream):
                    self.result = self.function(self.batch)
            if self.calls >= WARM_UP:
                self.graph.replay()
            self.calls += 1
            return self.result
