"""Tiny models of several systems, and a finished analysis of one of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from logpast.analysis.analyze import analyze
from logpast.cli import main
from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.models import LogMemoryConfig, ModelConfig, RecentConfig, TransformerXLConfig
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train

SIZES = {"window": 8, "layers": 1, "heads": 2, "width": 16}
MODELS: dict[str, ModelConfig] = {
    "memory": LogMemoryConfig(slots=17, sharpness=20, **SIZES),
    "control": RecentConfig(slots=5, **SIZES),
    "plain": RecentConfig(slots=0, **SIZES),
    "xl": TransformerXLConfig(memory=8, **SIZES),
    "recall": RecentConfig(slots=5, recall=32, recall_orders=2, recall_bins=2, **SIZES),
    "xl recall": TransformerXLConfig(memory=8, recall=32, recall_orders=1, recall_bins=2, **SIZES),
}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, books: Path) -> TokenStore:
    """Enough documents for intervals, also within the first 205 tokens: pieces of a book, and whole books."""
    folder = tmp_path_factory.mktemp("pieces")
    words = (books / "2.txt").read_text().split()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(" ".join(words[6 * number : 6 * number + 5 + number % 2]))
    for number in range(2):
        shutil.copy(books / f"{number}.txt", folder / f"whole-{number}.txt")
    (made,) = prepare([str(folder)], tmp_path_factory.mktemp("store") / "pieces", tokenizer="bpe-300", workers=1)
    return made


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict[str, Path]:
    """One run per system, trained for a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model in MODELS.items():
        train(TrainConfig(
            run=folder / name, data=DataConfig(train=str(store.path)), model=model, steps=20, batch_size=8,
            optimizer=OptimizerConfig(1e-2, 1e-3, warmup_steps=2), accelerator="cpu", tensorboard=False,
        ))  # fmt: skip
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="session")
def done(runs: dict[str, Path], store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished analysis of the memory model, with its control."""
    out = tmp_path_factory.mktemp("done") / "analysis"
    analyze(runs["memory"], str(store.path), runs["control"], out, limit=205, finest=4, device="cpu")
    return out


@pytest.fixture(scope="session")
def done_control(runs: dict[str, Path], store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished analysis of the control."""
    out = tmp_path_factory.mktemp("done_control") / "analysis"
    analyze(runs["control"], str(store.path), out=out, limit=205, finest=4, device="cpu")
    return out


@pytest.fixture(scope="session")
def done_recall(runs: dict[str, Path], store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished analysis of a model with recall, with a control that has none."""
    out = tmp_path_factory.mktemp("done_recall") / "analysis"
    analyze(runs["recall"], str(store.path), runs["control"], out, limit=205, finest=1, device="cpu")
    return out


@pytest.fixture
def result(done: Path) -> dict[str, Any]:
    """The content of a finished analysis.json."""
    content: dict[str, Any] = json.loads((done / "analysis.json").read_text())
    return content


@pytest.fixture
def result_recall(done_recall: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((done_recall / "analysis.json").read_text())
    return content


@pytest.fixture
def nats(done: Path) -> dict[str, np.ndarray]:
    return load_file(done / "nats.safetensors")


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without images, which take longer than a tiny analysis: for tests that do not look at them."""
    monkeypatch.setattr("logpast.reporting.html.render", lambda figure: b"")


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`logpast analyze` with these arguments must fail with one line: that line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["analyze", *map(str, words)])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("logpast: ")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def approximately() -> Callable[[Any], Any]:
    """A nested value whose numbers are compared up to the precision of float32."""

    def wrap(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: wrap(part) for name, part in value.items()}
        if isinstance(value, list):
            return [wrap(part) for part in value]
        return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value

    return wrap
