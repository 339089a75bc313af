"""GELU of x + bias for training on a GPU; the backward kernel computes the gradients of x and of the bias together.

GPT-2's form, the tanh approximation, is x · sigmoid(2u) with u = √(2/π) (x + 0.044715 x³).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.ops import operator

FORWARD = {"SIZE": 4096, "REPEATS": 1, "num_warps": 8}  # measured on an H200
BACKWARD = {"SIZE": 2048, "REPEATS": 16, "num_warps": 4}
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


def fits(x: Tensor, features: int) -> bool:
    """Whether the kernels support a layer from x to this number of features."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and features % 128 == 0


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x (…, n) + bias (n,)."""
    return torch.ops.logpast.gelu(x, bias)


class _Plan(NamedTuple):
    """The grid of programs over x (rows, width). A program computes REPEATS tiles of (ROWS, COLUMNS), row by row."""

    rows: int
    width: int
    grid: tuple[int, int]
    tile: dict[str, int]


def _plan(x: Tensor, SIZE: int, REPEATS: int, num_warps: int) -> _Plan:
    width = x.shape[-1]
    rows, columns = x.numel() // width, min(1024, width & -width)  # the largest power of two that divides the width
    tile = {"COLUMNS": columns, "ROWS": SIZE // columns, "REPEATS": REPEATS, "num_warps": num_warps}
    height = SIZE // columns * REPEATS
    return _Plan(
        rows, width, ((rows + height - 1) // height, width // columns), tile
    )  # CUDA limits the second to 65535


@operator("gelu")
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width, grid, tile = _plan(x, **FORWARD)
    _forward_kernel[grid](x.contiguous(), bias, out, rows, width, **tile)
    return out


@operator("gelu_backward")
def _gelu_backward(x: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """dx, and partial sums of dbias."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width, grid, tile = _plan(x, **BACKWARD)
    dbias = x.new_empty(grid[0], width, dtype=torch.float32)
    _backward_kernel[grid](x.contiguous(), bias, dout.contiguous(), dx, dbias, rows, width, **tile)
    return dx, dbias


@_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_backward.register_fake
def _(x: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(_plan(x, **BACKWARD).grid[0], x.shape[-1], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    dx, dbias = torch.ops.logpast.gelu_backward(x, bias, dout)
    return dx, dbias.sum(0).to(bias.dtype)


_gelu.register_autograd(_backward, setup_context=_setup_context)


@triton.jit
def _forward_kernel(x, bias, out, rows, width, COLUMNS: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + column).to(tl.float32)
    for repeat in range(REPEATS):
        row = (tl.program_id(0) * REPEATS + repeat) * ROWS + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * width + column
        mask = row[:, None] < rows
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + b
        value = value / (1 + tl.exp(value * (value * value * CUBIC + 1) * -TWO_SQRT_2_OVER_PI))
        tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x, bias, dout, dx, dbias, rows, width, COLUMNS: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + column).to(tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for repeat in tl.range(REPEATS, num_stages=3):
        row = (tl.program_id(0) * REPEATS + repeat) * ROWS + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * width + column
        mask = row[:, None] < rows
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + b
        dy = tl.load(dout + offset, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(value * (value * value * CUBIC + 1) * -TWO_SQRT_2_OVER_PI))
        derivative = sigmoid + value * sigmoid * (1 - sigmoid) * (value * value * (3 * CUBIC) + 1) * TWO_SQRT_2_OVER_PI
        grad = dy * derivative
        sums += grad
        tl.store(dx + offset, grad.to(dx.dtype.element_ty), mask=mask)
    tl.store(dbias + tl.program_id(0).to(tl.int64) * width + column, tl.sum(sums, axis=0))
