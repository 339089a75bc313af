"""Causal self-attention for training on a GPU, over sequences of at most `MAX_LENGTH` positions.

The kernels read q, k and v where the projection wrote them, qkv (B, T, 3, heads, head_dim), and write dq, dk and dv in
the same layout, so nothing is stacked or copied. The gradient of the projection's bias is the sum of dq, dk and dv over
all positions; the backward kernels compute it as well.

    forward     each block of queries visits the keys up to its own position; of the scores only
                lse = log2 Σ 2^score of each query is kept
    backward    each block of queries visits the same keys (dq), then each block of keys visits the queries from its
                own position on (dk, dv); nothing is added atomically, so the result is bit-reproducible
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.ops import operator

MAX_LENGTH = 1024  # positions; measured up to here, and faster than PyTorch's kernels
BLOCK = 64  # positions
LOG2_E = tl.constexpr(1.4426950408889634)


def options(kernel: Any, head_dim: int) -> dict[str, int]:
    """Compile options, measured on an H200 at a head_dim of 64; with 128, fewer stages fit into shared memory."""
    if kernel is _dkdv_kernel:
        return {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
    return {"num_warps": 4, "num_stages": 1 if head_dim > 64 else 3 if kernel is _forward_kernel else 2}


def fits(x: Tensor, heads: int) -> bool:
    """Whether the kernels support attention over x (B, T, width)."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and x.shape[1] <= MAX_LENGTH and x.shape[2] // heads in (16, 32, 64, 128)


