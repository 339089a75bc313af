"""The memory's Triton kernels, compiled for GPUs that need not be there."""

import pytest
import torch

LIMITS = {80: 166_912, 86: 101_376, 90: 232_448}  # shared memory of a block, by compute capability


@pytest.mark.slow
@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("slots", [53, 65, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_fit_into_shared_memory(capability: int, slots: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from logpast.memory import fused

    name = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    types = dict.fromkeys(("count", "tokens"), "*i32") | {"bags": "*fp32"}
    types["rows"] = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types |= dict.fromkeys(("table", "out", "grad"), name)
    for kernel, tile in ((fused._multiply, fused._tile), (fused._multiply_backward, fused._tile_backward)):
        sizes = {"SLOTS": fused._padded(slots)} | tile(slots, dtype)
        options = {word: sizes.pop(word) for word in ("num_warps", "num_stages")}
        signature = {word: "constexpr" if word in sizes else types.get(word, "i32") for word in kernel.arg_names}
        made = compile(ASTSource(kernel, signature, sizes), target=GPUTarget("cuda", capability, 32), options=options)
        assert made.metadata.shared <= LIMITS[capability]


@pytest.mark.slow
def test_bags_are_filled_by_integer_atomics_on_a_gpu() -> None:
    """So their sums do not depend on the order."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from logpast.memory import fused

    types = {"ids": "*i64", "count": "*i32", "first": "*i32", "weights": "*i64", "sums": "*i64", "scale": "*fp32"}
    types["bags"] = "*fp32"
    sizes = {fused._fill_sums: {"BLOCK": 128, "WIDTH": 16}, fused._round_sums: {"UNITS": fused.UNITS, "BLOCK": 4096}}
    made = {}
    for kernel, constants in sizes.items():
        signature = {word: "constexpr" if word in constants else types.get(word, "i32") for word in kernel.arg_names}
        made[kernel] = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ".add.u64" in made[fused._fill_sums]
    assert "f64" not in made[fused._round_sums]
