"""Comparisons of kernels with PyTorch in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

# bf16 is tested on a GPU only: the interpreter computes products of bf16 wrongly
BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3}
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def relative(ours: Tensor, exact: Tensor) -> float:
    """The largest error relative to the largest exact value."""
    error = (ours.detach().double() - exact.detach()).abs().max()
    return float(error / exact.abs().max().clamp(min=1e-30).detach())


def compare(ours: Function, exact: Function, inputs: list[Tensor], bound: float, used: tuple[int, ...] = (0,)) -> None:
    """Assert equal outputs and gradients; the loss depends on the outputs with the numbers `used`."""
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    true = [x.detach().double().requires_grad_() for x in inputs]
    outputs = [out if isinstance(out, tuple) else (out,) for out in (ours(*mine), exact(*true))]
    for one, other in zip(*outputs, strict=True):
        assert relative(one, other) < bound
    upstream = [torch.randn_like(outputs[0][number]) for number in used]
    for out, grads in zip(outputs, (upstream, [grad.double() for grad in upstream]), strict=True):
        torch.autograd.backward([out[number] for number in used], grads)
    for one, other in zip(mine, true, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.dtype == one.dtype
            assert relative(one.grad, other.grad) < bound


def check_operator(name: str, *inputs: object, differentiable: bool = True) -> None:
    """PyTorch's own checks of an operator: its schema, its autograd formula, and the shapes it promises to compile."""
    checks = ["test_schema", "test_faketensor", *(["test_autograd_registration"] if differentiable else [])]
    torch.library.opcheck(getattr(torch.ops.logpast, name), inputs, test_utils=checks)
