"""Ledger rows for cells of the paper's tables."""

import math
from typing import Any

from logpast.filters import PAPER_SPACING

BANK = {"spacing": PAPER_SPACING, "first_peak": 1.0, "kernel": "paper", "normalize": "none", "reach": 1.0}
TRAIN = {"name": "wiki22k:train", "sha256": "a" * 64, "tokens": 92_000_000}
TEST = {"name": "wikitext103:test", "sha256": "b" * 64, "tokens": 286_221}


def row(slots: int, sharpness: int | None, seed: int, ppl: float, **changes: Any) -> dict[str, Any]:
    """A row like those of `ledger.row`, with the fields that are read here; without a sharpness, the control's."""
    model: dict[str, Any] = {"system": "recent", "window": 256, "slots": slots}
    if sharpness:
        model |= {"system": "log_memory", "sharpness": sharpness, **BANK}
    model |= changes.pop("model", {})
    length = {"steps": 2991, "epochs": None, "batch_size": 64} | changes.pop("length", {})
    made = {
        "run": "r",
        "trained_at_revision": "0" * 40,
        "recipe": {"model": model, "seed": seed} | length,
        "seed": seed,
        "parameters": 124_000_000,
        "train_tokens": 49_000_000,
        "train_data": TRAIN | changes.pop("train_data", {}),
        "test_data": TEST | changes.pop("test_data", {}),
        "scores": {"accounting": "all", "ppl_token": ppl, "ppl_word": 2 * ppl, "bits_per_byte": 1.0}
        | changes.pop("scores", {}),
    }
    return made | changes


def with_documents(made: dict[str, Any], nats: list[float | None]) -> dict[str, Any]:
    """The row with losses of three documents, two of them in-vocabulary; its perplexity becomes that of their sum."""
    documents = {"nats": nats, "tokens": [100, 100, 200], "unseen": [2, 1, 2]}  # 2 % of the first are unseen
    known = [each for each in nats if each is not None]
    total = {"ppl_token": math.exp(sum(known) / 400)} if len(known) == len(nats) else {}
    return made | {"scores": made["scores"] | {"by_document": documents} | total}
