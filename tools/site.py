"""The documentation as a site: mkdocs' hook (mkdocs.yml), run by `make docs`.

Pages keep their places in the repository, so that their links are the same here and on GitHub. README.md is the front
page. Files that pages link to are copied; a folder becomes a page with its list of files.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import logpast
from logpast.explore.explore import render_data

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "logpast"
#: Markdown pages outside docs/ -> their places on the site
OTHERS = {
    "README.md": "index.html",
    "CONTRIBUTING.md": "contributing.html",
    "CHANGELOG.md": "changelog.html",
    "results/README.md": "results/rows.html",
}
EXPLORER = "docs/king-james.html"
EMBEDDED = re.compile(r"\[!\[(.*?)\]\(.*?\)\]\((.*?\.html)\)")
LINK = re.compile(r"\]\(([^)\s#:]+)")
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the reference to the navigation: one page per module or package."""
    assert config.nav is not None
    config.nav.append({"Reference": [f"reference/{name}.md" for name in ("index", *modules())]})
    return config


def modules() -> list[str]:
    """Modules and packages just below logpast."""
    found = [*SOURCE.glob("*.py"), *(path.parent for path in SOURCE.glob("*/__init__.py"))]
    return sorted(path.stem for path in found if not path.stem.startswith("__") and path.stem != "version")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All files at their places in the repository."""
    own = [file for file in files if file.src_dir == config.docs_dir]
    found = {f"docs/{file.src_uri}": file.dest_uri for file in own} | OTHERS
    found |= {place: place for page in found if page.endswith(".md") for place in targets(page) if place not in found}
    made = [_file(config, place, to) for place, to in found.items()]
    made += [_page(config, f"reference/{name}.md", f"# logpast.{name}\n\n::: logpast.{name}\n") for name in modules()]
    return Files([*(file for file in files if file not in own), *made, _page(config, "reference/index.md", _index())])


def targets(page: str) -> list[str]:
    """Places in the repository that a page links to."""
    folder = (ROOT / page).parent
    places = [(folder / link).resolve() for link in LINK.findall((ROOT / page).read_text(encoding="utf-8"))]
    return [
        place.relative_to(ROOT).as_posix() for place in places if place.exists() and not (place / "README.md").exists()
    ]


def _file(config: MkDocsConfig, place: str, to: str) -> File:
    if (ROOT / place).is_dir():
        text = _listing(place)
        return File.generated(config, f"{place}/index.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV)
    content = explorer() if place == EXPLORER else (ROOT / place).read_bytes()
    file = File.generated(config, place, content=content)
    file.dest_uri = to
    return file


def _page(config: MkDocsConfig, place: str, text: str) -> File:
    return File.generated(config, place, content=text)


def explorer() -> str:
    """The explorer's page with its data and today's scripts."""
    page = (ROOT / EXPLORER).read_text(encoding="utf-8")
    (index,) = re.findall(r'id="index">(.*?)</script>', page)
    columns = dict(re.findall(r'data-column="(.*?)">(.*?)</script>', page))
    return render_data(json.loads(index), columns)


def _listing(folder: str) -> str:
    files = sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    rows = [f"| {path.relative_to(ROOT / folder).as_posix()} | {path.stat().st_size:,} |" for path in files]
    return "\n".join([f"# {folder}", "", "Files in the repository:", "", "| file | bytes |", "|---|---|", *rows, ""])


def _index() -> str:
    """Public names, each with a link to its description."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    names = {each.name: f"{node.module}.{each.name}" for node in imports for each in node.names}
    public = [f"- [`{name}`][{names[name]}]" for name in logpast.__all__ if names.get(name, "__")[-1] != "_"]
    return "\n".join(["# Public names", "", "Imported from `logpast` on first use:", "", *public, ""])


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A page as GitHub shows it, with the explorer in it."""
    folder = (ROOT / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        """Links to folders lead to their lists of files."""
        target = folder / found[1]
        if not target.is_dir():
            return found[0]
        return f"{found[0].rstrip('/')}/{'README.md' if (target / 'README.md').exists() else 'index.md'}"

    def prose(text: str) -> str:
        """Without comments, which would swallow a table that follows. What is part of an item has four spaces."""
        text = EMBEDDED.sub(r'<iframe src="\2" title="\1"></iframe>', text)
        text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
        return LINK.sub(link, re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.M))

    return "".join(part if part.startswith("```") else prose(part) for part in FENCED.split(markdown))
