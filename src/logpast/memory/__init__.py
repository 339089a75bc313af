"""`LogMemory`: a long history compressed into a few slots. It picks one of four implementations ("paths")."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from logpast.filters import FilterBank
from logpast.kernels.ops import HAS_TRITON
from logpast.memory import bag, naive, support
from logpast.util.precision import accumulation_dtype, full_precision, in_autocast

Lengths = Tensor | Sequence[int]  # pass a tensor to a compiled module: it is recompiled for each new list
Path = Literal["auto", "naive", "bag", "support", "fused"]
PATHS: dict[str, Any] = {"naive": naive, "bag": bag, "support": support}
if HAS_TRITON:
    from logpast.memory import fused

    PATHS["fused"] = fused

__all__ = ["LogMemory"]


class LogMemory(nn.Module):
    """A log-compressed past in `bank.slots` vectors, to prepend to the recent tokens of any sequence model.

        memory = LogMemory(dim=768, bank=FilterBank(slots=53, sharpness=100))
        slots = memory(embeddings)                     # (B, T, 768) -> (B, 53, 768)
        slots = memory.from_ids(ids, table.weight)     # (B, T) -> the same, without a (B, T, 768) tensor

    The oldest slot is first. The only parameters are the LayerNorm's gain and bias. The filters are computed from the
    bank, in full precision, when a device first needs them. They are neither parameters nor buffers, so nothing that
    casts, copies or loads the module can change them.

    Args:
        dim: width of the embeddings.
        bank: the filters.
        norm: one LayerNorm over the slots, as in the paper; False gives the plain sums.
        path: `auto` takes the fastest path: `support` for embeddings; for ids `fused` on a CUDA device with Triton,
            else `bag`. `naive` is the definition.
        eps: the LayerNorm's epsilon.
    """

    def __init__(self, dim: int, bank: FilterBank, norm: bool = True, path: Path = "auto", eps: float = 1e-5) -> None:
        super().__init__()
        if not isinstance(bank, FilterBank):
            raise ValueError(f"bank must be a FilterBank, such as FilterBank(slots=33, sharpness=100); got {bank!r}")
        if path not in get_args(Path):
            raise ValueError(f"path must be {', '.join(get_args(Path))}; got {path!r}")
        if path == "fused" and not HAS_TRITON:
            raise ValueError("path 'fused' needs Triton, which comes with PyTorch for CUDA on Linux; use 'auto'")
        self.bank = bank
        self.path = path
        self.norm = nn.LayerNorm(dim, eps=eps) if norm else nn.Identity()
        self._layouts: dict[tuple[str, torch.device, torch.dtype], Any] = {}
        self._name = repr(bank)
        dtype = accumulation_dtype(torch.get_default_dtype())
        too_small = bank.peaks[bank.weights.max(axis=1) < torch.finfo(dtype).tiny]
        if too_small.size:
            raise ValueError(
                f"the filter with its peak at {too_small[0]:.4g} (sharpness={bank.sharpness:g}) has no weight that "
                f"{dtype} can hold; use normalize='area' or a smaller sharpness"
            )

    def forward(self, embeddings: Tensor, lengths: Lengths | None = None) -> Tensor:
        """Slots from the embeddings (B, T, d) before a position, in the order of the text.

        If T > `bank.horizon`, only the last `bank.horizon` are used. `lengths` (B,) is the number of real embeddings in
        each row, which stand at its end. The padding before them counts as zero vectors.
        """
        embeddings = self._within_horizon(embeddings, "batch", "tokens", "width")
        if lengths is not None:
            embeddings = embeddings.masked_fill(~self._not_padding(embeddings, lengths).unsqueeze(-1), 0)
        with full_precision(embeddings.device):
            path = "naive" if self.path == "naive" else "support"
            slots = PATHS[path].compress(self._layout(path, embeddings), embeddings)
        return self.norm(slots)

    def from_ids(self, ids: Tensor, table: Tensor | nn.Embedding, lengths: Lengths | None = None) -> Tensor:
        """Slots from token ids (B, T) and their embedding table (V, d) or its module. A negative id is a missing token.

        `lengths` as in `forward`: the padding stands before the tokens.
        """
        table = table.weight if isinstance(table, nn.Embedding) else table
        ids = self._within_horizon(ids, "batch", "tokens")
        if ids.is_floating_point():
            raise ValueError(f"ids should be whole numbers, got {ids.dtype}; `forward` takes embeddings")
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.long()
        if lengths is not None:
            ids = ids.masked_fill(~self._not_padding(ids, lengths), -1)
        path = self.path_for(table) if ids.numel() else "naive"
        if path == "fused":
            if not table.is_cuda and not os.environ.get("TRITON_INTERPRET"):
                raise ValueError(f"path 'fused' runs on CUDA devices, and the table is on {table.device}; use 'auto'")
            if table.dtype not in fused.DTYPES:
                raise ValueError(f"path 'fused' is for 16- and 32-bit floats, not {table.dtype}; use 'auto'")
            table = in_autocast(table)  # as for any product; sums are in float32
        with full_precision(table.device):
            slots = PATHS[path].compress_ids(self._layout(path, table), ids, table)
        return self.norm(slots)

    def path_for(self, table: Tensor) -> Path:
        """The path that `from_ids` takes with this table."""
        if self.path != "auto":
            return self.path
        return "fused" if HAS_TRITON and table.is_cuda and table.dtype in fused.DTYPES else "bag"

    def _within_horizon(self, history: Tensor, *axes: str) -> Tensor:
        if history.ndim != len(axes):
            raise ValueError(f"the history should be ({', '.join(axes)}), got a tensor of shape {tuple(history.shape)}")
        return history[:, max(0, history.shape[1] - self.bank.horizon) :]

    @staticmethod
    def _not_padding(history: Tensor, lengths: Lengths) -> Tensor:
        """(B, T): whether a position is among the last `lengths` of its row."""
        counts = torch.as_tensor(lengths, device=history.device)
        floating = counts.is_floating_point() and len(counts) > 0  # an empty list becomes float32
        if counts.shape != history.shape[:1] or counts.dtype == torch.bool or floating:
            got = f"{counts.dtype} of shape {tuple(counts.shape)}"
            raise ValueError(f"lengths should be a whole number for each of {len(history)} histories, got {got}")
        from_the_end = torch.arange(history.shape[1], 0, -1, device=history.device)
        return from_the_end <= counts.unsqueeze(1)

    def _layout(self, path: str, values: Tensor) -> Any:
        """The filters as a path needs them for these values."""
        if torch.compiler.is_compiling():
            import logpast.memory.compiled  # noqa: F401  while a module is compiled: it makes the result a constant
        return self._make_layout(path, self._name, values.device, accumulation_dtype(values.dtype))

    def _make_layout(self, path: str, bank: str, device: torch.device, dtype: torch.dtype) -> Any:
        """Made once. To a compiled module it is a constant, which the name of the bank keeps from other modules."""
        if (path, device, dtype) not in self._layouts:
            # in a thread of its own: this one may be in inference mode, inside torch.func or have fake tensors, and
            # tensors that are made there cannot be used elsewhere
            with ThreadPoolExecutor(1) as thread:
                made = thread.submit(PATHS[path].make_layout, self.bank, device, dtype).result()
            self._layouts[path, device, dtype] = made
        return self._layouts[path, device, dtype]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_layouts": {}}  # a copy may be loaded on another device

    def extra_repr(self) -> str:
        return f"{self.bank}, horizon={self.bank.horizon}, path={self.path!r}"
