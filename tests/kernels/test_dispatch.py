import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.helpers import relative
from logpast.models import LogMemoryConfig, RecentConfig, build
from logpast.models.decoder import KeyValueCache, Transformer, run_blocks
from logpast.util.errors import UserError

pytest.importorskip("triton", reason="Triton is for Linux")
from logpast.kernels import attention, cross_entropy, dispatch, gelu, layer_norm, matmul
from logpast.kernels.dispatch import KERNELS, disable
from logpast.kernels.ops import disabled

CONFIG = RecentConfig(slots=3, window=4, layers=1, heads=1, width=16, vocabulary=9)
HISTORY, TOKENS, TARGETS = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7]]), torch.tensor([[5, 6, 7, -1]])


def attend(qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
    q, k, v = dispatch.split_heads(qkv, heads)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def add_norm(
    residual: Tensor, x: Tensor, linear_bias: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual + x + linear_bias
    return total, F.layer_norm(total, total.shape[-1:], weight, bias, eps)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called. They fit all inputs, and PyTorch computes them."""
    names: list[str] = []

    def record(module: Any, function: str, replacement: Callable[..., Any]) -> None:
        def recorded(*args: Any) -> Any:
            names.append(module.__name__.rpartition(".")[2])
            return replacement(*args)

        monkeypatch.setattr(module, function, recorded)
        monkeypatch.setattr(module, "fits", lambda *args: True)

    record(attention, "attend", attend)
    record(gelu, "gelu", lambda x, bias: F.gelu(x + bias, approximate="tanh"))
    record(layer_norm, "add_norm", add_norm)
    record(matmul, "_plan", lambda *args: None)  # cuBLASLt has no kernel: PyTorch computes the product
    record(cross_entropy, "linear_cross_entropy", lambda hidden, weight, targets: loss(hidden @ weight.T, targets))
    record(cross_entropy, "cross_entropy", loss)
    return names


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    model = build(CONFIG)
    assert isinstance(model, Transformer)
    return model


def test_training_uses_every_kernel_that_fits(model: Transformer, used: list[str]) -> None:
    model(HISTORY, TOKENS, TARGETS)
    assert set(used) == set(KERNELS)


def test_training_on_a_cpu_uses_no_kernel(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function in ((attention, "attend"), (gelu, "gelu"), (layer_norm, "add_norm"), (matmul, "_plan")):
        monkeypatch.setattr(module, function, lambda *args: pytest.fail("a kernel was used"))
    monkeypatch.setattr(cross_entropy, "linear_cross_entropy", lambda *args: pytest.fail("a kernel was used"))
    model(HISTORY, TOKENS, TARGETS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_disable_switches_one_kernel_to_pytorch_and_back(model: Transformer, used: list[str], kernel: str) -> None:
    with disable(kernel):
        without = model(HISTORY, TOKENS, TARGETS)
        assert set(used) == set(KERNELS) - {kernel}
    torch.testing.assert_close(model(HISTORY, TOKENS, TARGETS), without)
    assert kernel in used


def test_disable_all(model: Transformer, used: list[str]) -> None:
    with disable("all"):
        model(HISTORY, TOKENS, TARGETS)
    assert not used
    model(HISTORY, TOKENS, TARGETS)
    assert set(used) == set(KERNELS)


def test_nested_disable_keeps_the_outer_one() -> None:
    with disable("gelu"):
        with disable("gelu", "attention"):
            assert disabled == {"gelu", "attention"}
        assert disabled == {"gelu"}
    assert not disabled


def test_disable_ends_with_an_error_in_its_block() -> None:
    with pytest.raises(ZeroDivisionError), disable("gelu"):
        _ = 1 / 0
    assert not disabled


def test_disable_of_an_unknown_kernel_names_the_known_ones() -> None:
    message = r"'atention'.*attention, layer_norm, gelu, matmul, cross_entropy"
    with pytest.raises(UserError, match=message), disable("gelu", "atention"):
        pass
    assert not disabled


@pytest.mark.parametrize(
    ("value", "expected"), [("", set()), ("attention, gelu,", {"attention", "gelu"}), ("all", set(KERNELS))]
)
def test_environment_variable(monkeypatch: pytest.MonkeyPatch, value: str, expected: set[str]) -> None:
    monkeypatch.setenv("LOGPAST_DISABLE_KERNELS", value)
    assert dispatch._disabled_by_environment() == expected


def test_imports_read_the_environment_variable_and_leave_out_the_compiler() -> None:
    """The compiler would add seconds to every command."""
    code = "import sys, logpast.training.loop; from logpast.kernels.ops import disabled; print(*disabled)"
    code += "; print('torch._dynamo' in sys.modules)"
    environment = os.environ | {"LOGPAST_DISABLE_KERNELS": "gelu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gelu", "False"]


def test_unknown_kernel_in_the_environment_is_a_one_line_error() -> None:
    command = [sys.executable, "-m", "logpast", "eval", "--checkpoint", "run", "--data", "text.txt"]
    environment = os.environ | {"LOGPAST_DISABLE_KERNELS": "atention"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "'atention' in LOGPAST_DISABLE_KERNELS" in line
    assert ", ".join(KERNELS) in line


def test_without_gradients_only_cross_entropy_is_used(model: Transformer, used: list[str]) -> None:
    """Scoring and generation use PyTorch's kernels."""
    with torch.no_grad():
        model(HISTORY, TOKENS, TARGETS)
    assert set(used) == {"cross_entropy"}


def test_attention_with_a_cache_uses_no_kernel(model: Transformer, used: list[str]) -> None:
    run_blocks(model.blocks, torch.randn(1, 4, 16), model.norm, KeyValueCache())
    assert "attention" not in used


def test_without_triton_no_kernel_is_used(model: Transformer, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    model(HISTORY, TOKENS, TARGETS)
    assert not used


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_layers_with_hooks_subclasses_and_layers_without_bias_are_called(model: Transformer, used: list[str]) -> None:
    block: Any = model.blocks[0]
    block.mlp_in = Adapted(16, 64)
    block.attention.query_key_value = nn.Linear(16, 48, bias=False)
    called: list[Any] = []
    block.attention.out.register_forward_hook(lambda *args: called.append(args))
    block.mlp_out = Adapted(64, 16)
    model(HISTORY, TOKENS, TARGETS)
    assert len(called) == 1
    assert set(used) == {"cross_entropy"}


@pytest.mark.interpreter
@pytest.mark.parametrize("config", [LogMemoryConfig, RecentConfig])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_model_with_kernels_has_the_losses_and_gradients_of_the_plain_model(
    monkeypatch: pytest.MonkeyPatch, config: type[RecentConfig], compiled: bool
) -> None:
    torch.manual_seed(0)
    model = build(config(slots=9, window=7, layers=1, heads=2, width=32, vocabulary=40))
    for parameter in model.parameters():  # so that biases matter
        nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 40, (2, model.history + 8))
    batch = ids[:, :-8], ids[:, -8:-1], ids[:, -7:]

    def losses_and_gradients(run: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        losses = run(*batch)
        losses.sum().backward()
        return losses.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    plain, plain_gradients = losses_and_gradients(model)
    calls: list[Any] = []
    for module in (attention, gelu, layer_norm, cross_entropy):
        monkeypatch.setattr(module, "fits", lambda *args: not calls.append(args))
    ours, gradients = losses_and_gradients(torch.compile(model, backend="aot_eager") if compiled else model)
    assert len(calls) == 1 + 1 + 2 + 1
    assert relative(ours, plain.double()) < 1e-5
    assert len(gradients) == len(plain_gradients)
    assert all(relative(one, other.double()) < 1e-4 for one, other in zip(gradients, plain_gradients, strict=True))
