"""Causal self-attention over a short sequence, for training on a GPU: from the packed projections and back to them.

Queries, keys and values are read where the projection left them, (B, T, 3, heads, D), and their gradients are written
in the same form, so nothing is stacked or copied; the bias's gradient, their sum over all places, falls out on the way.

    forward     a block of queries goes through the keys up to its own; kept of the weights is log2 Σ 2^score
    backward    a block of queries goes through the keys as before, then a block of keys through the queries from its
                own on; nothing is added atomically, so the result is the same to the bit
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.ops import operator

LONGEST = 1024  # places: so far measured, and faster than the libraries' kernels
BLOCK = 64
LOG2_E = tl.constexpr(1.4426950408889634)


def options(kernel: Any, depth: int) -> dict[str, int]:
    """How a kernel is compiled: measured on an H200 at a depth of 64; twice that must fit into shared memory, too."""
    if kernel is _to_keys:
        return {"num_warps": 4, "num_stages": 1, "maxnreg": 168}
    return {"num_warps": 4, "num_stages": 1 if depth > 64 else 3 if kernel is _forward else 2}


def fits(x: Tensor, heads: int) -> bool:
    """Whether these kernels are made for such embeddings (B, T, width)."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and x.shape[1] <= LONGEST and x.shape[2] // heads in (16, 32, 64, 128)


def attend(packed: Tensor, bias: Tensor, heads: int) -> Tensor:
    """What attention mixes (B, T, width) from projections (B, T, 3 × width), in which the bias is already contained.

    The bias (3 × width) is named for its gradient, which it gets from here and must not get from the projection too.
    """
    mixed, _ = torch.ops.logpast.attention(packed, bias, heads)
    return mixed


