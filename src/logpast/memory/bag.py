"""The fast path from token ids: sum the weights of equal tokens, then read each distinct token's embedding once.

A history of 8,192 tokens has about 2,000 distinct ones. With the weights of equal tokens summed into a weighted bag of
words (L, U), the slots are one product with the U rows of the table that occur in the history.
The operator is opaque to torch.compile, because the number of distinct tokens depends on the data. It saves no
embeddings for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logpast.kernels.ops import operator
from logpast.util.precision import accumulation_dtype

ROWS_BUDGET = 2**21  # elements of embedding rows that are processed at once; a batch is split accordingly


def entries(filters: Tensor, tolerance: float) -> Tensor:
    """(2, n): row and column of each weight of the time-ordered bank above `tolerance` × its filter's largest."""
    return (filters > tolerance * filters.amax(dim=1, keepdim=True)).nonzero().T.contiguous()


def compress_ids(filters: Tensor, ids: Tensor, table: Tensor, kept: Tensor) -> Tensor:
    """The same as `naive.compress_ids`, for at least one id, with only the weights `kept` that `entries` returned."""
    return torch.ops.logpast.bag(filters.to(accumulation_dtype(table.dtype)), ids.long(), table, kept)


@operator("bag")
def _forward(filters: Tensor, ids: Tensor, table: Tensor, kept: Tensor) -> Tensor:
    slots = table.new_empty(ids.shape[0], filters.shape[0], table.shape[1])
    for part, out in _split(ids, slots):
        distinct, bag = _bag(filters, part, table.shape[0], kept)
        out.copy_(torch.bmm(bag, table[distinct].to(filters.dtype)))
    return slots


@operator("bag_backward")
def _backward(filters: Tensor, ids: Tensor, grad: Tensor, kept: Tensor, vocabulary: int) -> Tensor:
    total = filters.new_zeros(vocabulary, grad.shape[2])
    for part, slots in _split(ids, grad):
        distinct, bag = _bag(filters, part, vocabulary, kept)
        rows = torch.bmm(bag.mT, slots.to(filters.dtype))
        total.index_add_(0, distinct.flatten(), rows.flatten(0, 1))
    return total.to(grad.dtype)


def _split(ids: Tensor, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, ROWS_BUDGET // (ids.shape[1] * slots.shape[2])) if ids.device.type == "cpu" else len(ids)
    return list(zip(ids.split(size), slots.split(size), strict=True))


def _bag(filters: Tensor, ids: Tensor, vocabulary: int, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct tokens (R, U) of each history, padded with token 0 at weight 0, and their bags (R, L, U)."""
    histories, length = ids.shape
    if int(ids.max()) >= vocabulary:
        raise IndexError(f"token id {int(ids.max())} is not in a table of {vocabulary} rows")
    missing = filters.shape[1] - length
    if missing:
        kept = kept[:, kept[1] >= missing]
    slot, column = kept[0], kept[1] - missing
    owner = torch.arange(histories, device=ids.device)
    keys, rank = torch.unique(ids.clamp(min=0) + (owner * vocabulary).unsqueeze(1), return_inverse=True)
    first = torch.searchsorted(keys, owner * vocabulary)
    rank = rank - first.unsqueeze(1)  # (R, T): index of each token among its history's distinct tokens
    widest = int(rank.max()) + 1

    distinct = ids.new_zeros(histories, widest)
    key_owner = keys // vocabulary
    distinct[key_owner, torch.arange(len(keys), device=ids.device) - first[key_owner]] = keys % vocabulary

    weight = filters[slot, kept[1]] * (ids >= 0)[:, column]
    position = (owner.unsqueeze(1) * filters.shape[0] + slot) * widest + rank[:, column]
    bag = filters.new_zeros(histories * filters.shape[0] * widest)
    bag.index_add_(0, position.flatten(), weight.flatten())
    return distinct, bag.view(histories, filters.shape[0], widest)


@_forward.register_fake
def _(filters: Tensor, ids: Tensor, table: Tensor, kept: Tensor) -> Tensor:
    return table.new_empty(ids.shape[0], filters.shape[0], table.shape[1])


@_backward.register_fake
def _(filters: Tensor, ids: Tensor, grad: Tensor, kept: Tensor, vocabulary: int) -> Tensor:
    return grad.new_empty(vocabulary, grad.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    filters, ids, table, kept = inputs
    ctx.save_for_backward(filters, ids, kept)
    ctx.vocabulary = table.shape[0]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
    filters, ids, kept = ctx.saved_tensors
    return None, None, torch.ops.logpast.bag_backward(filters, ids, grad, kept, ctx.vocabulary), None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
