"""History -> slots. `LogMemory` is the module people import; it chooses a path and says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from logpast.filters import FilterBank
from logpast.memory import bag, naive, support

Path = Literal["auto", "naive", "bag", "support"]

__all__ = ["LogMemory"]


class LogMemory(nn.Module):
    """A log-compressed past in `bank.slots` vectors, to be put before the recent tokens of any sequence model.

        memory = LogMemory(dim=768, bank=FilterBank(slots=53, sharpness=100))
        slots = memory(embeddings)                     # (B, T, 768) -> (B, 53, 768)
        slots = memory.from_ids(ids, table.weight)     # (B, T) -> the same, without a (B, T, 768) tensor

    Slots come oldest first. The bank is rebuilt in full precision wherever the module goes and is not stored in
    its state_dict, which holds the LayerNorm's gain and bias alone.

    Args:
        dim: width of the embeddings.
        bank: the filters.
        norm: one LayerNorm over the slots, as in the paper; False gives the bare sums.
        path: `auto` takes the fast path (`bag` for ids, `support` for embeddings); `naive` is the definition.
        eps: the LayerNorm's epsilon.
    """

    filters: Tensor
    kept: Tensor

    def __init__(self, dim: int, bank: FilterBank, norm: bool = True, path: Path = "auto", eps: float = 1e-5) -> None:
        super().__init__()
        if path not in ("auto", "naive", "bag", "support"):
            raise ValueError(f"path must be auto, naive, bag or support, got {path!r}")
        self.bank = bank
        self.path = path
        self.norm = nn.LayerNorm(dim, eps=eps) if norm else nn.Identity()
        self.register_buffer("filters", torch.empty(0, dtype=torch.get_default_dtype()), persistent=False)
        self.register_buffer("kept", torch.empty(0, dtype=torch.int64), persistent=False)
        self._lay_out()

    def forward(self, embeddings: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Slots from the embeddings (B, T, d) before a position, in the order of the text.

        Of more than `bank.horizon` embeddings the last are used. `lengths` (B,) says how many of each row's last
        embeddings are real; what lies before counts as missing, that is, as zero vectors.
        """
        embeddings = self._within_horizon(embeddings)
        if lengths is not None:
            embeddings = embeddings * self._real(embeddings, lengths).unsqueeze(-1)
        with _full_precision(embeddings.device):
            if self.path == "naive":
                slots = naive.compress(self.filters, embeddings)
            else:
                slots = support.compress(self.filters, embeddings, self._groups)
        return self.norm(slots)

    def from_ids(self, ids: Tensor, table: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Slots from token ids (B, T) and their embedding table (V, d). A negative id is a missing token."""
        ids = self._within_horizon(ids).long()
        if lengths is not None:
            ids = ids.masked_fill(~self._real(ids, lengths), -1)
        with _full_precision(table.device):
            if self.path == "naive":
                slots = naive.compress_ids(self.filters, ids, table)
            elif self.path == "support":
                slots = support.compress(self.filters, naive.embed(table, ids), self._groups)
            else:
                slots = bag.compress_ids(self.filters, ids, table, self.kept)
        return self.norm(slots)

    def _within_horizon(self, history: Tensor) -> Tensor:
        return history[:, max(0, history.shape[1] - self.bank.horizon) :]

    @staticmethod
    def _real(history: Tensor, lengths: Tensor) -> Tensor:
        from_the_end = torch.arange(history.shape[1], 0, -1, device=history.device)
        return from_the_end <= lengths.unsqueeze(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._lay_out()
        return result

    def _lay_out(self) -> None:
        """Build the bank anew on the module's device: a cast to bf16 must not round the filters."""
        device, dtype = self.filters.device, naive.accumulation_dtype(self.filters.dtype)
        in_time_order = torch.from_numpy(self.bank.weights[::-1, ::-1].copy())
        tolerance = torch.finfo(dtype).eps
        self._groups = support.groups(self.bank, tolerance)
        self.kept = bag.entries(in_time_order, tolerance).to(device)
        self.filters = in_time_order.to(dtype).to(device)  # a device need not know float64

    def extra_repr(self) -> str:
        return f"{self.bank}, horizon={self.bank.horizon}, path={self.path!r}"


def _full_precision(device: torch.device) -> torch.autocast:
    """Autocast would round the filters to bf16 on their way into the products; the memory is cheap without it."""
    return torch.autocast(device.type, enabled=False)
