"""The path from ids by weighted bags of words; test_log_memory.py compares it with the definition."""

import pytest
import torch

from logpast.filters import FilterBank
from logpast.memory import LogMemory, bag
from memory.helpers import BANKS, memory_of, saved_for_backward


def test_backward_saves_less_than_the_embedded_history() -> None:
    bank = FilterBank(slots=29)
    table, ids = torch.randn(11, 7, requires_grad=True), torch.randint(11, (64, bank.horizon))
    saved = saved_for_backward(lambda: memory_of(bank, "bag", torch.float32, 7).from_ids(ids, table))
    assert saved
    assert all(tensor.numel() < ids.numel() * 7 for tensor in saved)


def test_backward_inside_autocast_has_the_same_bits() -> None:
    memory, ids = LogMemory(6, BANKS[0], path="bag"), torch.randint(0, 20, (2, 40))
    gradients = []
    for inside in (False, True):
        table = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        slots = memory.from_ids(ids, table).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            slots.backward()
        gradients.append(table.grad)
    assert torch.equal(*gradients)


def test_a_batch_split_for_lack_of_memory_gives_the_same_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, ids = memory_of(BANKS[2], "bag", torch.float64), torch.randint(-1, 20, (5, 200))
    results = []
    for budget in (bag.ROWS_BUDGET, 1):  # a budget of 1 takes the histories one by one
        monkeypatch.setattr(bag, "ROWS_BUDGET", budget)
        table = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
        slots = memory.from_ids(ids, table)
        slots.square().sum().backward()
        results.append((slots.detach(), table.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
