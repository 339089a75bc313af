"""The documentation as a site: tools/site.py and mkdocs.yml; the built site (slow) in a browser, without a network."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt
from tools import site

from browsing import DESKTOP, PHONE
from markdown_pages import PAGES, ROOT

TAGS = ("li", "ul", "ol", "table", "tr", "pre", "h1", "h2", "h3", "h4", "em", "strong")


def shown(text: str, page: str = "docs/page.md") -> str:
    return site.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)))  # type: ignore[arg-type]


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} == set(listed)


def test_reference_has_every_module_and_package() -> None:
    assert {"filters", "memory", "explore", "lm_eval", "cli"} <= set(site.modules())
    assert not {"version", "__init__", "logpast"} & set(site.modules())


def test_links_to_folders_lead_to_their_lists() -> None:
    assert shown("[logs](../results/logs/demo/)") == "[logs](../results/logs/demo/index.md)"
    assert shown("[rows](../results)") == "[rows](../results/README.md)"
    assert shown("[page](attach.md#save-and-load)") == "[page](attach.md#save-and-load)"


def test_code_is_shown_as_it_is() -> None:
    code = "```\na\n  b  <!-- c -->\n```"
    assert shown(f"- a\n  - b\n\n{code}\n<!-- end -->\n") == f"- a\n    - b\n\n{code}\n"


def test_targets_of_links_are_copied() -> None:
    assert "CITATION.cff" in site.targets("README.md")
    assert "results/logs/demo" in site.targets("docs/results/demo.md")


def test_explorer_keeps_its_data_under_the_scripts_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    data = r'<script type="(?:application/json|text/plain)".*?</script>'
    committed = (ROOT / site.EXPLORER).read_text()
    rendered = site.explorer()
    assert re.findall(data, rendered) == re.findall(data, committed)
    assert all(f"{(ROOT / 'src/logpast/explore' / name).read_text()}" in rendered for name in ("main.js", "panel.js"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it; a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def visit(built: Path, browser: Any) -> Iterator[Any]:
    """Open a page of the site; at the end nothing was asked for but files of the site."""
    requests, problems = list[str](), list[str]()

    def open_page(name: str, **options: Any) -> Any:
        tab = browser.new_context(**{"viewport": DESKTOP} | options).new_page()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto((built / name).as_uri())
        return tab

    yield open_page
    assert requests
    assert all(url.startswith((built.as_uri(), "data:", "blob:", "about:")) for url in requests), requests
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_has_the_structure_that_github_shows(page: Path, built: Path) -> None:
    """Lists, tables and so on: Python-Markdown reads some indented lines in another way."""
    name = page.relative_to(ROOT).as_posix()
    to = site.OTHERS.get(name, name.removeprefix("docs/").replace("README", "index").replace(".md", ".html"))
    (article,) = re.findall(r"<article.*?</article>", (built / to).read_text(), re.S)
    expected = MarkdownIt("gfm-like", {"linkify": False}).render(page.read_text())
    counts = [Counter(re.findall(rf"<({'|'.join(TAGS)})[ >]", html)) for html in (article, expected)]
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index.html", "how-it-works.html", "results/recall.html", "reference/memory.html"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_loads_nothing_from_elsewhere(name: str, scheme: str, visit: Any) -> None:
    tab = visit(name, viewport=PHONE, color_scheme=scheme)
    tab.wait_for_selector("h1")
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth)")


@pytest.mark.slow
def test_search_works_from_the_disk(visit: Any) -> None:
    tab = visit("index.html")
    tab.fill("input.md-search__input", "sharpness")
    tab.wait_for_selector(".md-search-result__item a")
    assert "sharpness" in tab.inner_text(".md-search-result__list").lower()


@pytest.mark.slow
def test_explorer_is_embedded(visit: Any) -> None:
    tab = visit("explore.html")
    frame = tab.frame_locator("iframe[title]")
    frame.locator("#lines").get_by_text("serpent").first.wait_for()


@pytest.mark.slow
def test_reference_describes_public_names(built: Path) -> None:
    assert 'href="memory.html#logpast.memory.LogMemory"' in (built / "reference" / "index.html").read_text()
    assert "from_ids" in (built / "reference" / "memory.html").read_text()
