"""GELU of a layer with a bias, for training on a GPU: its gradient and the bias's in one go.

GPT-2's form of it, by tanh, is x · σ(2u) with u = √(2/π) (x + 0.044715 x³).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.ops import operator

FORWARD = {"SIZE": 4096, "TIMES": 1, "num_warps": 8}  # measured on an H200
BACKWARD = {"SIZE": 2048, "TIMES": 16, "num_warps": 4}
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
CUBIC = tl.constexpr(0.044715)


def fits(x: Tensor, wide: int) -> bool:
    """Whether these kernels are made for a layer from x to so many features."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and wide % 128 == 0


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias, (…, n) and (n,)."""
    return torch.ops.logpast.gelu(x, bias)


class _Plan(NamedTuple):
    """How x is cut into tiles, each done some times one below the other."""

    rows: int
    wide: int
    grid: tuple[int, int]
    tile: dict[str, int]


def _plan(x: Tensor, SIZE: int, TIMES: int, num_warps: int) -> _Plan:
    wide = x.shape[-1]
    rows, columns = x.numel() // wide, min(1024, wide & -wide)  # the largest power of two that divides it
    tile = {"COLUMNS": columns, "ROWS": SIZE // columns, "TIMES": TIMES, "num_warps": num_warps}
    tall = SIZE // columns * TIMES
    return _Plan(rows, wide, ((rows + tall - 1) // tall, wide // columns), tile)  # the first may be large


@operator("gelu")
def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, wide, grid, tile = _plan(x, **FORWARD)
    _forward[grid](x.contiguous(), bias, out, rows, wide, **tile)
    return out


@operator("gelu_backward")
def _gelu_backward(x: Tensor, bias: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, wide, grid, tile = _plan(x, **BACKWARD)
    parts = x.new_empty(grid[0], wide, dtype=torch.float32)
    _backward[grid](x.contiguous(), bias, above.contiguous(), out, parts, rows, wide, **tile)
    return out, parts


@_gelu.register_fake
def _(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_backward.register_fake
def _(x: Tensor, bias: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    return gradient, x.new_empty(_plan(x, **BACKWARD).grid[0], x.shape[-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _chain(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    gradient, parts = torch.ops.logpast.gelu_backward(x, bias, above)
    return gradient, parts.sum(0).to(bias.dtype)


_gelu.register_autograd(_chain, setup_context=_keep)


@triton.jit
def _forward(x, bias, out, rows, wide, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    level = tl.load(bias + column).to(tl.float32)
    for number in range(TIMES):
        row = (tl.program_id(0) * TIMES + number) * ROWS + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * wide + column
        inside = row[:, None] < rows
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + level
        value = value / (1 + tl.exp(value * (value * value * CUBIC + 1) * -TWICE_ROOT))
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, bias, above, out, parts, rows, wide, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    level = tl.load(bias + column).to(tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in tl.range(TIMES, num_stages=3):
        row = (tl.program_id(0) * TIMES + number) * ROWS + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * wide + column
        inside = row[:, None] < rows
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + level
        towards = tl.load(above + place, mask=inside, other=0.0).to(tl.float32)
        open = 1 / (1 + tl.exp(value * (value * value * CUBIC + 1) * -TWICE_ROOT))
        slope = open + value * open * (1 - open) * (value * value * (3 * CUBIC) + 1) * TWICE_ROOT
        gradient = towards * slope
        sums += gradient
        tl.store(out + place, gradient.to(out.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * wide + column, tl.sum(sums, axis=0))
