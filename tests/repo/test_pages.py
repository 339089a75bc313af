"""Marked places on pages: filled in, checked, and refused where the marks are wrong."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from tools.pages import MARKED, fill, pages, view
from tools.views import VIEWS

from logpast.util.errors import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
ANALYSIS = "analyses/much-width192-seed0/analysis.json"
PAIR = "analyses/wiki22k-k200-seed0/analysis.json"
BOOKS = "analyses/pg19-k200-seed0/analysis.json"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of all that the pages are made from."""
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_a_changed_page_is_named_and_mended(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = checkout / "results" / "README.md"
    right = page.read_text()
    page.write_text(right.replace("| 39.03 | 40.17 |", "| 39.02 | 40.17 |"))
    with pytest.raises(UserError, match=r"README\.md: 'demo-text' has '39\.02' where results/ have '39\.03'"):
        pages(checkout, check=True)
    assert "| 39.02 |" in page.read_text()
    assert pages(checkout) == [page]
    assert page.read_text().split() == right.split()
    assert pages(checkout, check=True) == []
    assert "pages are as results/ have them" in capsys.readouterr().out


def test_a_sweep_of_pairs_is_told_in_quarters(tmp_path: Path) -> None:
    """Rows in any order, a control that is missing, and a log of eight steps."""
    (tmp_path / "logs" / "sweep-small").mkdir(parents=True)
    rows = []
    made = (
        (53, 100, 1, 2.0),
        (53, None, 1, 1.0),
        (5, 100, 0, 4.0),
        (53, 200, 1, 1.5),
        (5, None, 0, 4.5),
        (21, 100, 0, 3.0),
        (54, 100, 1, 9.0),
        (54, None, 1, 8.0),
    )
    for slots, k, seed, loss in made:
        cell = f"{slots}-{k}-{seed}"
        wide = slots == 54  # the same cell as at 53 but for its width
        model = {"slots": slots - wide, "width": 96 + wide} | ({"sharpness": float(k)} if k else {})
        rows.append({
            "recipe": {"model": model}, "seed": seed, "train_data": {"name": "wiki22k:train", "tokens": 5e6},
            "sweep": {"cell": cell}, "scores": {"ppl_token": math.exp(loss)}, "parameters": 400_000,
        })  # fmt: skip
        if slots == 5:  # the third document is not familiar, and there the memory is further ahead
            by_document = {"nats": [5 * loss, 15 * loss, 95 * loss], "tokens": [10, 30, 90], "unseen": [0, 0, 9]}
            rows[-1]["scores"]["by_document"] = by_document
        records = [{"step": step, "loss": 10 - step * loss, "tokens": 1e6 * step} for step in range(1, 9)]
        if slots == 53:
            records += [{"step": step, "validation_loss": step * loss} for step in (4, 8)]
        place = tmp_path / "logs" / "sweep-small" / f"{cell}.jsonl"
        place.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "sweep-small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert VIEWS["sweep-small-on-the-way"](tmp_path).splitlines() == [
        "| trained on | times | weights | k | L | seed | 0–2M tokens | 2–4M tokens | 4–6M tokens | 6–8M tokens "
        "| validation | test | test, familiar |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        "| wiki22k:train | 1.6 | 0.4M | 100 | 5 | 0 | +0.7500 | +1.7500 | +2.7500 | +3.7500 |  | -0.5000 | -0.2500 |",
        "| wiki22k:train | 1.6 | 0.4M | 100 | 53 | 1 | -1.5000 | -3.5000 | -5.5000 | -7.5000 | +8.0000 | +1.0000 |  |",
        "| wiki22k:train | 1.6 | 0.4M | 200 | 53 | 1 | -0.7500 | -1.7500 | -2.7500 | -3.7500 | +4.0000 | +0.5000 |  |",
        "| wiki22k:train | 1.6 | 0.4M | 100 | 53 | 1 | -1.5000 | -3.5000 | -5.5000 | -7.5000 |  | +1.0000 |  |",
    ]
    assert VIEWS["sweep-small-gains"](tmp_path) == "−0.500 at L = 5, +1.000 at L = 53"
    ledger = tmp_path / "sweep-small.jsonl"
    whole = ledger.read_text()
    ledger.write_text(whole + json.dumps(rows[0]) + "\n")
    assert VIEWS["sweep-small-gains"](tmp_path) == "−0.500 at L = 5, +1.000 at L = 53"
    ledger.write_text(whole + json.dumps(rows[0] | {"scores": {"ppl_token": 1.0}}) + "\n")
    with pytest.raises(UserError, match="two rows of 53-100-1 with other scores; remove one"):
        VIEWS["sweep-small-gains"](tmp_path)
    ledger.write_text(whole)
    (log := tmp_path / "logs" / "sweep-small" / "5-100-0.jsonl").rename(log.with_name("lost"))
    with pytest.raises(UserError, match=r"needs .*5-100-0\.jsonl, which is not there; bring it back"):
        view("sweep-small-on-the-way", tmp_path, "page, line 1")
    ledger.write_text(ledger.read_text().replace("wiki22k", "pg19"))
    assert VIEWS["sweep-small-gains-pg19"](tmp_path) == "−0.250 at L = 5"  # of familiar documents, where others are


