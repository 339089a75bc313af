"""Which floating-point type a computation uses."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_autocast(x: Tensor) -> Tensor:
    """x in autocast's type where autocast is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def full_precision(device: torch.device) -> torch.autocast:
    """A context with autocast off: it would round filters to bf16 before a product."""
    return torch.autocast(device.type, enabled=False)
