"""`make pages`: every figure on our pages comes from results/, and stays what it is there.

A page holds `<!-- results: NAME -->…<!-- end -->`; what stands between is what the view NAME makes of the files. A view
is one of views.VIEWS, or FILE:PLACE:FORMAT for a single value of a table: train_gpu:data.tokens:, is 19,752,673, and
rivals-pg19:delta.ppl_token:.1f is 89.7.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from logpast.ledger import row as ledger
from logpast.util.errors import UserError, suggest
from logpast.util.files import atomic_write
from logpast.util.serialization import flatten
from tools.views import VIEWS, read_table

BEGIN, END = "<!-- results: ", "<!-- end -->"
MARKED = re.compile(rf"{BEGIN}(?P<name>.+?) -->(?P<text>.*?){END}", re.S)


def pages(root: Path = Path("."), check: bool = False) -> list[Path]:
    """Bring the figures on README.md, docs/*.md and results/*.md up to date with the rows in results/.

    What is generated stands between the comments <!-- results: NAME --> and <!-- end -->; the rest is left alone.

    Args:
        root: the checkout.
        check: change nothing; exit with code 2 if a figure on a page is not the one in results/.

    Returns:
        The pages that were changed.
    """
    found = [page for pattern in ("README.md", "docs/**/*.md", "results/*.md") for page in sorted(root.glob(pattern))]
    if not found or not (root / "results").is_dir():
        raise UserError(f"{root} has no pages and results/; run this where the checkout is, or give --root")
    texts = {page: _text(page) for page in found}
    fresh = {page: fill(text, root / "results", str(page)) for page, text in texts.items()}
    changed = [page for page in found if fresh[page] != texts[page]]
    if check and changed:
        raise UserError(f"{_differences(changed[0], texts, fresh)}; `make pages` fixes it")
    for page in changed:
        atomic_write(page, fresh[page])
        print(f"brought up to date: {page}")
    count = sum(len(MARKED.findall(text)) for text in fresh.values())
    print(f"{count} places on {len(found)} pages are as results/ have them")
    return changed


def _text(page: Path) -> str:
    """Line breaks as they are."""
    with ledger.reading(f"{page} is not UTF-8", "save it as such"):
        return page.read_bytes().decode("utf-8")


def fill(text: str, results: Path, page: str) -> str:
    """A page with each marked place as its view has it; what differs in spaces alone is left as it is."""

    def replaced(mark: re.Match[str]) -> str:
        name, old = mark["name"], mark["text"]
        line = f"{page}, line {text.count(chr(10), 0, mark.start()) + 1}"
        if BEGIN in old:
            raise UserError(f"{line}: {name!r} has no {END}")
        alone = re.match(r"\r?\n", old)
        if not alone and text[: mark.start()].endswith("\n"):  # Markdown would end the paragraph here
            raise UserError(f"{line}: {name!r} begins a line; put a word of its sentence before it")
        new = view(name, results, line)
        if alone:
            same = [line.split() for line in old.strip().split("\n")] == [line.split() for line in new.split("\n")]
            new = f"\n{new}\n".replace("\n", alone[0])
        else:  # in a sentence, lines may be broken anywhere
            same = old.split() == new.split()
        return mark[0] if same else f"{BEGIN}{name} -->{new}{END}"

    if text.count(BEGIN) != text.count(END):
        raise UserError(f"{page}: {text.count(BEGIN)} places begin with {BEGIN}…, {text.count(END)} close with {END}")
    return MARKED.sub(replaced, text)


def _differences(page: Path, texts: dict[Path, str], fresh: dict[Path, str]) -> str:
    """The first place of a page that is not what results/ have, in a line."""
    marks = zip(MARKED.finditer(texts[page]), MARKED.finditer(fresh[page]), strict=True)
    old, new = next((old, new) for old, new in marks if old[0] != new[0])
    words = zip([*old["text"].split(), ""], [*new["text"].split(), ""], strict=False)
    one, other = next((pair for pair in words if pair[0] != pair[1]), ("", ""))
    return f"{page}: {old['name']!r} has {one!r} where results/ have {other!r}"


def view(name: str, results: Path, line: str) -> str:
    """What belongs between the marks of this name."""
    try:
        with ledger.reading(f"{name!r} cannot be made of what is in {results}", "mend the file"):
            return VIEWS[name](results) if name in VIEWS else _value(name, results)
    except FileNotFoundError as error:
        raise UserError(f"{line}: {name!r} needs {error.filename}, which is not there; bring it back") from None
    except UserError as error:
        raise UserError(f"{line}: {error}") from None


def _value(name: str, results: Path) -> str:
    """FILE:PLACE:FORMAT"""
    file, *rest = name.split(":", 2)
    if len(rest) != 2:
        raise UserError(f"unknown view {name!r}; {suggest(name, list(VIEWS))}")
    place, form = rest
    values = flatten(read_table(results, file))
    if place not in values:
        raise UserError(f"{file} has no {place!r}; {suggest(place, list(values))}")
    try:
        return format(values[place], form)
    except (TypeError, ValueError) as error:
        raise UserError(f"{values[place]!r} cannot be written as {form!r}: {error}; change the mark {name!r}") from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=pages.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs from results/")
    try:
        pages(check=parser.parse_args().check)
    except UserError as error:
        sys.exit(f"pages: {error}")
