"""Whether a text that a model is scored or validated on is part of its training text."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from logpast.data.corpora import splits_overlap
from logpast.data.store import TokenStore


def training_overlap(text: TokenStore, trained_on: dict[str, Any], train: TokenStore | None = None) -> str | None:
    """What a text has in common with the training text, in words; None if nothing is known.

    Args:
        text: the text to score, with the model's tokenizer.
        trained_on: identity of the training text, as a checkpoint and a ledger row record it.
        train: the training text, if it is available; otherwise only identical texts and splits of known corpora are
            recognised.
    """
    if text.sha256 == trained_on.get("sha256"):
        return "it is the training text"
    if train is not None:
        shared, number = shared_documents(text, train), len(text.documents)
        part = f"all its documents ({number:,})" if shared == number else f"{shared:,} of its {number:,} documents"
        return f"{part} are in the training text" if shared else None
    name = str(trained_on.get("name"))
    return f"it has documents of the training text, {name}" if splits_overlap(text.name, name) else None


def shared_documents(text: TokenStore, train: TokenStore) -> int:
    """How many documents of a text are also documents of the training text, token for token."""
    sizes = set(text.documents.tokens.tolist()) & set(train.documents.tokens.tolist()) - {0}  # only these are hashed
    known = set(_hashes(train, sizes))
    return sum(each in known for each in _hashes(text, sizes))


def _hashes(store: TokenStore, sizes: set[int]) -> Iterator[bytes]:
    for start, size in zip(store.documents.start.tolist(), store.documents.tokens.tolist(), strict=True):
        if size in sizes:
            yield hashlib.sha256(store.tokens[start : start + size].tobytes()).digest()


def warn(text: TokenStore, overlap: str, consequence: str) -> None:
    """Print one line to standard error."""
    print(f"logpast: warning: {text.name} is not unseen text: {overlap}; {consequence}", file=sys.stderr)
