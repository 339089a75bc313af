"""The Makefile: its targets are documented and exist, and what they run exists."""

import re
import shlex
import subprocess

import pytest

from logpast.cli import main
from markdown_pages import PAGES, ROOT, commands, prose

MAKEFILE = (ROOT / "Makefile").read_text()
HELP = re.findall(r'@echo "make (\S+)', MAKEFILE)


@pytest.mark.parametrize("target", HELP)
def test_target_of_make_help_exists(target: str) -> None:
    assert subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True).returncode == 0


def test_targets_named_on_pages_are_in_make_help() -> None:
    typed = {words[0] for page in PAGES for words in commands(page, "make")}
    named = {target for page in PAGES for target in re.findall(r"`make ([\w-]+)`", prose(page))}
    assert {"demo", "test", "pages"} <= typed | named <= set(HELP)


def test_logpast_commands_of_the_makefile_parse() -> None:
    typed = re.findall(r"\$\(BIN\)/logpast (.+)", MAKEFILE)
    assert len(typed) == 4
    for words in typed:
        with pytest.raises(SystemExit) as stop:
            main([*shlex.split(words), "--help"])
        assert stop.value.code == 0
