"""All pages: commands parse, links resolve. Guides are followed, their results looked at; the rest: test_snippets."""

import io
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from logpast.cli import main
from logpast.training.config import TrainConfig
from logpast.training.loop import train
from markdown_pages import PAGES, ROOT, anchors, code_blocks, commands, inline_commands, links
from models.hf.tiny import save_tiny
from serving.helpers import while_serving

SMALL = ["--steps=3", "--batch_size=4", "--model.layers=1", "--model.width=16", "--accelerator=cpu"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_commands_of_own_text_run(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a reader would type them, at toy size."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation", "test"):
        shutil.copytree(books, tmp_path / "mytext" / split)
    typed = commands(ROOT / "docs" / "own-text.md")
    assert [words[0] for words in typed] == ["data", "data", "data", "train", "eval", "train", "eval", "generate"]
    for words in typed:
        small = ["bpe-300" if word == "bpe-2048" else word for word in words] + (SMALL if words[0] == "train" else [])
        with pytest.raises(SystemExit) as stop:
            main(small)
        assert not stop.value.code, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "ppl_word" in out
    assert "against runs/control" in out
    assert "Once upon a time" in out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_have_the_options_that_are_shown(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page) + inline_commands(page):
        end = len(words) - words[-1].startswith("--")  # a sentence may name an option without its value
        with pytest.raises(SystemExit) as stop:
            main([*words[:end], "--help", *words[end:]])
        assert stop.value.code == 0, f"{words}: {capsys.readouterr().err}"


def test_commands_are_found_on_the_pages() -> None:
    assert len(commands(ROOT / "docs" / "commands.md")) > 30
    assert len([words for page in PAGES for words in inline_commands(page)]) > 20


def test_examples_of_attaching_run(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a reader would type them, with a tiny model and text."""
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for split in ("train", "validation"):
        shutil.copytree(books, tmp_path / "mytext" / split)
    (tmp_path / "path/to/model").mkdir(parents=True)
    save_tiny(tmp_path / "path/to/model", [(books / "0.txt").read_text()])
    page = ROOT / "docs" / "attach.md"
    typed, code = commands(page), code_blocks(page, "python")
    assert (len(typed), len(code)) == (2, 5)
    for words in typed:
        with pytest.raises(SystemExit) as stop:
            main([*words, "--window=16", "--steps=2", "--device=cpu"])
        assert not stop.value.code, capsys.readouterr().err
    for number, block in enumerate(code):
        exec(compile(block, f"docs/attach.md, example {number}", "exec"), {})


def test_examples_of_streaming_run(
    tmp_path: Path,
    books: Path,
    train_config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a reader would type them, with tiny models and a short book."""
    pytest.importorskip("transformers")
    from logpast.models.hf.attach import attach_memory, load_model

    monkeypatch.chdir(tmp_path)
    shutil.copy(books / "0.txt", "book.txt")
    train(replace(train_config, run=Path("runs/mine"), steps=2))
    (tmp_path / "path/to/model").mkdir(parents=True)
    save_tiny(tmp_path / "path/to/model", [(books / "0.txt").read_text()])
    attach_memory(load_model("path/to/model"), window=16, recall=100).save_pretrained("attached/mine")
    page = ROOT / "docs" / "streaming.md"
    typed, code = commands(page), code_blocks(page, "python")
    assert (len(typed), len(code)) == (6, 6)
    for words in typed:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"And God\n"), encoding="utf-8"))
        with pytest.raises(SystemExit) as stop:
            main([*words, "--tokens=9", "--device=cpu"])
        assert not stop.value.code, capsys.readouterr().err
    for number, block in enumerate(code):
        exec(compile(block, f"docs/streaming.md, example {number}", "exec"), {})


def test_examples_of_serving_run(
    tmp_path: Path,
    books: Path,
    train_config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each server is started as a reader would type it. The first one, and one that reads a book, get all requests."""
    for package in ("transformers", "openai", "uvicorn"):
        pytest.importorskip(package)
    from logpast.models.hf.attach import attach_memory, load_model

    monkeypatch.chdir(tmp_path)
    shutil.copy(books / "0.txt", "book.txt")
    train(replace(train_config, run=Path("runs/mine"), steps=2))
    (tmp_path / "path/to/model").mkdir(parents=True)
    save_tiny(tmp_path / "path/to/model", [(books / "0.txt").read_text()])
    attach_memory(load_model("path/to/model"), window=16, recall=100).save_pretrained("attached/mine")
    page = ROOT / "docs" / "serving.md"
    typed, code, curls = commands(page), code_blocks(page, "python"), commands(page, "curl")
    assert (len(typed), len(code), len(curls)) == (5, 2, 3)

    def ask(port: int) -> None:
        for words in curls if shutil.which("curl") else []:
            here = [word.replace("8000", str(port)) for word in words]
            subprocess.run(["curl", "--silent", "--fail", *here], capture_output=True, check=True)
        for number, block in enumerate(code):
            exec(compile(block.replace("8000", str(port)), f"docs/serving.md, example {number}", "exec"), {})

    for words in typed:
        if words[0] == "serve":
            while_serving(ask, *words[1:])
        else:
            with pytest.raises(SystemExit) as stop:
                main(words)
            assert not stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_links_are_found_on_the_pages() -> None:
    found = [link for page in PAGES for link in links(page)]
    assert len(found) > 100
    assert sum("#" in link for link in found) > 30
