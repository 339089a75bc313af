"""Every path against the definition, and the definition against a loop; outputs and gradients, odd shapes and types."""

import copy

import pytest
import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.kernels.ops import HAS_TRITON
from logpast.memory import LogMemory, naive, support

# largest error of a slot relative to its largest value, and of the gradient to its largest
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

BANKS = [
    FilterBank(slots=1, sharpness=5),
    FilterBank(slots=5),
    FilterBank(slots=30, sharpness=200),
    FilterBank(slots=26, sharpness=20, kernel="isith", reach=3, normalize="area"),
    FilterBank(slots=13, sharpness=40, spacing=0.5, first_peak=2.5, kernel="binned", normalize="peak"),
]


def by_loop(bank: FilterBank, history: Tensor) -> Tensor:
    """Σ_t Φ(t, τ*) e(p − t), one addition at a time, oldest slot first."""
    batch, length, width = history.shape
    slots = torch.zeros(batch, bank.slots, width, dtype=torch.float64)
    for i in range(bank.slots):
        for t in range(1, min(length, bank.horizon) + 1):
            slots[:, bank.slots - 1 - i] += bank.weights[i, t - 1] * history[:, length - t].double()
    return slots


def relative(ours: Tensor, exact: Tensor, bank: FilterBank | None = None) -> float:
    """The largest error, relative to the largest value; with a bank, slot by slot: to its own, or its filter's."""
    ours, exact = ours.detach().double(), exact.detach().double()
    scale = exact.abs().max().clamp(min=1e-30)
    if bank is not None:  # or the error of a filter that is small everywhere would go unseen
        largest_weight = torch.from_numpy(bank.weights.max(axis=1)[::-1].copy()).unsqueeze(1)
        scale = torch.maximum(largest_weight, exact.abs().amax(dim=-1, keepdim=True))
    return float(((ours - exact).abs() / scale).max())


