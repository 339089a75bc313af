"""The models' Triton kernels against their definitions, in Triton's interpreter: run by test_fused.py.

bf16 is left to `make test-gpu`: the interpreter's products of bf16 are wrong.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels import attention as attention_kernels
from logpast.kernels import cross_entropy as head
from logpast.kernels import gelu as gelu_kernels
from logpast.kernels import layer_norm as norm_kernels
from logpast.kernels.linear import linear
from logpast.models import LogMemoryConfig, RecentConfig, build
from logpast.models import decoder as transformer

BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).abs().max() / exact.abs().max().clamp(min=1e-30).detach())


def compare(ours: Function, exact: Function, given: list[Tensor], bound: float, used: tuple[int, ...] = (0,)) -> None:
    """Results and gradients, ours against those in float64, from the results that are `used`."""
    mine = [x.detach().clone().requires_grad_() for x in given]
    true = [x.detach().double().requires_grad_() for x in given]
    results = [made if isinstance(made, tuple) else (made,) for made in (ours(*mine), exact(*true))]
    for one, other in zip(*results, strict=True):
        assert relative(one, other) < bound
    towards = [torch.randn_like(results[0][number]) for number in used]
    for made, up in zip(results, (towards, [up.double() for up in towards]), strict=True):
        torch.autograd.backward([made[number] for number in used], up)
    for one, other in zip(mine, true, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.dtype == one.dtype
            assert relative(one.grad, other.grad) < bound


def by_library(packed: Tensor, heads: int) -> Tensor:
    query, key, value = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("length", "heads", "depth"), [(1, 1, 16), (64, 2, 16), (65, 1, 32), (130, 3, 16), (7, 1, 64)])
def test_attention(dtype: torch.dtype, length: int, heads: int, depth: int) -> None:
    """The bias's gradient, too: the sum of what goes to the projections."""
    torch.manual_seed(length)
    packed, bias = torch.randn(2, length, 3 * heads * depth).to(dtype), torch.zeros(3 * heads * depth)

    def exact(packed: Tensor, bias: Tensor) -> Tensor:
        return by_library(packed + bias, heads)

    compare(lambda *given: attention_kernels.attend(*given, heads), exact, [packed, bias], BOUNDS[dtype])


def test_attention_does_not_look_ahead() -> None:
    packed = torch.randn(1, 70, 48)
    before = attention_kernels.attend(packed, torch.zeros(48), 1)
    packed[:, 66:] += 1
    after = attention_kernels.attend(packed, torch.zeros(48), 1)
    assert torch.equal(before[:, :66], after[:, :66])
    assert not torch.equal(before[:, 66:], after[:, 66:])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (3, 37, 384), (2, 65, 256)], ids=str)
def test_gelu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = [3 * torch.randn(shape).to(dtype), torch.randn(shape[-1])]
    compare(gelu_kernels.gelu, lambda x, bias: F.gelu(x + bias, approximate="tanh"), given, BOUNDS[dtype])


