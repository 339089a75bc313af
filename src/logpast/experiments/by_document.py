"""What rows of the ledger tell of single documents."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNSEEN = 0.01  # of a document's tokens: above this share, it is not familiar


class Documents(NamedTuple):
    """Of what was scored, document by document; rows of earlier versions do not tell."""

    tokens: NDArray[np.int64]
    familiar: NDArray[np.bool_]
    """those with next to no tokens that the training text never has. How a model reads on after what it has never seen
    is chance, and in a few documents can outweigh what it has learned."""

    @property
    def tell_apart(self) -> bool:
        """Whether some are familiar and some are not."""
        return 1 < self.familiar.sum() < len(self.tokens)


def documents(rows: list[dict[str, Any]]) -> Documents:
    told = [row["scores"]["by_document"] for row in rows if "by_document" in row["scores"]]
    tokens = np.array(told[0]["tokens"] if told else [], dtype=np.int64)
    unseen = next((np.array(each["unseen"]) for each in told if "unseen" in each), np.zeros_like(tokens))
    return Documents(tokens, unseen <= UNSEEN * tokens)


def nats(group: list[dict[str, Any]]) -> dict[int, NDArray[np.float64]]:
    """seed -> of each document, where a row tells them."""
    return {row["seed"]: np.array(d["nats"]) for row in group if (d := row["scores"].get("by_document"))}
