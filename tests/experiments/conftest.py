"""Pictures, looked at before they are written."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **how: found.append(figure))
    return found
