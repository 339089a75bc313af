"""The fast path from embeddings: small dense products instead of a large one that is mostly zeros.

A filter is negligible outside a range of lags around its peak, and the ranges of neighbours overlap. So the bank is
split into groups of a few filters, and each group is multiplied with the range of lags that its filters need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.util.precision import accumulation_dtype

FILTERS_PER_GROUP = 4  # measured: smaller groups read the history more often, larger ones multiply more zeros


class Group(NamedTuple):
    """The filters `rows` of the time-ordered bank are negligible outside `columns`."""

    rows: slice
    columns: slice


def find_groups(bank: FilterBank, tolerance: float) -> list[Group]:
    """Split the bank into groups; weights below `tolerance` × their filter's largest weight may be left out."""
    columns = bank.horizon - bank.support(tolerance)[::-1, ::-1]  # from lags, nearest first, to the order of time
    found = []
    for first in range(0, bank.slots, FILTERS_PER_GROUP):
        rows = slice(first, min(first + FILTERS_PER_GROUP, bank.slots))
        found.append(Group(rows, slice(int(columns[rows, 0].min()), int(columns[rows, 1].max()))))
    return found


class _Compress(torch.autograd.Function):
    """A linear map with fixed filters, so the backward pass does not need the history."""

    @staticmethod
    def forward(history: Tensor, filters: Tensor, groups: list[Group]) -> Tensor:
        batch, length, width = history.shape
        slots = history.new_zeros(batch, filters.shape[0], width)
        for rows, block, span in _blocks(filters, groups, length):
            slots[:, rows] = torch.bmm(block.expand(batch, -1, -1), history[:, span].to(block.dtype)).to(slots.dtype)
        return slots

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, list[Group]], output: Tensor) -> None:
        history, filters, ctx.groups = inputs
        ctx.length = history.shape[1]
        ctx.save_for_backward(filters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (filters,) = ctx.saved_tensors
        batch, _, width = grad.shape
        wide = grad.to(filters.dtype)
        total = wide.new_zeros(batch, ctx.length, width)
        for rows, block, span in _blocks(filters, ctx.groups, ctx.length):
            total[:, span].baddbmm_(block.mT.expand(batch, -1, -1), wide[:, rows])
        return total.to(grad.dtype), None, None


def _blocks(filters: Tensor, groups: list[Group], length: int) -> list[tuple[slice, Tensor, slice]]:
    """For a history of this length: (rows of the result, block of the bank, range of the history)."""
    missing = filters.shape[1] - length
    found = []
    for rows, columns in groups:
        start = max(columns.start, missing)
        if start < columns.stop:
            block = filters[rows, start : columns.stop].unsqueeze(0)
            found.append((rows, block, slice(start - missing, columns.stop - missing)))
    return found


def compress(filters: Tensor, history: Tensor, groups: list[Group]) -> Tensor:
    """The same as `naive.compress`, with the groups that `find_groups` returned for these filters."""
    return _Compress.apply(history, filters.to(accumulation_dtype(history.dtype)), groups)
