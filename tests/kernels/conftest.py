"""Fixtures of the tests of GPU kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode


@pytest.fixture
def on_gpu() -> Callable[..., Tensor]:
    """Makes tensors that claim to be on a GPU and have no data."""

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        with FakeTensorMode():
            return torch.empty(shape, dtype=dtype, device="cuda")

    return make
