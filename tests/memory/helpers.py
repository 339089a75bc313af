"""Banks, error bounds and a reference that the tests of all memory paths share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func

from logpast.filters import FilterBank
from logpast.memory import LogMemory

# largest error of a slot relative to its largest value, and of the gradient to its largest
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

BANKS = [
    FilterBank(slots=1, sharpness=5),
    FilterBank(slots=5),
    FilterBank(slots=30, sharpness=200),
    FilterBank(slots=26, sharpness=20, kernel="isith", reach=3, normalize="area"),
    FilterBank(slots=13, sharpness=40, spacing=0.5, first_peak=2.5, kernel="binned", normalize="peak"),
]


# arguments of the functions below: two batches of histories (2, B, T) and two tables (2, V, 3)
HISTORIES = torch.tensor([[[1, 2, -1, 4], [0, 0, 3, 1]], [[4, 4, 4, -1], [2, 3, 0, 1]]])
TABLES = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _cubes(memory: LogMemory, ids: Tensor, table: Tensor) -> Tensor:
    """The memory is linear; the derivatives of this are not constant."""
    return memory.from_ids(ids, table).pow(3).sum()


TRANSFORMS: dict[str, Callable[[LogMemory, Tensor, Tensor], Any]] = {
    "jvp": lambda m, i, t: func.jvp(lambda x: m.from_ids(i[0], x), (t[0],), (t[1],)),
    "jvp of embeddings": lambda m, i, t: func.jvp(m, (t,), (t.flip(0),)),
    "grad": lambda m, i, t: func.grad(lambda x: _cubes(m, i[0], x))(t[0]),
    "grad of embeddings": lambda m, i, t: func.grad(lambda x: m(x).pow(3).sum())(t),
    "hessian": lambda m, i, t: func.hessian(lambda x: _cubes(m, i[0], x))(t[0]),
    "jacrev": lambda m, i, t: func.jacrev(lambda x: m.from_ids(i[0], x))(t[0]),
    "jacfwd": lambda m, i, t: func.jacfwd(lambda x: m.from_ids(i[0], x))(t[0]),
    "vmap over tables": lambda m, i, t: func.vmap(lambda x: m.from_ids(i[0], x), 2, 1)(t.movedim(0, 2)),
    "vmap over ids": lambda m, i, t: func.vmap(lambda x: m.from_ids(x, t[0]))(i),
    "vmap over ids and tables": lambda m, i, t: func.vmap(m.from_ids)(i, t),
    "vmap over lengths": lambda m, i, t: func.vmap(lambda x: m.from_ids(i[0], t[0], x))(i[:, :, 0]),
    "vmap over embeddings": lambda m, i, t: func.vmap(m)(torch.stack([t, t.flip(0)])),
    "gradient of each history": lambda m, i, t: func.vmap(func.grad(lambda x, y: _cubes(m, y, x)), (None, 0))(t[0], i),
}


def bank_id(bank: FilterBank) -> str:
    return f"L{bank.slots}-{bank.kernel}"


def relative_error(ours: Tensor, exact: Tensor, bank: FilterBank | None = None) -> float:
    """The largest error relative to the largest value; with a bank, relative to each slot's own largest value."""
    ours, exact = ours.detach().double(), exact.detach().double()
    scale = exact.abs().max().clamp(min=1e-30)
    if bank is not None:  # or the error of a filter with small weights would go unnoticed
        largest_weight = torch.from_numpy(bank.weights.max(axis=1)[::-1].copy()).unsqueeze(1)
        scale = torch.maximum(largest_weight, exact.abs().amax(dim=-1, keepdim=True))
    return float(((ours - exact).abs() / scale).max())


def memory_of(bank: FilterBank, path: str, dtype: torch.dtype, width: int = 6) -> LogMemory:
    return LogMemory(width, bank, norm=False, path=path).to(dtype)  # type: ignore[arg-type]


def saved_for_backward(compute: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that autograd saves while `compute` runs."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return saved
