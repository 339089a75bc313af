"""Pages in a real browser: Chromium, driven by Playwright."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 720}


class Opened(NamedTuple):
    """A page in the browser, and what the browser reported."""

    tab: Any
    problems: list[str]
    requests: list[str]

    def __call__(self, script: str) -> Any:
        return self.tab.evaluate(script)


@contextmanager
def opened_in(browser: Any, page: Path, address: str = "", ready: str = "body", **options: Any) -> Iterator[Opened]:
    """A page from the disk, once it is ready. At the end there was no error, and only the page itself was asked for."""
    options = {"viewport": DESKTOP, "color_scheme": "light"} | options
    tab = browser.new_context(**options).new_page()
    problems, requests = list[str](), list[str]()
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(page.as_uri() + address)
    tab.wait_for_selector(ready)
    yield Opened(tab, problems, requests)
    assert problems == []
    assert {url.partition("#")[0] for url in requests if not url.startswith("data:image")} == {page.as_uri()}
    tab.context.close()


def brightness(opened: Opened) -> float:
    """Of the page's background, from 0 to 255."""
    colour = opened("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour[4:-1].split(",")) / 3


def serious_findings(browser: Any, page: Path, axe: Path, acts: tuple[str, ...] = ("0",), **options: Any) -> list[str]:
    """What axe-core calls serious or critical, after each of these scripts."""
    found = []
    with opened_in(browser, page, bypass_csp=True, **options) as opened:
        opened.tab.add_script_tag(path=str(axe))
        for act in acts:
            opened(act)
            for each in opened("axe.run().then((result) => result.violations)"):
                if each["impact"] in ("serious", "critical"):
                    found.append(f"{act}: {each['id']}: {each['nodes'][0]['failureSummary']}")
    return found
