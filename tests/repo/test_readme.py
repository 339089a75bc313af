"""README.md: short, and it shows the commands that matter."""

import re

from markdown_pages import ROOT, commands

README = ROOT / "README.md"


def test_readme_has_at_most_900_words() -> None:
    visible = re.sub(r"<!--.*?-->", "", README.read_text(), flags=re.S)
    assert len(visible.split()) <= 900


def test_readme_shows_five_commands() -> None:
    assert [words[0] for words in commands(README)] == ["data", "train", "eval", "generate", "attach"]


def test_readme_names_make_demo_and_make_test() -> None:
    assert [words[0] for words in commands(README, "make")] == ["demo", "test"]
