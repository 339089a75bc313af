"""benchmarks/explore.py: its table, and a whole book."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import explore as benchmark

from logpast.explore.explore import explore
from logpast.models import LogMemoryConfig
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from markdown_pages import ROOT


def page_of(text: Path, folder: Path, tokenizer: str, model: LogMemoryConfig) -> Path:
    """The page of a text and of a model that was trained on it for one step."""
    train(TrainConfig(
        run=folder / "run", data=DataConfig(train=str(text), tokenizer=tokenizer), model=model, steps=1, batch_size=1,
        optimizer=OptimizerConfig(1e-3, 1e-4, warmup_steps=1), accelerator="cpu", tensorboard=False,
    ))  # fmt: skip
    return explore(folder / "run", str(text), out=folder / "page.html", device="cpu")


def test_row_has_size_and_times(tmp_path: Path, browser: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"and the number {n} was before the number {n + 1}; " for n in range(300)))
    model = LogMemoryConfig(slots=9, window=16, layers=1, heads=1, width=8, recall=64)
    page = page_of(text, tmp_path, "bpe-300", model)
    row = benchmark.measure_page(browser, page, repeats=1, frames=20)
    assert row["name"] == "text.txt"
    assert row["tokens"] == row["details"] > 3000
    assert row["megabytes"] == round(page.stat().st_size / 1e6, 2)
    assert 0 < row["paint"] <= row["ready"]
    assert 0 < row["text"] < row["ready"] < 60
    assert row["scripting"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("browser")  # or it is skipped
def test_book_of_200000_tokens(tmp_path: Path, data_root: Path) -> None:
    """At most 30 MB; it can be read at once and scrolls smoothly."""
    model = LogMemoryConfig(slots=53, window=128, layers=1, heads=2, width=32, normalize="area", recall=8192)
    page = page_of(data_root / "pg19" / "test" / "28988.txt", tmp_path, "bpe-4096", model)
    words = ["benchmarks/explore.py", str(page), "--repeats", "3", "--out", str(tmp_path / "table.json")]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": "src"}, check=True)
    row = json.loads((tmp_path / "table.json").read_text())
    assert len(row["revision"]) >= 40
    assert row["tokens"] > 190_000
    assert row["details"] == 20_000
    assert row["megabytes"] < 30
    assert row["text"] < 5
    assert row["scripting"] < 8  # of the 16 that a frame has
