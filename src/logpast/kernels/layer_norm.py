"""A layer's output added to the stream, and LayerNorm of the sum, for training on a GPU: one kernel there, one back.

    total = x + more + bias        normed = (total − mean) / √(variance + ε) · gain + shift

The way back adds what comes to the total and to its norm, and sums up over all rows what goes to bias, gain and shift.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.ops import operator

FORWARD = {"ROWS": 4, "num_warps": 4}  # measured on an H200
BACKWARD = {"ROWS": 1, "TIMES": 32, "num_warps": 4}


def fits(x: Tensor) -> bool:
    """Whether these kernels are made for such embeddings (…, width)."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] <= 4096


def add_norm(
    x: Tensor, more: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The total and its norm, both (…, width) in the type of x."""
    total, normed, _ = torch.ops.logpast.add_norm(x, more, bias, gain, shift, epsilon)
    return total, normed


@operator("add_norm")
def _add_norm(
    x: Tensor, more: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    total, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    spread = x.new_empty(rows, 2, dtype=torch.float32)
    _forward[triton.cdiv(rows, FORWARD["ROWS"]),](
        x.contiguous(), more.contiguous(), bias, gain, shift, total, normed, spread, rows, width, epsilon,
        COLUMNS=triton.next_power_of_2(width), **FORWARD,
    )  # fmt: skip
    return total, normed, spread


@operator("add_norm_backward")
def _add_norm_backward(
    total: Tensor, spread: Tensor, gain: Tensor, to_total: Tensor | None, to_normed: Tensor
) -> tuple[Tensor, Tensor]:
    width = total.shape[-1]
    rows = total.numel() // width
    gradient = torch.empty_like(total)
    tall = triton.cdiv(rows, BACKWARD["ROWS"] * BACKWARD["TIMES"])
    parts = total.new_empty(tall, 3, width, dtype=torch.float32)
    _backward[tall,](
        total, spread, gain, total if to_total is None else to_total.contiguous(), to_normed.contiguous(),
        gradient, parts, rows, width,
        MORE=to_total is not None, COLUMNS=triton.next_power_of_2(width), **BACKWARD,
    )  # fmt: skip
    return gradient, parts


@_add_norm.register_fake
def _(
    x: Tensor, more: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    total, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return total, normed, x.new_empty(x.numel() // x.shape[-1], 2, dtype=torch.float32)


@_add_norm_backward.register_fake
def _(total: Tensor, spread: Tensor, gain: Tensor, to_total: Tensor | None, to_normed: Tensor) -> tuple[Tensor, Tensor]:
    rows = total.numel() // total.shape[-1]
    tall = (rows + BACKWARD["ROWS"] * BACKWARD["TIMES"] - 1) // (BACKWARD["ROWS"] * BACKWARD["TIMES"])
    return torch.empty_like(total), total.new_empty(tall, 3, total.shape[-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    total, _, spread = output
    ctx.save_for_backward(total, spread, inputs[3])
    ctx.dtypes = [part.dtype for part in inputs[2:5]]
    ctx.mark_non_differentiable(spread)
    ctx.set_materialize_grads(False)


def _chain(ctx: Any, to_total: Tensor | None, to_normed: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if to_normed is None:  # only the sum was used
        to_bias = None if to_total is None else to_total.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.dtypes[0])
        return to_total, to_total, to_bias, None, None, None
    gradient, parts = torch.ops.logpast.add_norm_backward(*ctx.saved_tensors, to_total, to_normed)
    small = (part.to(dtype) for part, dtype in zip(parts.sum(0), ctx.dtypes, strict=True))
    return gradient, gradient, *small, None


_add_norm.register_autograd(_chain, setup_context=_keep)


@triton.jit
def _forward(
    x, more, bias, gain, shift, total, normed, spread, rows, width, epsilon, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = row[:, None].to(tl.int64) * width + column
    wide = column < width
    inside = (row[:, None] < rows) & wide
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=wide, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    value = rounded.to(tl.float32)  # the norm is that of the total as it is kept
    mean = tl.sum(value, axis=1) / width
    value = tl.where(wide, value - mean[:, None], 0.0)
    slope = 1 / tl.sqrt(tl.sum(value * value, axis=1) / width + epsilon)
    tl.store(spread + 2 * row, mean, mask=row < rows)
    tl.store(spread + 2 * row + 1, slope, mask=row < rows)
    value = value * slope[:, None] * tl.load(gain + column, mask=wide, other=0.0).to(tl.float32)
    value += tl.load(shift + column, mask=wide, other=0.0).to(tl.float32)
    tl.store(normed + place, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    total, spread, gain, to_total, to_normed, gradient, parts, rows, width,
    MORE: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    wide = column < width
    scale = tl.load(gain + column, mask=wide, other=0.0).to(tl.float32)
    to_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    to_gain = tl.zeros((ROWS, COLUMNS), tl.float32)
    to_shift = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in tl.range(TIMES, num_stages=4):
        row = (tl.program_id(0) * TIMES + number) * ROWS + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * width + column
        inside = (row[:, None] < rows) & wide
        mean = tl.load(spread + 2 * row, mask=row < rows, other=0.0)
        slope = tl.load(spread + 2 * row + 1, mask=row < rows, other=0.0)
        value = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        towards = tl.load(to_normed + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, (value - mean[:, None]) * slope[:, None], 0.0)
        to_gain += towards * value
        to_shift += towards
        towards *= scale
        level = tl.sum(towards, axis=1) / width
        tilt = tl.sum(towards * value, axis=1) / width
        change = (towards - level[:, None] - value * tilt[:, None]) * slope[:, None]
        if MORE:
            change += tl.load(to_total + place, mask=inside, other=0.0).to(tl.float32)
        change = tl.where(inside, change, 0.0)
        to_bias += change
        tl.store(gradient + place, change.to(gradient.dtype.element_ty), mask=inside)
    parts += tl.program_id(0).to(tl.int64) * 3 * width + column
    tl.store(parts, tl.sum(to_bias, axis=0), mask=wide)
    tl.store(parts + width, tl.sum(to_gain, axis=0), mask=wide)
    tl.store(parts + 2 * width, tl.sum(to_shift, axis=0), mask=wide)
