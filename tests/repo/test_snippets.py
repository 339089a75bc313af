"""Every command and Python example on the pages is run by a test, or listed here with the reason why not."""

import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pytest

from logpast.cli import main
from markdown_pages import PAGES, ROOT, snippets
from models.hf.tiny import save_tiny

#: what a command begins with -> why no test runs it as it stands there
NOT_RUN = {
    "make ": "targets of the Makefile; the workflow runs them",
    "python3 -m venv": "installation; the workflow does the same",
    "source .venv": "installation",
    "pip install": "installation; needs a network",
    "logpast data prepare wikitext103": "needs WikiText-103",
    "logpast eval --checkpoint runs/mine --data wikitext103:test": "needs WikiText-103",
    "logpast train --config paper-wikitext103": "days on a GPU",
    "logpast compare rivals-toy": "minutes; tests/comparison runs a smaller one",
    "logpast compare rivals-small": "hours on a GPU",
    "logpast sweep sweep-small": "hours on a GPU",
    "logpast sweep sweep-paper --address": "needs a Ray cluster",
    "logpast demo": "minutes; tests/demo and the test of the wheel run it with fewer steps",
    "python -m logpast.lm_eval": "tests/test_lm_eval.py runs it where lm-eval is installed",
    "logpast serve": "runs until it is stopped; test_docs.py runs the examples of its own page",
    "curl ": "tests/serving sends such requests",
    "logpast attach --model SmolLM2": "needs SmolLM2 and PG-19",
    "logpast generate --checkpoint attached/gates": "needs SmolLM2 and PG-19",
    "logpast explore runs/demo": "needs the demo's models, minutes of training; tests/explore runs the command",
}
#: pages whose examples are run by tests that look at the results, too
ELSEWHERE = {
    "docs/own-text.md": ("repo/test_docs.py", "test_commands_of_own_text_run"),
    "docs/attach.md": ("repo/test_docs.py", "test_examples_of_attaching_run"),
    "docs/streaming.md": ("repo/test_docs.py", "test_examples_of_streaming_run"),
    "docs/serving.md": ("repo/test_docs.py", "test_examples_of_serving_run"),
}
WALKED = (
    *("README.md", "docs/commands.md", "docs/explore.md", "docs/huggingface.md", "docs/paper.md", "docs/python.md"),
    "results/README.md",
)
QUICK = ("README.md", "docs/python.md")
TRAIN = ["--batch_size=4", "--accelerator=cpu"]
TINY = ["--model.layers=1", "--model.width=16"]  # a model that starts from another has its sizes
#: what the reader of a page has already done
BEFORE = [
    "logpast data prepare mybooks/ --out data/mine --tokenizer bpe-300",
    "logpast train --config small-cpu --data.train data/mine --data.validation other.txt --run runs/mine",
    "logpast train --config small-cpu --data.train data/mine --model recent --run runs/control",
    "logpast eval --checkpoint runs/mine --data unseen.txt --record results/mine.jsonl",
    "logpast attach --model path/to/model --data mytext/train --out attached/mine",
]
#: further options that make a command quick
SMALLER = {
    "attach": ["--window=16", "--steps=2", "--device=cpu"],
    "generate": ["--tokens=5", "--device=cpu"],
    "eval": ["--device=cpu"],
    "explore": ["--device=cpu"],
}


@pytest.fixture
def workshop(tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the pages speak of."""
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    for folder in ("mybooks", "mytext/train", "mytext/validation", "mytext/test"):
        shutil.copytree(books, tmp_path / folder)
    for name in ("other", "validation", "test", "unseen", "new", "book", "chapter"):
        (tmp_path / f"{name}.txt").write_text((books / "0.txt").read_text() * 20)
    for name in ("model", "llama"):
        (tmp_path / "path/to" / name).mkdir(parents=True)
        save_tiny(tmp_path / "path/to" / name, [(books / "0.txt").read_text()])
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "results").mkdir()
    for path in [*(ROOT / "results").glob("*.json*"), ROOT / "results" / "logs"]:
        (tmp_path / "results" / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reason(line: str) -> str | None:
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


def smaller(words: list[str]) -> list[str]:
    """A command at toy size."""
    words = [re.sub(r"^bpe-\d+$", "bpe-300", word) for word in words]
    if words[0] == "train":
        steps = "--steps=6" if "--steps" in words else "--steps=3"  # more steps extend a run
        return [*words, steps, *TRAIN, *([] if "--init_from" in words else TINY)]
    return words + SMALLER.get(words[0], [])


def walk(page: str) -> Iterator[str]:
    """Run what is on a page, in order; what was run."""
    for language, block in snippets(ROOT / page):
        if language == "python":
            exec(compile(block, page, "exec"), {})
            yield block
        for line in block.splitlines() if language != "python" else []:
            if reason(line) is None and line.startswith("logpast"):
                run(line)
                yield line


def run(line: str) -> None:
    words = shlex.split(line.replace("$'\\n'", "'\n'"), comments=True)[1:]
    words = [each for word in words for each in sorted(glob(word)) or [word]]  # as a shell does
    made = {"train": "--run", "export": "--out"}.get(words[0], "")
    if made in words and "--resume" not in words:  # pages show several ways to make the same folder
        shutil.rmtree(words[words.index(made) + 1], ignore_errors=True)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"And God\n"), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(smaller(words))
    assert not stop.value.code, words


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in WALKED]
)
def test_page_runs(page: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader would type it, at toy size."""
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    for line in BEFORE if page in ("docs/explore.md", "docs/huggingface.md") else []:
        run(line)
    assert list(walk(page))


def test_every_snippet_is_run_or_listed() -> None:
    tested = {*WALKED, *ELSEWHERE}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for language, block in snippets(page):
            if language == "python":
                assert name in tested, f"{name} has Python that no test runs: {block[:60]}"
            for line in block.splitlines() if language == "sh" else []:
                assert reason(line) or (name in tested and re.match(r"logpast |python -m logpast", line)), (name, line)
            for line in re.findall(r"^(?:logpast|make|pip|python) .*", block, re.M) if not language else []:
                assert reason(line) or name in tested, (name, line)


def test_languages_of_code_blocks_are_known() -> None:
    assert {language for page in PAGES for language, _ in snippets(page)} == {"", "sh", "python", "yaml"}


@pytest.mark.parametrize("start", NOT_RUN)
def test_reason_is_needed(start: str) -> None:
    lines = [line for page in PAGES for _, block in snippets(page) for line in block.splitlines()]
    assert any(line.startswith(start) for line in lines)


@pytest.mark.parametrize(("page", "where"), ELSEWHERE.items())
def test_page_is_run_elsewhere(page: str, where: tuple[str, str]) -> None:
    file, name = where
    code = (ROOT / "tests" / file).read_text()
    assert f"def {name}(" in code
    assert page.rpartition("/")[2] in code
