"""Floating-point types of sums and products."""

import pytest
import torch

from logpast.util.precision import accumulation_dtype, full_precision, in_autocast


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_sums_are_in_float32_or_float64(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert accumulation_dtype(dtype) == expected


def test_in_autocast_casts_only_where_autocast_is_on() -> None:
    x = torch.ones(2)
    assert in_autocast(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert in_autocast(x).dtype == torch.bfloat16
        with full_precision(x.device):
            assert in_autocast(x).dtype == torch.float32
            assert (x @ x).dtype == torch.float32
