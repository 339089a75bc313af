"""Decides, in one place, when a kernel of ours replaces a standard layer.

Each function computes one part of a decoder: by a kernel where one is enabled and fits, else by plain PyTorch. Kernels
run in training on a CUDA device with Triton, in half precision. `LOGPAST_DISABLE_KERNELS=attention,gelu` (or `all`)
switches some of them off for a process, `disable(...)` for a block of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.kernels.ops import HAS_TRITON, disabled
from logpast.util.errors import UserError, suggest
from logpast.util.precision import accumulation_dtype, in_autocast

if HAS_TRITON:
    from logpast.kernels import attention, cross_entropy, gelu, layer_norm
    from logpast.kernels.linear import linear

KERNELS = ("attention", "layer_norm", "gelu", "matmul", "cross_entropy")


@contextmanager
def disable(*kernels: str) -> Iterator[None]:
    """Use plain PyTorch in place of these kernels. A compiled model keeps what it was compiled with."""
    for name in kernels:
        if name not in KERNELS:
            raise UserError(f"unknown kernel {name!r}; {suggest(name, list(KERNELS))}")
    added = set(kernels) - disabled
    disabled.update(added)
    try:
        yield
    finally:
        disabled.difference_update(added)


def self_attention(x: Tensor, projection: nn.Linear, heads: int) -> Tensor:
    """Causal self-attention (B, T, d) of x (B, T, d), whose queries, keys and values `projection` makes."""
    x = in_autocast(x)
    if _replaceable("attention", projection) and attention.fits(x, heads):
        return attention.attend(linear(x, projection.weight, projection.bias), projection.bias, heads)
    query, key, value = split_heads(projection(x), heads)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def split_heads(projected: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, each (B, heads, T, d per head), from their joint projection (B, T, 3 d)."""
    return projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """GPT-2's GELU (the tanh form) of layer(x)."""
    x = in_autocast(x)
    if _replaceable("gelu", layer) and gelu.fits(x, layer.out_features):
        return gelu.gelu(linear(x, layer.weight), layer.bias)
    return F.gelu(layer(x), approximate="tanh")


def add_linear_norm(x: Tensor, layer: nn.Linear, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The residual sum x + layer(branch), and the LayerNorm of it."""
    branch = in_autocast(branch)
    if _replaceable("layer_norm", layer, norm) and x.dtype == branch.dtype and layer_norm.fits(x):
        return layer_norm.add_norm(x, linear(branch, layer.weight), layer.bias, norm.weight, norm.bias, norm.eps)
    x = x + layer(branch)
    return x, norm(x)


SCORED_AT_ONCE = 2048  # tokens whose logits are held at a time when there is no gradient to keep


def token_losses(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """−ln p (N,) of the targets (N,) with logits = hidden (N, d) @ table (V, d)ᵀ; 0 where the target is -1."""
    kernel = HAS_TRITON and "cross_entropy" not in disabled and hidden.is_cuda and hidden.dtype != torch.float64
    if kernel and torch.is_grad_enabled():
        hidden = in_autocast(hidden)
        return cross_entropy.linear_cross_entropy(hidden, table.to(hidden.dtype), targets)
    size = len(hidden) if torch.is_grad_enabled() else SCORED_AT_ONCE
    loss = cross_entropy.cross_entropy if kernel else _cross_entropy
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([loss(F.linear(some, table), wanted) for some, wanted in parts])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), targets, ignore_index=-1, reduction="none")


def _replaceable(kernel: str, *layers: nn.Module) -> bool:
    """Whether a kernel may stand in for these layers: in training, unless hooks or subclasses changed what they do."""
    if not HAS_TRITON or kernel in disabled or torch.version.hip or not torch.is_grad_enabled():
        return False
    return all(
        type(layer) in (nn.Linear, nn.LayerNorm)
        and layer.bias is not None
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        for layer in layers
    )


def _disabled_by_environment() -> list[str]:
    names = [name.strip() for name in os.environ.get("LOGPAST_DISABLE_KERNELS", "").split(",") if name.strip()]
    return list(KERNELS) if names == ["all"] else names


disable(*_disabled_by_environment()).__enter__()
