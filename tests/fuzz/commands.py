"""Command lines, in this process. None of them names a text to train on, so that no training starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.harness import Target
from fuzz.mutations import NUMBERS, TEXTS
from logpast.cli import COMMANDS, command_parser, main, train_parser

WORDS = [
    "--help", "-h", "--", "-", "--out", "--out=out", "--config", "small-cpu", "--config=no.yaml", "recipe.yaml",
    "--print_config", "--dry_run", "--dry-run=true", "--dry_run=maybe", "--model", "recent", "--model.width",
    "--model.slots=5", "--steps", "10", "--epochs=1", "--run", "run", "--data", "--data.train", "none.txt",
    "--checkpoint", "none", "--checkpoint=none/x", "--prompt", "--tokens", "--seed=-1", "--seed", "4294967296",
    "--temperature=nan", "--top_p", "2", "--stop", "[a, b]", "[", "--tokenizer", "bpe-300", "bpe-1", "gpt2",
    "text.txt", "empty.txt", "binary.bin", "rows.jsonl", "--plot", "plot.png", "plot.xyz", "--x", "--y", "--by",
    "seed", "system=recent", "seed=", "=", "--json", "--csv", "--folder", ".", "--jobs", "0", "--minutes", "1e300",
    "--device", "cpu", "cuda:9", "tpu", "--load_state", "--save_state", "--follow", "--workers", "--root",
    "--freeze", "--resume", "best", "--set", "true", "false", "null", "bash", "zsh", "--kernel",
    "paper",
]  # fmt: skip
NAMES = sorted(COMMANDS)
LETTERS = st.characters(exclude_characters="/~")  # no paths outside the folder
SLOW = ("demo", "compare", "attach")  # they would begin to work: always with an unknown option
FIGURES = ("filters", "paper fig1", "paper figA1", "paper results-figure")  # half a second each
COMMON = [name for name in NAMES if name not in (*SLOW, *FIGURES)]
LAST = {"train": "--data.train=none.txt", "sweep": "--dry_run"}  # the last option wins
NOT_HERE = ("/", "~", "wikitext103", "pg19", "kjv")  # a command may write there, or read for minutes
SAFE = [text for text in TEXTS if not text.startswith(NOT_HERE) and ".." not in text]


def command_lines(home: Path) -> Target:
    """Words of options, names and odd values, in any order; mostly options of the command."""
    odd = st.one_of(
        st.sampled_from(WORDS), st.sampled_from(SAFE), st.sampled_from(NUMBERS).map(_text), st.text(LETTERS, max_size=8)
    )
    any_words = st.one_of(st.sampled_from(WORDS), odd, st.tuples(st.sampled_from(WORDS), odd).map("=".join))
    own = {name: st.tuples(st.sampled_from(_options(name)), odd).map("=".join) for name in NAMES}
    names = st.one_of(st.sampled_from(COMMON), st.sampled_from(COMMON), st.sampled_from(NAMES))
    lines = names.flatmap(lambda name: st.tuples(st.just(name), st.lists(st.one_of(own[name], any_words), max_size=6)))
    inputs = st.tuples(st.one_of(lines, lines, st.tuples(odd, st.lists(any_words, max_size=6))), st.integers(0, 9))
    content = {
        "text.txt": b"Some words, and some words.\n" * 9,
        "empty.txt": b"",
        "binary.bin": bytes(range(256)),
        "recipe.yaml": b"model: {width: 16}\n",
        "rows.jsonl": b'{"a": 1}\n',
    }

    def place(value: Any) -> Callable[[], object]:
        (name, options), number = value
        for path in home.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for file, text in content.items():
            (home / file).write_bytes(text)
        words = [*name.split(), *map(_as_given, options)]
        if name in SLOW or (name in FIGURES and number):
            words.append("--unknown_option")
        if number == 9:
            words.append("--help")
        if words[:1] and words[0] in LAST:
            words.append(LAST[words[0]])
        return lambda: call(home, words)

    return Target(inputs, place, home, "logpast: ")


def _options(name: str) -> list[str]:
    """All options of a command but one that downloads."""
    parser = train_parser("log_memory") if name == "train" else command_parser(name)
    return sorted({*parser.known} - {"--help", "--init_from"}) or ["--help"]


def call(home: Path, words: list[str]) -> None:
    os.chdir(home)
    main(words)


def _as_given(word: str) -> str:
    """What Python makes of a word's bytes; no system passes a NUL on."""
    return os.fsdecode(word.replace("\0", "").encode("utf-8", "surrogatepass"))


def _text(number: float) -> str:
    return f"{number:.3g}" if isinstance(number, float) else str(number)
