"""LogMemory: all paths against the definition, inputs of any length and type, and the bank's precision."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from logpast.filters import FilterBank
from logpast.kernels.ops import HAS_TRITON
from logpast.memory import LogMemory, naive
from memory.helpers import BANKS, BOUNDS, HISTORIES, TABLES, TRANSFORMS, bank_id, memory_of, relative_error


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
    assert torch.autograd.gradcheck(lambda t: memory.from_ids(ids, t), table, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: memory.from_ids(ids, t).square(), table)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("path", ["bag", "support"])
def test_torch_func_equals_naive(path: str, transform: str) -> None:
    ours, exact = (memory_of(BANKS[1], each, torch.float64, 3) for each in (path, "naive"))
    results = [TRANSFORMS[transform](memory, HISTORIES, TABLES) for memory in (ours, exact)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("transform", ["jvp", "vmap over ids and tables"])
def test_torch_func_in_compiled_code_equals_naive(transform: str) -> None:
    ours, exact = (memory_of(BANKS[1], each, torch.float64, 3) for each in ("auto", "naive"))
    compiled = torch.compile(lambda: TRANSFORMS[transform](ours, HISTORIES, TABLES), backend="aot_eager")
    torch.testing.assert_close(compiled(), TRANSFORMS[transform](exact, HISTORIES, TABLES))


def test_tangents_of_dual_tensors() -> None:
    ours, exact = (memory_of(BANKS[1], path, torch.float64, 3) for path in ("auto", "naive"))
    with forward_ad.dual_level():
        table = forward_ad.make_dual(*TABLES)
        for compute in (lambda memory: memory.from_ids(HISTORIES[0], table), lambda memory: memory(table[None])):
            tangent, expected = (forward_ad.unpack_dual(compute(memory)).tangent for memory in (ours, exact))
            torch.testing.assert_close(tangent, expected)


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


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_casting_the_module_does_not_round_the_filters(path: str, dtype: torch.dtype) -> None:
    """The slots of an identity matrix are the filters."""
    memory = memory_of(FilterBank(slots=21, sharpness=200), path, dtype)
    exact = torch.from_numpy(naive.in_time_order(memory.bank))
    ids, identity = torch.arange(32).unsqueeze(0), torch.eye(32, dtype=torch.float64)
    assert torch.equal(
        memory.from_ids(ids, identity)[0].masked_fill(exact < 1e-19, 0), exact.masked_fill(exact < 1e-19, 0)
    )
    torch.testing.assert_close(memory.from_ids(ids, identity.float())[0].double(), exact, rtol=1e-6, atol=1e-18)


class Model(nn.Module):
    """A table and a memory; both ways to compute the slots."""

    def __init__(self, bank: FilterBank = BANKS[2]) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.memory = LogMemory(6, bank)
        nn.init.normal_(self.memory.norm.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.memory.from_ids(ids, self.table), self.memory(self.table(ids))])


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Memory that is not initialised holds NaN instead of what was there before."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


IDS = torch.randint(20, (2, 150), generator=torch.Generator().manual_seed(0))


def test_from_pretrained_of_transformers_keeps_the_filters(tmp_path: Path, uninitialised_is_nan: None) -> None:
    transformers = pytest.importorskip("transformers")

    class Pretrained(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Model()
            self.post_init()

    model = Pretrained(transformers.PretrainedConfig())
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = Pretrained.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.model.table.weight.dtype == dtype
        assert torch.equal(loaded.model(IDS), copy.deepcopy(model.model).to(dtype)(IDS))


@pytest.mark.parametrize("load", ["assign", "to_empty"])
def test_loading_a_model_from_the_meta_device_keeps_the_filters(load: str, uninitialised_is_nan: None) -> None:
    model = Model()
    with torch.device("meta"):
        loaded = Model()
    if load == "to_empty":
        loaded.to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict(), assign=load == "assign")
    assert torch.equal(torch.compile(loaded, backend="aot_eager", fullgraph=True)(IDS), model(IDS))
    assert torch.equal(loaded(IDS), model(IDS))


def test_copies_and_pickles_have_the_bank_but_no_filters() -> None:
    model = Model()
    before = len(pickle.dumps(model.memory))
    slots = model(IDS)
    assert len(pickle.dumps(model.memory)) == before
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for same in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(same(IDS), slots)


FIRST_USES: dict[str, Callable[[Model], Any]] = {
    "inference": lambda model: torch.inference_mode()(model)(IDS),
    "torch.func": lambda model: torch.func.grad(lambda x: model.memory(x).sum())(torch.randn(1, 9, 6)),
    "vmap": lambda model: torch.func.vmap(model)(IDS.expand(3, -1, -1)),
    "fake": lambda model: use_fake(model),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16)(model)(IDS),
}


def use_fake(model: Model) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.zeros(2, 150, dtype=torch.int64))


@pytest.mark.parametrize("first", FIRST_USES)
def test_a_first_use_anywhere_leaves_ordinary_filters(first: str) -> None:
    model = Model()
    same = copy.deepcopy(model)
    FIRST_USES[first](model)
    for each in (model, same):
        each(IDS).square().sum().backward()
    assert torch.equal(model.table.weight.grad, same.table.weight.grad)


def test_the_filters_keep_their_addresses() -> None:
    """A CUDA graph reads them there."""
    memory = LogMemory(6, BANKS[2])
    layout = memory._layout("support", torch.zeros(1))
    memory.half().to("meta").to_empty(device="cpu").load_state_dict(memory.state_dict())
    assert memory._layout("support", torch.zeros(1)).filters.data_ptr() == layout.filters.data_ptr()


def test_compiled_modules_have_their_own_filters_and_are_compiled_once() -> None:
    """Banks of the same horizon, so that nothing else tells the modules apart."""
    torch.compiler.reset()  # functions that could not be compiled elsewhere
    counter = CompileCounterWithBackend("aot_eager")
    models = [Model(FilterBank(slots=21, sharpness=k)) for k in (20, 40)]
    compiled = [torch.compile(model.memory.from_ids, backend=counter, fullgraph=True) for model in models]
    for _ in range(3):
        for model, ours in zip(models, compiled, strict=True):
            assert torch.equal(ours(IDS, model.table), model.memory.from_ids(IDS, model.table))
    assert counter.frame_count == 2


def missing(ids: Tensor, kind: str, length: int) -> Tensor:
    """Histories with only some of their tokens."""
    before, after = torch.full_like(ids, -1), ids.clone()
    if kind == "short":
        return ids[:, -length:]
    if kind == "padded before":
        return torch.cat([before[:, length:], ids[:, -length:]], dim=1)
    if kind == "padded after":
        return torch.cat([ids[:, :length], before[:, length:]], dim=1)
    after[:, -length : -length // 2] = -1
    return after


@pytest.mark.parametrize("scale", [0.02, 1, 1e3, 1e6])
@pytest.mark.parametrize("path", ["bag", "support"])
@pytest.mark.parametrize("kind", ["short", "padded before", "padded after", "hole"])
def test_normalised_slots_of_incomplete_histories_equal_the_definition(kind: str, path: str, scale: float) -> None:
    """The LayerNorm magnifies the slots of filters whose largest weights are not in sight."""
    torch.manual_seed(0)
    bank = FilterBank(slots=41, sharpness=100)
    table, whole = scale * torch.randn(50, 16), torch.randint(50, (2, bank.horizon))
    exact, ours = LogMemory(16, bank, path="naive").double(), LogMemory(16, bank, path=path)  # type: ignore[arg-type]
    for length in (1, 7, 53, 300, 1000):
        ids = missing(whole, kind, length)
        assert (ours.from_ids(ids, table) - exact.from_ids(ids, table.double())).abs().max() < 1e-5


def test_lengths_leave_the_slots_of_each_row_exact() -> None:
    torch.manual_seed(0)
    bank, lengths = FilterBank(slots=41, sharpness=100), torch.tensor([0, 1, 30, 500, 1024])
    table, ids = 1000 * torch.randn(50, 16), torch.randint(50, (5, bank.horizon))
    exact = LogMemory(16, bank, path="naive").double().from_ids(ids, table.double(), lengths)
    for path in ("naive", "bag", "support"):
        memory = LogMemory(16, bank, path=path)  # type: ignore[arg-type]
        assert (memory.from_ids(ids, table, lengths) - exact).abs().max() < 1e-5
        assert (memory(naive.embed(table, ids), lengths) - exact).abs().max() < 1e-5


def test_the_state_dict_holds_only_the_layer_norm() -> None:
    assert set(LogMemory(4, FilterBank(slots=5)).state_dict()) == {"norm.weight", "norm.bias"}


def test_repr_names_the_bank() -> None:
    assert "slots=5" in repr(LogMemory(4, FilterBank(slots=5)))


def test_auto_takes_fused_on_a_gpu_except_for_float64() -> None:
    memory, tables = (
        LogMemory(6, BANKS[2]),
        [SimpleNamespace(is_cuda=True, dtype=d) for d in (torch.half, torch.double)],
    )
    assert [memory.path_for(table) for table in tables] == ["fused" if HAS_TRITON else "bag", "bag"]  # type: ignore[arg-type]
    assert memory.path_for(torch.zeros(1)) == "bag"


def test_layer_norm_is_over_each_slot() -> None:
    slots = LogMemory(16, FilterBank(slots=9, normalize="area"))(torch.randn(2, 8, 16))
    torch.testing.assert_close(slots.mean(-1), torch.zeros(2, 9), atol=1e-6, rtol=0)
    torch.testing.assert_close(slots.var(-1, unbiased=False), torch.ones(2, 9), atol=1e-3, rtol=0)


def test_compiled_inside_another_model_with_gradients() -> None:
    model = Model()
    expected = model(IDS)
    expected.square().sum().backward()
    gradient = model.table.weight.grad.clone()
    model.zero_grad()
    ours = torch.compile(model, backend="aot_eager", fullgraph=True)(IDS)
    ours.square().sum().backward()
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