@pytest.mark.parametrize(
    ("file", "old", "new", "view"),
    [
        ("demo-text.jsonl", '"ppl_token": 38.96', '"ppl_token": 37.96', "demo-summary"),
        ("demo-topics.jsonl", '"ppl_token": 5.80509', '"ppl_token": 5.70509', "demo-summary"),
        ("demo-topics-optima.json", '"optimum_given_all": 1.738', '"optimum_given_all": 1.728', "demo-topics"),
        ("train_gpu.json", '"memory / delta": ', '"memory / delta": 1', "price-of-memory"),
        ("train_gpu.json", r'("case": "full-8448".*?"ms": )', r"\g<1>9", "price-of-attention"),
        ("train_gpu.json", '"revision": "', '"revision": "x', "train_gpu:revision"),
        ("memory_gpu.json", '"forward_ms": ', '"forward_ms": 9', "memory-gpu"),
        ("score_gpu.json", r'("batch_size": 64,\s+"seconds": )', r"\g<1>9", "score-gpu"),
        ("logs/fast-step/fast0.jsonl", '"loss": ', '"loss": 1', "fast-step"),
        ("rivals-toy.jsonl", '"ppl_token": 118.7', '"ppl_token": 117.7', "rivals-toy"),
        ("sweep-small.jsonl", '"ppl_token": 40.0606', '"ppl_token": 40.0649', "sweep-small-on-the-way"),
        ("logs/sweep-small/wiki22k-slots5-k100-seed1.jsonl", '"loss": ', '"loss": 1', "sweep-small-on-the-way"),
        (ANALYSIS, r'("binned".*?"gain": \{\s+"nats": \[ )', r"\g<1>9", "rereading-where"),
        (ANALYSIS, r'("cut": \{.*?"increase": \[ )', r"\g<1>9", "rereading-past"),
        ("sweep-pairs.jsonl", '"ppl_token": 32.10', '"ppl_token": 32.11', "sweep-pairs"),
        ("sweep-pairs.jsonl", '"ppl_token": 58.82', '"ppl_token": 58.84', "sweep-pairs-pg19"),
        (PAIR, r'("binned".*?"gain": \{\s+"nats": \[ -)', r"\g<1>9", "pairs-wiki22k-where"),
        (PAIR, r'("replaced": \{.*?"increase": \[ )', r"\g<1>9", "pairs-wiki22k-past"),
        (BOOKS, r'("binned".*?"gain": \{\s+"nats": \[ -)', r"\g<1>9", "pairs-pg19-where"),
        (BOOKS, r'("replaced": \{.*?"increase": \[ )', r"\g<1>9", "pairs-pg19-past"),
    ],
)
def test_a_changed_row_is_noticed(file: str, old: str, new: str, view: str, checkout: Path) -> None:
    """On the pages' own places for it, alone: to make all the others each time would take long."""
    found = [*checkout.glob("*.md"), *checkout.glob("*/*.md")]
    marked = [mark for page in found for mark in MARKED.finditer(page.read_text()) if mark["name"].startswith(view)]
    assert marked
    for page in found:
        page.unlink()
    (checkout / "README.md").write_text("".join(f"It has {mark[0]}\n" for mark in marked))
    assert pages(checkout, check=True) == []
    rows = (checkout / "results" / file).read_text()
    changed = re.sub(old, new, rows, count=1, flags=re.DOTALL)
    assert changed != rows
    (checkout / "results" / file).write_text(changed)
    with pytest.raises(UserError, match=f"'{view}"):
        pages(checkout, check=True)


