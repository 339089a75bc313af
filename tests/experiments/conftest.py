"""Pictures, looked at before they are written, and a ledger to stand beside the paper's Table A1."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from paper_rows import row

from logpast.experiments.ledger import append


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **how: found.append(figure))
    return found


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    for slots, sharpness, seed, ppl in (
        (5, None, 0, 40.0),
        (5, None, 1, 41.0),
        (53, None, 0, 39.0),
        (5, 100, 0, 38.0),
        (53, 200, 0, 37.0),
    ):
        append(folder / "sweep.jsonl", row(slots, sharpness, seed, ppl))
    return folder