@pytest.mark.parametrize("used", [(0, 1), (1,), (0,)], ids=["both", "the norm", "the sum"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 37, 96), (2, 40, 130)], ids=str)
def test_add_norm(shape: tuple[int, ...], used: tuple[int, ...]) -> None:
    width = shape[-1]

    def exact(x: Tensor, more: Tensor, bias: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        total = x + more + bias
        return total, F.layer_norm(total, (width,), gain, shift, 1e-5)

    given = [torch.randn(shape), 2 * torch.randn(shape) + 1, *(torch.randn(width) for _ in range(3))]
    compare(lambda *given: norm_kernels.add_norm(*given, 1e-5), exact, given, 1e-5, used)


def test_add_norm_in_half_precision() -> None:
    """Both are rounded once; the norm is that of the sum as it is kept."""
    x, more = torch.randn(2, 5, 64).half(), torch.randn(2, 5, 64).half()
    bias, gain, shift = (torch.randn(64) for _ in range(3))
    total, normed = norm_kernels.add_norm(x, more, bias, gain, shift, 1e-5)
    assert total.dtype == normed.dtype == torch.float16
    assert torch.equal(total, (x.float() + more.float() + bias).half())
    exact = F.layer_norm(total.double(), (64,), gain.double(), shift.double(), 1e-5)
    assert relative(normed, exact) < 1e-3


def test_weight_gradients_are_not_rounded() -> None:
    x, weight, bias = torch.randn(3, 40, 24).half(), torch.randn(8, 24, requires_grad=True), torch.randn(8)
    up = torch.randn(3, 40, 8).half()
    made = linear(x, weight, bias)
    made.backward(up)
    assert relative(made, F.linear(x.double(), weight.detach().half().double(), bias.double())) < 2e-3
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert relative(weight.grad, up.flatten(0, 1).double().T @ x.flatten(0, 1).double()) < 1e-6


@pytest.mark.parametrize("config", [LogMemoryConfig, RecentConfig])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_of_them_is_the_same_model(
    monkeypatch: pytest.MonkeyPatch, config: type[RecentConfig], compiled: bool
) -> None:
    torch.manual_seed(0)
    model = build(config(slots=9, window=7, layers=3, heads=2, width=32, vocabulary=40))
    for weight in model.parameters():  # biases and gains that count
        nn.init.normal_(weight, std=0.3)
    ids = torch.randint(0, 40, (2, model.history + 8))
    given = ids[:, :-8], ids[:, -8:-1], ids[:, -7:]

    def costs_and_gradients(run: nn.Module) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        costs = run(*given)
        costs.sum().backward()
        return costs.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    plain, gradients = costs_and_gradients(model)
    calls = []
    for module in (attention_kernels, gelu_kernels, norm_kernels):
        monkeypatch.setattr(module, "fits", lambda *given: not calls.append(given))
    ours, others = costs_and_gradients(torch.compile(model, backend="aot_eager") if compiled else model)
    assert len(calls) == 3 + 3 + 6
    assert relative(ours, plain.double()) < 1e-5
    assert len(others) == len(gradients)
    assert all(relative(one, other.double()) < 1e-4 for one, other in zip(others, gradients, strict=True))


SMALL = RecentConfig(slots=3, window=4, layers=1, heads=1, width=16, vocabulary=9)
IDS = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)