def test_line_breaks_are_free_in_a_sentence_and_not_in_a_table() -> None:
    phrase = fill("costs <!-- results: price-of-memory -->?<!-- end --> more", RESULTS, "page")
    broken = phrase.replace(" %", "\n%")
    assert broken != phrase
    assert fill(broken, RESULTS, "page") == broken
    right = fill("<!-- results: demo-summary -->\n<!-- end -->\n", RESULTS, "page")
    assert right.startswith("<!-- results: demo-summary -->\n| small models")
    assert right.endswith("|\n<!-- end -->\n")
    assert fill(right, RESULTS, "page") == right
    assert fill(right.replace("|\n|", "| |"), RESULTS, "page") == right


def test_single_values() -> None:
    assert ">19,752,673<" in fill("a <!-- results: train_gpu:data.tokens:, -->?<!-- end -->", RESULTS, "page")
    assert ">89.7<" in fill("a <!-- results: rivals-pg19:delta.ppl_token:.1f -->?<!-- end -->", RESULTS, "page")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nb <!-- results: demo-txt -->x<!-- end -->", "page, line 2: unknown view .*did you mean demo-text"),
        (
            "b <!-- results: train_gpu:nothing:, -->x<!-- end -->",
            "line 1: train_gpu has no 'nothing'; known: what",
        ),
        ("b <!-- results: train_gpu:what:.2f -->x<!-- end -->", "cannot be written as '.2f': .*; change the mark"),
        ("b <!-- results: no_file:what: -->x<!-- end -->", "page, line 1: .* needs .*no_file.json, which is not there"),
        ("b <!-- results: demo-text -->x", "1 places begin with .*, 0 close"),
        ("b <!-- results: a -->x <!-- results: b -->y<!-- end --> z<!-- end -->", "'a' has no <!-- end -->"),
        ("b\n<!-- results: price-of-memory -->x<!-- end --> c", "line 2: 'price-of-memory' begins a line"),
    ],
)
def test_wrong_marks_are_named(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        fill(text, RESULTS, "page")


@pytest.mark.parametrize(
    ("file", "content", "view"),
    [
        ("train_gpu.json", "{}", "train-gpu"),
        ("train_gpu.json", "{", "train-gpu"),
        (
            "train_gpu.json",
            '{"step_time_ratios": {"memory / delta": NaN}, "rows": []}',
            "train_gpu:step_time_ratios.memory / delta:",
        ),
        ("train_gpu.json", "[]", "price-of-memory"),
        ("train_gpu.json", '{"rows": [3]}', "train-gpu"),
        ("demo-text.jsonl", "{}", "demo-text"),
        ("demo-text.jsonl", "", "demo-text"),
        ("rivals-toy.jsonl", '{"seed": 0}', "rivals-toy"),
        ("rivals-toy.jsonl", "", "rivals-toy"),
        ("demo-topics-optima.json", '{"optimum_given_all": "x"}', "demo-topics"),
        ("demo-text.jsonl", None, "demo-text"),
    ],
)
def test_damaged_files_are_named_with_the_place_that_needs_them(
    file: str, content: str | None, view: str, checkout: Path
) -> None:
    place = checkout / "results" / file
    place.unlink()
    if content is not None:
        place.write_text(content)
    with pytest.raises(UserError, match=r"^page, line 1: .*; (mend|bring)"):
        fill(f"b <!-- results: {view} -->x<!-- end -->", checkout / "results", "page")


def test_the_rest_of_a_page_is_left_alone(checkout: Path) -> None:
    front, docs = checkout / "README.md", checkout / "docs" / "paper.md"
    right = front.read_bytes().replace(b"\n", b"\r\n")
    front.write_bytes(right.replace(b"| small models", b"| large models"))
    front.chmod(0o600)
    docs.write_bytes(docs.read_bytes() + b"\xff")
    with pytest.raises(UserError, match=r"paper\.md is not UTF-8"):
        pages(checkout)
    docs.write_bytes(docs.read_bytes()[:-1])
    assert pages(checkout) == [front]
    assert front.read_bytes() == right
    assert front.stat().st_mode & 0o777 == 0o600
    assert not list(checkout.glob(".*"))


def test_nothing_is_written_when_one_page_is_wrong(checkout: Path) -> None:
    right = (checkout / "README.md").read_text()
    front = re.sub(r"(price-of-memory -->)", r"\g<1>9", right)
    assert front != right
    (checkout / "README.md").write_text(front)
    with (checkout / "results" / "README.md").open("a") as page:
        page.write("b <!-- results: nonsense -->x<!-- end -->")
    with pytest.raises(UserError, match="nonsense"):
        pages(checkout)
    assert (checkout / "README.md").read_text() == front
    with pytest.raises(UserError, match="has no pages"):
        pages(checkout / "docs")
