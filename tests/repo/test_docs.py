"""docs/own-text.md, typed in as it stands, at toy size."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from logpast.cli import main

ROOT = Path(__file__).parents[2]


def test_own_text_page(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation", "test"):
        shutil.copytree(books, tmp_path / "mytext" / split)
    page = (ROOT / "docs" / "own-text.md").read_text()
    commands = [
        shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", page, re.S) for line in block.splitlines()
    ]
    assert len(commands) == 8
    smaller = ["--steps=3", "--batch_size=4", "--model.layers=1", "--model.width=16", "--accelerator=cpu"]
    for program, verb, *words in commands:
        assert program == "logpast"
        words = ["bpe-300" if word == "bpe-2048" else word for word in words]
        with pytest.raises(SystemExit) as stop:
            main([verb, *words, *(smaller if verb == "train" else [])])
        assert not stop.value.code, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "ppl_word" in out
    assert "against runs/control" in out
    assert "Once upon a time" in out
