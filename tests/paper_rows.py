"""Rows that belong beside the paper's tables."""

import math
from typing import Any

from logpast.filters import PAPER_SPACING

BANK = {"spacing": PAPER_SPACING, "first_peak": 1.0, "kernel": "paper", "normalize": "none", "reach": 1.0}


def row(slots: int, sharpness: int | None, seed: int, ppl: float, **changes: Any) -> dict[str, Any]:
    """As `ledger.row` makes them, with what is read here."""
    model: dict[str, Any] = {"system": "recent", "window": 256, "slots": slots}
    if sharpness:
        model |= {"system": "log_memory", "sharpness": sharpness, **BANK}
    model |= changes.pop("model", {})
    length = {"steps": 2991, "epochs": None, "batch_size": 64} | changes.pop("length", {})
    made = {
        "run": "r", "trained_at_revision": "0" * 40, "recipe": {"model": model, "seed": seed} | length, "seed": seed,
        "parameters": 124_000_000, "train_tokens": 49_000_000, "train_data": {"name": "wiki22k:train"},
        "test_data": {"name": "wikitext103:test", "tokens": 286_221},
        "scores": {"accounting": "all", "ppl_token": ppl, "ppl_word": 2 * ppl, "bits_per_byte": 1.0},
    }  # fmt: skip
    return made | changes


def with_documents(made: dict[str, Any], nats: list[float]) -> dict[str, Any]:
    """Its perplexity becomes what they add up to."""
    documents = {"nats": nats, "tokens": [100, 100, 200], "unseen": [2, 1, 2]}  # 2 % of the first
    summed = {} if None in nats else {"ppl_token": math.exp(sum(nats) / 400)}
    return made | {"scores": made["scores"] | {"by_document": documents} | summed}
