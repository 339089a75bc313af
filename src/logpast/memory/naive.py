"""The memory as the paper defines it; every other path is tested against this one.

All paths use the same layout. `filters` is the (L, M) bank in the order of time: row 0 is the oldest slot and the last
column is lag 1. So its columns match the tokens of a history, which runs forward in time, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from logpast.util.precision import accumulation_dtype


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
