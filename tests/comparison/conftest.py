"""A comparison that takes seconds."""

from pathlib import Path

import pytest
import yaml


@pytest.fixture
def recipe(tmp_path: Path, books: Path) -> Path:
    """The YAML file of a comparison of three systems."""
    values = {
        "train": str(books), "validation": str(books), "test": str(books), "tokenizer": "bpe-300",
        "tokens": 600, "seconds": 0.5, "tokens_per_step": 100, "learning_rates": [1e-3, 1e-2], "search_tokens": 300,
        "model": {"window": 8, "layers": 1, "heads": 2, "width": 16},
        "systems": {
            "memory": {"system": "log_memory", "slots": 9},
            "full": {"system": "recent", "slots": 0, "window": 24},
            "xl": {"system": "transformer_xl", "memory": 8, "memory_when_scoring": 12, "segments": 2},
        },
    }  # fmt: skip
    file = tmp_path / "rivals.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file
