"""results/: rows are whole, and the pages have its numbers."""

import json
import re
import statistics
from pathlib import Path

import pytest
from tools.pages import REGION, find_pages, pages
from tools.views import VIEWS, topics

from logpast.ledger import row as ledger
from logpast.reporting.differences import in_words
from markdown_pages import ROOT

RESULTS = ROOT / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: file.name)
def test_rows_are_whole(file: Path) -> None:
    rows = ledger.read(file)
    assert rows
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{40}", row["trained_at_revision"])
        assert row["scores"]["unscored"] == 0
        assert row["recipe_hash"] == ledger.hash_recipe(row["recipe"])


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_benchmark_tables_name_their_revision(file: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", json.loads(file.read_text())["revision"])


def test_every_file_of_results_is_described() -> None:
    described = (RESULTS / "README.md").read_text()
    for file in RESULTS.iterdir():
        assert f"`{file.name}{'/' if file.is_dir() else ''}`" in described or file.name == "README.md", file.name


def test_pages_have_the_numbers_of_results() -> None:
    """If this fails: `make pages`."""
    assert pages(ROOT, check=True) == []


def test_every_view_is_on_a_page() -> None:
    assert regions(*find_pages(ROOT)) >= set(VIEWS)


def test_readme_has_the_main_results() -> None:
    expected = {"sweep-pairs", "recall-short", "gap-perplexities", "price-of-memory", "price-of-attention"}
    assert regions(ROOT / "README.md") >= expected | {"paper-best", "paper-all-counted"}


def regions(*paths: Path) -> set[str]:
    return {region["name"] for path in paths for region in REGION.finditer(path.read_text())}


def test_output_of_the_demo_on_the_summary_is_that_of_the_ledger() -> None:
    """It is in a code block, where no region can be."""
    (row,) = [
        row["scores"] for row in ledger.read(RESULTS / "demo-text.jsonl") if (row["run"], row["seed"]) == ("recall", 0)
    ]
    page = (ROOT / "docs" / "results" / "summary.md").read_text()
    for name in ("ppl_token", "ppl_word", "bits_per_byte"):
        low, high = row["interval"][name]
        assert re.search(rf"{name} +{row[name]:.4f} \[{low:.4f}, {high:.4f}\]", page)
    against = row["against"]
    assert f"loss {in_words(against['nats_per_token'], against['interval'])}; lower on " in page
    assert f"; lower on {against['documents_better']} of {against['documents']} documents" in page


def test_topics_control_is_near_its_optimum_and_memory_below_it() -> None:
    """The pages say: the control is within 0.01 nats of the best loss for its view, and the memory is below that."""
    optima, nats = topics(RESULTS)
    best, best_of_view = optima["optimum_given_all"], optima["optimum_given_recent"]
    assert all(0 < value - best_of_view < 0.01 for value in nats["control"])
    error = statistics.stdev(nats["memory"]) / 3**0.5
    assert all(best < value < best_of_view - 2 * error for value in nats["memory"])


@pytest.mark.parametrize("name", ["rivals-toy", "demo-text", "demo-topics"])
def test_systems_that_are_compared_are_of_one_revision(name: str) -> None:
    rows = ledger.read(RESULTS / f"{name}.jsonl")
    assert len({(row["seed"], row["trained_at_revision"]) for row in rows}) == len({row["seed"] for row in rows})
