"""A product with a weight that is kept in float32 and used in half precision, for training on a GPU.

The gradient of the weight leaves the product in float32, as it was summed up there: not rounded and cast back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logpast.kernels.matmul import product
from logpast.kernels.ops import operator


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in the type of x, half precision; a bias (out,) is added and gets no gradient from here."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        return product(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, low = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        to_weight = torch.ops.logpast.to_weight(above.flatten(0, -2), x.flatten(0, -2)) if wanted[1] else None
        to_x = product(above, low, back=True) if wanted[0] else None
        return to_x, to_weight, None


@operator("to_weight")
def _to_weight(above: Tensor, x: Tensor) -> Tensor:
    if above.is_cuda:
        return torch.mm(above.T, x, out_dtype=torch.float32)
    return above.T.float() @ x.float()


@_to_weight.register_fake
def _(above: Tensor, x: Tensor) -> Tensor:
    return above.new_empty(above.shape[1], x.shape[1], dtype=torch.float32)
