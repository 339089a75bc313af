"""What the README shows is run."""

import re
import shlex
from pathlib import Path

import pytest

from logpast.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S))
def test_python_examples_run(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_commands_have_the_options_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for help, a command looks at its words, and does no more."""
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(line, comments=True) for line in README.splitlines() if line.startswith("logpast ")]
    assert len(commands) == 12
    for _, *words in commands:
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])


def test_recipes_and_targets_exist() -> None:
    for recipe in re.findall(r"recipes/[\w-]+\.yaml", README):
        assert (ROOT / recipe).is_file(), recipe
    targets = re.findall(r"^make (\w+)", README, re.M)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)


def _off_test_every_room() -> None:
    for path in (ROOT / "src" / "logpast").iterdir():
        if not path.name.startswith(("_", "version", "py.typed")):
            assert path.name.removesuffix(".py") in README, path.name
