"""The last linear layer and its cross-entropy as one operator, for training on a GPU.

The logits (N, V) are by far the largest tensor of a training step. They are computed once, in the dtype of the matrix
product, and overwritten with their own gradient:

    loss_n = ln Σ_v e^logit_nv − logit_n,target          ∂loss_n / ∂logit_nv = softmax_nv − [v = target]

The upstream gradient is one number per token. The backward pass applies it to the small matrices, not to the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from logpast.kernels.matmul import matmul
from logpast.kernels.ops import operator

TILE = {"BLOCK": 4096, "num_warps": 16}  # measured on an H200
GROUP = tl.constexpr(8)  # neighbouring logits that one thread reads at once


def fits(hidden: Tensor) -> bool:
    """Whether the kernels support these hidden states."""
    return hidden.is_cuda and hidden.dtype != torch.float64


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss (N,) in nats of the targets (N,) with logits = hidden (N, d) @ weight (V, d)ᵀ; 0 for a target of -1."""
    loss, _ = torch.ops.logpast.linear_cross_entropy(hidden, weight, targets)
    return loss


@operator("cross_entropy")
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The same loss from logits, without a gradient: for scoring."""
    return _loss(logits, targets, gradient=False)


@cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)


@operator("linear_cross_entropy")
def _linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to the logits."""
    logits = matmul(hidden, weight)
    return _loss(logits, targets, gradient=True), logits


@_linear_cross_entropy.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    return loss, hidden.new_empty(hidden.shape[0], weight.shape[0])


def _loss(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """The loss of each row. With `gradient`, the logits are overwritten with their gradient."""
    rows, vocabulary = logits.shape
    torch._assert_async((targets < vocabulary).all())
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _kernel[rows,](logits.contiguous(), targets.contiguous(), loss, vocabulary, GRADIENT=gradient, **TILE)
    return loss


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, _ = inputs
    ctx.save_for_backward(hidden, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or PyTorch would allocate zeros of the logits' size


def _backward(ctx: Any, dloss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    hidden, weight, dlogits = ctx.saved_tensors
    if dloss is None:
        return None, None, None
    dloss = dloss.unsqueeze(1)
    return (
        ((dlogits @ weight) * dloss).to(hidden.dtype),
        dlogits.T @ (hidden * dloss).to(hidden.dtype),
        None,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


@triton.jit
def _kernel(logits, targets, loss, vocabulary, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One row of logits."""
    row = logits + tl.program_id(0).to(tl.int64) * vocabulary
    target = tl.load(targets + tl.program_id(0))
    scored = target >= 0
    target_logit = tl.load(row + target, mask=scored, other=0.0).to(tl.float32)
    group = tl.arange(0, BLOCK // GROUP)
    in_block = group[:, None] * GROUP + tl.arange(0, GROUP)
    group_max = tl.full((BLOCK // GROUP,), -float("inf"), tl.float32)
    group_sum = tl.zeros((BLOCK // GROUP,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + in_block
        x = tl.load(row + column, mask=column < vocabulary, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        new_max = tl.maximum(group_max, tl.max(x, axis=1))
        finite_max = tl.where(new_max > -float("inf"), new_max, 0.0)  # for groups without a logit so far
        group_sum = group_sum * tl.exp(group_max - finite_max) + tl.sum(tl.exp(x - finite_max[:, None]), axis=1)
        group_max = new_max
    row_max = tl.max(group_max, axis=0)
    lse = row_max + tl.log(tl.sum(group_sum * tl.exp(group_max - row_max), axis=0))
    tl.store(loss + tl.program_id(0), tl.where(scored, lse - target_logit, 0.0))
    if GRADIENT:
        last = (vocabulary - 1) // BLOCK * BLOCK
        for start in range(0, vocabulary, BLOCK):  # backwards: the block read last is still in the cache
            column = last - start + in_block
            x = tl.load(row + column, mask=column < vocabulary, other=-float("inf"), eviction_policy="evict_first")
            grad = tl.exp(x.to(tl.float32) - lse) - tl.where(column == target, 1.0, 0.0)
            grad = tl.where(scored, grad, 0.0).to(logits.dtype.element_ty)
            tl.store(row + column, grad, mask=column < vocabulary, eviction_policy="evict_first")
