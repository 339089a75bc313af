"""LogMemory: all paths against the definition, inputs of any length and type, and the bank's precision."""

import copy

import pytest
import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.kernels.ops import HAS_TRITON
from logpast.memory import LogMemory, naive
from memory.helpers import BANKS, BOUNDS, bank_id, memory_of, relative_error


@pytest.mark.parametrize("path", ["naive", "bag", "support", "auto"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bank", BANKS, ids=bank_id)
@pytest.mark.parametrize("length", [0, 1, 7, 400])
def test_slots_and_gradients_from_ids_equal_naive(bank: FilterBank, length: int, dtype: torch.dtype, path: str) -> None:
    torch.manual_seed(length)
    table = torch.randn(17, 6, dtype=dtype).requires_grad_()
    exact = table.detach().double().requires_grad_()
    ids = torch.randint(-1, 17, (3, length))  # -1: missing
    ours = memory_of(bank, path, dtype).from_ids(ids, table)
    reference = memory_of(bank, "naive", torch.float64)(naive.embed(exact, ids))
    assert ours.dtype == dtype
    assert relative_error(ours, reference, bank) < BOUNDS[dtype]
    upstream = torch.randn_like(reference).to(dtype)
    ours.backward(upstream)
    reference.backward(upstream.double())
    # `bag` sums a token's gradient in float32; the others leave that to PyTorch's embedding, which sums in the dtype
    bound = BOUNDS[dtype] if path in ("bag", "auto") or dtype.itemsize > 2 else 5 * BOUNDS[dtype]
    assert relative_error(table.grad, exact.grad) < bound


@pytest.mark.parametrize("path", ["bag", "support"])
def test_gradients_equal_finite_differences(path: str) -> None:
    memory = memory_of(FilterBank(slots=9, sharpness=20), path, torch.float64, 3)
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 2, -1, 4], [0, 0, 3, 1]])
    assert torch.autograd.gradcheck(lambda t: memory.from_ids(ids, t), table)


def test_padding_may_hold_nan() -> None:
    memory = LogMemory(4, FilterBank(slots=9, sharpness=20), norm=False)
    embeddings = torch.randn(2, 6, 4)
    lengths = torch.tensor([6, 2])
    whole = memory(embeddings, lengths)
    embeddings[1, :4] = torch.nan
    assert torch.equal(memory(embeddings, lengths), whole)


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_different_lengths_in_a_batch(path: str) -> None:
    """A padded row gives the same slots as its history alone."""
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


def test_only_the_last_embeddings_within_the_horizon_count() -> None:
    memory = memory_of(FilterBank(slots=9), "auto", torch.float64)
    history = torch.randn(2, 50, 6, dtype=torch.float64)
    torch.testing.assert_close(memory(history), memory(history[:, -memory.bank.horizon :]))


def test_casting_the_module_does_not_round_the_filters() -> None:
    memory = LogMemory(4, FilterBank(slots=33, sharpness=200))
    exact = torch.from_numpy(memory.bank.weights[::-1, ::-1].copy())
    torch.testing.assert_close(memory.bfloat16().filters.double(), exact, rtol=1e-6, atol=1e-37)
    assert memory.norm.weight.dtype == torch.bfloat16
    assert (memory.double().filters == exact).all()
    assert (memory.to("meta").to_empty(device="cpu").double().filters == exact).all()


def test_the_state_dict_holds_only_the_layer_norm() -> None:
    assert set(LogMemory(4, FilterBank(slots=5)).state_dict()) == {"norm.weight", "norm.bias"}


def test_deepcopy_and_repr() -> None:
    memory = copy.deepcopy(LogMemory(4, FilterBank(slots=5)))
    assert "slots=5" in repr(memory)
    assert memory(torch.randn(1, 2, 4)).shape == (1, 5, 4)


