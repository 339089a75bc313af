"""How our operators are made known to PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from logpast.memory.naive import full_precision


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function the operator logpast::name, which torch.compile leaves whole.

    Its body runs on the device of its first argument, a tensor, and outside autocast, whoever calls it from where.
    """

    def make(body: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(body)
        def run(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first), full_precision(first.device):
                return body(first, *others)

        return torch.library.custom_op(f"logpast::{name}", run, mutates_args=())

    return make
