"""The fast path from embeddings: small dense products instead of a large one that is mostly zeros.

A filter is negligible outside a range of lags around its peak, and the ranges of neighbours overlap. So the bank is
split into groups of a few filters, and each group is multiplied with the range of lags that its filters need.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.kernels.ops import linear, operator
from logpast.memory import naive

FILTERS_PER_GROUP = 8  # measured: smaller groups read the history more often, larger ones multiply more zeros


class Layout(NamedTuple):
    """The bank in the order of time. Each group of FILTERS_PER_GROUP rows is negligible outside its columns."""

    filters: Tensor  # (L, M)
    columns: list[int]  # start and stop of the first group, of the second, …


def make_layout(bank: FilterBank, device: torch.device, dtype: torch.dtype) -> Layout:
    # from lags, nearest first, to the order of time
    columns = bank.horizon - bank.support(naive.NEGLIGIBLE)[::-1, ::-1]
    groups = [columns[first : first + FILTERS_PER_GROUP] for first in range(0, bank.slots, FILTERS_PER_GROUP)]
    bounds = [int(bound) for group in groups for bound in (group[:, 0].min(), group[:, 1].max())]
    filters = naive.in_time_order(bank)
    filters[filters <= naive.NEGLIGIBLE * filters.max(axis=1, keepdims=True)] = 0  # CPUs are slow with subnormals
    return Layout(torch.from_numpy(filters).to(dtype).to(device), bounds)


def compress(layout: Layout, history: Tensor) -> Tensor:
    """The same as `naive.compress`. The map is linear, so its backward pass does not need the history."""
    return _compress(history, layout.filters, sizes=[history.shape[1], *layout.columns])


def compress_ids(layout: Layout, ids: Tensor, table: Tensor) -> Tensor:
    """The same from token ids (B, T) and their embedding table (V, d)."""
    return compress(layout, naive.embed(table, ids))


@operator("support")
def _forward(history: Tensor, filters: Tensor, sizes: list[int]) -> Tensor:
    batch, _, width = history.shape
    slots = history.new_zeros(batch, filters.shape[0], width)
    for rows, block, span in _blocks(filters, *sizes):
        slots[:, rows] = torch.bmm(block.expand(batch, -1, -1), history[:, span].to(block.dtype)).to(slots.dtype)
    return slots


@operator("support_backward")
def _backward(grad: Tensor, filters: Tensor, sizes: list[int]) -> Tensor:
    batch, _, width = grad.shape
    wide = grad.to(filters.dtype)
    total = wide.new_zeros(batch, sizes[0], width)
    for rows, block, span in _blocks(filters, *sizes):
        total[:, span].baddbmm_(block.mT.expand(batch, -1, -1), wide[:, rows])
    return total.to(grad.dtype)


def _blocks(filters: Tensor, length: int, *columns: int) -> list[tuple[slice, Tensor, slice]]:
    """For a history of this length: (rows of the result, block of the bank, range of the history)."""
    missing = filters.shape[1] - length
    found = []
    for group, (first, stop) in enumerate(zip(columns[::2], columns[1::2], strict=True)):
        start = max(first, missing)
        if start < stop:
            rows = slice(group * FILTERS_PER_GROUP, (group + 1) * FILTERS_PER_GROUP)
            found.append((rows, filters[rows, start:stop].unsqueeze(0), slice(start - missing, stop - missing)))
    return found


@_forward.register_fake
def _(history: Tensor, filters: Tensor, sizes: list[int]) -> Tensor:
    return history.new_empty(history.shape[0], filters.shape[0], history.shape[2])


@_backward.register_fake
def _(grad: Tensor, filters: Tensor, sizes: list[int]) -> Tensor:
    return grad.new_empty(grad.shape[0], sizes[0], grad.shape[2])


_compress = linear("support", _forward, _backward)
