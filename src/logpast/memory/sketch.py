"""A memory of a stream of vectors whose state grows with the logarithm of its reach: `Sketch`.

Token ids need no sketch: keeping them is exact and smaller (`models.stream`). A stream of vectors that stand for no
ids, such as measurements, is summed up in blocks of 1, 2, 4, … inputs, the larger the older. A block keeps the
projections of its inputs onto polynomials in time, orthonormal over the block, of degree 0 … moments − 1. Those of a
block follow exactly from those of its two halves, so errors do not add up. Each filter is replaced by its projection
onto the same polynomials, which is its best approximation by them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from logpast.filters import FilterBank
from logpast.util.precision import accumulation_dtype

AT_ONCE = 4096  # inputs that are summed up together, which bounds the memory needed


class Sketch:
    """Slots of a stream of vectors that never ends, from a state of bounded size.

        sketch = Sketch(FilterBank(slots=53, sharpness=100, normalize="area", reach=1.5), dim=16)
        sketch.push(inputs)     # (B, T, 16), the next T of each stream
        sketch.slots()          # (B, 53, 16), nearly those of LogMemory(norm=False)
        sketch.error()          # (53,): |slot − exact slot| ≤ error · |filter| · |inputs|

    A bank that ends at the peak of its last filter, as the paper's does, has an edge there that no polynomial follows:
    the error of the last slots is then about 0.1. Use a reach of at least 1.5.

    Args:
        bank: the filters.
        dim: width of the inputs.
        batch: streams that go in step.
        blocks: blocks of each size, at least 2. The error falls with blocks^−moments.
        moments: numbers kept of each block and component of the input.
        dtype: of the inputs and the slots.
        device: where the state is.

    Attributes:
        moments: (blocks, B, moments, dim), oldest block first: with `length` the whole state.
        length: inputs so far, per stream.
    """

    def __init__(
        self, bank: FilterBank, dim: int, batch: int = 1, blocks: int = 24, moments: int = 3,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        for name, value, least in (
            ("dim", dim, 1),
            ("batch", batch, 1),
            ("blocks", blocks, 2),
            ("moments", moments, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.bank, self.blocks, self.dtype, self.length = bank, blocks, dtype, 0
        self.moments = torch.zeros(0, batch, moments, dim, dtype=accumulation_dtype(dtype), device=device)
        self._levels = 0  # the largest blocks have 2^levels inputs: up to `blocks` of them must reach the horizon
        while (blocks - 1) * (2 ** (self._levels + 1) - 1) < bank.horizon:
            self._levels += 1

    def push(self, inputs: Tensor) -> None:
        """Append inputs (B, T, dim) to the streams. Gradients flow through the state into them."""
        batch, dim = self.moments.shape[1], self.moments.shape[3]
        if inputs.ndim != 3 or inputs.shape[0] != batch or inputs.shape[2] != dim:
            raise ValueError(f"inputs should be ({batch}, any number, {dim}), got {tuple(inputs.shape)}")
        for part in inputs.split(AT_ONCE, dim=1):
            self._push(part.to(self.moments.dtype).to(self.moments.device))

    def slots(self) -> Tensor:
        """(B, L, dim): the filtered past of the next input, oldest slot first."""
        filters = torch.from_numpy(np.concatenate(self._projections(), axis=1)).flip(0)
        slots = torch.einsum("lkm,kbmd->bld", filters.to(self.moments.dtype).to(self.moments.device), self.moments)
        return slots.to(self.dtype)

    def error(self) -> NDArray[np.float64]:
        """(L,): what the projections leave out of each filter, nearest first, as a share of its norm.

        It depends on how many inputs there are, but not on their values.
        """
        squares = np.square(self.bank.weights)
        kept = sum(np.square(level).sum(axis=(1, 2)) for level in self._projections())
        lost = np.maximum(squares[:, : self.length].sum(axis=1) - kept, 0)
        return np.sqrt(lost / squares.sum(axis=1))

    @property
    def vectors(self) -> int:
        """How many vectors of width dim are kept of each stream."""
        return sum(self._counts(self.length)) * self.moments.shape[2]

    def state(self) -> dict[str, Tensor]:
        """All that is needed to continue, to be saved with safetensors, for instance."""
        return {"moments": self.moments.detach().clone(), "length": torch.tensor(self.length)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of a sketch with the same arguments."""
        length, shape = int(state["length"]), self.moments.shape[1:]
        expected = (sum(self._counts(length)), *shape)
        if state["moments"].shape != expected:
            found = tuple(state["moments"].shape)
            raise ValueError(
                f"after {length} inputs the moments have the shape {expected}, not {found}: another sketch"
            )
        self.moments, self.length = state["moments"].to(self.moments, copy=True), length

    def _counts(self, length: int) -> list[int]:
        """Blocks of each size after so many inputs, smallest first; of the largest, only those within the horizon."""
        counts, arriving, covered = list[int](), length, 0
        for level in range(self._levels):
            pairs = max(0, arriving - self.blocks + 1) // 2
            counts.append(arriving - 2 * pairs)
            covered += counts[-1] << level
            arriving = pairs
        within = max(0, -(-(self.bank.horizon - covered) >> self._levels))
        return [*counts, min(arriving, within)]

    def _push(self, new: Tensor) -> None:
        before = self.moments.split(self._counts(self.length)[::-1])[::-1]
        self.length += new.shape[1]
        arriving = F.pad(new.transpose(0, 1).unsqueeze(2), (0, 0, 0, self.moments.shape[2] - 1))
        after = list[Tensor]()
        for level, (blocks, kept) in enumerate(zip(before, self._counts(self.length), strict=True)):
            here = torch.cat([blocks, arriving])
            old = here[: len(here) - kept]
            after.append(here[len(here) - kept :])
            if level < self._levels:  # of the largest, the oldest are dropped
                halves = torch.from_numpy(_merge(level, here.shape[2])).to(here)
                arriving = torch.einsum("nhbmd,hMm->nbMd", old.unflatten(0, (-1, 2)), halves)
        self.moments = torch.cat(after[::-1])

    def _projections(self) -> list[NDArray[np.float64]]:
        """The filters, nearest first, in terms of each block's polynomials: (L, blocks, moments) per size of block.

        The largest blocks first, and the oldest first among equals, as in `moments`.
        """
        found, near = list[NDArray[np.float64]](), 0
        for level, number in enumerate(self._counts(self.length)):
            far = near + (number << level)
            weights = self.bank.weights[:, near:far]
            weights = np.pad(weights, ((0, 0), (0, far - near - weights.shape[1])))[:, ::-1]
            in_blocks = weights.reshape(self.bank.slots, number, 1 << level)
            found.append(in_blocks @ _polynomials(level, self.moments.shape[2]))
            near = far
        return found[::-1]


@lru_cache(maxsize=256)
def _polynomials(level: int, moments: int) -> NDArray[np.float64]:
    """(2^level, moments): orthonormal polynomials at the inputs of a block; zero from degree 2^level on."""
    size = 1 << level
    times = (np.arange(size) - (size - 1) / 2) / size
    columns, triangle = np.linalg.qr(np.vander(times, min(moments, size), increasing=True))
    return np.pad(columns * np.sign(np.diag(triangle)), ((0, 0), (0, moments - columns.shape[1])))


@lru_cache(maxsize=256)
def _merge(level: int, moments: int) -> NDArray[np.float64]:
    """(2, moments, moments): what the older and the newer half of a block add to its moments."""
    half = _polynomials(level, moments)
    return np.stack([part.T @ half for part in np.split(_polynomials(level + 1, moments), 2)])
