"""A ledger made of given rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logpast.ledger.row import append


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write rows to a ledger; returns its folder."""

    def save(*rows: dict[str, Any], folder: str = "rows") -> Path:
        for row in rows:
            append(tmp_path / folder / "saved.jsonl", row)
        return tmp_path / folder

    return save
