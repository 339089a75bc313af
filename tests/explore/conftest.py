"""Tiny models of several systems, a text that is hard to show, and its page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.explore.explore import explore
from logpast.models import LogMemoryConfig, ModelConfig, RecentConfig, TransformerXLConfig
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train

SIZES = {"window": 8, "layers": 2, "heads": 2, "width": 16}
RECALL = {"recall": 64, "recall_orders": 3, "recall_bins": 2}
MODELS: dict[str, ModelConfig] = {
    "both": LogMemoryConfig(slots=17, sharpness=20, normalize="area", **RECALL, **SIZES),
    "memory": LogMemoryConfig(slots=17, sharpness=20, **SIZES),
    "control": RecentConfig(slots=5, **SIZES),
    "recall": RecentConfig(slots=5, recall=32, recall_input=False, **SIZES),
    "xl recall": TransformerXLConfig(memory=8, recall_input=False, **RECALL, **SIZES),
}
#: what a page could take for markup, what reorders or hides text, and characters of several bytes
STRANGE = (
    "<script>alert(1)</script> </script><!-- & &amp; \"quotes\" 'single' {{ braces }} \\ \n"
    "\u202ereversed\u202c \x00\x07\x1b[31m \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f600 \U0001f469\u200d\U0001f680 \u732b \u00e9\ttab\n\n"
)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, books: Path) -> TokenStore:
    """Three documents: strange text, a book, the strange text again. The tokens are pieces of characters."""
    folder = tmp_path_factory.mktemp("strange")
    (folder / "a.txt").write_text(STRANGE * 3)
    (folder / "b.txt").write_text((books / "2.txt").read_text()[:1500])
    (folder / "c.txt").write_text(STRANGE)
    out = tmp_path_factory.mktemp("store") / "strange"
    (training,) = prepare([str(books)], out.with_name("books"), tokenizer="bpe-300", workers=1)
    (made,) = prepare([str(folder)], out, tokenizer=str(training.path), workers=1)
    return made


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict[str, Path]:
    """One run per system, trained for a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model in MODELS.items():
        data = DataConfig(train=str(store.path), streams="document")
        optimizer = OptimizerConfig(1e-2, 1e-3, warmup_steps=2)
        train(TrainConfig(run=folder / name, data=data, model=model, steps=10, batch_size=8, optimizer=optimizer,
                          accelerator="cpu", tensorboard=False))  # fmt: skip
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="session")
def page(runs: dict[str, Path], store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with memory and recall, with a control. Most tokens have details."""
    out = tmp_path_factory.mktemp("page") / "text.html"
    return explore(runs["both"], str(store.path), runs["control"], out, details=400, device="cpu")


def index_of(page: Path) -> dict[str, Any]:
    """The index of a page."""
    found = re.search(r'id="index">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)
    assert found
    content: dict[str, Any] = json.loads(found[1])
    return content
