"""The demo's page, from results that were not trained."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from browsing import PHONE, opened_in, serious_findings
from logpast.demo.page import write_report

SCORES = {"ppl_token": 20.0, "ppl_word": 40.0, "bits_per_byte": 1.5, "train_seconds": 100.0}
EXAMPLE = {"chapter": "01001", "token": " <God>", "context": "and the spirit of", "earlier": "In the beginning",
           "tokens_ago": 1234, "control": 0.0123, "recall": 0.456}  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A demo's folder with the logs of its five trainings."""
    for part, names in (("text", ("control", "memory", "recall")), ("topics", ("control", "memory"))):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            records = [{"step": s, "epoch": 0, "tokens_per_second": 1.0, "loss": 2.0 - s / 10} for s in (1, 2, 3)]
            records += [{"step": s, "validation_loss": 2.1 - s / 10} for s in (2, 3)]
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / part / name / "log.jsonl").write_text(lines)
    return tmp_path


def text_part(low: float, high: float) -> dict[str, Any]:
    difference = {"nats_per_token": (low + high) / 2, "interval": [low, high], "documents_better": 3, "documents": 4}
    return {"chapters": {"train": 1000, "validation": 40, "test": 4}, "sample": "And it <came> to pass",
            "control": SCORES, "memory": SCORES | {"against": difference | {"interval": [-0.3, 0.3]}},
            "recall": SCORES | {"against": difference}, "example": EXAMPLE}  # fmt: skip


def topics_part(memory: float) -> dict[str, Any]:
    return {"optimum_given_all": 1.0, "optimum_given_recent": 1.1, "memory": {"ppl_token": math.exp(memory)},
            "control": {"ppl_token": math.exp(1.15)}}  # fmt: skip


def page_of(out: Path, **parts: Any) -> str:
    write_report(out, {"seed": 7, **parts})
    return " ".join((out / "report.html").read_text().split())


def test_page_has_both_parts_and_is_self_contained(out: Path) -> None:
    page = page_of(out, text=text_part(-0.2, -0.1), topics=topics_part(1.05))
    assert page.count("<img") == page.count("data:image/png;base64,iVBOR") == 3
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.count("<td>20.000</td> <td>40.000</td> <td>1.500</td> <td>100</td>") == 3
    assert "seed (7)" in page
    assert "1,000 chapters" in page


@pytest.mark.parametrize("only", ["text", "topics"])
def test_page_with_one_part_only(out: Path, only: str) -> None:
    page = page_of(out, **{only: {"text": text_part(-0.2, -0.1), "topics": topics_part(1.05)}[only]})
    assert ("King James" in page, "drifting topics" in page) == (only == "text", only == "topics")


@pytest.mark.parametrize(
    ("low", "high", "verdict", "words"),
    [
        (-0.2, -0.1, "better than the control", "lower by 0.1500 nats/token (13.9 %), 95 % interval: 0.1000 to 0.2000"),
        (0.1, 0.2, "worse than the control", "higher by 0.1500 nats/token (16.2 %)"),
        (-0.1, 0.2, "recall</b> and the control on", "95 % interval: 0.1000 lower to 0.2000 higher"),
    ],
)
def test_verdict_on_text_depends_on_the_interval(out: Path, low: float, high: float, verdict: str, words: str) -> None:
    page = page_of(out, text=text_part(low, high))
    assert verdict in page
    assert words in page


def test_few_chapters_have_no_interval_and_no_verdict(out: Path) -> None:
    part = text_part(-0.2, -0.1)
    part["recall"]["against"]["interval"] = None
    page = page_of(out, text=part)
    assert "too few chapters" in page
    assert "lower by 0.1500 nats/token (13.9 %) " in page


@pytest.mark.parametrize(("loss", "verdict"), [(1.05, "is below that optimum"), (1.12, "is not below that optimum")])
def test_verdict_on_topics_depends_on_the_optimum(out: Path, loss: float, verdict: str) -> None:
    page = page_of(out, topics=topics_part(loss))
    assert verdict in page
    for value in ("1.0000", "1.1000", "1.1500", f"{loss:.4f}", "higher by 0.0500 nats/token (5.1 %)"):
        assert value in page


def test_example_of_recall_is_shown_with_both_passages_and_escaped(out: Path) -> None:
    page = page_of(out, text=text_part(-0.2, -0.1))
    marked = '<b class="recall"> &lt;God&gt;</b>'
    assert f"… In the beginning{marked} here: … and the spirit of{marked}</pre>" in page
    assert "0.012, recall 0.46. The earlier passage is 1,234 tokens before" in page


def test_page_without_an_example(out: Path) -> None:
    assert "Where recall helped" not in page_of(out, text=text_part(-0.2, -0.1) | {"example": None})


def test_sample_is_escaped(out: Path) -> None:
    assert "<pre>And it &lt;came&gt; to pass</pre>" in page_of(out, text=text_part(-0.2, -0.1))


def test_page_in_a_browser_fits_a_phone(out: Path, browser: Any) -> None:
    write_report(out, {"seed": 7, "text": text_part(-0.2, -0.1), "topics": topics_part(1.05)})
    with opened_in(browser, out / "report.html", viewport=PHONE) as opened:
        assert opened("document.documentElement.scrollWidth") == 360
        assert opened("[...document.images].every((image) => image.naturalWidth > 100)")


def test_axe_finds_nothing_serious(out: Path, browser: Any, axe: Path) -> None:
    write_report(out, {"seed": 7, "text": text_part(-0.2, -0.1), "topics": topics_part(1.05)})
    assert serious_findings(browser, out / "report.html", axe, color_scheme="dark") == []
