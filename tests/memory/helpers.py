"""Banks, error bounds and a reference that the tests of all memory paths share."""

from collections.abc import Callable

import torch
from torch import Tensor

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
