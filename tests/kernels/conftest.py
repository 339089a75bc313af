"""Tests marked `interpreter` run Triton kernels on a CPU, in Triton's interpreter.

The interpreter must be switched on (TRITON_INTERPRET=1) before the kernels are imported, so test_interpreter.py runs
these tests in a process of their own. To run them directly: TRITON_INTERPRET=1 pytest -m interpreter tests/kernels
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreter: runs in Triton's interpreter; run by test_interpreter.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter: see test_interpreter.py")


@pytest.fixture
def on_gpu() -> Callable[..., Tensor]:
    """Makes tensors that claim to be on a GPU and have no data."""

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        with FakeTensorMode():
            return torch.empty(shape, dtype=dtype, device="cuda")

    return make
