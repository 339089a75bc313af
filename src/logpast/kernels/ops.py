"""Registers operators with PyTorch, so that torch.compile treats them as opaque."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from logpast.util.precision import full_precision

HAS_TRITON = importlib.util.find_spec("triton") is not None
disabled: set[str] = set()  # names of kernels that are switched off; set by dispatch


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as the operator logpast::name.

    It runs on the device of its first argument, a tensor, and with autocast off.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def run(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first), full_precision(first.device):
                return function(first, *others)

        return torch.library.custom_op(f"logpast::{name}", run, mutates_args=())

    return make


def linear(name: str, forward: CustomOpDef, transposed: CustomOpDef) -> Callable[..., Tensor]:
    """A linear map that can be differentiated any number of times, in both modes, and inside torch.func.

    Args:
        name: a name for the pair of operators.
        forward: the map, an operator (x, *tensors, sizes: list[int]) -> Tensor. It is linear in x and treats all
            columns of x (its last axis) alike.
        transposed: the transposed map, with the same tensors and sizes.

    Returns:
        The map as a function (x, *tensors, sizes=…) -> Tensor.
    """
    _PAIRS[name] = forward, transposed

    def compute(x: Tensor, *tensors: Tensor, sizes: list[int]) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.logpast.linear(x, name, tensors, sizes)
        return _Linear.apply(x, _PAIRS[name], sizes, *tensors)

    return compute


_PAIRS: dict[str, tuple[CustomOpDef, CustomOpDef]] = {}


class _Linear(torch.autograd.Function):
    """The first of two operators, which are the transposed of each other."""

    @staticmethod
    def forward(x: Tensor, pair: tuple[CustomOpDef, CustomOpDef], sizes: list[int], *tensors: Tensor) -> Tensor:
        return pair[0](x, *tensors, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.pair, ctx.sizes, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        return _Linear.apply(grad, ctx.pair[::-1], ctx.sizes, *tensors), None, None, *[None] * len(tensors)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _Linear.apply(tangent, ctx.pair, ctx.sizes, *ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, pair: Any, sizes: list[int], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        axis, _, _, *axes = in_dims
        if axes == [None] * len(axes):  # the same map of several x: of one x with more columns
            out = _Linear.apply(x.movedim(axis, -2).flatten(-2), pair, sizes, *tensors)
            return out.unflatten(-1, (info.batch_size, out.shape[-1] // info.batch_size)), out.ndim - 1
        each = zip(*map(functools.partial(_unbind, info.batch_size), (x, *tensors), (axis, *axes)), strict=True)
        return torch.stack([_Linear.apply(one, pair, sizes, *others) for one, *others in each]), 0


def _unbind(size: int, x: Tensor, axis: int | None) -> tuple[Tensor, ...]:
    """The elements of a batch of torch.vmap; a tensor without this axis is the same for all of them."""
    return (x,) * size if axis is None else x.unbind(axis)


def _linear(x: Tensor, name: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """torch.compile does not trace a Function with its own forward mode, but it takes an operator apart."""
    return _Linear.apply(x, _PAIRS[name], sizes, *tensors)


torch.library.define("logpast::linear", torch.library.infer_schema(_linear, mutates_args=()))
torch.library.impl("logpast::linear", "CompositeImplicitAutograd", _linear)


@torch.library.register_vmap("logpast::linear")
def _(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, name: str, tensors: list[Tensor], sizes: list[int]
) -> tuple[Tensor, int]:
    axis, _, axes, _ = in_dims
    return _Linear.vmap(info, (axis, None, None, *axes), x, _PAIRS[name], sizes, *tensors)
