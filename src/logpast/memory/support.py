"""The fast path from embeddings: neighbouring filters share a block of the bank, and only that block is multiplied.

A filter is negligible outside a stretch around its peak, and stretches of neighbours overlap. So the bank is cut
into groups of a few filters, each with the one range of lags that any of them needs: a handful of small dense
products instead of one large one that is mostly zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.util.precision import accumulation_dtype

FILTERS_PER_GROUP = 4  # measured: fewer read the history more often, more multiply more zeros


class Group(NamedTuple):
    """Filters `rows` of the time-ordered bank need its `columns` only."""

    rows: slice
    columns: slice


def groups(bank: FilterBank, tolerance: float) -> list[Group]:
    """Cut the bank into groups; weights below `tolerance` × their filter's largest may be left out."""
    columns = bank.horizon - bank.support(tolerance)[::-1, ::-1]  # from lags, nearest first, to the order of time
    found = []
    for first in range(0, bank.slots, FILTERS_PER_GROUP):
        rows = slice(first, min(first + FILTERS_PER_GROUP, bank.slots))
        found.append(Group(rows, slice(int(columns[rows, 0].min()), int(columns[rows, 1].max()))))
    return found


class _Compress(torch.autograd.Function):
    """The map is linear with fixed filters, so its backward pass needs nothing of the history."""

    @staticmethod
    def forward(history: Tensor, filters: Tensor, parts: list[Group]) -> Tensor:
        batch, length, width = history.shape
        slots = history.new_zeros(batch, filters.shape[0], width)
        for rows, block, seen in _blocks(filters, parts, length):
            slots[:, rows] = torch.bmm(block.expand(batch, -1, -1), history[:, seen].to(block.dtype)).to(slots.dtype)
        return slots

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, list[Group]], output: Tensor) -> None:
        history, filters, ctx.parts = inputs
        ctx.length = history.shape[1]
        ctx.save_for_backward(filters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (filters,) = ctx.saved_tensors
        batch, _, width = grad.shape
        wide = grad.to(filters.dtype)
        total = wide.new_zeros(batch, ctx.length, width)
        for rows, block, seen in _blocks(filters, ctx.parts, ctx.length):
            total[:, seen].baddbmm_(block.mT.expand(batch, -1, -1), wide[:, rows])
        return total.to(grad.dtype), None, None


def _blocks(filters: Tensor, parts: list[Group], length: int) -> list[tuple[slice, Tensor, slice]]:
    """For a history of this length: (rows of the result, block of the bank, stretch of the history)."""
    missing = filters.shape[1] - length
    found = []
    for rows, columns in parts:
        start = max(columns.start, missing)
        if start < columns.stop:
            block = filters[rows, start : columns.stop].unsqueeze(0)
            found.append((rows, block, slice(start - missing, columns.stop - missing)))
    return found


def compress(filters: Tensor, history: Tensor, parts: list[Group]) -> Tensor:
    """As `naive.compress`, by the groups that `groups` found for these filters."""
    return _Compress.apply(history, filters.to(accumulation_dtype(history.dtype)), parts)
