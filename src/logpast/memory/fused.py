"""The fast path on a GPU: weighted bags of words in fixed point, then one product with the rows that occur.

As in bag.py, the weights of a history's equal tokens are summed before the table is read: a history of 8,192 tokens
reads about 2,000 rows, and one of a million tokens reads one row per distinct token. There are three operators:

    plan        finds the distinct tokens of each history (one flag per token and a running count, no sorting) and
                fills its bags. Only a few neighbouring filters have weight at a lag; each adds its weight, as a whole
                number of units, to the bag of the token at that lag. A unit is 2^-62 of the power of two above the
                filter's sum. The sums are then rounded to float32.
    slots       bags (L, U) × rows of the table (U, d), which are gathered as needed; sums in float32
    backward    bags (U, L) × gradient (L, d) for each history, then for each token the sum over histories

Integer sums do not depend on the order, and no float is added atomically, so results are reproducible bit by bit.
A weight is off by at most half a unit, which is negligible even if only the filter's smallest weights are in sight.
In bf16, each history's contribution to a token's gradient is rounded to bf16 before the sum over histories in float32.
The CPU never waits for the GPU, and no tensor of size (B, M, d) is created.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.filters import FilterBank
from logpast.kernels.ops import linear, operator
from logpast.memory import naive

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNITS = 2**62  # in the power of two above a filter's sum
ROWS_BUDGET = 2**32  # bytes of the backward pass's rows; it processes as many columns at a time as fit

# Block sizes, measured on an H200. They must also fit into the shared memory of smaller GPUs.
FLAG, FILL = 1024, 128
SUM = {"ROWS": 4, "num_warps": 1}


def _tile(slots: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes of the product with the table; fp16 is multiplied as float32."""
    if slots <= 64:
        return {"ROWS": 32, "COLUMNS": 128, "num_warps": 4, "num_stages": 6 if dtype == torch.bfloat16 else 2}
    if dtype == torch.bfloat16 and slots <= 128:
        return {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, "num_stages": 2}
    return {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}


