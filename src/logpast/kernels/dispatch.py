"""Decides, in one place, when a kernel replaces a standard layer.

Each function computes one part of a decoder: with a kernel if it is enabled and fits, otherwise with plain PyTorch. The
kernels (`KERNELS`) are for training on a CUDA device with Triton, most of them in half precision; `cross_entropy` is
also used for scoring. Two switches turn them off, for debugging and for benchmarks:

    LOGPAST_DISABLE_KERNELS=attention,gelu             for a process
    with dispatch.disable("attention", "gelu"): ...    for a block of code

The name `all` stands for all kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.matmul import linear
from logpast.kernels.ops import HAS_TRITON, disabled
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype, in_autocast

if HAS_TRITON:
    from logpast.kernels import attention, cross_entropy, gelu, layer_norm

KERNELS = ("attention", "layer_norm", "gelu", "matmul", "cross_entropy")
VARIABLE = "LOGPAST_DISABLE_KERNELS"


@contextmanager
def disable(*kernels: str) -> Iterator[None]:
    """Use plain PyTorch instead of these kernels. A compiled model keeps the kernels it was compiled with."""
    added = _select(kernels) - disabled
    disabled.update(added)
    try:
        yield
    finally:
        disabled.difference_update(added)


def _select(names: Sequence[str], source: str = "") -> set[str]:
    """The kernels with these names; `all` stands for all of them."""
    known = (*KERNELS, "all")
    for name in names:
        if name not in known:
            raise UserError(f"unknown kernel {name!r}{source}; known: {', '.join(known)}")
    return set(KERNELS) if "all" in names else set(names)


def _disabled_by_environment() -> set[str]:
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    return _select(names, f" in {VARIABLE}")


disabled.update(_disabled_by_environment())


def self_attention(x: Tensor, projection: nn.Linear, heads: int) -> Tensor:
    """Causal self-attention (B, T, d) of x (B, T, d); `projection` computes queries, keys and values."""
    x = in_autocast(x)
    if _replaceable("attention", projection) and attention.fits(x, heads):
        return attention.attend(linear(x, projection.weight, projection.bias), projection.bias, heads)
    query, key, value = split_heads(projection(x), heads)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def split_heads(projected: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, each (B, heads, T, d per head), from their joint projection (B, T, 3 d)."""
    return projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """GPT-2's GELU (the tanh approximation) of layer(x)."""
    x = in_autocast(x)
    if _replaceable("gelu", layer) and gelu.fits(x, layer.out_features):
        return gelu.gelu(linear(x, layer.weight), layer.bias)
    return F.gelu(layer(x), approximate="tanh")


def add_linear_norm(x: Tensor, layer: nn.Linear, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The residual sum x + layer(branch), and its LayerNorm."""
    branch = in_autocast(branch)
    if _replaceable("layer_norm", layer, norm) and x.dtype == branch.dtype and layer_norm.fits(x):
        return layer_norm.add_norm(x, linear(branch, layer.weight), layer.bias, norm.weight, norm.bias, norm.eps)
    x = x + layer(branch)
    return x, norm(x)


TOKENS_AT_ONCE = 2048  # whose logits exist at the same time when there is no gradient


def token_losses(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """−ln p (N,) of the targets (N,) with logits = hidden (N, d) @ table (V, d)ᵀ; 0 where the target is -1."""
    kernel = HAS_TRITON and "cross_entropy" not in disabled and cross_entropy.fits(hidden)
    if kernel and torch.is_grad_enabled():
        hidden = in_autocast(hidden)
        return cross_entropy.linear_cross_entropy(hidden, table.to(hidden.dtype), targets)
    size = len(hidden) if torch.is_grad_enabled() else TOKENS_AT_ONCE
    loss = cross_entropy.cross_entropy if kernel else _cross_entropy
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([loss(F.linear(some, table), wanted) for some, wanted in parts])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), targets, ignore_index=-1, reduction="none")


def _replaceable(kernel: str, *layers: nn.Module) -> bool:
    """Whether a kernel may replace these layers: only in training, and only layers without hooks or subclassing."""
    if not HAS_TRITON or kernel in disabled or torch.version.hip or not torch.is_grad_enabled():
        return False
    return all(
        type(layer) in (nn.Linear, nn.LayerNorm)
        and layer.bias is not None
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        for layer in layers
    )
