"""`logpast results pages`: every figure on our pages comes from results/, and stays what it is there.

A page holds `<!-- results: NAME -->…<!-- end -->`; what stands between is what the view NAME makes of the files. A view
is one of views.VIEWS, or FILE:PLACE:FORMAT for a single value of a table: train_gpu:data.tokens:, is 19,752,673.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from logpast.errors import UserError
from logpast.experiments.results import flat
from logpast.experiments.views import VIEWS, read_table

BEGIN, END = "<!-- results: ", "<!-- end -->"
MARKED = re.compile(rf"{BEGIN}(?P<name>.+?) -->(?P<text>.*?){END}", re.S)


def pages(root: Path = Path("."), check: bool = False) -> list[Path]:
    """Bring the figures on README.md, docs/*.md and results/*.md up to date with the rows in results/.

    What is generated stands between the comments <!-- results: NAME --> and <!-- end -->; the rest is left alone.

    Examples:
        logpast results pages
        logpast results pages --check true

    Args:
        root: the checkout.
        check: change nothing; exit with code 2 if a figure on a page is not the one in results/.

    Returns:
        The pages that were changed.
    """
    found = [page for pattern in ("README.md", "docs/*.md", "results/*.md") for page in sorted(root.glob(pattern))]
    if not found or not (root / "results").is_dir():
        raise UserError(f"{root} has no pages and results/; run this where the checkout is, or give --root")
    texts = {page: page.read_text(encoding="utf-8") for page in found}
    fresh = {page: fill(text, root / "results", str(page)) for page, text in texts.items()}
    changed = [page for page in found if fresh[page] != texts[page]]
    if check and changed:
        raise UserError(f"{_differences(changed[0], texts, fresh)}; `logpast results pages` mends it")
    for page in changed:
        page.write_text(fresh[page], encoding="utf-8")
        print(f"brought up to date: {page}")
    count = sum(len(MARKED.findall(text)) for text in fresh.values())
    print(f"{count} places on {len(found)} pages are as results/ have them")
    return changed


def fill(text: str, results: Path, page: str) -> str:
    """A page with each marked place as its view has it; what differs in spaces alone is left as it is."""

    def replaced(mark: re.Match[str]) -> str:
        name, old = mark["name"], mark["text"]
        line = f"{page}, line {text.count(chr(10), 0, mark.start()) + 1}"
        if BEGIN in old:
            raise UserError(f"{line}: {name!r} has no {END}")
        alone = old.startswith("\n")
        if not alone and text[: mark.start()].endswith("\n"):  # Markdown would end the paragraph here
            raise UserError(f"{line}: {name!r} begins a line; put a word of its sentence before it")
        new = view(name, results, line)
        if alone:
            same = [line.split() for line in old.strip().split("\n")] == [line.split() for line in new.split("\n")]
        else:  # in a sentence, lines may be broken anywhere
            same = old.split() == new.split()
        return mark[0] if same else f"{BEGIN}{name} -->" + (f"\n{new}\n" if alone else new) + END

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
    if name in VIEWS:
        return VIEWS[name](results)
    file, *rest = name.split(":", 2)
    if len(rest) != 2:
        near = get_close_matches(name, VIEWS, n=1)
        raise UserError(f"{line}: unknown view {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(VIEWS)}")
    place, form = rest
    try:
        return format(flat(read_table(results, file))[place], form)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{line}: {name!r} cannot be made: {type(error).__name__} {error}") from None
