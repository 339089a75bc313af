"""Registers our operators with PyTorch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from logpast.util.precision import full_precision

HAS_TRITON = importlib.util.find_spec("triton") is not None
disabled: set[str] = set()  # kernels that are switched off: see dispatch.disable


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as the operator logpast::name, which torch.compile treats as opaque.

    Its body runs on the device of its first argument (a tensor) and with autocast off.
    """

    def make(body: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(body)
        def run(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first), full_precision(first.device):
                return body(first, *others)

        return torch.library.custom_op(f"logpast::{name}", run, mutates_args=())

    return make
