from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.helpers import check_operator, compare, relative

pytest.importorskip("triton", reason="Triton is for Linux")
from logpast.kernels import layer_norm


@pytest.mark.interpreter
@pytest.mark.parametrize("used", [(0, 1), (1,), (0,)], ids=["both", "norm only", "sum only"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 11, 96), (2, 18, 130)], ids=str)
def test_outputs_and_gradients_equal_pytorch(shape: tuple[int, ...], used: tuple[int, ...]) -> None:
    width = shape[-1]

    def ours(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return layer_norm.add_norm(*inputs, 1e-5)

    def exact(residual: Tensor, x: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x + linear_bias
        return total, F.layer_norm(total, (width,), weight, bias, 1e-5)

    inputs = [torch.randn(shape), 2 * torch.randn(shape) + 1, *(torch.randn(width) for _ in range(3))]
    compare(ours, exact, inputs, 1e-5, used)


@pytest.mark.interpreter
def test_half_precision_rounds_once_and_normalises_the_rounded_sum() -> None:
    residual, x = torch.randn(2, 5, 64).half(), torch.randn(2, 5, 64).half()
    linear_bias, weight, bias = (torch.randn(64) for _ in range(3))
    total, out = layer_norm.add_norm(residual, x, linear_bias, weight, bias, 1e-5)
    assert total.dtype == out.dtype == torch.float16
    assert torch.equal(total, (residual.float() + x.float() + linear_bias).half())
    exact = F.layer_norm(total.double(), (64,), weight.double(), bias.double(), 1e-5)
    assert relative(out, exact) < 1e-3


@pytest.mark.interpreter
def test_operator_is_registered_correctly() -> None:
    residual, x = (torch.randn(2, 5, 16, requires_grad=True) for _ in range(2))
    parameters = (torch.randn(16, requires_grad=True) for _ in range(3))
    check_operator("add_norm", residual, x, *parameters, 1e-5)


def test_fits_half_precision_and_at_most_4096_columns(on_gpu: Callable[..., Tensor]) -> None:
    assert layer_norm.fits(on_gpu(2, 4096))
    assert not layer_norm.fits(on_gpu(2, 4097))
    assert not layer_norm.fits(on_gpu(2, 4096, dtype=torch.float32))
    assert not layer_norm.fits(torch.empty(2, 4096, dtype=torch.bfloat16))