@operator("attention")
def _attention(packed: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, length, width = _sizes(packed)
    packed = packed.contiguous()
    mixed = packed.new_empty(batch, length, width)
    sums = packed.new_empty(batch, heads, length, dtype=torch.float32)
    depth, blocks = width // heads, triton.cdiv(length, BLOCK)
    _forward[blocks * batch * heads,](
        packed, mixed, sums, length, depth**-0.5, HEADS=heads, DEPTH=depth, BLOCK=BLOCK, **options(_forward, depth)
    )
    return mixed, sums


@operator("attention_backward")
def _attention_backward(
    packed: Tensor, mixed: Tensor, sums: Tensor, above: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    batch, length, width = _sizes(packed)
    gradient = torch.empty_like(packed, memory_format=torch.contiguous_format)
    depth, blocks = width // heads, triton.cdiv(length, BLOCK)
    parts = packed.new_empty(batch * blocks, 3 * width, dtype=torch.float32)
    tensors = packed.contiguous(), mixed, sums, torch.empty_like(sums), above.contiguous(), gradient, parts
    for kernel in (_to_queries, _to_keys):  # in this order: the first leaves something for the second
        kernel[blocks * batch * heads,](
            *tensors, length, depth**-0.5, HEADS=heads, DEPTH=depth, BLOCK=BLOCK, **options(kernel, depth)
        )
    return gradient, parts


def _sizes(packed: Tensor) -> tuple[int, int, int]:
    return packed.shape[0], packed.shape[1], packed.shape[2] // 3


@_attention.register_fake
def _(packed: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, length, width = _sizes(packed)
    mixed = packed.new_empty(batch, length, width)
    return mixed, packed.new_empty(batch, heads, length, dtype=torch.float32)


@_attention_backward.register_fake
def _(packed: Tensor, mixed: Tensor, sums: Tensor, above: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    gradient = torch.empty_like(packed, memory_format=torch.contiguous_format)
    blocks = (packed.shape[1] + BLOCK - 1) // BLOCK
    return gradient, packed.new_empty(packed.shape[0] * blocks, packed.shape[2], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    packed, bias, ctx.heads = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(packed, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _chain(ctx: Any, above: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    if above is None:
        return None, None, None
    gradient, parts = torch.ops.logpast.attention_backward(*ctx.saved_tensors, above, ctx.heads)
    return gradient, parts.sum(0).to(ctx.bias_dtype), None


_attention.register_autograd(_chain, setup_context=_keep)


@triton.jit
def _forward(packed, mixed, sums, length, scale, HEADS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(length, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    packed = _of(packed, pair, length, 3, HEADS, DEPTH)
    mixed = _of(mixed, pair, length, 1, HEADS, DEPTH)
    here = block * BLOCK + tl.arange(0, BLOCK)
    query = _load(packed, here, length, 3, 0, HEADS, DEPTH)
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sofar = tl.zeros((BLOCK, DEPTH), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        there = start + tl.arange(0, BLOCK)
        key = _load(packed, there, length, 3, 1, HEADS, DEPTH)
        value = _load(packed, there, length, 3, 2, HEADS, DEPTH)
        score = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
        score = tl.where(there[None, :] <= here[:, None], score, -float("inf"))
        larger = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - larger[:, None])
        shrunk = tl.exp2(peak - larger)
        total = total * shrunk + tl.sum(weight, axis=1)
        sofar = tl.dot(weight.to(value.dtype), value, sofar * shrunk[:, None])
        peak = larger
    _store(mixed, sofar / total[:, None], here, length, 1, 0, HEADS, DEPTH)
    tl.store(sums + pair.to(tl.int64) * length + here, peak + tl.log2(total), mask=here < length)


@triton.jit
def _to_queries(
    packed, mixed, sums, centres, above, gradient, parts, length, scale,
    HEADS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of queries: what all keys up to their own send back to them."""
    blocks = tl.cdiv(length, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    packed = _of(packed, pair, length, 3, HEADS, DEPTH)
    here = block * BLOCK + tl.arange(0, BLOCK)
    query = _load(packed, here, length, 3, 0, HEADS, DEPTH)
    towards = _load(_of(above, pair, length, 1, HEADS, DEPTH), here, length, 1, 0, HEADS, DEPTH)
    result = _load(_of(mixed, pair, length, 1, HEADS, DEPTH), here, length, 1, 0, HEADS, DEPTH)
    centre = tl.sum(towards.to(tl.float32) * result.to(tl.float32), axis=1)
    tl.store(centres + pair.to(tl.int64) * length + here, centre, mask=here < length)
    normal = tl.load(sums + pair.to(tl.int64) * length + here, mask=here < length, other=float("inf"))
    to_query = tl.zeros((BLOCK, DEPTH), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        there = start + tl.arange(0, BLOCK)
        key = _load(packed, there, length, 3, 1, HEADS, DEPTH)
        value = _load(packed, there, length, 3, 2, HEADS, DEPTH)
        score = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
        weight = tl.where(there[None, :] <= here[:, None], tl.exp2(score - normal[:, None]), 0.0)
        change = weight * (tl.dot(towards, tl.trans(value)) - centre[:, None])
        to_query = tl.dot(change.to(key.dtype), key, to_query)
    to_query *= scale
    _store(_of(gradient, pair, length, 3, HEADS, DEPTH), to_query, here, length, 3, 0, HEADS, DEPTH)
    _add_up(parts, to_query, pair, block, blocks, 0, HEADS, DEPTH)


@triton.jit
def _to_keys(
    packed, mixed, sums, centres, above, gradient, parts, length, scale,
    HEADS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of keys and values: what all queries from their own on send back to them."""
    blocks = tl.cdiv(length, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    packed = _of(packed, pair, length, 3, HEADS, DEPTH)
    above = _of(above, pair, length, 1, HEADS, DEPTH)
    here = block * BLOCK + tl.arange(0, BLOCK)
    key = _load(packed, here, length, 3, 1, HEADS, DEPTH)
    value = _load(packed, here, length, 3, 2, HEADS, DEPTH)
    to_key = tl.zeros((BLOCK, DEPTH), tl.float32)
    to_value = tl.zeros((BLOCK, DEPTH), tl.float32)
    for start in range(block * BLOCK, length, BLOCK):
        there = start + tl.arange(0, BLOCK)
        query = _load(packed, there, length, 3, 0, HEADS, DEPTH)
        towards = _load(above, there, length, 1, 0, HEADS, DEPTH)
        normal = tl.load(sums + pair.to(tl.int64) * length + there, mask=there < length, other=float("inf"))
        centre = tl.load(centres + pair.to(tl.int64) * length + there, mask=there < length, other=0.0)
        score = tl.dot(key, tl.trans(query)) * (scale * LOG2_E)
        weight = tl.where(here[:, None] <= there[None, :], tl.exp2(score - normal[None, :]), 0.0)
        to_value = tl.dot(weight.to(towards.dtype), towards, to_value)
        change = weight * (tl.dot(value, tl.trans(towards)) - centre[None, :])
        to_key = tl.dot(change.to(query.dtype), query, to_key)
    to_key *= scale
    gradient = _of(gradient, pair, length, 3, HEADS, DEPTH)
    _store(gradient, to_key, here, length, 3, 1, HEADS, DEPTH)
    _store(gradient, to_value, here, length, 3, 2, HEADS, DEPTH)
    _add_up(parts, to_key, pair, block, blocks, 1, HEADS, DEPTH)
    _add_up(parts, to_value, pair, block, blocks, 2, HEADS, DEPTH)


@triton.jit
def _of(rows, pair, length, KINDS: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr):
    """Where the rows (B, T, kinds, heads, D) of a pair, a batch's and a head's, begin."""
    return rows + (pair // HEADS).to(tl.int64) * length * (KINDS * HEADS * DEPTH) + pair % HEADS * DEPTH


@triton.jit
def _load(rows, place, length, KINDS: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr):
    at = place[:, None] * (KINDS * HEADS * DEPTH) + KIND * HEADS * DEPTH + tl.arange(0, DEPTH)
    return tl.load(rows + at, mask=place[:, None] < length, other=0.0)


@triton.jit
def _store(
    rows, what, place, length, KINDS: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr
):
    at = place[:, None] * (KINDS * HEADS * DEPTH) + KIND * HEADS * DEPTH + tl.arange(0, DEPTH)
    tl.store(rows + at, what.to(rows.dtype.element_ty), mask=place[:, None] < length)


@triton.jit
def _add_up(parts, what, pair, block, blocks, KIND: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr):
    """This block's part of the bias's gradient; what lies beyond the sequence is zero."""
    row = (pair // HEADS).to(tl.int64) * blocks + block
    at = (row * 3 + KIND) * (HEADS * DEPTH) + pair % HEADS * DEPTH + tl.arange(0, DEPTH)
    tl.store(parts + at, tl.sum(what, axis=0))
