"""The memory as the paper defines it; every other path is tested against this one.

All paths use the same layout. `filters` is the (L, M) bank in the order of time: row 0 is the oldest slot and the last
column is lag 1. So its columns match the tokens of a history, which runs forward in time, too.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from logpast.filters import FilterBank
from logpast.util.precision import accumulation_dtype

# The other paths leave out weights below this share of their filter's largest. A float's own precision would not do:
# if the past is shorter than a filter's peak lag, only small weights are in sight, and the LayerNorm magnifies them.
NEGLIGIBLE = 1e-20


def in_time_order(bank: FilterBank) -> NDArray[np.float64]:
    """(L, M): the bank's weights, oldest slot and largest lag first."""
    return bank.weights[::-1, ::-1].copy()


def make_layout(bank: FilterBank, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same as a tensor."""
    return torch.from_numpy(in_time_order(bank)).to(dtype).to(device)  # some devices have no float64


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of the table (V, d) for ids of any shape; a negative id means "no token here" and gives a zero vector."""
    return embedding(ids.clamp(min=0), table) * (ids >= 0).unsqueeze(-1)


def compress(filters: Tensor, history: Tensor) -> Tensor:
    """Slot τ* is Σ_t Φ(t, τ*) · e(p − t): the sum of the embeddings before position p, weighted by their lag t.

    Args:
        filters: (L, M), in the order of time.
        history: (B, T, d), the T ≤ M embeddings before p; earlier ones count as zero vectors.

    Returns:
        (B, L, d), oldest slot first.
    """
    dtype = accumulation_dtype(history.dtype)
    filters = filters[:, filters.shape[1] - history.shape[1] :].to(dtype)
    return torch.einsum("lt,btd->bld", filters, history.to(dtype)).to(history.dtype)


def compress_ids(filters: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """The same from token ids (B, T) and their embedding table (V, d)."""
    return compress(filters, embed(table, ids))
