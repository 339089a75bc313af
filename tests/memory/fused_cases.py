"""The memory's Triton kernels against their definitions, in Triton's interpreter: run by test_fused.py.

bf16 is left to `make test-gpu`: the interpreter's products of bf16 are wrong.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logpast.filters import FilterBank
from logpast.memory import LogMemory, fused
from memory.test_memory import BANKS as FEW

BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3}
BANKS = [*FEW, FilterBank(slots=70, sharpness=8, spacing=0.07)]  # more slots than one tile, and wide filters


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def both(bank: FilterBank, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots and the table's gradient: ours, and as defined, in float64."""
    mine = table.detach().clone().requires_grad_()
    slots = LogMemory(table.shape[1], bank, norm=False, path="fused").from_ids(ids, mine)
    exact = table.detach().double().requires_grad_()
    reference = LogMemory(table.shape[1], bank, norm=False, path="naive").double().from_ids(ids, exact)
    towards = torch.randn_like(reference).to(table.dtype)
    slots.backward(towards)
    reference.backward(towards.double())
    assert mine.grad is not None
    assert exact.grad is not None
    assert slots.dtype == mine.grad.dtype == table.dtype
    return slots, mine.grad, reference.detach(), exact.grad


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bank", BANKS, ids=lambda b: f"L{b.slots}-{b.kernel}")
@pytest.mark.parametrize(("length", "vocabulary", "width"), [(1, 3, 6), (7, 50, 129), (400, 17, 6)])
def test_fused_is_the_definition(
    bank: FilterBank, dtype: torch.dtype, length: int, vocabulary: int, width: int
) -> None:
    torch.manual_seed(length)
    ids = torch.randint(-1, vocabulary, (3, length))
    slots, gradient, true_slots, true_gradient = both(bank, ids, torch.randn(vocabulary, width).to(dtype))
    largest = torch.from_numpy(bank.weights.max(axis=1)[::-1].copy()).unsqueeze(1)
    scale = torch.maximum(largest, true_slots.abs().amax(dim=-1, keepdim=True))  # slot by slot
    assert float(((slots.detach().double() - true_slots).abs() / scale).max()) < BOUNDS[dtype]
    assert relative(gradient, true_gradient) < BOUNDS[dtype]


def test_more_than_one_block_of_everything() -> None:
    """Tokens to mark, rows of a program, programs of a history."""
    torch.manual_seed(0)
    ids, table = torch.randint(-1, 700, (3, 1500)), torch.randn(700, 20)
    slots, gradient, true_slots, true_gradient = both(FilterBank(slots=45, sharpness=100), ids, table)
    assert relative(slots, true_slots) < 5e-6
    assert relative(gradient, true_gradient) < 5e-6


def test_no_history_and_no_token() -> None:
    table = torch.randn(9, 4)
    for ids in (torch.empty(2, 0, dtype=torch.int64), torch.full((2, 5), -1)):
        slots = LogMemory(4, BANKS[1], norm=False, path="fused").from_ids(ids, table)
        assert torch.equal(slots, torch.zeros(2, 5, 4))


def test_ids_of_any_type_and_stride() -> None:
    memory = LogMemory(6, BANKS[2], path="fused")
    table, stream = torch.randn(20, 6), torch.randint(0, 20, (300,))
    histories = stream.unfold(0, 100, 7)[:5]  # overlapping rows of one stream
    expected = memory.from_ids(histories.clone(), table)
    for same in (histories, histories.int(), histories.T.contiguous().T):
        assert torch.equal(memory.from_ids(same, table), expected)


def test_lengths_say_what_is_real() -> None:
    memory = LogMemory(6, BANKS[2], path="fused")
    table, ids = torch.randn(20, 6), torch.randint(0, 20, (2, 50))
    ours = memory.from_ids(ids, table, lengths=torch.tensor([50, 3]))
    torch.testing.assert_close(ours[1:], memory.from_ids(ids[1:, -3:], table))


