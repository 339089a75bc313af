"""The command `logpast demo` at toy size: both parts, failed trainings."""

import json
import math
import shutil
import subprocess
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import pytest

from logpast import cli
from logpast.data import TokenStore
from logpast.data.corpora import CORPORA, kjv_chapters
from logpast.demo import demo
from logpast.ledger import row as ledger
from logpast.training.checkpoint import sorted_checkpoints
from logpast.util.errors import UserError

QUICK = ["--steps=4", "--validate_every=2", "--checkpoint_every=2", "--log_every=1", "--accelerator=cpu"]
QUICK += ["--data.validation_tokens=500", "--model.layers=1", "--model.heads=2", "--model.width=16"]


class InThisProcess:
    """Runs a command in place of a process."""

    def __init__(self, words: list[str], stdout: TextIO, **how: Any) -> None:
        with redirect_stdout(stdout):
            self.code = cli.run(words[3:])  # after python -m logpast

    def poll(self) -> int:
        return self.code

    wait = terminate = poll


def test_both_parts_are_trained_scored_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At toy size: some chapters, short streams. The models of the text are trained in this process."""
    monkeypatch.setattr(demo, "STREAMS", {"train": (3, 500), "validation": (1, 300), "test": (1, 2000)})
    some = replace(CORPORA["kjv"], package=lambda split: islice(kjv_chapters(split), 12))
    monkeypatch.setitem(CORPORA, "kjv", some)
    popen = subprocess.Popen

    def inside(words: list[str]) -> bool:
        return "demo" in words and "--print_config" not in words

    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **how: (InThisProcess if inside(words) else popen)(words, **how)
    )
    out = tmp_path / "demo"
    results = demo.demo(out, record=tmp_path / "rows.jsonl", train_options=QUICK)
    assert results == json.loads((out / "report.json").read_text())
    page = (out / "report.html").read_text()
    assert page.count("<img") == 3
    assert "ppl_word" in page
    assert results["text"]["sample"].startswith("And it came to pass")
    assert len(ledger.read(tmp_path / "rows.jsonl")) == 5
    assert results["text"]["chapters"] == {"train": 12, "validation": 12, "test": 12}
    topics = results["topics"]
    assert topics["optimum_given_all"] < topics["optimum_given_recent"] < math.log(8)
    for name in ("control", "memory"):
        assert results["topics"][name]["tokens"] == 2000  # one letter per token
    for name in ("control", "memory", "recall"):
        assert results["text"][name]["unscored"] == 0
        assert results["text"][name]["train_seconds"] > 0
        assert ("against" in results["text"][name]) == (name != "control")
    with pytest.raises(UserError, match="exists already"):
        demo.demo(out)


def test_splits_hold_all_chapters_and_share_none() -> None:
    texts = {
        split: {title: b"".join(blocks).decode() for title, _, blocks in kjv_chapters(split)}
        for split in ("train", "validation", "test")
    }
    every = {title: text for split in texts.values() for title, text in split.items()}
    assert sum(map(len, texts.values())) == len(every) == 1189
    assert every["01001"].startswith("In the beginning God created the heaven and the earth.\n")
    assert every["01001"].count("\n") == 31


@pytest.fixture
def _small_text(monkeypatch: pytest.MonkeyPatch, store: TokenStore) -> None:
    def prepared(home: Path) -> dict[str, Any]:
        for split in ("train", "validation"):
            shutil.copytree(store.path, home / "data" / split)
        return {}

    monkeypatch.setattr(demo, "prepare_chapters", prepared)
    monkeypatch.setattr(demo, "_check_options", lambda part, options: None)


def test_misspelt_options_are_named_before_anything_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--train_options: .*--stepz; did you mean --steps"):
        demo.demo(tmp_path / "demo", train_options=["--batch_size=4 --stepz=5"])
    assert not (tmp_path / "demo").exists()


@pytest.mark.usefixtures("_small_text")
def test_when_one_training_fails_its_log_is_named_and_the_other_is_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.TEXT.systems, "control", ["--model=no-such-system"])
    with pytest.raises(UserError, match=r"control\.log"):
        demo.demo(tmp_path / "demo", only="text")  # the memory model would take minutes
    assert not sorted_checkpoints(tmp_path / "demo" / "text" / "memory")


@pytest.mark.parametrize(
    ("options", "steps"), [([], None), (["--steps=100"], 100), (["--log_every=1", "--steps", "7"], 7)]
)
def test_progress_counts_the_steps_that_are_asked_for(options: list[str], steps: int | None) -> None:
    assert demo._steps(options) == steps
