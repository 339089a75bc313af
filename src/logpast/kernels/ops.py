"""Registers operators with PyTorch, so that torch.compile treats them as opaque."""

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
disabled: set[str] = set()  # names of kernels that are switched off; set by dispatch


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as the operator logpast::name.

    It runs on the device of its first argument, a tensor, and with autocast off.
    """

    def make(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def run(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first), full_precision(first.device):
                return function(first, *others)

        return torch.library.custom_op(f"logpast::{name}", run, mutates_args=())

    return make
