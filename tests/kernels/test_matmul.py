"""On a CPU, PyTorch computes the products; tests/test_gpu.py tests the choice between cuBLASLt's kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.helpers import check_operator, relative
from logpast.kernels import matmul


@pytest.mark.parametrize("bias", [torch.randn(5), None], ids=["bias", "no bias"])
def test_product_with_the_transposed_weight(bias: Tensor | None) -> None:
    x, weight = torch.randn(2, 7, 3), torch.randn(5, 3)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative(matmul.matmul(x, weight, bias), exact) < 1e-6


def test_product_with_the_weight_as_it_is() -> None:
    x, weight = torch.randn(2, 7, 5), torch.randn(5, 3)
    assert relative(matmul.matmul(x, weight, transpose=False), x.double() @ weight.double()) < 1e-6


def test_weight_gradient_stays_in_float32() -> None:
    x, weight, bias = torch.randn(3, 40, 24).half(), torch.randn(8, 24, requires_grad=True), torch.randn(8)
    upstream = torch.randn(3, 40, 8).half()
    out = matmul.linear(x, weight, bias)
    out.backward(upstream)
    assert out.dtype == torch.float16
    assert relative(out, F.linear(x.double(), weight.detach().half().double(), bias.double())) < 2e-3
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert relative(weight.grad, upstream.flatten(0, 1).double().T @ x.flatten(0, 1).double()) < 1e-6


def test_input_gradient_and_no_bias_gradient() -> None:
    x, weight = torch.randn(3, 4, 24).half().requires_grad_(), torch.randn(8, 24)
    bias, upstream = torch.randn(8, requires_grad=True), torch.randn(3, 4, 8).half()
    matmul.linear(x, weight, bias).backward(upstream)
    assert x.grad is not None
    assert x.grad.dtype == torch.float16
    assert relative(x.grad, upstream.double() @ weight.half().double()) < 2e-3
    assert bias.grad is None


def test_second_derivative_is_an_error() -> None:
    x, weight = torch.randn(2, 3, 4).half().requires_grad_(), torch.randn(5, 4, requires_grad=True)
    (first,) = torch.autograd.grad(matmul.linear(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


def test_operators_are_registered_correctly() -> None:
    check_operator("weight_gradient", torch.randn(7, 3), torch.randn(7, 4), differentiable=False)
    check_operator("matmul", torch.randn(2, 7, 3), torch.randn(5, 3), torch.randn(5), True, differentiable=False)
    check_operator("matmul", torch.randn(2, 7, 5), torch.randn(5, 3), None, False, differentiable=False)


def test_fits_half_precision_of_one_dtype(on_gpu: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_library", object)
    x, weight, bias = on_gpu(2, 7, 3), on_gpu(5, 3), on_gpu(5)
    assert matmul.fits(x, weight, bias)
    assert matmul.fits(x, weight, None)
    assert not matmul.fits(x, weight, on_gpu(3))
    assert not matmul.fits(x, weight, on_gpu(5, dtype=torch.float32))
    assert not matmul.fits(on_gpu(2, 0, 3), weight, bias)
    assert not matmul.fits(on_gpu(7, 3, dtype=torch.float32), on_gpu(5, 3, dtype=torch.float32), None)
    assert not matmul.fits(torch.randn(7, 3).half(), torch.randn(5, 3).half(), None)
    monkeypatch.setattr(matmul, "_library", lambda: None)
    assert not matmul.fits(x, weight, bias)
