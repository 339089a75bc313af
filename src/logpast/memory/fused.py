"""The fast path on a GPU: bags of words counted in whole numbers, then one product with the rows that occur.

As in bag.py, the weights of a history's equal tokens are added up before the table is touched, so that a history of
8,192 tokens costs the reading of some 2,000 rows, and one of a million hardly more than its distinct tokens do. Here:

    plan        which tokens each history has (a mark per token and a running count, no sorting), and its bags. A
                lag is seen by a few neighbouring filters only; each adds its weight, as a whole number of parts, to
                the bag of the token that stands there. A part is 2^-30 of the power of two above its filter's sum.
    slots       bags (L, U) × rows of the table (U, d), gathered on the way, added up in float32
    backward    bags (U, L) × gradient (L, d) for each history, then for each token the sum over histories

Whole numbers add up to the same in any order and no float is added atomically: the result is the same to the bit,
always. A weight is off by at most half a part, far less than bf16 can tell at any horizon; in float32 a slot is
off by some 4e-6 of its size at a horizon of 8,192, 3e-5 at 65,536, and 5e-4 at a million (`bag` has no such bound).
In bf16 what a history contributes to a token's gradient is rounded to bf16 before histories are added up in float32.
Nothing waits for the GPU, nothing of size (B, M, d) exists, and all three are operators to torch.compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from logpast.kernels.ops import operator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = 2**30  # whole numbers that the power of two above a filter's sum is cut into
ROWS_BUDGET = 2**32  # bytes of the backward pass's rows: so many columns of the table are done at a time

# How the work is cut up: measured on an H200. What is in flight must fit into the shared memory of lesser chips too.
MARK, FILL = 1024, 128
GATHER = {"ROWS": 4, "num_warps": 1}


def _tile(slots: int, dtype: torch.dtype) -> dict[str, int]:
    """Of the product with the table. fp16 goes by way of float32."""
    if slots <= 64:
        return {"ROWS": 32, "COLUMNS": 128, "num_warps": 4, "num_stages": 6 if dtype == torch.bfloat16 else 2}
    if dtype == torch.bfloat16 and slots <= 128:
        return {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, "num_stages": 2}
    return {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}


def _tile_back(slots: int, dtype: torch.dtype) -> dict[str, int]:
    """Of the product with the gradient: so many rows, so many times, for some columns of the table's gradient."""
    columns = 128 if slots <= 64 else 32 if slots <= 128 else 16
    if dtype == torch.bfloat16:
        columns = 256 if slots <= 128 else 32
    return {"ROWS": 64, "COLUMNS": columns, "TIMES": 4, "num_warps": 4, "num_stages": 1}


class Layout(NamedTuple):
    """A bank seen from its lags: what a token at column t of the time-ordered bank adds to which slots."""

    first: Tensor  # (M,) int32, the first slot that sees it
    parts: Tensor  # (M, W) int32, the weights in that slot and the W − 1 after it
    unit: Tensor  # (L,) float32, what one part is worth: a power of two


def lay_out(filters: NDArray[np.float64], tolerance: float) -> Layout:
    """Weights below `tolerance` × their filter's largest, of the time-ordered bank (L, M), are left out."""
    slots = len(filters)
    kept = filters > tolerance * filters.max(axis=1, keepdims=True)
    first = np.where(kept.any(axis=0), kept.argmax(axis=0), 0)
    last = np.where(kept.any(axis=0), slots - 1 - kept[::-1].argmax(axis=0), 0)
    width = int((last - first).max()) + 1
    first = np.minimum(first, slots - width)
    unit = 2.0 ** np.ceil(np.log2(np.maximum(filters.sum(axis=1), np.finfo(np.float64).tiny))) / PARTS
    places = first + np.arange(width)[:, None]  # (W, M)
    lags = np.arange(filters.shape[1])
    parts = np.where(kept[places, lags], np.rint(filters[places, lags] / unit[places]), 0)
    return Layout(
        torch.from_numpy(first.astype(np.int32)),
        torch.from_numpy(np.ascontiguousarray(parts.T, dtype=np.int32)),
        torch.from_numpy(unit.astype(np.float32)),
    )


