"""Figures in prose are those of the ledger."""

import json
import re
import statistics
from pathlib import Path

import pytest
from tools.pages import MARKED, pages
from tools.views import VIEWS, topics

from logpast.ledger import row as ledger

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), RESULTS / "README.md"]


def test_rows_are_whole() -> None:
    for file in RESULTS.glob("*.jsonl"):
        for row in ledger.read(file):
            assert re.fullmatch(r"[0-9a-f]{40}", row["trained_at_revision"])
            assert row["scores"]["unscored"] == 0
            assert row["recipe_hash"] == ledger.hash_recipe(row["recipe"])
    for file in RESULTS.glob("*.json"):
        assert re.fullmatch(r"[0-9a-f]{40}", json.loads(file.read_text())["revision"])


def test_pages_say_what_the_ledger_says() -> None:
    """When this fails: `logpast results pages`."""
    assert pages(ROOT, check=True) == []


def test_every_view_is_on_a_page() -> None:
    marked = {mark["name"] for page in PAGES for mark in MARKED.finditer(page.read_text())}
    assert marked >= set(VIEWS)
    front = {mark["name"] for mark in MARKED.finditer((ROOT / "README.md").read_text())}
    assert front >= {"demo-summary", "price-of-memory", "price-of-attention", "paper-best", "paper-all-counted"}


def test_the_demo_on_the_front_page_is_the_ledgers() -> None:
    """What `make demo` prints there, in a code block, where no comment can stand."""
    (row,) = [
        row["scores"]
        for row in ledger.read(RESULTS / "demo-text.jsonl")
        if (row["recipe"]["model"]["system"], row["seed"]) == ("log_memory", 0)
    ]
    page = (ROOT / "README.md").read_text()
    for name in ("ppl_token", "ppl_word", "bits_per_byte"):
        low, high = row["interval"][name]
        assert re.search(rf"{name} +{row[name]:.4f} \[{low:.4f}, {high:.4f}\]", page)
    low, high = row["against"]["interval"]
    assert f"{row['against']['nats_per_token']:+.4f} nats per token [{low:+.4f}, {high:+.4f}]" in page
    assert f"better on {row['against']['documents_better']} of {row['against']['documents']} documents" in page


def test_what_is_said_of_the_topics() -> None:
    """The control is within 0.01 nats of the best that its view allows; the memory is below it."""
    optima, nats = topics(RESULTS)
    best, view = optima["optimum_given_all"], optima["optimum_given_recent"]
    assert all(0 < value - view < 0.01 for value in nats["recent"])
    error = statistics.stdev(nats["log_memory"]) / 3**0.5
    assert all(best < value < view - 2 * error for value in nats["log_memory"])


@pytest.mark.parametrize("name", ["rivals-toy", "demo-text", "demo-topics"])
def test_a_table_is_of_one_revision(name: str) -> None:
    assert len({row["trained_at_revision"] for row in ledger.read(RESULTS / f"{name}.jsonl")}) == 1
