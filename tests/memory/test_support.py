"""The path from embeddings by groups of filters, against the definition."""

import pytest
import torch

from logpast.filters import FilterBank
from logpast.memory import naive, support
from memory.helpers import BANKS, BOUNDS, bank_id, memory_of, relative_error, saved_for_backward


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bank", BANKS, ids=bank_id)
@pytest.mark.parametrize("length", [0, 1, 7, 80, 400])
def test_slots_and_gradients_equal_naive(bank: FilterBank, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(length)
    history = torch.randn(3, length, 6, dtype=dtype).requires_grad_()
    exact = history.detach().double().requires_grad_()
    ours = memory_of(bank, "support", dtype)(history)
    reference = memory_of(bank, "naive", torch.float64)(exact)
    assert ours.dtype == dtype
    assert relative_error(ours, reference, bank) < BOUNDS[dtype]
    upstream = torch.randn_like(reference).to(dtype)
    ours.backward(upstream)
    reference.backward(upstream.double())
    if length:
        assert relative_error(history.grad, exact.grad) < BOUNDS[dtype]


@pytest.mark.parametrize("bank", BANKS, ids=bank_id)
def test_groups_cover_every_weight_that_is_not_negligible(bank: FilterBank) -> None:
    exact = torch.from_numpy(naive.in_time_order(bank))
    layout, left = support.make_layout(bank, torch.device("cpu"), torch.float64), exact.clone()
    for rows, block, columns in support._blocks(layout.filters, bank.horizon, *layout.columns):
        left[rows, columns] -= block[0]
    assert (left.abs() <= naive.NEGLIGIBLE * exact.amax(1, keepdim=True)).all()


def test_no_weight_is_subnormal() -> None:
    """Products with them take a CPU many times as long."""
    weights = support.make_layout(FilterBank(slots=53, sharpness=100), torch.device("cpu"), torch.float32).filters
    assert (weights[weights > 0] >= torch.finfo(torch.float32).tiny).all()


def test_backward_saves_less_than_the_history() -> None:
    bank = FilterBank(slots=29)
    history = torch.randn(64, bank.horizon, 7, requires_grad=True)
    saved = saved_for_backward(lambda: memory_of(bank, "support", torch.float32, 7)(history))
    assert saved
    assert all(tensor.numel() < history.numel() for tensor in saved)
