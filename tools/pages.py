"""`make pages`: write the numbers of results/ into generated regions of README.md, docs/ and results/.

A region is `<!-- results: NAME -->…<!-- end -->`. NAME is a view of views.VIEWS, or FILE:PLACE:FORMAT for one value of
a table: train_gpu:data.tokens:, gives 19,752,673, and rivals-pg19:delta.ppl_token:.1f gives 89.7.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from logpast.util.errors import UserError, suggest
from logpast.util.files import atomic_write
from logpast.util.serialization import flatten
from tools.views import VIEWS, read_table

PAGES = ("README.md", "docs/**/*.md", "results/*.md")
BEGIN, END = "<!-- results: ", "<!-- end -->"
REGION = re.compile(rf"{BEGIN}(?P<name>.+?) -->(?P<text>.*?){END}", re.S)


def pages(root: Path = Path("."), check: bool = False) -> list[Path]:
    """Update the generated regions of all pages; the rest of a page is not changed.

    Args:
        root: the checkout.
        check: write nothing; raise UserError if a page differs from results/.

    Returns:
        The pages that were changed.
    """
    found = find_pages(root)
    if not found or not (root / "results").is_dir():
        raise UserError(f"{root} has no pages or no results/; run this in the checkout")
    old = {page: _read(page) for page in found}
    new = {page: fill(text, root / "results", str(page)) for page, text in old.items()}
    changed = [page for page in found if new[page] != old[page]]
    if check and changed:
        raise UserError(f"{changed[0]}: {_first_difference(old[changed[0]], new[changed[0]])}; run `make pages`")
    for page in changed:
        atomic_write(page, new[page])
        print(f"updated {page}")
    print(f"{sum(len(REGION.findall(text)) for text in new.values())} regions on {len(found)} pages are up to date")
    return changed


def find_pages(root: Path) -> list[Path]:
    """The pages that may have generated regions."""
    return [page for pattern in PAGES for page in sorted(root.glob(pattern))]


def _read(page: Path) -> str:
    try:
        return page.read_bytes().decode("utf-8")  # read_text would change the line ends
    except UnicodeDecodeError:
        raise UserError(f"{page} is not UTF-8; save it as UTF-8") from None


def fill(text: str, results: Path, page: str) -> str:
    """The text of a page with all regions filled. A region that differs only in white space is left as it is."""

    def replace(region: re.Match[str]) -> str:
        name, old = region["name"], region["text"]
        line = f"{page}, line {text.count(chr(10), 0, region.start()) + 1}"
        if BEGIN in old:
            raise UserError(f"{line}: {name!r} has no {END}")
        block = re.match(r"\r?\n", old)
        if not block and text[: region.start()].endswith("\n"):  # an HTML comment here would end the paragraph
            raise UserError(f"{line}: {name!r} begins a line; put a word of its sentence before it")
        try:
            new = view(name, results)
        except FileNotFoundError as error:
            raise UserError(f"{line}: {name!r} needs {error.filename}, which does not exist; restore it") from None
        except UserError as error:
            raise UserError(f"{line}: {error}") from None
        if block:
            same = [line.split() for line in old.strip().split("\n")] == [line.split() for line in new.split("\n")]
            new = f"\n{new}\n".replace("\n", block[0])
        else:  # lines of a sentence may be broken anywhere
            same = old.split() == new.split()
        return region[0] if same else f"{BEGIN}{name} -->{new}{END}"

    if text.count(BEGIN) != text.count(END):
        raise UserError(f"{page}: {text.count(BEGIN)} regions begin with {BEGIN}…, {text.count(END)} end with {END}")
    return REGION.sub(replace, text)


def view(name: str, results: Path) -> str:
    """The content of a region."""
    if name in VIEWS:
        return VIEWS[name](results)
    file, _, rest = name.partition(":")
    place, given, form = rest.rpartition(":")  # a place may have a colon
    if not given:
        raise UserError(f"unknown view {name!r}; {suggest(name, list(VIEWS))}")
    values = flatten(read_table(results, file))
    if place not in values:
        raise UserError(f"{file} has no {place!r}; {suggest(place, list(values))}")
    try:
        return format(values[place], form)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name!r}: {values[place]!r} has no format {form!r} ({error}); change the region") from None


def _first_difference(old: str, new: str) -> str:
    """The first region that differs, and the first word in it."""
    regions = zip(REGION.finditer(old), REGION.finditer(new), strict=True)
    before, after = next((a, b) for a, b in regions if a[0] != b[0])
    words = zip([*before["text"].split(), ""], [*after["text"].split(), ""], strict=False)
    on_page, in_results = next((pair for pair in words if pair[0] != pair[1]), ("", ""))
    return f"{before['name']!r} has {on_page!r} where results/ has {in_results!r}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tools.pages", description="Write the numbers of results/ into README.md, docs/ and results/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs from results/")
    try:
        pages(check=parser.parse_args().check)
    except UserError as error:
        sys.exit(f"pages: {error}")
