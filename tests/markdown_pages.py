"""The Markdown pages of the repository, and what is in them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*.md")),
]


def snippets(page: Path) -> list[tuple[str, str]]:
    """Language and text of all fenced code blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M)


def code_blocks(page: Path, language: str | None = None) -> list[str]:
    """Fenced code blocks, of one language or all."""
    return [block for found, block in snippets(page) if language in (None, found)]


def prose(page: Path) -> str:
    """The text without fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def commands(page: Path, program: str = "logpast") -> list[list[str]]:
    """The arguments of every command line of a program in a page's code blocks."""
    lines = [line for block in code_blocks(page) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(f"{program} ") or line == program]


def inline_commands(page: Path) -> list[list[str]]:
    """The same for commands in sentences, up to an ellipsis; `logpast COMMAND` is not one."""
    found = re.findall(r"`logpast ([^`]+)`", prose(page))
    return [shlex.split(words.partition("…")[0]) for words in found if not words.startswith("COMMAND")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def links(page: Path) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
