"""The definition of the memory against a loop over lags."""

import pytest
import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.memory import naive
from memory.helpers import BANKS, bank_id, memory_of


def by_loop(bank: FilterBank, history: Tensor) -> Tensor:
    """Σ_t Φ(t, τ*) e(p − t), one addition at a time, oldest slot first."""
    batch, length, width = history.shape
    slots = torch.zeros(batch, bank.slots, width, dtype=torch.float64)
    for i in range(bank.slots):
        for t in range(1, min(length, bank.horizon) + 1):
            slots[:, bank.slots - 1 - i] += bank.weights[i, t - 1] * history[:, length - t].double()
    return slots


@pytest.mark.parametrize("bank", BANKS, ids=bank_id)
@pytest.mark.parametrize("length", [0, 1, 3, 40, 500])
def test_compress_equals_a_loop_over_the_formula(bank: FilterBank, length: int) -> None:
    history = torch.randn(2, length, 3, dtype=torch.float64)
    slots = memory_of(bank, "naive", torch.float64, 3)(history)
    torch.testing.assert_close(slots, by_loop(bank, history), rtol=1e-12, atol=1e-12)


def test_embed_gives_zero_vectors_for_negative_ids() -> None:
    table = torch.randn(5, 3)
    assert torch.equal(naive.embed(table, torch.tensor([[4, -1]])), torch.stack([table[4], torch.zeros(3)])[None])