def test_the_same_to_the_bit_in_any_order_and_company() -> None:
    bank, table, ids = BANKS[2], torch.randn(20, 6), torch.randint(0, 20, (4, 200))
    memory = LogMemory(6, bank, norm=False, path="fused")
    whole = memory.from_ids(ids, table)
    assert torch.equal(memory.from_ids(ids[[2, 0, 3, 1]], table), whole[[2, 0, 3, 1]])
    assert torch.equal(memory.from_ids(ids[:1], table), whole[:1])


def test_columns_are_done_in_turn_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(0, 20, (3, 90)), torch.randn(20, 100)
    monkeypatch.setattr(fused, "ROWS_BUDGET", 1)
    tile, used = fused._tile_back, list[dict[str, int]]()
    monkeypatch.setattr(fused, "_tile_back", lambda *given: used.append(tile(*given)) or used[-1])
    _, gradient, _, true_gradient = both(BANKS[2], ids, table)
    assert [one["COLUMNS"] for one in used] == [32]
    assert relative(gradient, true_gradient) < 5e-6


def test_a_token_beyond_the_table_is_refused() -> None:
    with pytest.raises(RuntimeError):
        LogMemory(4, BANKS[1], path="fused").from_ids(torch.tensor([[1, 9]]), torch.randn(9, 4))


@pytest.mark.parametrize("bank", [*BANKS, FilterBank(slots=57, sharpness=100)], ids=lambda b: f"L{b.slots}-{b.kernel}")
def test_the_stated_bound_on_weights(bank: FilterBank) -> None:
    """Off by half a part at most, or left out for being below the tolerance; and no sum of parts overflows."""
    weights = bank.weights[::-1, ::-1].copy()
    first, parts, unit = (part.numpy() for part in fused.lay_out(weights, 1e-7))
    seen = weights * 0
    for column, (slot, some) in enumerate(zip(first, parts, strict=True)):
        seen[slot : slot + len(some), column] = some * unit[slot : slot + len(some)].astype("f8")
    error = abs(seen - weights)
    bound = unit[:, None].astype("f8") / 2 + 1e-7 * weights.max(axis=1, keepdims=True) * (seen == 0)
    assert (error <= bound * (1 + 1e-6)).all()
    assert (unit <= 2.0**-29 * weights.sum(axis=1)).all()
    assert ((seen / unit[:, None]).sum(axis=1) < 2**31).all()


def test_with_activation_checkpointing() -> None:
    memory, ids = LogMemory(6, BANKS[2], path="fused"), torch.randint(0, 20, (2, 60))
    gradients = []
    for wrap in (False, True):
        table = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        slots = checkpoint(memory.from_ids, ids, table, use_reentrant=False) if wrap else memory.from_ids(ids, table)
        slots.square().sum().backward()
        gradients.append(table.grad)
    assert torch.equal(*gradients)


def test_operators_are_what_they_say() -> None:
    layout, ids = fused.lay_out(BANKS[2].weights[::-1, ::-1].copy(), 1e-7), torch.randint(0, 20, (2, 40))
    table = torch.randn(20, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.logpast.fused_plan, (layout.first, layout.parts, 30, ids, 20), test_utils=CHECKS)
    plan = torch.ops.logpast.fused_plan(layout.first, layout.parts, 30, ids, 20)
    torch.library.opcheck(torch.ops.logpast.fused_slots, (*plan, layout.unit, table), test_utils=CHECKS)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_a_double_table_is_refused() -> None:
    with pytest.raises(ValueError, match="use 'auto'"):
        LogMemory(4, BANKS[1], path="fused").from_ids(torch.tensor([[1]]), torch.randn(9, 4).double())


def test_naive_takes_a_double_table_where_only_fused_is_laid_out() -> None:
    memory = LogMemory(6, BANKS[2], norm=False)
    memory.kept = memory.kept[:0]  # as on a GPU
    assert memory.path_for(torch.zeros(1, dtype=torch.float64)) == "naive"
    assert memory.path_for(torch.zeros(1)) == "fused"
