"""What rows of the ledger tell of single documents. Rows of earlier versions tell nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from logpast.metrics import paired_difference

UNSEEN = 0.01  # of a document's tokens: above this share, it is not familiar

Seeds = Mapping[int, Mapping[str, Any]]  # seed -> the scores of a row


class Documents(NamedTuple):
    tokens: NDArray[np.int64]
    familiar: NDArray[np.bool_]
    """those with next to no tokens that the training text never has. How a model reads on after what it has never seen
    is chance, and in a few documents can outweigh what it has learned."""

    @property
    def tell_apart(self) -> bool:
        """Whether some are familiar and some are not."""
        return bool(1 < self.familiar.sum() < len(self.tokens))


def documents(*systems: Seeds) -> Documents:
    """Of one test text, scored by any of these."""
    told = [scores["by_document"] for seeds in systems for scores in seeds.values() if "by_document" in scores]
    tokens = np.array(told[0]["tokens"] if told else [], dtype=np.int64)
    unseen = next((np.array(each["unseen"]) for each in told if "unseen" in each), np.zeros_like(tokens))
    return Documents(tokens, unseen <= UNSEEN * tokens)


def familiar_perplexity(seeds: Seeds, of: Documents) -> dict[int, float]:
    """seed -> perplexity per token over the familiar documents, where a row tells it."""
    total = of.tokens[of.familiar].sum()
    return {seed: math.exp(nats[of.familiar].sum() / total) for seed, nats in _nats(seeds).items()}


def against(ours: Seeds, theirs: Seeds, of: Documents, familiar: bool = False) -> tuple[str, list[int]] | None:
    """Ours − theirs in nats per token, the mean over seeds that both have, with its 95 % over documents; these seeds.

    None if there is nothing to set side by side.
    """
    both = _nats(ours), _nats(theirs)
    seeds = [seed for seed in both[0] if seed in both[1]]
    if not seeds:
        return None
    chosen = of.familiar if familiar else np.ones_like(of.familiar)
    one, other = (np.mean([nats[seed][chosen] for seed in seeds], axis=0) for nats in both)
    found = paired_difference(one, other, of.tokens[chosen])
    low, high = found["interval"]
    return f"{found['nats_per_token']:+.4f} [{low:+.4f}, {high:+.4f}]", seeds


def _nats(seeds: Seeds) -> dict[int, NDArray[np.float64]]:
    return {seed: np.array(told["nats"]) for seed, scores in seeds.items() if (told := scores.get("by_document"))}
