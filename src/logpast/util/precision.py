"""Which floating-point type a computation runs in."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums run in float64 for float64 and in float32 for everything narrower, whatever the path."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_autocast(x: Tensor) -> Tensor:
    """In the type that products have under autocast, where that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def full_precision(device: torch.device) -> torch.autocast:
    """Keeps autocast out: filters rounded to bf16 on their way into a product would be other filters."""
    return torch.autocast(device.type, enabled=False)
