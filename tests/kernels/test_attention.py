from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.helpers import BOUNDS, check_operator, compare

pytest.importorskip("triton", reason="Triton is for Linux")
from logpast.kernels import attention

SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes per block, by compute capability


def plain(qkv: Tensor, heads: int) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("length", "heads", "head_dim"), [(1, 1, 16), (64, 2, 16), (65, 1, 32), (130, 3, 16), (7, 1, 64)]
)
def test_output_and_gradients_equal_pytorch(dtype: torch.dtype, length: int, heads: int, head_dim: int) -> None:
    """The gradient of the projection's bias too."""
    torch.manual_seed(length)
    qkv, bias = torch.randn(2, length, 3 * heads * head_dim).to(dtype), torch.zeros(3 * heads * head_dim)

    def ours(qkv: Tensor, bias: Tensor) -> Tensor:
        return attention.attend(qkv, bias, heads)

    def exact(qkv: Tensor, bias: Tensor) -> Tensor:
        return plain(qkv + bias, heads)

    compare(ours, exact, [qkv, bias], BOUNDS[dtype])


@pytest.mark.interpreter
def test_output_does_not_depend_on_later_positions() -> None:
    qkv = torch.randn(1, 70, 48)
    before = attention.attend(qkv, torch.zeros(48), 1)
    qkv[:, 66:] += 1
    after = attention.attend(qkv, torch.zeros(48), 1)
    assert torch.equal(before[:, :66], after[:, :66])
    assert not torch.equal(before[:, 66:], after[:, 66:])


@pytest.mark.interpreter
def test_operator_is_registered_correctly() -> None:
    check_operator("attention", torch.randn(2, 9, 96, requires_grad=True), torch.randn(96, requires_grad=True), 2)


def test_fits_half_precision_short_sequences_and_known_head_sizes(on_gpu: Callable[..., Tensor]) -> None:
    assert attention.fits(on_gpu(2, 1024, 128), 2)
    assert not attention.fits(on_gpu(2, 1025, 128), 2)
    assert not attention.fits(on_gpu(2, 1024, 96), 2)
    assert not attention.fits(on_gpu(2, 1024, 128, dtype=torch.float32), 2)
    assert not attention.fits(torch.empty(2, 1024, 128, dtype=torch.bfloat16), 2)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_kernels_fit_into_shared_memory(capability: int, head_dim: int) -> None:
    """Compiled for real GPUs, which needs none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = dict.fromkeys(("qkv", "out", "do", "dqkv"), "*bf16") | {"scale": "fp32", "length": "i32"}
    types |= dict.fromkeys(("lse", "delta", "dbias"), "*fp32")
    fixed = {"HEADS": 12, "HEAD_DIM": head_dim, "BLOCK": attention.BLOCK}
    types |= dict.fromkeys(fixed, "constexpr")
    for kernel in (attention._forward_kernel, attention._dq_kernel, attention._dkdv_kernel):
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, fixed)
        options = attention.options(kernel, head_dim)
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= SHARED_MEMORY[capability]
