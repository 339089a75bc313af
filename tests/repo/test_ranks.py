"""benchmarks/ranks.py: several processes against one, in double precision."""

from pathlib import Path

import pytest
from benchmarks.ranks import SYSTEMS, measure


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [("logpast", 4), ("torchrun", 2)])
def test_several_processes_equal_one(launcher: str, ranks: int, tmp_path: Path) -> None:
    for row in measure(tmp_path, {launcher: (ranks,)}, list(SYSTEMS)):
        assert row["loss"] < 1e-10, row
        assert row["score"] < 1e-12, row
        assert row["weight"] < 1e-10, row
        assert row["held"] == pytest.approx(1 / ranks if row["strategy"] == "fsdp" else 1, abs=0.01), row
