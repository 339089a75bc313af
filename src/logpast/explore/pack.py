"""The explorer's data as text in a page: an index for JSON, and columns of numbers in base64 of compressed binary.

A column is little-endian and gzip-compressed. Its kind is u1, u2 or u4 for unsigned integers, f2 for half precision.
Columns of several values per token have the first value of all tokens first, which compresses better.
"""

from __future__ import annotations

import base64
import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from logpast.explore.compute import Array, Details, Text, bank_of
from logpast.explore.pieces import make_pieces, visible
from logpast.models import LanguageModel, Recurrent, Transformer

SMALLEST = 0.003  # of a filter's largest weight: smaller ones are left out


class Column(NamedTuple):
    """Numbers of one kind, ready for the page."""

    kind: str
    content: str

    @classmethod
    def of(cls, values: NDArray[Any], kind: str) -> Column:
        packed = np.ascontiguousarray(np.asarray(values).T).astype(f"<{kind}").tobytes()
        return cls(kind, base64.b64encode(gzip.compress(packed, 9, mtime=0)).decode())


def unsigned(values: NDArray[Any]) -> Column:
    """A column of the smallest unsigned type."""
    largest = int(values.max(initial=0))
    return Column.of(values, next(kind for kind in ("u1", "u2", "u4") if largest < 256 ** int(kind[1])))


def pack(
    model: LanguageModel, text: Text, scores: dict[str, Array], details: Details
) -> tuple[dict[str, Any], dict[str, Column]]:
    """What the page's scripts read: an index, and columns by name."""
    documents, form = text.store.documents, model.config.recall_form
    shown = np.flatnonzero((documents.start < text.tokens) & (documents.tokens > 0))
    starts = documents.start[shown]
    sources = {name: each for name, each in (("own", details.own), ("mixed", details.mixed)) if each}
    others = np.concatenate([each.ids.ravel() for each in sources.values()])
    pieces = make_pieces(text.store.tokens[: text.tokens], starts, text.store.load_tokenizer(), others)
    series = [name for name in scores if name != "weights"]
    columns = {"place": unsigned(pieces.place), "detailed": unsigned(details.tokens)}
    columns |= {f"loss {name}": Column.of(scores[name], "f2") for name in series}
    if form:
        columns["weights"] = Column.of(scores["weights"], "f2")
    for name, each in sources.items():
        columns[f"{name}-pieces"] = unsigned(pieces.of_tokens(each.ids))
        columns[f"{name}-probabilities"] = Column.of(each.probabilities, "f2")
    slots, slot_columns = _pack_slots(model, details.attention)
    columns |= slot_columns
    return {
        "text": visible(Path(text.store.name).name),
        "tokens": text.tokens,
        "all": len(text.store),
        "documents": [[int(documents.start[i]), visible(documents.names[i])] for i in shown],
        "streams": starts.tolist() if text.streams == "document" else [0],
        "pieces": {"id": pieces.ids, "text": pieces.text, "label": pieces.label},
        "series": series,
        "means": {name: float(scores[name].mean()) for name in series},
        "memory": "state" if isinstance(model, Recurrent) else "memory",
        "recall": form and {"reach": form.reach, "orders": form.orders, "edges": form.edges},
        "slots": slots,
        "details": len(details.tokens),
        "types": {name: column.kind for name, column in columns.items()},
    }, columns


def _pack_slots(model: LanguageModel, attention: Array | None) -> tuple[dict[str, Any] | None, dict[str, Column]]:
    """Where each slot looks, nearest first: the lags of its filter, without small weights, and the weights."""
    if attention is None or not isinstance(model, Transformer):
        return None, {}
    bank, tokens = bank_of(model), model.config.slots
    weights, peaks = (bank.weights, bank.peaks) if bank else (np.eye(tokens), np.arange(1.0, tokens + 1))
    spans = [np.flatnonzero(row > SMALLEST * row.max())[[0, -1]] for row in weights]
    rows = [row[first : last + 1] / row.max() for row, (first, last) in zip(weights, spans, strict=True)]
    about = {"peaks": peaks.tolist(), "spans": [(span + 1).tolist() for span in spans]}
    columns = {"filters": Column.of(np.concatenate(rows), "f2"), "attention": Column.of(attention, "f2")}
    return about, columns
