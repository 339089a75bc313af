"""A small share of the odd inputs of `make fuzz`, always the same."""

from pathlib import Path

import pytest

from fuzz.harness import run
from fuzz.targets import TARGETS

SHARE = 40  # inputs of each target


@pytest.mark.parametrize("name", TARGETS)
def test_odd_inputs_are_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = run(TARGETS[name](tmp_path), SHARE)
    assert counts.accepted
    assert counts.refused
    assert counts.inputs >= SHARE
