"""The fast path from token ids: sum the weights of equal tokens, then read each distinct token's embedding once.

A history of 8,192 tokens has about 2,000 distinct ones. With the weights of equal tokens summed into a weighted bag of
words (U, L), the slots are one product with the U rows of the table that occur in the history.
The operator is opaque to torch.compile, because the number of distinct tokens depends on the data. It saves no
embeddings for the backward pass.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from logpast.filters import FilterBank
from logpast.kernels.ops import linear, operator
from logpast.memory.naive import NEGLIGIBLE, in_time_order

ROWS_BUDGET = 2**21  # elements of embedding rows that are processed at once; a batch is split accordingly


def make_layout(bank: FilterBank, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(M + 1, L): the weights at each column of the time-ordered bank, and a row of zeros for missing tokens."""
    filters = in_time_order(bank)
    filters[filters <= NEGLIGIBLE * filters.max(axis=1, keepdims=True)] = 0
    rows = np.concatenate([filters.T, np.zeros((1, bank.slots))])
    return torch.from_numpy(rows).to(dtype).contiguous().to(device)


def compress_ids(weights: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """The same as `naive.compress_ids`, for at least one id."""
    return _compress(table, weights, ids.long(), sizes=[weights.shape[1], table.shape[0]])


@operator("bag")
def _forward(table: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    out = table.new_empty(ids.shape[0], sizes[0], table.shape[1])
    for part, target in _split(ids, out):
        distinct, bags = _bags(weights, part, sizes[1])
        target.copy_(torch.bmm(bags.mT, table[distinct].to(weights.dtype)))
    return out


@operator("bag_backward")
def _backward(grad: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    total = weights.new_zeros(sizes[1], grad.shape[2])
    for part, upstream in _split(ids, grad):
        distinct, bags = _bags(weights, part, sizes[1])
        rows = torch.bmm(bags, upstream.to(weights.dtype))
        total.index_add_(0, distinct.flatten(), rows.flatten(0, 1))
    return total.to(grad.dtype)


def _split(ids: Tensor, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, ROWS_BUDGET // (ids.shape[1] * slots.shape[2])) if ids.device.type == "cpu" else len(ids)
    return list(zip(ids.split(size), slots.split(size), strict=True))


def _bags(weights: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Distinct tokens (R, U) of each history, padded with token 0 at weight 0, and their bags (R, U, L)."""
    (histories, length), horizon = ids.shape, len(weights) - 1
    if int(ids.max()) >= vocabulary:
        raise IndexError(f"token id {int(ids.max())} is not in a table of {vocabulary} rows")
    owner = torch.arange(histories, device=ids.device)
    column = torch.arange(horizon - length, horizon, device=ids.device)
    column = torch.where(ids < 0, horizon, column).flatten()
    keys = (ids.clamp(min=0) + (owner * vocabulary).unsqueeze(1)).flatten()
    if histories * vocabulary < 2**31:
        keys = keys.int()  # sorted twice as fast
    keys, order = keys.sort(stable=True)
    keys, counts = torch.unique_consecutive(keys, return_counts=True)
    sums = embedding_bag(column[order], weights, counts.cumsum(0) - counts, mode="sum")
    history = keys // vocabulary
    place = torch.arange(len(keys), device=ids.device) - torch.searchsorted(history, owner)[history]
    distinct = keys.new_zeros(histories, int(place.max()) + 1)
    distinct[history, place] = keys % vocabulary
    bags = sums.new_zeros(*distinct.shape, sums.shape[1])
    bags[history, place] = sums
    return distinct, bags


@_forward.register_fake
def _(table: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    return table.new_empty(ids.shape[0], sizes[0], table.shape[1])


@_backward.register_fake
def _(grad: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    return grad.new_empty(sizes[1], grad.shape[2])


_compress = linear("bag", _forward, _backward)
