"""In-vocabulary documents: at most 1 % of a document's tokens never occur in the training text.

What a model predicts after a token that it has never seen is largely chance. In a test text with a few such documents,
chance can outweigh the difference between models, so results are also reported over in-vocabulary documents only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from logpast.data.store import TokenStore

UNSEEN = 0.01  # largest share of unseen tokens in an in-vocabulary document


def occurrences(store: TokenStore) -> NDArray[np.int64]:
    """How often each id occurs in a text: (vocabulary,)."""
    counts, piece = np.zeros(store.tokenizer.size, np.int64), 1 << 24  # in pieces: bincount copies to 64 bits
    for first in range(0, len(store), piece):
        counts += np.bincount(store.tokens[first : first + piece], minlength=len(counts))
    return counts


def unseen(train: TokenStore, test: TokenStore) -> NDArray[np.int64]:
    """For each document of `test`, the number of its tokens that never occur in `train`."""
    never = occurrences(train) == 0
    first, last = test.documents.start, test.documents.start + test.documents.tokens
    return np.array([never[test.tokens[a:b]].sum() for a, b in zip(first, last, strict=True)], dtype=np.int64)