def attend(qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Causal self-attention (B, T, width) from the projection qkv (B, T, 3 × width), which includes its bias.

    The bias (3 × width) is an argument because its gradient is computed here. The projection must not compute it too.
    """
    out, _ = torch.ops.logpast.attention(qkv, bias, heads)
    return out


@operator("attention")
def _attention(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, length, width = _sizes(qkv)
    qkv = qkv.contiguous()
    out = qkv.new_empty(batch, length, width)
    lse = qkv.new_empty(batch, heads, length, dtype=torch.float32)
    head_dim, blocks = width // heads, triton.cdiv(length, BLOCK)
    _forward_kernel[blocks * batch * heads,](
        qkv, out, lse, length, head_dim**-0.5,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK=BLOCK, **options(_forward_kernel, head_dim),
    )  # fmt: skip
    return out, lse


@operator("attention_backward")
def _attention_backward(qkv: Tensor, out: Tensor, lse: Tensor, do: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """dqkv, and the partial sums of dbias: one row per sequence and block."""
    batch, length, width = _sizes(qkv)
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    head_dim, blocks = width // heads, triton.cdiv(length, BLOCK)
    dbias = qkv.new_empty(batch * blocks, 3 * width, dtype=torch.float32)
    delta = torch.empty_like(lse)
    tensors = qkv.contiguous(), out, lse, delta, do.contiguous(), dqkv, dbias
    for kernel in (_dq_kernel, _dkdv_kernel):  # in this order: the first writes delta, the second reads it
        kernel[blocks * batch * heads,](
            *tensors, length, head_dim**-0.5, HEADS=heads, HEAD_DIM=head_dim, BLOCK=BLOCK, **options(kernel, head_dim)
        )
    return dqkv, dbias


def _sizes(qkv: Tensor) -> tuple[int, int, int]:
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3


@_attention.register_fake
def _(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, length, width = _sizes(qkv)
    out = qkv.new_empty(batch, length, width)
    return out, qkv.new_empty(batch, heads, length, dtype=torch.float32)


@_attention_backward.register_fake
def _(qkv: Tensor, out: Tensor, lse: Tensor, do: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    blocks = (qkv.shape[1] + BLOCK - 1) // BLOCK
    return dqkv, qkv.new_empty(qkv.shape[0] * blocks, qkv.shape[2], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, ctx.heads = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(qkv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    if do is None:
        return None, None, None
    dqkv, dbias = torch.ops.logpast.attention_backward(*ctx.saved_tensors, do, ctx.heads)
    return dqkv, dbias.sum(0).to(ctx.bias_dtype), None


_attention.register_autograd(_backward, setup_context=_setup_context)


@triton.jit
def _forward_kernel(qkv, out, lse, length, scale, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One block of queries of one sequence and head."""
    blocks = tl.cdiv(length, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    qkv = _head(qkv, pair, length, 3, HEADS, HEAD_DIM)
    out = _head(out, pair, length, 1, HEADS, HEAD_DIM)
    q_position = block * BLOCK + tl.arange(0, BLOCK)
    q = _load(qkv, q_position, length, 3, 0, HEADS, HEAD_DIM)
    row_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        k_position = start + tl.arange(0, BLOCK)
        k = _load(qkv, k_position, length, 3, 1, HEADS, HEAD_DIM)
        v = _load(qkv, k_position, length, 3, 2, HEADS, HEAD_DIM)
        score = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        score = tl.where(k_position[None, :] <= q_position[:, None], score, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(score, axis=1))
        p = tl.exp2(score - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    _store(out, acc / row_sum[:, None], q_position, length, 1, 0, HEADS, HEAD_DIM)
    tl.store(lse + pair.to(tl.int64) * length + q_position, row_max + tl.log2(row_sum), mask=q_position < length)


@triton.jit
def _dq_kernel(
    qkv, out, lse, delta, do, dqkv, dbias, length, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, from all keys up to its own position; delta = Σ do · out of each query."""
    blocks = tl.cdiv(length, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    qkv = _head(qkv, pair, length, 3, HEADS, HEAD_DIM)
    q_position = block * BLOCK + tl.arange(0, BLOCK)
    q = _load(qkv, q_position, length, 3, 0, HEADS, HEAD_DIM)
    do_block = _load(_head(do, pair, length, 1, HEADS, HEAD_DIM), q_position, length, 1, 0, HEADS, HEAD_DIM)
    out_block = _load(_head(out, pair, length, 1, HEADS, HEAD_DIM), q_position, length, 1, 0, HEADS, HEAD_DIM)
    delta_block = tl.sum(do_block.to(tl.float32) * out_block.to(tl.float32), axis=1)
    tl.store(delta + pair.to(tl.int64) * length + q_position, delta_block, mask=q_position < length)
    lse_block = tl.load(lse + pair.to(tl.int64) * length + q_position, mask=q_position < length, other=float("inf"))
    dq = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        k_position = start + tl.arange(0, BLOCK)
        k = _load(qkv, k_position, length, 3, 1, HEADS, HEAD_DIM)
        v = _load(qkv, k_position, length, 3, 2, HEADS, HEAD_DIM)
        score = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        p = tl.where(k_position[None, :] <= q_position[:, None], tl.exp2(score - lse_block[:, None]), 0.0)
        dscore = p * (tl.dot(do_block, tl.trans(v)) - delta_block[:, None])
        dq = tl.dot(dscore.to(k.dtype), k, dq)
    dq *= scale
    _store(_head(dqkv, pair, length, 3, HEADS, HEAD_DIM), dq, q_position, length, 3, 0, HEADS, HEAD_DIM)
    _store_dbias(dbias, dq, pair, block, blocks, 0, HEADS, HEAD_DIM)


@triton.jit
def _dkdv_kernel(
    qkv, out, lse, delta, do, dqkv, dbias, length, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, from all queries from its own position on."""
    blocks = tl.cdiv(length, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    qkv = _head(qkv, pair, length, 3, HEADS, HEAD_DIM)
    do = _head(do, pair, length, 1, HEADS, HEAD_DIM)
    k_position = block * BLOCK + tl.arange(0, BLOCK)
    k = _load(qkv, k_position, length, 3, 1, HEADS, HEAD_DIM)
    v = _load(qkv, k_position, length, 3, 2, HEADS, HEAD_DIM)
    dk = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for start in range(block * BLOCK, length, BLOCK):
        q_position = start + tl.arange(0, BLOCK)
        q = _load(qkv, q_position, length, 3, 0, HEADS, HEAD_DIM)
        do_block = _load(do, q_position, length, 1, 0, HEADS, HEAD_DIM)
        lse_block = tl.load(lse + pair.to(tl.int64) * length + q_position, mask=q_position < length, other=float("inf"))
        delta_block = tl.load(delta + pair.to(tl.int64) * length + q_position, mask=q_position < length, other=0.0)
        score = tl.dot(k, tl.trans(q)) * (scale * LOG2_E)
        p = tl.where(k_position[:, None] <= q_position[None, :], tl.exp2(score - lse_block[None, :]), 0.0)
        dv = tl.dot(p.to(do_block.dtype), do_block, dv)
        dscore = p * (tl.dot(v, tl.trans(do_block)) - delta_block[None, :])
        dk = tl.dot(dscore.to(q.dtype), q, dk)
    dk *= scale
    dqkv = _head(dqkv, pair, length, 3, HEADS, HEAD_DIM)
    _store(dqkv, dk, k_position, length, 3, 1, HEADS, HEAD_DIM)
    _store(dqkv, dv, k_position, length, 3, 2, HEADS, HEAD_DIM)
    _store_dbias(dbias, dk, pair, block, blocks, 1, HEADS, HEAD_DIM)
    _store_dbias(dbias, dv, pair, block, blocks, 2, HEADS, HEAD_DIM)


# In these helpers a tensor is (B, T, PACKED, heads, head_dim): PACKED is 3 for qkv (INDEX 0 is q, 1 k, 2 v) and 1 for
# out. `pair` numbers the pairs of a sequence and a head.


@triton.jit
def _head(tensor, pair, length, PACKED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Pointer to the first element of a pair."""
    return tensor + (pair // HEADS).to(tl.int64) * length * (PACKED * HEADS * HEAD_DIM) + pair % HEADS * HEAD_DIM


@triton.jit
def _load(
    tensor, position, length, PACKED: tl.constexpr, INDEX: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    offset = position[:, None] * (PACKED * HEADS * HEAD_DIM) + INDEX * HEADS * HEAD_DIM + tl.arange(0, HEAD_DIM)
    return tl.load(tensor + offset, mask=position[:, None] < length, other=0.0)


@triton.jit
def _store(
    tensor, value, position, length,
    PACKED: tl.constexpr, INDEX: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    offset = position[:, None] * (PACKED * HEADS * HEAD_DIM) + INDEX * HEADS * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(tensor + offset, value.to(tensor.dtype.element_ty), mask=position[:, None] < length)


@triton.jit
def _store_dbias(dbias, grad, pair, block, blocks, INDEX: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The block's partial sum; `grad` is zero at positions beyond the sequence."""
    row = (pair // HEADS).to(tl.int64) * blocks + block
    offset = (row * 3 + INDEX) * (HEADS * HEAD_DIM) + pair % HEADS * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(dbias + offset, tl.sum(grad, axis=0))
