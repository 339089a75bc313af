"""README.md: short, and its examples run."""

import re

import pytest

from logpast.cli import main
from markdown_pages import ROOT, code_blocks, commands

README = ROOT / "README.md"


def test_readme_has_at_most_900_words() -> None:
    visible = re.sub(r"<!--.*?-->", "", README.read_text(), flags=re.S)
    assert len(visible.split()) <= 900


@pytest.mark.parametrize("code", code_blocks(README, "python"))
def test_python_example_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_readme_shows_five_commands() -> None:
    assert [words[0] for words in commands(README)] == ["data", "train", "eval", "generate", "attach"]


@pytest.mark.parametrize("words", commands(README), ids=" ".join)
def test_command_has_the_options_that_are_shown(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0


def test_readme_names_make_demo_and_make_test() -> None:
    assert [words[0] for words in commands(README, "make")] == ["demo", "test"]
