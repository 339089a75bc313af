"""What each token costs, from the decoder's last layer: logits and cross-entropy in one, for training on a GPU.

The logits (N, V) are by far the largest tensor of a training step. They are made once, in the type of the product, and
overwritten with their own gradient while they are at hand:

    nats_n = ln Σ_v e^logit_nv − logit_n,target          ∂nats_n / ∂logit_nv = softmax_nv − [v = target]

What comes from above is one number a token, so it scales rows of small matrices in the backward pass, not this one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.matmul import product
from logpast.kernels.ops import operator


def linear_cross_entropy(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """The cost (N,) in nats of the targets (N,), 0 for a target of -1, with logits = hidden (N, d) @ table (V, d)ᵀ."""
    costs, _ = torch.ops.logpast.head(hidden, table, targets)
    return costs


@operator("cross_entropy")
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The same from logits, for scoring: there is no gradient."""
    return _costs(logits, targets, gradient=False)


@cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)


@operator("head")
def _head(hidden: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = product(hidden, table)
    return _costs(logits, targets, gradient=True), logits


def _costs(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    rows, vocabulary = logits.shape
    torch._assert_async((targets < vocabulary).all())
    costs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _cost[rows,](logits.contiguous(), targets.contiguous(), costs, vocabulary, GRADIENT=gradient, **TILE)
    return costs


TILE = {"BLOCK": 4096, "num_warps": 16}  # measured on an H200
GROUP = tl.constexpr(8)  # neighbouring logits, which one thread reads at once


@triton.jit
def _cost(logits, targets, costs, vocabulary, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """A row of logits, which may become its gradient."""
    row = logits + tl.program_id(0).to(tl.int64) * vocabulary
    target = tl.load(targets + tl.program_id(0))
    scored = target >= 0
    wanted = tl.load(row + target, mask=scored, other=0.0).to(tl.float32)
    group = tl.arange(0, BLOCK // GROUP)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)
    largest = tl.full((BLOCK // GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK // GROUP,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        place = start + inside
        x = tl.load(row + place, mask=place < vocabulary, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=1))
        safe = tl.where(larger > -float("inf"), larger, 0.0)  # where there was nothing yet, nothing is added up
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(x - safe[:, None]), axis=1)
        largest = larger
    peak = tl.max(largest, axis=0)
    normal = peak + tl.log(tl.sum(total * tl.exp(largest - peak), axis=0))
    tl.store(costs + tl.program_id(0), tl.where(scored, normal - wanted, 0.0))
    if GRADIENT:
        last = (vocabulary - 1) // BLOCK * BLOCK
        for start in range(0, vocabulary, BLOCK):  # backwards: what was read last is still in the cache
            place = last - start + inside
            x = tl.load(row + place, mask=place < vocabulary, other=-float("inf"), eviction_policy="evict_first")
            gradient = tl.exp(x.to(tl.float32) - normal) - tl.where(place == target, 1.0, 0.0)
            gradient = tl.where(scored, gradient, 0.0).to(logits.dtype.element_ty)
            tl.store(row + place, gradient, mask=place < vocabulary, eviction_policy="evict_first")


@_head.register_fake
def _(hidden: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    costs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    return costs, hidden.new_empty(hidden.shape[0], table.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    hidden, table, _ = inputs
    ctx.save_for_backward(hidden, table, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or zeros of the logits' size would be made for nothing


def _chain(ctx: Any, above: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    hidden, table, gradient = ctx.saved_tensors
    if above is None:
        return None, None, None
    above = above.unsqueeze(1)
    return (
        ((gradient @ table) * above).to(hidden.dtype),
        gradient.T @ (hidden * above).to(hidden.dtype),
        None,
    )


_head.register_autograd(_chain, setup_context=_keep)