def test_layer_norm_is_over_each_slot() -> None:
    slots = LogMemory(16, FilterBank(slots=9, normalize="area"))(torch.randn(2, 8, 16))
    torch.testing.assert_close(slots.mean(-1), torch.zeros(2, 9), atol=1e-6, rtol=0)
    torch.testing.assert_close(slots.var(-1, unbiased=False), torch.ones(2, 9), atol=1e-3, rtol=0)


def test_compiled_inside_another_model_with_gradients() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(13, 8)
            self.memory = LogMemory(8, FilterBank(slots=17))

        def forward(self, ids: Tensor) -> Tensor:
            return self.memory.from_ids(ids, self.table.weight).sum(1).tanh()

    model = Model()
    ids = torch.randint(13, (2, 16))
    expected = model(ids)
    expected.sum().backward()
    gradient = model.table.weight.grad.clone()
    model.zero_grad()
    ours = torch.compile(model, backend="aot_eager")(ids)
    ours.sum().backward()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(model.table.weight.grad, gradient)


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_autocast_does_not_round_the_filters(path: str) -> None:
    memory = memory_of(FilterBank(slots=29, sharpness=200), path, torch.float32)
    table, ids = torch.randn(17, 6), torch.randint(17, (3, 128))
    exact = memory.from_ids(ids, table)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(memory.from_ids(ids, table), exact)
        torch.testing.assert_close(memory(naive.embed(table, ids)), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_int32_ids_are_accepted_and_ids_beyond_the_table_refused(path: str) -> None:
    memory = memory_of(FilterBank(slots=9), path, torch.float32)
    table, ids = torch.randn(10, 6), torch.tensor([[3, 4], [9, 0]])
    torch.testing.assert_close(memory.from_ids(ids.int(), table), memory.from_ids(ids, table))
    with pytest.raises(IndexError):
        memory.from_ids(ids + 1, table)


@pytest.mark.parametrize("lengths", [[2], [[1, 2, 3, 4]], [[1]] * 4, [True] * 4, [1.0] * 4], ids=str)
def test_illegal_lengths_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        LogMemory(4, BANKS[0]).from_ids(torch.randint(9, (4, 7)), torch.randn(9, 4), lengths)


def test_no_lengths_for_no_histories() -> None:
    assert LogMemory(4, BANKS[1]).from_ids(torch.empty(0, 7, dtype=torch.int64), torch.randn(9, 4), []).shape == (
        0,
        5,
        4,
    )


def test_the_table_may_be_given_as_its_module() -> None:
    memory, ids, table = LogMemory(4, BANKS[1]), torch.randint(9, (2, 7)), torch.nn.Embedding(9, 4)
    assert torch.equal(memory.from_ids(ids, table), memory.from_ids(ids, table.weight))


def test_inputs_of_the_wrong_shape_or_type_are_refused() -> None:
    memory = LogMemory(8, FilterBank(slots=9))
    with pytest.raises(ValueError, match=r"\(batch, tokens\), got .*\(5,\)"):
        memory.from_ids(torch.arange(5), torch.randn(9, 8))
    with pytest.raises(ValueError, match=r"\(batch, tokens, width\), got .*\(5, 8\)"):
        memory(torch.randn(5, 8))
    with pytest.raises(ValueError, match=r"ids should be whole numbers, got torch\.float32"):
        memory.from_ids(torch.ones(2, 5), torch.randn(9, 8))


def test_illegal_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"path must be .*'quick'"):
        LogMemory(4, FilterBank(slots=5), path="quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bank must be a FilterBank.*33"):
        LogMemory(4, 33)  # type: ignore[arg-type]


def test_a_filter_below_the_smallest_float32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"peak at 1\.414 \(sharpness=2000\).*torch\.float32"):
        LogMemory(4, FilterBank(slots=17, sharpness=2000))
    LogMemory(4, FilterBank(slots=17, sharpness=2000, normalize="area"))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_fused_path_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"'fused'.*cpu"):
        LogMemory(4, BANKS[1], path="fused").from_ids(torch.randint(9, (2, 7)), torch.randn(9, 4))
