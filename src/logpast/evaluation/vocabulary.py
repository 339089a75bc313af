"""Tokens that the training text never has, and the documents without many of them ("in-vocabulary" documents).

What a model predicts after a token that it has never seen is largely chance. In a test text with a few such documents
that chance can outweigh what models differ in, so results are also reported for in-vocabulary documents alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from logpast.data.store import TokenStore

UNSEEN = 0.01  # largest share of tokens that training never had, in an in-vocabulary document


def occurrences(store: TokenStore) -> NDArray[np.int64]:
    """How often each id of the vocabulary occurs in a text."""
    counts, piece = np.zeros(store.tokenizer.size, np.int64), 1 << 24  # bincount makes 64-bit numbers of what it reads
    for first in range(0, len(store), piece):
        counts += np.bincount(store.tokens[first : first + piece], minlength=len(counts))
    return counts


def unseen(train: TokenStore, test: TokenStore) -> NDArray[np.int64]:
    """The number of tokens of each document of `test` that never occur in `train`."""
    never = occurrences(train) == 0
    first, last = test.documents.start, test.documents.start + test.documents.tokens
    return np.array([never[test.tokens[a:b]].sum() for a, b in zip(first, last, strict=True)], dtype=np.int64)