def test_without_gradients_they_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring and generation use the libraries' kernels; attention with a cache does in any case."""
    monkeypatch.setattr(attention_kernels, "fits", lambda *given: pytest.fail("asked for"))
    model = build(SMALL)
    transformer.run_blocks(model.blocks, torch.randn(1, 4, 16), model.norm, transformer.KeyValueCache())
    for module in (gelu_kernels, norm_kernels):
        monkeypatch.setattr(module, "fits", lambda *given: pytest.fail("asked for"))
    with torch.no_grad():
        model(*IDS)


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_layers_that_someone_changed_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter, a hook, no bias: what they do counts."""
    for module in (attention_kernels, gelu_kernels, norm_kernels):
        monkeypatch.setattr(module, "fits", lambda *given: True)
    monkeypatch.setattr(gelu_kernels, "gelu", lambda *given: pytest.fail("GELU of ours"))
    monkeypatch.setattr(attention_kernels, "attend", lambda *given: pytest.fail("attention of ours"))
    monkeypatch.setattr(norm_kernels, "add_norm", lambda *given: pytest.fail("norm of ours"))
    model, seen = build(SMALL), []
    block = model.blocks[0]
    block.mlp_in = Adapted(16, 64)
    block.attention.query_key_value = nn.Linear(16, 48, bias=False)
    block.attention.out.register_forward_hook(lambda *given: seen.append(given))
    block.mlp_out = Adapted(64, 16)
    model(*IDS)
    assert len(seen) == 1


def test_many_rows_are_no_limit() -> None:
    """CUDA takes 65,535 in all directions but the first."""
    x = torch.empty(2**22, 3072, device="meta")
    assert all(gelu_kernels._plan(x, **tile).grid[1] < 2**16 for tile in (gelu_kernels.FORWARD, gelu_kernels.BACKWARD))


def test_second_derivatives_are_refused() -> None:
    x, weight = torch.randn(2, 3, 4).half().requires_grad_(), torch.randn(5, 4, requires_grad=True)
    (first,) = torch.autograd.grad(linear(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


def test_operators_are_what_they_say() -> None:
    def x(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    ops = torch.ops.logpast
    for op, given in (
        (ops.head, (x(5, 6), x(20, 6), torch.tensor([3, -1, 0, 19, 7]))),
        (ops.cross_entropy, (x(5, 20), torch.tensor([3, -1, 0, 19, 7]))),
        (ops.attention, (x(2, 9, 96), x(96), 2)),
        (ops.gelu, (x(3, 128), x(128))),
        (ops.add_norm, (x(2, 5, 16), x(2, 5, 16), x(16), x(16), x(16), 1e-5)),
        (ops.to_weight, (x(7, 3), x(7, 4))),
        (ops.product, (x(2, 7, 3), x(5, 3), x(5), False)),
        (ops.product, (x(2, 7, 5), x(5, 3), None, True)),
    ):
        no_gradient = op in (ops.to_weight, ops.product, ops.cross_entropy)
        torch.library.opcheck(op, given, test_utils=CHECKS[::2] if no_gradient else CHECKS)


def test_operators_are_known_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """To PyTorch before 2.13, which takes minutes over GPT-2 Small on a GPU else."""
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.11.0"))
    build(SMALL).compile()
    assert {"logpast::head", "logpast::add_norm_backward", "logpast::fused_backward"} <= set(FALLBACK_ALLOW_LIST)


def test_operators_take_no_notice_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ops.logpast.to_weight(torch.randn(7, 3), torch.randn(7, 4)).dtype == torch.float32
        assert torch.ops.logpast.head(torch.randn(5, 6), torch.randn(20, 6), torch.arange(5))[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("vocabulary", [3, 2048, 5003])
def test_head_is_cross_entropy(dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(0)
    hidden, table = (torch.randn(n, 12).to(dtype).requires_grad_() for n in (7, vocabulary))
    targets = torch.randint(0, vocabulary, (7,))
    targets[[2, 5]] = -1
    towards = torch.randn(7)
    costs = head.linear_cross_entropy(hidden, table, targets)
    costs.backward(towards)
    exact = [x.detach().double().requires_grad_() for x in (hidden, table)]
    reference = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-1, reduction="none")
    reference.backward(towards.double())
    assert costs.dtype == torch.float32
    assert costs[2] == costs[5] == 0
    assert relative(costs, reference.detach()) < BOUNDS[dtype]
    logits = F.linear(hidden, table).detach()
    kept = logits.clone()
    assert relative(head.cross_entropy(logits, targets), reference.detach()) < BOUNDS[dtype]
    assert torch.equal(logits, kept)
    for ours, true in zip((hidden, table), exact, strict=True):
        assert ours.grad is not None
        assert true.grad is not None
        assert relative(ours.grad, true.grad) < BOUNDS[dtype]


def test_head_takes_targets_of_any_stride_but_only_those_in_the_table() -> None:
    hidden, table, ids = torch.randn(4, 6), torch.randn(9, 6), torch.tensor([[0, 3], [1, 8], [2, -1], [3, 4]])
    strided = head.linear_cross_entropy(hidden, table, ids[:, 1])
    assert torch.equal(strided, head.linear_cross_entropy(hidden, table, ids[:, 1].clone()))
    with pytest.raises(RuntimeError):
        head.linear_cross_entropy(hidden, table, torch.tensor([0, 9, 1, 2]))
    with pytest.raises(RuntimeError):
        head.cross_entropy(hidden @ table.T, torch.tensor([0, 9, 1, 2]))