def memory_of(bank: FilterBank, path: str, dtype: torch.dtype, width: int = 6) -> LogMemory:
    return LogMemory(width, bank, norm=False, path=path).to(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("bank", BANKS, ids=lambda b: f"L{b.slots}-{b.kernel}")
@pytest.mark.parametrize("length", [0, 1, 3, 40, 500])
def test_naive_is_the_formula(bank: FilterBank, length: int) -> None:
    history = torch.randn(2, length, 3, dtype=torch.float64)
    slots = memory_of(bank, "naive", torch.float64, 3)(history)
    torch.testing.assert_close(slots, by_loop(bank, history), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bank", BANKS, ids=lambda b: f"L{b.slots}-{b.kernel}")
@pytest.mark.parametrize("length", [0, 1, 7, 80, 400])
def test_support_equals_naive(bank: FilterBank, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(length)
    history = torch.randn(3, length, 6, dtype=dtype).requires_grad_()
    exact = history.detach().double().requires_grad_()
    ours = memory_of(bank, "support", dtype)(history)
    reference = memory_of(bank, "naive", torch.float64)(exact)
    assert ours.dtype == dtype
    assert relative(ours, reference, bank) < BOUNDS[dtype]
    towards = torch.randn_like(reference).to(dtype)
    ours.backward(towards)
    reference.backward(towards.double())
    if length:
        assert relative(history.grad, exact.grad) < BOUNDS[dtype]


@pytest.mark.parametrize("path", ["naive", "bag", "support", "auto"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bank", BANKS, ids=lambda b: f"L{b.slots}-{b.kernel}")
@pytest.mark.parametrize("length", [0, 1, 7, 400])
def test_ids_equal_naive(bank: FilterBank, length: int, dtype: torch.dtype, path: str) -> None:
    torch.manual_seed(length)
    table = torch.randn(17, 6, dtype=dtype).requires_grad_()
    exact = table.detach().double().requires_grad_()
    ids = torch.randint(-1, 17, (3, length))  # -1: missing
    ours = memory_of(bank, path, dtype).from_ids(ids, table)
    reference = memory_of(bank, "naive", torch.float64)(naive.embed(exact, ids))
    assert ours.dtype == dtype
    assert relative(ours, reference, bank) < BOUNDS[dtype]
    towards = torch.randn_like(reference).to(dtype)
    ours.backward(towards)
    reference.backward(towards.double())
    # `bag` sums a token's gradient in float32; the others leave that to PyTorch's embedding, which sums in the dtype
    bound = BOUNDS[dtype] if path in ("bag", "auto") or dtype.itemsize > 2 else 5 * BOUNDS[dtype]
    assert relative(table.grad, exact.grad) < bound


@pytest.mark.parametrize("path", ["bag", "support"])
def test_gradients_by_finite_differences(path: str) -> None:
    memory = memory_of(FilterBank(slots=9, sharpness=20), path, torch.float64, 3)
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 2, -1, 4], [0, 0, 3, 1]])
    assert torch.autograd.gradcheck(lambda t: memory.from_ids(ids, t), table)


def test_what_is_missing_may_hold_anything() -> None:
    memory = LogMemory(4, FilterBank(slots=9, sharpness=20), norm=False)
    embeddings = torch.randn(2, 6, 4)
    lengths = torch.tensor([6, 2])
    whole = memory(embeddings, lengths)
    embeddings[1, :4] = torch.nan
    assert torch.equal(memory(embeddings, lengths), whole)


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_different_lengths_in_a_batch(path: str) -> None:
    """A row with a short history equals that history alone, whatever stands before it."""
    memory = memory_of(FilterBank(slots=21), path, torch.float64)
    table = torch.randn(11, 6, dtype=torch.float64)
    ids = torch.randint(11, (4, 30))
    lengths = torch.tensor([0, 1, 12, 30])
    together = memory.from_ids(ids, table, lengths)
    embedded = memory(naive.embed(table, ids), lengths)
    assert torch.equal(memory.from_ids(ids, table, lengths.tolist()), together)
    for row, length in enumerate(lengths.tolist()):
        alone = memory.from_ids(ids[row : row + 1, 30 - length :], table)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(embedded[row], alone[0], rtol=1e-12, atol=1e-12)
    assert (together[0] == 0).all()
    for wrong in ([2], [[1, 2, 3, 4]], [[1]] * 4, [True] * 4, [1.0] * 4):
        with pytest.raises(ValueError, match="lengths should be a whole number for each of 4 histories"):
            memory.from_ids(ids, table, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ids should be whole numbers"):
        memory.from_ids(ids + 0.5, table)


def test_more_history_than_the_horizon_is_cut() -> None:
    memory = memory_of(FilterBank(slots=9), "auto", torch.float64)
    history = torch.randn(2, 50, 6, dtype=torch.float64)
    torch.testing.assert_close(memory(history), memory(history[:, -memory.bank.horizon :]))


def test_no_embeddings_are_kept_for_the_backward_pass() -> None:
    """Of a (B, M, d) history only tensors without its d axis, or of the table's own size, may be saved."""
    batch, width = 64, 7
    bank = FilterBank(slots=29)
    table = torch.randn(11, width, requires_grad=True)
    ids = torch.randint(11, (batch, bank.horizon))
    for path in ("bag", "support"):
        saved: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = saved) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if path == "bag":
                memory_of(bank, path, torch.float32, width).from_ids(ids, table)
            else:
                memory_of(bank, path, torch.float32, width)(torch.randn(batch, bank.horizon, width, requires_grad=True))
        assert saved
        assert all(tensor.numel() < batch * bank.horizon * width for tensor in saved)


def test_the_bank_is_never_rounded() -> None:
    memory = LogMemory(4, FilterBank(slots=33, sharpness=200))
    exact = torch.from_numpy(memory.bank.weights[::-1, ::-1].copy())
    torch.testing.assert_close(memory.bfloat16().filters.double(), exact, rtol=1e-6, atol=1e-37)
    assert memory.norm.weight.dtype == torch.bfloat16
    assert (memory.double().filters == exact).all()
    assert (memory.to("meta").to_empty(device="cpu").double().filters == exact).all()


def test_the_bank_is_not_in_the_checkpoint() -> None:
    assert set(LogMemory(4, FilterBank(slots=5)).state_dict()) == {"norm.weight", "norm.bias"}


def test_copies_and_says_what_it_is() -> None:
    memory = copy.deepcopy(LogMemory(4, FilterBank(slots=5)))
    assert "slots=5" in repr(memory)
    assert memory(torch.randn(1, 2, 4)).shape == (1, 5, 4)


def test_shapes_are_told() -> None:
    memory = LogMemory(8, FilterBank(slots=9))
    with pytest.raises(ValueError, match=r"should be \(batch, tokens\), got a tensor of shape \(5,\)"):
        memory.from_ids(torch.arange(5), torch.randn(9, 8))
    with pytest.raises(ValueError, match=r"should be \(batch, tokens, width\), got a tensor of shape \(5, 8\)"):
        memory(torch.randn(5, 8))


def test_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path"):
        LogMemory(4, FilterBank(slots=5), path="quick")  # type: ignore[arg-type]


def test_layer_norm_is_over_each_slot() -> None:
    slots = LogMemory(16, FilterBank(slots=9, normalize="area"))(torch.randn(2, 8, 16))
    torch.testing.assert_close(slots.mean(-1), torch.zeros(2, 9), atol=1e-6, rtol=0)
    torch.testing.assert_close(slots.var(-1, unbiased=False), torch.ones(2, 9), atol=1e-3, rtol=0)


def test_in_ones_own_model_compiled() -> None:
    """Through torch.compile, with gradients, beside other layers."""

    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(13, 8)
            self.memory = LogMemory(8, FilterBank(slots=17))

        def forward(self, ids: Tensor) -> Tensor:
            return self.memory.from_ids(ids, self.table.weight).sum(1).tanh()

    model = Mine()
    ids = torch.randint(13, (2, 16))
    expected = model(ids)
    expected.sum().backward()
    gradient = model.table.weight.grad.clone()
    model.zero_grad()
    ours = torch.compile(model, backend="aot_eager")(ids)
    ours.sum().backward()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(model.table.weight.grad, gradient)


def test_the_way_back_may_be_taken_inside_autocast() -> None:
    memory, ids = LogMemory(6, BANKS[0], path="bag"), torch.randint(0, 20, (2, 40))
    gradients = []
    for inside in (False, True):
        table = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        slots = memory.from_ids(ids, table).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            slots.backward()
        gradients.append(table.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_autocast_does_not_round_the_filters(path: str) -> None:
    memory = memory_of(FilterBank(slots=29, sharpness=200), path, torch.float32)
    table, ids = torch.randn(17, 6), torch.randint(17, (3, 128))
    exact = memory.from_ids(ids, table)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(memory.from_ids(ids, table), exact)
        torch.testing.assert_close(memory(naive.embed(table, ids)), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_ids_of_any_kind_but_only_those_in_the_table(path: str) -> None:
    memory = memory_of(FilterBank(slots=9), path, torch.float32)
    table, ids = torch.randn(10, 6), torch.tensor([[3, 4], [9, 0]])
    torch.testing.assert_close(memory.from_ids(ids.int(), table), memory.from_ids(ids, table))
    with pytest.raises(IndexError):
        memory.from_ids(ids + 1, table)


def test_groups_cover_every_weight_that_counts() -> None:
    for bank in BANKS:
        in_time_order = torch.from_numpy(bank.weights[::-1, ::-1].copy())
        left = in_time_order.clone()
        for rows, columns in support.groups(bank, 1e-7):
            left[rows, columns] = 0
        assert (left <= 1e-7 * in_time_order.amax(1, keepdim=True)).all()


def test_mistakes_are_told_with_the_way_out() -> None:
    bank, ids, table = FilterBank(slots=5, sharpness=20), torch.randint(9, (2, 7)), torch.nn.Embedding(9, 4)
    with pytest.raises(ValueError, match=r"bank must be a FilterBank, such as .*; got 33"):
        LogMemory(4, 33)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"peak at 1\.414 \(sharpness=2000\) has no weight that torch\.float32 can hold"
    ):
        LogMemory(4, FilterBank(slots=17, sharpness=2000))
    LogMemory(4, FilterBank(slots=17, sharpness=2000, normalize="area"))
    memory = LogMemory(4, bank)
    torch.testing.assert_close(memory.from_ids(ids, table), memory.from_ids(ids, table.weight))
    if HAS_TRITON:
        with pytest.raises(ValueError, match="path 'fused' runs on CUDA devices, and the table is on cpu; use 'auto'"):
            LogMemory(4, bank, path="fused").from_ids(ids, table)
