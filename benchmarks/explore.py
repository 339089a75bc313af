"""The explorer's page in a browser: its size, the time until it can be read, and the cost of scrolling.

    logpast explore runs/mine --data book.txt --out book.html
    python benchmarks/explore.py book.html --out results/explore.json

Chromium opens the page from the disk, without a window, --repeats times: all times are medians. "paint": seconds until
anything is drawn (first contentful paint); "text": until the text is there; "ready": until every token has its details.
Then the text is scrolled, three lines in each of --frames frames: milliseconds per frame for scripting, styles and
layout as Chromium itself counts them, and for one token's panel, the mean over 100 tokens. Needs Playwright and
Chromium, which `pip install playwright` and `apt-get install chromium` provide.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

from logpast.util.environment import describe, revision
from logpast.util.errors import UserError

CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCROLL = """async (frames) => {
  const text = document.getElementById("text");
  for (let frame = 0; frame < frames; frame++) {
    text.scrollTop += 90;
    await new Promise(requestAnimationFrame);
  }
}"""
PANELS = """() => {
  const tokens = ranking("helped").slice(0, 100), started = performance.now();
  for (const token of tokens) showToken(token);
  return (performance.now() - started) / tokens.length;
}"""
TIMES = """() => ({
  paint: performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000,
  text: performance.getEntriesByName("text")[0].startTime / 1000,
  ready: performance.getEntriesByName("ready")[0].startTime / 1000,
})"""
PER_FRAME = {"scripting": "ScriptDuration", "styles": "RecalcStyleDuration", "layout": "LayoutDuration"}


def find_chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    raise UserError("no Chromium found; install it, as with apt-get install chromium")


def measure(browser: Any, page: Path, frames: int) -> dict[str, float]:
    """Open the page once, scroll it, and show some tokens."""
    tab = browser.new_page(viewport={"width": 1280, "height": 860})
    tools = tab.context.new_cdp_session(tab)
    tools.send("Performance.enable")

    def counters() -> dict[str, float]:
        return {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}

    tab.goto(page.resolve().as_uri())
    tab.wait_for_selector("html[data-ready=true]")
    found: dict[str, float] = tab.evaluate(TIMES)
    before = counters()
    tab.evaluate(SCROLL, frames)
    after = counters()
    found |= {name: 1000 * (after[key] - before[key]) / frames for name, key in PER_FRAME.items()}
    found |= {"panel": tab.evaluate(PANELS), "heap_megabytes": after["JSHeapUsedSize"] / 1e6}
    tab.close()
    return found


def measure_page(browser: Any, page: Path, repeats: int, frames: int) -> dict[str, Any]:
    """One row: the medians of several visits to a page."""
    visits = [measure(browser, page, frames) for _ in range(repeats)]
    tab = browser.new_page()
    tab.goto(page.resolve().as_uri())
    tokens, details, name = tab.evaluate("[index.tokens, index.details, index.text]")
    tab.close()
    row = {"name": name, "tokens": tokens, "details": details, "megabytes": round(page.stat().st_size / 1e6, 2)}
    medians = {name: round(statistics.median(visit[name] for visit in visits), 3) for name in visits[0]}
    return row | medians | {"chromium": browser.version}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page that `logpast explore` wrote")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args(argv)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM)
        row = measure_page(browser, args.page, args.repeats, args.frames)
        browser.close()
    print(row)
    if args.out:
        about = {
            "what": "the explorer's page in Chromium", "repeats": args.repeats, "frames": args.frames,
            "revision": revision(), "hardware": describe(torch.device("cpu")),
        }  # fmt: skip
        args.out.write_text(json.dumps(about | row, indent=2) + "\n")


if __name__ == "__main__":
    main()
