"""The memory's Triton kernels against the definition, in Triton's interpreter.

`make test-gpu` tests bf16, whose products are wrong in the interpreter.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logpast.filters import FilterBank
from logpast.memory import LogMemory, fused, naive
from memory import helpers
from memory.helpers import BOUNDS, HISTORIES, TABLES, TRANSFORMS, bank_id, relative_error

pytestmark = pytest.mark.interpreter
DTYPES = [torch.float32, torch.float16]
BANKS = [*helpers.BANKS, FilterBank(slots=70, sharpness=8, spacing=0.07)]  # more slots than one tile, and wide filters


def both(bank: FilterBank, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots and the table's gradient: ours, then those of the definition in float64."""
    mine = table.detach().clone().requires_grad_()
    slots = LogMemory(table.shape[1], bank, norm=False, path="fused").from_ids(ids, mine)
    exact = table.detach().double().requires_grad_()
    reference = LogMemory(table.shape[1], bank, norm=False, path="naive").double().from_ids(ids, exact)
    upstream = torch.randn_like(reference).to(table.dtype)
    slots.backward(upstream)
    reference.backward(upstream.double())
    assert mine.grad is not None
    assert exact.grad is not None
    assert slots.dtype == mine.grad.dtype == table.dtype
    return slots, mine.grad, reference.detach(), exact.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bank", BANKS, ids=bank_id)
@pytest.mark.parametrize(("length", "vocabulary", "width"), [(1, 3, 6), (7, 50, 129), (400, 17, 6)])
def test_slots_and_gradients_equal_naive(
    bank: FilterBank, dtype: torch.dtype, length: int, vocabulary: int, width: int
) -> None:
    torch.manual_seed(length)
    ids = torch.randint(-1, vocabulary, (3, length))
    slots, gradient, true_slots, true_gradient = both(bank, ids, torch.randn(vocabulary, width).to(dtype))
    assert relative_error(slots, true_slots, bank) < BOUNDS[dtype]
    assert relative_error(gradient, true_gradient) < BOUNDS[dtype]


def test_a_text_with_several_blocks_of_tokens_rows_and_programs() -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(-1, 700, (3, 1500)), torch.randn(700, 20)
    slots, gradient, true_slots, true_gradient = both(FilterBank(slots=45, sharpness=100), ids, table)
    assert relative_error(slots, true_slots) < 5e-6
    assert relative_error(gradient, true_gradient) < 5e-6


def test_no_history_gives_zero_slots() -> None:
    table = torch.randn(9, 4)
    for ids in (torch.empty(2, 0, dtype=torch.int64), torch.full((2, 5), -1)):
        slots = LogMemory(4, BANKS[1], norm=False, path="fused").from_ids(ids, table)
        assert torch.equal(slots, torch.zeros(2, 5, 4))


def test_ids_of_any_integer_type_and_stride() -> None:
    memory = LogMemory(6, BANKS[2], path="fused")
    table, stream = torch.randn(20, 6), torch.randint(0, 20, (300,))
    histories = stream.unfold(0, 100, 7)[:5]  # overlapping rows of one stream
    expected = memory.from_ids(histories.clone(), table)
    for same in (histories, histories.int(), histories.T.contiguous().T):
        assert torch.equal(memory.from_ids(same, table), expected)


def test_padding_before_lengths_is_ignored() -> None:
    memory = LogMemory(6, BANKS[2], path="fused")
    table, ids = torch.randn(20, 6), torch.randint(0, 20, (2, 50))
    ours = memory.from_ids(ids, table, lengths=torch.tensor([50, 3]))
    torch.testing.assert_close(ours[1:], memory.from_ids(ids[1:, -3:], table))


def test_slots_have_the_same_bits_in_any_batch() -> None:
    bank, table, ids = BANKS[2], torch.randn(20, 6), torch.randint(0, 20, (4, 200))
    memory = LogMemory(6, bank, norm=False, path="fused")
    whole = memory.from_ids(ids, table)
    assert torch.equal(memory.from_ids(ids[[2, 0, 3, 1]], table), whole[[2, 0, 3, 1]])
    assert torch.equal(memory.from_ids(ids[:1], table), whole[:1])


