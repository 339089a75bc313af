"""tools/windows.py: what recall gains, against how many tokens attention sees."""

import math
from pathlib import Path

import pytest
from tools import gap, windows

from logpast.ledger import row as ledger
from markdown_pages import ROOT

RESULTS = ROOT / "results"


def test_lines_are_differences_of_recorded_losses() -> None:
    report = gap.read(RESULTS / "pretrained_gap-pg19.json")
    losses = {gap.name(row): row["nats_per_token"] for row in report["rows"]}
    expected = {
        int(name.split("-")[1]): losses[name] - losses[f"{name} + recall"]
        for name in ("sliding-256", "sliding-512", "sliding-1024", "full-8192")
    }
    assert dict(windows.pretrained(report, "pg19:test")) == pytest.approx(expected)
    ppl = {
        row["sweep"]["cell"]: row["scores"]["ppl_token"] for row in ledger.read(RESULTS / "sweep-recall-rates.jsonl")
    }
    best = [
        min(math.log(value) for cell, value in ppl.items() if f"-256-{system}" in cell)
        for system in ("control", "recall")
    ]
    assert dict(windows.trained(RESULTS))[256] == pytest.approx(best[0] - best[1])


def test_plot_is_written(tmp_path: Path) -> None:
    windows.draw(RESULTS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
