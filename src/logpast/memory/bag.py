"""The fast path from token ids: sum the weights of equal tokens, then read each distinct token's embedding once.

A history of 8,192 tokens has about 2,000 distinct ones. With the weights of equal tokens summed into a weighted bag of
words (L, U), the slots are one product with the U rows of the table that occur in the history.
The operator is opaque to torch.compile, because the number of distinct tokens depends on the data. It saves no
embeddings for the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.kernels.ops import linear, operator
from logpast.memory.naive import NEGLIGIBLE, in_time_order

ROWS_BUDGET = 2**21  # elements of embedding rows that are processed at once; a batch is split accordingly


class Layout(NamedTuple):
    """The weights of the time-ordered bank that are not negligible."""

    indices: Tensor  # (2, n): row and column of each
    weights: Tensor  # (n,)
    slots: int
    horizon: int


def make_layout(bank: FilterBank, device: torch.device, dtype: torch.dtype) -> Layout:
    filters = torch.from_numpy(in_time_order(bank))
    indices = (filters > NEGLIGIBLE * filters.amax(dim=1, keepdim=True)).nonzero().T.contiguous()
    weights = filters[indices[0], indices[1]].to(dtype)
    return Layout(indices.to(device), weights.to(device), bank.slots, bank.horizon)


def compress_ids(layout: Layout, ids: Tensor, table: Tensor) -> Tensor:
    """The same as `naive.compress_ids`, for at least one id."""
    sizes = [layout.slots, layout.horizon, table.shape[0]]
    return _compress(table, layout.indices, layout.weights, ids.long(), sizes=sizes)


@operator("bag")
def _forward(table: Tensor, indices: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    out = table.new_empty(ids.shape[0], sizes[0], table.shape[1])
    for part, target in _split(ids, out):
        distinct, bag = _bag(indices, weights, part, sizes)
        target.copy_(torch.bmm(bag, table[distinct].to(weights.dtype)))
    return out


@operator("bag_backward")
def _backward(grad: Tensor, indices: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    total = weights.new_zeros(sizes[2], grad.shape[2])
    for part, upstream in _split(ids, grad):
        distinct, bag = _bag(indices, weights, part, sizes)
        rows = torch.bmm(bag.mT, upstream.to(weights.dtype))
        total.index_add_(0, distinct.flatten(), rows.flatten(0, 1))
    return total.to(grad.dtype)


def _split(ids: Tensor, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, ROWS_BUDGET // (ids.shape[1] * slots.shape[2])) if ids.device.type == "cpu" else len(ids)
    return list(zip(ids.split(size), slots.split(size), strict=True))


def _bag(indices: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Distinct tokens (R, U) of each history, padded with token 0 at weight 0, and their bags (R, L, U)."""
    (histories, length), (slots, horizon, vocabulary) = ids.shape, sizes
    if int(ids.max()) >= vocabulary:
        raise IndexError(f"token id {int(ids.max())} is not in a table of {vocabulary} rows")
    missing = horizon - length
    if missing:
        seen = indices[1] >= missing
        indices, weights = indices[:, seen], weights[seen]
    slot, column = indices[0], indices[1] - missing
    owner = torch.arange(histories, device=ids.device)
    keys, rank = torch.unique(ids.clamp(min=0) + (owner * vocabulary).unsqueeze(1), return_inverse=True)
    first = torch.searchsorted(keys, owner * vocabulary)
    rank = rank - first.unsqueeze(1)  # (R, T): index of each token among its history's distinct tokens
    widest = int(rank.max()) + 1

    distinct = ids.new_zeros(histories, widest)
    key_owner = keys // vocabulary
    distinct[key_owner, torch.arange(len(keys), device=ids.device) - first[key_owner]] = keys % vocabulary

    weight = weights * (ids >= 0)[:, column]
    position = (owner.unsqueeze(1) * slots + slot) * widest + rank[:, column]
    bag = weights.new_zeros(histories * slots * widest)
    bag.index_add_(0, position.flatten(), weight.flatten())
    return distinct, bag.view(histories, slots, widest)


@_forward.register_fake
def _(table: Tensor, indices: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    return table.new_empty(ids.shape[0], sizes[0], table.shape[1])


@_backward.register_fake
def _(grad: Tensor, indices: Tensor, weights: Tensor, ids: Tensor, sizes: list[int]) -> Tensor:
    return grad.new_empty(sizes[2], grad.shape[2])


_compress = linear("bag", _forward, _backward)
