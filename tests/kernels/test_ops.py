import pytest
import torch
from torch import Tensor

from logpast.kernels import ops
from logpast.models import RecentConfig, build


@ops.operator("product_for_tests")
def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@product.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


def test_operator_is_registered_under_its_name() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(torch.ops.logpast.product_for_tests(x, y), x @ y)


def test_operator_runs_without_autocast() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ y).dtype == torch.bfloat16
        assert product(x, y).dtype == torch.float32


def test_operator_is_opaque_to_the_compiler() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(torch.compile(lambda: product(x, y) + 1, backend=backend, fullgraph=True)(), x @ y + 1)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("product_for_tests" in name for name in called)
    assert not any("matmul" in name for name in called)


@pytest.mark.skipif(not ops.HAS_TRITON, reason="Triton is for Linux")
def test_compile_makes_operators_known_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.13 would otherwise take minutes to compile GPT-2 Small for a GPU."""
    from torch._inductor import lowering

    import logpast.memory.fused  # noqa: F401

    known: set[str] = set()
    monkeypatch.setattr(lowering, "FALLBACK_ALLOW_LIST", known)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.11.0"))
    build(RecentConfig(slots=3, window=4, layers=1, heads=1, width=16, vocabulary=9)).compile()
    assert {"logpast::linear_cross_entropy", "logpast::add_norm_backward", "logpast::fused_backward"} <= known