def _tile_backward(slots: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes of the product with the gradient; each program computes REPEAT × ROWS rows."""
    columns = 128 if slots <= 64 else 32 if slots <= 128 else 16
    if dtype == torch.bfloat16:
        columns = 256 if slots <= 128 else 32
    return {"ROWS": 64, "COLUMNS": columns, "REPEAT": 4, "num_warps": 4, "num_stages": 1}


class Layout(NamedTuple):
    """A bank by lag: which slots a token at column t of the time-ordered bank contributes to, and how much."""

    first: Tensor  # (M,) int32, the first of these slots
    weights: Tensor  # (M, W) int64, the weights in that slot and the W − 1 after it, in units
    scale: Tensor  # (L,) float32, the value of UNITS units, a power of two


def make_layout(bank: FilterBank, device: torch.device, dtype: torch.dtype) -> Layout:
    """The layout without negligible weights. It is the same for all types."""
    filters = naive.in_time_order(bank)
    kept = filters > naive.NEGLIGIBLE * filters.max(axis=1, keepdims=True)
    first = np.where(kept.any(axis=0), kept.argmax(axis=0), 0)
    last = np.where(kept.any(axis=0), bank.slots - 1 - kept[::-1].argmax(axis=0), 0)
    width = int((last - first).max()) + 1
    first = np.minimum(first, bank.slots - width)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(filters.sum(axis=1), np.finfo(np.float64).tiny)))
    rows = first + np.arange(width)[:, None]  # (W, M)
    columns = np.arange(bank.horizon)
    weights = np.where(kept[rows, columns], np.rint(filters[rows, columns] / scale[rows] * UNITS), 0)
    return Layout(
        torch.from_numpy(first.astype(np.int32)).to(device),
        torch.from_numpy(np.ascontiguousarray(weights.T, dtype=np.int64)).to(device),
        torch.from_numpy(scale.astype(np.float32)).to(device),
    )


def compress_ids(layout: Layout, ids: Tensor, table: Tensor) -> Tensor:
    """The same as `naive.compress_ids`, for at least one id."""
    vocabulary = table.shape[0]
    plan = torch.ops.logpast.fused_plan(layout.first, layout.weights, layout.scale, ids, vocabulary)
    return _compress(table, *plan, sizes=[len(layout.scale), vocabulary])


@operator("fused_plan")
def _plan(first: Tensor, weights: Tensor, scale: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The running count of distinct (history, token) pairs, the token of each pair, and its bag."""
    (batch, length), slots = ids.shape, len(scale)
    flags = torch.zeros(batch * vocabulary + 1, dtype=torch.int32, device=ids.device)
    _flag_tokens[triton.cdiv(length, FLAG) * batch,](
        ids, *ids.stride(), flags, len(flags) - 1, batch, length, vocabulary, BLOCK=FLAG
    )
    torch._assert_async(flags[-1] == 0)  # set by an id that is not in the table
    count = flags[:-1].cumsum(0, dtype=torch.int32)
    most, stride, width = batch * min(length, vocabulary), _round_up(slots, 16), weights.shape[1]
    tokens = ids.new_empty(most, dtype=torch.int32)
    sums = ids.new_empty(most, stride, dtype=torch.int64)
    bags = ids.new_empty(most, stride, dtype=torch.float32)
    blocks = triton.cdiv(most * stride, 4096)
    _list_tokens[triton.cdiv(vocabulary, 1024), batch](count, tokens, vocabulary, BLOCK=1024)
    _clear_sums[blocks,](count, sums, len(count), stride, BLOCK=4096)
    _fill_sums[triton.cdiv(length, FILL) * batch,](
        ids, *ids.stride(), count, first, weights, sums, batch, length, len(first) - length, vocabulary, stride, width,
        BLOCK=FILL, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    _round_sums[blocks,](count, sums, scale, bags, len(count), stride, slots, UNITS=UNITS, BLOCK=4096)
    return count, tokens, bags


@operator("fused_slots")
def _slots(table: Tensor, count: Tensor, tokens: Tensor, bags: Tensor, sizes: list[int]) -> Tensor:
    (slots, vocabulary), dim = sizes, table.shape[1]
    batch = len(count) // vocabulary
    table = table.contiguous()
    out = table.new_empty(batch, slots, dim)
    tile = _tile(slots, table.dtype)
    _multiply[triton.cdiv(dim, tile["COLUMNS"]), batch](
        count, tokens, bags, table, out, vocabulary, dim, slots, bags.shape[1], SLOTS=_padded(slots), **tile
    )
    return out


@operator("fused_backward")
def _backward(grad: Tensor, count: Tensor, tokens: Tensor, bags: Tensor, sizes: list[int]) -> Tensor:
    (slots, vocabulary), (batch, _, dim) = sizes, grad.shape
    grad = grad.contiguous()
    out = grad.new_empty(vocabulary, dim)
    most = len(bags)
    by_token, order = _sort_by_token(count, tokens, batch, vocabulary)
    tile = _tile_backward(slots, grad.dtype)
    dtype = torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32
    while tile["COLUMNS"] > 32 and most * tile["COLUMNS"] * dtype.itemsize > ROWS_BUDGET:
        tile["COLUMNS"] //= 2
    columns = tile["COLUMNS"]
    rows = torch.empty(most, columns, dtype=dtype, device=grad.device)
    for start in range(0, dim, columns):
        _multiply_backward[triton.cdiv(most // batch, tile["ROWS"] * tile["REPEAT"]), batch](
            count, bags, grad, rows, vocabulary, dim, slots, bags.shape[1], start, SLOTS=_padded(slots), **tile
        )
        _sum_histories[vocabulary,](by_token, order, rows, out, batch, dim, start, COLUMNS=columns, **SUM)
    return out


def _sort_by_token(count: Tensor, tokens: Tensor, batch: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The running count of the (history, token) pairs sorted by token, and the index of each of these in `tokens`."""
    flags = torch.diff(count, prepend=count.new_zeros(1)).view(batch, vocabulary)
    by_token = flags.T.flatten().cumsum(0, dtype=torch.int32)
    order = torch.empty_like(tokens)
    _transpose[triton.cdiv(len(tokens) // batch, 1024), batch](
        count, tokens, by_token, order, batch, vocabulary, BLOCK=1024
    )
    return by_token, order


@_plan.register_fake
def _(first: Tensor, weights: Tensor, scale: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = ids.shape
    most = batch * min(length, vocabulary)
    count = ids.new_empty(batch * vocabulary, dtype=torch.int32)
    return count, count.new_empty(most), scale.new_empty(most, _round_up(scale.shape[0], 16))


@_slots.register_fake
def _(table: Tensor, count: Tensor, tokens: Tensor, bags: Tensor, sizes: list[int]) -> Tensor:
    return table.new_empty(count.shape[0] // sizes[1], sizes[0], table.shape[1])


@_backward.register_fake
def _(grad: Tensor, count: Tensor, tokens: Tensor, bags: Tensor, sizes: list[int]) -> Tensor:
    return grad.new_empty(sizes[1], grad.shape[2])


@_plan.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], first: Tensor, weights: Tensor, scale: Tensor, ids: Tensor, vocabulary: int):
    plans = [torch.ops.logpast.fused_plan(first, weights, scale, one, vocabulary) for one in ids.unbind(in_dims[3])]
    return tuple(torch.stack(parts) for parts in zip(*plans, strict=True)), (0, 0, 0)


_compress = linear("fused", _slots, _backward)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padded(slots: int) -> int:
    """The number of slots as a block size that tensor cores can multiply."""
    return max(16, triton.next_power_of_2(slots))


@triton.jit
def _flag_tokens(ids, row, column, flags, wrong, batch, length, vocabulary, BLOCK: tl.constexpr):
    """Set the flag of each token of a history, unless it is set: repeated writes to one address are slow.

    Here and in `_fill_bags`, neighbouring programs have different histories, so that fewer of them write to the address
    of a frequent token at the same time.
    """
    history = (tl.program_id(0) % batch).to(tl.int64)
    position = tl.program_id(0) // batch * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + history * row + position.to(tl.int64) * column, mask=position < length, other=-1)
    flag = flags + tl.where(token < vocabulary, history * vocabulary + token, wrong)
    is_set = tl.load(flag, mask=token >= 0, other=1)
    tl.store(flag, 1, mask=is_set == 0)


@triton.jit
def _range(count, group, size):
    """Start and stop of the pairs of one group, a history or a token, from the running count of `size` per group."""
    start = tl.load(count + group * size - 1, mask=group > 0, other=0)
    return start, tl.load(count + (group + 1) * size - 1)


@triton.jit
def _list_tokens(count, tokens, vocabulary, BLOCK: tl.constexpr):
    """Store the token of each pair."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.program_id(1).to(tl.int64) * vocabulary + token
    here = tl.load(count + key, mask=token < vocabulary, other=0)
    before = tl.load(count + key - 1, mask=(token < vocabulary) & (key > 0), other=0)
    tl.store(tokens + here - 1, token, mask=here > before)


@triton.jit
def _clear_sums(count, sums, keys, stride, BLOCK: tl.constexpr):
    """Set the sums that are used to zero."""
    end = tl.load(count + keys - 1).to(tl.int64) * stride
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < end:
        element = start + tl.arange(0, BLOCK)
        tl.store(sums + element, tl.zeros((BLOCK,), tl.int64), mask=element < end)


@triton.jit
def _fill_sums(
    ids, row, column, count, first, weights, sums, batch, length, missing, vocabulary, stride, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the weights of each position to its token's sums; neighbouring threads have neighbouring slots."""
    history = (tl.program_id(0) % batch).to(tl.int64)
    thread = tl.arange(0, BLOCK * WIDTH)
    position = tl.program_id(0) // batch * BLOCK + thread // WIDTH
    offset = thread % WIDTH
    token = tl.load(ids + history * row + position.to(tl.int64) * column, mask=position < length, other=-1)
    valid = (token >= 0) & (offset < width)
    lag = (missing + position).to(tl.int64)
    pair = tl.load(count + history * vocabulary + token, mask=valid, other=1).to(tl.int64) - 1
    slot = tl.load(first + lag, mask=valid, other=0)
    weight = tl.load(weights + lag * width + offset, mask=valid, other=0)
    tl.atomic_add(sums + pair * stride + slot + offset, weight, mask=valid & (weight != 0), sem="relaxed")


@triton.jit
def _round_sums(count, sums, scale, bags, keys, stride, slots, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """The bags in float32 from their sums in units."""
    end = tl.load(count + keys - 1).to(tl.int64) * stride
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < end:
        element = start + tl.arange(0, BLOCK)
        slot = element % stride
        factor = tl.load(scale + slot, mask=slot < slots, other=0.0)
        total = tl.load(sums + element, mask=element < end, other=0)
        tl.store(bags + element, total.to(tl.float32) * (1 / UNITS) * factor, mask=element < end)


@triton.jit
def _dot(bag, x):
    """bag @ x. For a bf16 x each number of the bag is split into two bf16, which keeps 16 bits of it."""
    if x.dtype == tl.bfloat16:
        high = bag.to(tl.bfloat16)
        low = (bag - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, x) + tl.dot(low, x)
    return tl.dot(bag, x.to(tl.float32), input_precision="tf32x3")


@triton.jit
def _multiply(
    count, tokens, bags, table, out, vocabulary, dim, slots, stride,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one history's slots."""
    history = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    start, stop = _range(count, history, vocabulary)
    total = tl.zeros((SLOTS, COLUMNS), tl.float32)
    for begin in range(start, stop, ROWS):
        pair = begin + tl.arange(0, ROWS)
        valid = pair < stop
        token = tl.load(tokens + pair, mask=valid, other=0)
        rows = tl.load(
            table + token[:, None].to(tl.int64) * dim + column[None, :],
            mask=valid[:, None] & (column[None, :] < dim), other=0.0,
        )  # fmt: skip
        bag = tl.load(
            bags + pair[None, :].to(tl.int64) * stride + slot[:, None],
            mask=valid[None, :] & (slot[:, None] < stride), other=0.0,
        )  # fmt: skip
        total += _dot(bag, rows)
    target = out + (history * slots + slot[:, None]) * dim + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(slot[:, None] < slots) & (column[None, :] < dim))


@triton.jit
def _transpose(count, tokens, by_token, order, batch, vocabulary, BLOCK: tl.constexpr):
    history = tl.program_id(1).to(tl.int64)
    start, stop = _range(count, history, vocabulary)
    pair = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + pair, mask=pair < stop, other=0).to(tl.int64)
    rank = tl.load(by_token + token * batch + history, mask=pair < stop, other=1) - 1
    tl.store(order + rank, pair, mask=pair < stop)


@triton.jit
def _multiply_backward(
    count, bags, grad, rows, vocabulary, dim, slots, stride, first,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REPEAT: tl.constexpr,
):  # fmt: skip
    """The gradient of each token from one history, for some columns of the table."""
    history = tl.program_id(1).to(tl.int64)
    start, stop = _range(count, history, vocabulary)
    start += tl.program_id(0) * ROWS * REPEAT
    if start < stop:
        slot = tl.arange(0, SLOTS)
        offset = tl.arange(0, COLUMNS)
        column = first + offset
        upstream = tl.load(
            grad + (history * slots + slot[:, None]) * dim + column[None, :],
            mask=(slot[:, None] < slots) & (column[None, :] < dim), other=0.0,
        )  # fmt: skip
        for begin in range(start, min(stop, start + ROWS * REPEAT), ROWS):
            pair = begin + tl.arange(0, ROWS)
            valid = pair[:, None] < stop
            bag = tl.load(
                bags + pair[:, None].to(tl.int64) * stride + slot[None, :],
                mask=valid & (slot[None, :] < stride), other=0.0,
            )  # fmt: skip
            tl.store(rows + pair[:, None].to(tl.int64) * COLUMNS + offset[None, :], _dot(bag, upstream), mask=valid)


@triton.jit
def _sum_histories(by_token, order, rows, out, batch, dim, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of one token: the sum of its rows over histories."""
    token = tl.program_id(0).to(tl.int64)
    start, stop = _range(by_token, token, batch)
    offset = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(start, stop, ROWS):
        rank = begin + tl.arange(0, ROWS)
        pair = tl.load(order + rank, mask=rank < stop, other=0).to(tl.int64)
        valid = rank[:, None] < stop
        some = tl.load(rows + pair[:, None] * COLUMNS + offset[None, :], mask=valid, other=0.0)
        total += tl.sum(some.to(tl.float32), axis=0)
    column = first + offset
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=column < dim)