def compress_ids(layout: Layout, ids: Tensor, table: Tensor) -> Tensor:
    """As `naive.compress_ids`, for at least one id and a bank laid out by `lay_out`."""
    slots = len(layout.unit)
    plan = torch.ops.logpast.fused_plan(layout.first, layout.parts, slots, ids, table.shape[0])
    return torch.ops.logpast.fused_slots(*plan, layout.unit, table)


@operator("fused_plan")
def _plan(first: Tensor, parts: Tensor, slots: int, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The number of each (history, token) among those that occur, counted from 1; their tokens; their bags."""
    batch, length = ids.shape
    marks = torch.zeros(batch * vocabulary + 1, dtype=torch.int32, device=ids.device)
    _mark[triton.cdiv(length, MARK) * batch,](
        ids, *ids.stride(), marks, len(marks) - 1, batch, length, vocabulary, BLOCK=MARK
    )
    torch._assert_async(marks[-1] == 0)  # where an id that is not in the table leaves its mark
    number = marks[:-1].cumsum(0, dtype=torch.int32)
    most = batch * min(length, vocabulary)
    tokens = ids.new_empty(most, dtype=torch.int32)
    bags = ids.new_empty(most, _up(slots, 16), dtype=torch.int32)
    stride, width = bags.shape[1], parts.shape[1]
    _list[triton.cdiv(vocabulary, 1024), batch](number, tokens, vocabulary, BLOCK=1024)
    _empty[triton.cdiv(most * stride, 4096),](number, bags, len(number), stride, BLOCK=4096)
    _fill[triton.cdiv(length, FILL) * batch,](
        ids, *ids.stride(), number, first, parts, bags, batch, length, len(first) - length, vocabulary, stride, width,
        BLOCK=FILL, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return number, tokens, bags


@operator("fused_slots")
def _slots(number: Tensor, tokens: Tensor, bags: Tensor, unit: Tensor, table: Tensor) -> Tensor:
    (vocabulary, dim), slots = table.shape, len(unit)
    batch = len(number) // vocabulary
    table = table.contiguous()
    out = table.new_empty(batch, slots, dim)
    tile = _tile(slots, table.dtype)
    _multiply[triton.cdiv(dim, tile["COLUMNS"]), batch](
        number, tokens, bags, unit, table, out, vocabulary, dim, slots, bags.shape[1], SLOTS=_wide(slots), **tile
    )
    return out


@operator("fused_backward")
def _backward(number: Tensor, tokens: Tensor, bags: Tensor, unit: Tensor, grad: Tensor, vocabulary: int) -> Tensor:
    batch, slots, dim = grad.shape
    grad = grad.contiguous()
    out = grad.new_empty(vocabulary, dim)
    most = len(bags)
    by_token, order = _by_token(number, tokens, batch, vocabulary)
    tile = _tile_back(slots, grad.dtype)
    kind = torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32
    while tile["COLUMNS"] > 32 and most * tile["COLUMNS"] * kind.itemsize > ROWS_BUDGET:
        tile["COLUMNS"] //= 2
    columns = tile["COLUMNS"]
    rows = torch.empty(most, columns, dtype=kind, device=grad.device)
    for start in range(0, dim, columns):
        _spread[triton.cdiv(most // batch, tile["ROWS"] * tile["TIMES"]), batch](
            number, bags, unit, grad, rows, vocabulary, dim, slots, bags.shape[1], start, SLOTS=_wide(slots), **tile
        )
        _gather[vocabulary,](by_token, order, rows, out, batch, dim, start, COLUMNS=columns, **GATHER)
    return out


def _by_token(number: Tensor, tokens: Tensor, batch: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The same (history, token) pairs counted token by token, and what number each has history by history."""
    marks = torch.diff(number, prepend=number.new_zeros(1)).view(batch, vocabulary)
    by_token = marks.T.flatten().cumsum(0, dtype=torch.int32)
    order = torch.empty_like(tokens)
    _transpose[triton.cdiv(len(tokens) // batch, 1024), batch](
        number, tokens, by_token, order, batch, vocabulary, BLOCK=1024
    )
    return by_token, order


@_plan.register_fake
def _(first: Tensor, parts: Tensor, slots: int, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = ids.shape
    most = batch * min(length, vocabulary)
    number = ids.new_empty(batch * vocabulary, dtype=torch.int32)
    return number, number.new_empty(most), number.new_empty(most, _up(slots, 16))


@_slots.register_fake
def _(number: Tensor, tokens: Tensor, bags: Tensor, unit: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(number.shape[0] // table.shape[0], unit.shape[0], table.shape[1])


@_backward.register_fake
def _(number: Tensor, tokens: Tensor, bags: Tensor, unit: Tensor, grad: Tensor, vocabulary: int) -> Tensor:
    return grad.new_empty(vocabulary, grad.shape[2])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    *plan, unit, table = inputs
    ctx.save_for_backward(*plan, unit)
    ctx.vocabulary = table.shape[0]


def _chain(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, Tensor]:
    return None, None, None, None, torch.ops.logpast.fused_backward(*ctx.saved_tensors, grad, ctx.vocabulary)


_slots.register_autograd(_chain, setup_context=_keep)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _wide(slots: int) -> int:
    """The slots as a side of a matrix product on tensor cores."""
    return max(16, triton.next_power_of_2(slots))


@triton.jit
def _mark(ids, row, column, marks, wrong, batch, length, vocabulary, BLOCK: tl.constexpr):
    """Put a 1 where a history has a token, unless it is there already: writing to one place again and again is slow.

    Here and in `_fill` neighbouring programs have different histories, so that a frequent token waits less for itself.
    """
    history = (tl.program_id(0) % batch).to(tl.int64)
    place = tl.program_id(0) // batch * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + history * row + place.to(tl.int64) * column, mask=place < length, other=-1)
    mark = marks + tl.where(token < vocabulary, history * vocabulary + token, wrong)
    seen = tl.load(mark, mask=token >= 0, other=1)
    tl.store(mark, 1, mask=seen == 0)


@triton.jit
def _range(number, which, size):
    """From which number to which the things of one history, or of one token, go."""
    start = tl.load(number + which * size - 1, mask=which > 0, other=0)
    return start, tl.load(number + (which + 1) * size - 1)


@triton.jit
def _list(number, tokens, vocabulary, BLOCK: tl.constexpr):
    """Write down which token each number means."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.program_id(1).to(tl.int64) * vocabulary + token
    upto = tl.load(number + key, mask=token < vocabulary, other=0)
    before = tl.load(number + key - 1, mask=(token < vocabulary) & (key > 0), other=0)
    tl.store(tokens + upto - 1, token, mask=upto > before)


@triton.jit
def _empty(number, bags, keys, stride, BLOCK: tl.constexpr):
    """Empty the bags that will be used."""
    end = tl.load(number + keys - 1).to(tl.int64) * stride
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < end:
        place = start + tl.arange(0, BLOCK)
        tl.store(bags + place, tl.zeros((BLOCK,), tl.int32), mask=place < end)


@triton.jit
def _fill(
    ids, row, column, number, first, parts, bags, batch, length, missing, vocabulary, stride, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add what each token of a history weighs to its bag: neighbouring threads, neighbouring slots."""
    history = (tl.program_id(0) % batch).to(tl.int64)
    thread = tl.arange(0, BLOCK * WIDTH)
    place = tl.program_id(0) // batch * BLOCK + thread // WIDTH
    one = thread % WIDTH
    token = tl.load(ids + history * row + place.to(tl.int64) * column, mask=place < length, other=-1)
    here = (token >= 0) & (one < width)
    lag = (missing + place).to(tl.int64)
    which = tl.load(number + history * vocabulary + token, mask=here, other=1).to(tl.int64) - 1
    slot = tl.load(first + lag, mask=here, other=0)
    weight = tl.load(parts + lag * width + one, mask=here, other=0)
    tl.atomic_add(bags + which * stride + slot + one, weight, mask=here & (weight != 0), sem="relaxed")


@triton.jit
def _dot(bag, x):
    """bag @ x with whole numbers in the bag: as two bf16 for a bf16 x, so that 16 bits of each count."""
    wide = bag.to(tl.float32)
    if x.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, x) + tl.dot(low, x)
    return tl.dot(wide, x.to(tl.float32), input_precision="tf32x3")


@triton.jit
def _multiply(
    number, tokens, bags, unit, table, out, vocabulary, dim, slots, stride,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    history = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    start, stop = _range(number, history, vocabulary)
    total = tl.zeros((SLOTS, COLUMNS), tl.float32)
    for begin in range(start, stop, ROWS):
        which = begin + tl.arange(0, ROWS)
        there = which < stop
        token = tl.load(tokens + which, mask=there, other=0)
        rows = tl.load(
            table + token[:, None].to(tl.int64) * dim + column[None, :],
            mask=there[:, None] & (column[None, :] < dim), other=0.0,
        )  # fmt: skip
        bag = tl.load(
            bags + which[None, :].to(tl.int64) * stride + slot[:, None],
            mask=there[None, :] & (slot[:, None] < stride), other=0,
        )  # fmt: skip
        total += _dot(bag, rows)
    total *= tl.load(unit + slot, mask=slot < slots, other=0.0)[:, None]
    place = out + (history * slots + slot[:, None]) * dim + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(slot[:, None] < slots) & (column[None, :] < dim))


@triton.jit
def _transpose(number, tokens, by_token, order, batch, vocabulary, BLOCK: tl.constexpr):
    history = tl.program_id(1).to(tl.int64)
    start, stop = _range(number, history, vocabulary)
    which = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + which, mask=which < stop, other=0).to(tl.int64)
    place = tl.load(by_token + token * batch + history, mask=which < stop, other=1) - 1
    tl.store(order + place, which, mask=which < stop)


@triton.jit
def _spread(
    number, bags, unit, grad, rows, vocabulary, dim, slots, stride, first,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Each token's share of its history's gradient, in some columns of the table."""
    history = tl.program_id(1).to(tl.int64)
    start, stop = _range(number, history, vocabulary)
    start += tl.program_id(0) * ROWS * TIMES
    if start < stop:
        slot = tl.arange(0, SLOTS)
        some = tl.arange(0, COLUMNS)
        column = first + some
        towards = tl.load(
            grad + (history * slots + slot[:, None]) * dim + column[None, :],
            mask=(slot[:, None] < slots) & (column[None, :] < dim), other=0.0,
        )  # fmt: skip
        worth = towards.to(tl.float32) * tl.load(unit + slot, mask=slot < slots, other=0.0)[:, None]
        if towards.dtype == tl.bfloat16:
            worth = worth.to(tl.bfloat16)  # exact: a unit is a power of two
        for begin in range(start, min(stop, start + ROWS * TIMES), ROWS):
            which = begin + tl.arange(0, ROWS)
            there = which[:, None] < stop
            bag = tl.load(
                bags + which[:, None].to(tl.int64) * stride + slot[None, :],
                mask=there & (slot[None, :] < stride), other=0,
            )  # fmt: skip
            tl.store(rows + which[:, None].to(tl.int64) * COLUMNS + some[None, :], _dot(bag, worth), mask=there)


@triton.jit
def _gather(by_token, order, rows, out, batch, dim, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over histories, for a token of the table."""
    token = tl.program_id(0).to(tl.int64)
    start, stop = _range(by_token, token, batch)
    some = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(start, stop, ROWS):
        place = begin + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < stop, other=0).to(tl.int64)
        there = place[:, None] < stop
        share = tl.load(rows + row[:, None] * COLUMNS + some[None, :], mask=there, other=0.0)
        total += tl.sum(share.to(tl.float32), axis=0)
    column = first + some
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=column < dim)
