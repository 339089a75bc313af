"""Rows of the ledger for tests: the smallest that are valid."""

from typing import Any


def scored_row(**changes: Any) -> dict[str, Any]:
    """A row of a scored run; `changes` replace or add fields."""
    row = {
        "run": "r",
        "trained_at_revision": "0" * 40,
        "recipe": {"model": {"system": "recent"}},
        "seed": 0,
        "parameters": 9,
        "train_tokens": 9,
        "train_data": {"name": "a", "sha256": "1"},
        "test_data": {"name": "b", "sha256": "2"},
        "scores": {"ppl_token": 20.0, "ppl_word": 30.0, "bits_per_byte": 1.5},
    }
    return row | changes
