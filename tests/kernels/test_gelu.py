from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.helpers import BOUNDS, check_operator, compare

pytest.importorskip("triton", reason="Triton is for Linux")
from logpast.kernels import gelu


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (3, 37, 384), (2, 65, 256)], ids=str)
def test_output_and_gradients_equal_pytorch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [3 * torch.randn(shape).to(dtype), torch.randn(shape[-1])]
    compare(gelu.gelu, lambda x, bias: F.gelu(x + bias, approximate="tanh"), inputs, BOUNDS[dtype])


@pytest.mark.interpreter
def test_operator_is_registered_correctly() -> None:
    check_operator("gelu", torch.randn(3, 128, requires_grad=True), torch.randn(128, requires_grad=True))


@pytest.mark.parametrize("tile", [gelu.FORWARD, gelu.BACKWARD], ids=["forward", "backward"])
def test_grid_stays_within_cuda_limits_for_many_rows(tile: dict[str, int]) -> None:
    """65,535 programs in the second direction, 2³¹ − 1 in the first."""
    grid = gelu._plan(torch.empty(2**22, 3072, device="meta"), **tile).grid
    assert grid[0] < 2**31
    assert grid[1] < 2**16


def test_fits_half_precision_and_multiples_of_128_features(on_gpu: Callable[..., Tensor]) -> None:
    assert gelu.fits(on_gpu(2, 5, 24), 384)
    assert not gelu.fits(on_gpu(2, 5, 24), 100)
    assert not gelu.fits(on_gpu(2, 5, 24, dtype=torch.float32), 384)
    assert not gelu.fits(torch.empty(2, 5, 24, dtype=torch.bfloat16), 384)
