"""Residual addition followed by LayerNorm, for training on a GPU: one kernel forward, one kernel backward.

    total = residual + x + linear_bias        out = (total − mean) · rstd · weight + bias

x is the output of a linear layer without its bias, `linear_bias`. The backward kernel adds the gradients that arrive
at total and through out, and sums those of linear_bias, weight and bias over all rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.ops import operator

FORWARD = {"ROWS": 4, "num_warps": 4}  # measured on an H200
BACKWARD = {"ROWS": 1, "REPEATS": 32, "num_warps": 4}


def fits(x: Tensor) -> bool:
    """Whether the kernels support x (…, width)."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] <= 4096


def add_norm(
    residual: Tensor, x: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """total and out, both (…, width) in the dtype of residual."""
    total, out, _ = torch.ops.logpast.add_norm(residual, x, linear_bias, weight, bias, eps)
    return total, out


@operator("add_norm")
def _add_norm(
    residual: Tensor, x: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """total, out, and mean and rstd of each row."""
    width = residual.shape[-1]
    rows = residual.numel() // width
    total, out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    stats = residual.new_empty(rows, 2, dtype=torch.float32)
    _forward_kernel[triton.cdiv(rows, FORWARD["ROWS"]),](
        residual.contiguous(), x.contiguous(), linear_bias, weight, bias, total, out, stats, rows, width, eps,
        COLUMNS=triton.next_power_of_2(width), **FORWARD,
    )  # fmt: skip
    return total, out, stats


@operator("add_norm_backward")
def _add_norm_backward(
    total: Tensor, stats: Tensor, weight: Tensor, dtotal: Tensor | None, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """dx, which is the residual's gradient too, and partial sums of the gradients of linear_bias, weight and bias."""
    width = total.shape[-1]
    rows = total.numel() // width
    dx = torch.empty_like(total)
    programs = triton.cdiv(rows, BACKWARD["ROWS"] * BACKWARD["REPEATS"])
    sums = total.new_empty(programs, 3, width, dtype=torch.float32)
    _backward_kernel[programs,](
        total, stats, weight, total if dtotal is None else dtotal.contiguous(), dout.contiguous(),
        dx, sums, rows, width,
        HAS_DTOTAL=dtotal is not None, COLUMNS=triton.next_power_of_2(width), **BACKWARD,
    )  # fmt: skip
    return dx, sums


@_add_norm.register_fake
def _(
    residual: Tensor, x: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total, out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    return total, out, residual.new_empty(residual.numel() // residual.shape[-1], 2, dtype=torch.float32)


@_add_norm_backward.register_fake
def _(total: Tensor, stats: Tensor, weight: Tensor, dtotal: Tensor | None, dout: Tensor) -> tuple[Tensor, Tensor]:
    rows = total.numel() // total.shape[-1]
    programs = (rows + BACKWARD["ROWS"] * BACKWARD["REPEATS"] - 1) // (BACKWARD["ROWS"] * BACKWARD["REPEATS"])
    return torch.empty_like(total), total.new_empty(programs, 3, total.shape[-1], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, linear_bias, weight, bias, _ = inputs
    total, _, stats = output
    ctx.save_for_backward(total, stats, weight)
    ctx.dtypes = [parameter.dtype for parameter in (linear_bias, weight, bias)]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dtotal: Tensor | None, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:  # only the total was used
        dlinear_bias = None if dtotal is None else dtotal.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.dtypes[0])
        return dtotal, dtotal, dlinear_bias, None, None, None
    dx, sums = torch.ops.logpast.add_norm_backward(*ctx.saved_tensors, dtotal, dout)
    dparameters = (grad.to(dtype) for grad, dtype in zip(sums.sum(0), ctx.dtypes, strict=True))
    return dx, dx, *dparameters, None


_add_norm.register_autograd(_backward, setup_context=_setup_context)


@triton.jit
def _forward_kernel(
    residual, x, linear_bias, weight, bias, total, out, stats, rows, width, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    offset = row[:, None].to(tl.int64) * width + column
    in_width = column < width
    mask = (row[:, None] < rows) & in_width
    value = tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(linear_bias + column, mask=in_width, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + offset, rounded, mask=mask)
    value = rounded.to(tl.float32)  # normalise the total as it is stored
    mean = tl.sum(value, axis=1) / width
    value = tl.where(in_width, value - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(stats + 2 * row, mean, mask=row < rows)
    tl.store(stats + 2 * row + 1, rstd, mask=row < rows)
    value = value * rstd[:, None] * tl.load(weight + column, mask=in_width, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    total, stats, weight, dtotal, dout, dx, sums, rows, width,
    HAS_DTOTAL: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    in_width = column < width
    w = tl.load(weight + column, mask=in_width, other=0.0).to(tl.float32)
    dlinear_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for repeat in tl.range(REPEATS, num_stages=4):
        row = (tl.program_id(0) * REPEATS + repeat) * ROWS + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * width + column
        mask = (row[:, None] < rows) & in_width
        mean = tl.load(stats + 2 * row, mask=row < rows, other=0.0)
        rstd = tl.load(stats + 2 * row + 1, mask=row < rows, other=0.0)
        x_hat = tl.load(total + offset, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dout + offset, mask=mask, other=0.0).to(tl.float32)
        x_hat = tl.where(mask, (x_hat - mean[:, None]) * rstd[:, None], 0.0)
        dweight += dy * x_hat
        dbias += dy
        dy *= w
        mean_dy = tl.sum(dy, axis=1) / width
        mean_dy_x_hat = tl.sum(dy * x_hat, axis=1) / width
        grad = (dy - mean_dy[:, None] - x_hat * mean_dy_x_hat[:, None]) * rstd[:, None]
        if HAS_DTOTAL:
            grad += tl.load(dtotal + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.where(mask, grad, 0.0)
        dlinear_bias += grad
        tl.store(dx + offset, grad.to(dx.dtype.element_ty), mask=mask)
    sums += tl.program_id(0).to(tl.int64) * 3 * width + column
    tl.store(sums, tl.sum(dlinear_bias, axis=0), mask=in_width)
    tl.store(sums + width, tl.sum(dweight, axis=0), mask=in_width)
    tl.store(sums + 2 * width, tl.sum(dbias, axis=0), mask=in_width)