def test_gradient_in_column_blocks_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids, table = torch.randint(0, 20, (3, 90)), torch.randn(20, 100)
    monkeypatch.setattr(fused, "ROWS_BUDGET", 1)
    tile, used = fused._tile_backward, list[dict[str, int]]()
    monkeypatch.setattr(fused, "_tile_backward", lambda *given: used.append(tile(*given)) or used[-1])
    _, gradient, _, true_gradient = both(BANKS[2], ids, table)
    assert [one["COLUMNS"] for one in used] == [32]
    assert relative_error(gradient, true_gradient) < 5e-6


def test_an_id_beyond_the_table_is_refused() -> None:
    with pytest.raises(RuntimeError):
        LogMemory(4, BANKS[1], path="fused").from_ids(torch.tensor([[1, 9]]), torch.randn(9, 4))


CPU = torch.device("cpu")


@pytest.mark.parametrize("bank", [*BANKS, FilterBank(slots=57, sharpness=100)], ids=bank_id)
def test_weights_in_units_are_off_by_at_most_half_a_unit(bank: FilterBank) -> None:
    """Or negligible and left out. No sum of them overflows."""
    weights = naive.in_time_order(bank)
    first, units, scale = (part.numpy() for part in fused.make_layout(bank, CPU, torch.float32))
    unit, rounded = scale.astype("f8") / fused.UNITS, weights * 0
    for column, (slot, some) in enumerate(zip(first, units, strict=True)):
        rounded[slot : slot + len(some), column] = some * unit[slot : slot + len(some)]
    bound = unit[:, None] / 2 + naive.NEGLIGIBLE * weights.max(axis=1, keepdims=True) * (rounded == 0)
    assert (abs(rounded - weights) <= bound + 1e-15 * weights).all()  # float64 has fewer digits than the units
    assert (scale <= 2 * weights.sum(axis=1)).all()
    assert ((rounded / unit[:, None]).sum(axis=1) < 2**63).all()


@pytest.mark.parametrize("scale", [0.02, 1, 1000])
def test_normalised_slots_of_short_and_padded_histories_equal_the_definition(scale: float) -> None:
    torch.manual_seed(0)
    bank = FilterBank(slots=33, sharpness=100)
    table, ids = scale * torch.randn(20, 16), torch.randint(20, (6, bank.horizon))
    for row, length in enumerate((0, 1, 7, 53, 150)):
        ids[row, : bank.horizon - length] = -1
    ids[5, 100:] = -1
    exact, ours = LogMemory(16, bank, path="naive").double(), LogMemory(16, bank, path="fused")
    for some in (ids, ids[:, -53:]):
        assert (ours.from_ids(some, table) - exact.from_ids(some, table.double())).abs().max() < 1e-5


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if "embeddings" not in name])
def test_torch_func_equals_naive(transform: str) -> None:
    ours, exact = (LogMemory(3, BANKS[1], norm=False, path=path) for path in ("fused", "naive"))  # type: ignore[arg-type]
    results = [TRANSFORMS[transform](memory, HISTORIES, TABLES.float()) for memory in (ours, exact)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    memory, ids = LogMemory(6, BANKS[2], path="fused"), torch.randint(0, 20, (2, 60))
    gradients = []
    for wrap in (False, True):
        table = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        slots = checkpoint(memory.from_ids, ids, table, use_reentrant=False) if wrap else memory.from_ids(ids, table)
        slots.square().sum().backward()
        gradients.append(table.grad)
    assert torch.equal(*gradients)


def test_operators_pass_opcheck() -> None:
    checks = ("test_schema", "test_faketensor")
    layout, ids = fused.make_layout(BANKS[2], CPU, torch.float32), torch.randint(0, 20, (2, 40))
    torch.library.opcheck(torch.ops.logpast.fused_plan, (*layout, ids, 20), test_utils=checks)
    plan = torch.ops.logpast.fused_plan(*layout, ids, 20)
    torch.library.opcheck(torch.ops.logpast.fused_slots, (torch.randn(20, 6), *plan, [30, 20]), test_utils=checks)
    torch.library.opcheck(torch.ops.logpast.fused_backward, (torch.randn(2, 30, 6), *plan, [30, 20]), test_utils=checks)


def test_a_float64_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fused'.*float64"):
        LogMemory(4, BANKS[1], path="fused").from_ids(torch.tensor([[1]]), torch.randn(9, 4).double())
