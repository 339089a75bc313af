"""tools/pages.py: generated regions are filled, checked, and refused where they are malformed."""

import re
import shutil
from pathlib import Path

import pytest
from tools.pages import REGION, fill, find_pages, pages

from logpast.util.errors import UserError
from markdown_pages import ROOT

RESULTS = ROOT / "results"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the pages and of results/."""
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def keep_pages(checkout: Path, *names: str) -> list[Path]:
    """Delete all other pages: to compute all regions takes seconds. test_results.py does so once."""
    kept = [checkout / name for name in names]
    for page in set(find_pages(checkout)) - set(kept):
        page.unlink()
    return kept


def region(name: str, text: str = "?") -> str:
    return f"see <!-- results: {name} -->{text}<!-- end -->."


def test_changed_page_is_reported_and_restored(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, _ = keep_pages(checkout, "docs/results/demo.md", "docs/results/summary.md")
    right = page.read_text()
    page.write_text(right.replace("| 49.64 |", "| 49.63 |"))
    with pytest.raises(UserError, match=r"demo\.md: 'demo-text' has '49\.63' where results/ has '49\.64'"):
        pages(checkout, check=True)
    assert "| 49.63 |" in page.read_text()
    assert pages(checkout) == [page]
    assert page.read_text().split() == right.split()
    assert pages(checkout, check=True) == []
    assert str(page) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        ("demo-text.jsonl", '"nats_per_token": -0.33', '"nats_per_token": -0.23', "demo-text"),
        ("demo-topics.jsonl", '"ppl_token": 5.80509', '"ppl_token": 5.70509', "demo-summary"),
        ("demo-topics-optima.json", '"optimum_given_all": 1.738', '"optimum_given_all": 1.728', "demo-topics"),
        ("train_gpu.json", '"memory / delta": ', '"memory / delta": 1', "price-of-memory"),
        ("train_gpu.json", r'("case": "full-8448".*?"ms": )', r"\g<1>9", "price-of-attention"),
        ("train_gpu.json", '"revision": "', '"revision": "x', "train_gpu:revision"),
        ("memory_gpu.json", '"forward_ms": ', '"forward_ms": 9', "memory-gpu"),
        ("score_gpu.json", r'("batch_size": 64,\s+"seconds": )', r"\g<1>9", "score-gpu"),
        ("logs/fast-step/fast0.jsonl", '"loss": ', '"loss": 1', "fast-step"),
        ("rivals-toy.jsonl", '"bits_per_byte": ', '"bits_per_byte": 1', "rivals-toy"),
        (
            "rivals-pg19.jsonl",
            r'("system": "plain window"[^\n]*?"tokens_per_second": )',
            r"\g<1>9",
            "rivals-pg19-speeds",
        ),
        ("rivals-wiki.jsonl", '"ppl_token": 80.355', '"ppl_token": 80.385', "rivals-wiki"),
        ("sweep-small.jsonl", '"ppl_token": 40.0606', '"ppl_token": 40.0649', "sweep-small-training"),
        ("logs/sweep-small/wiki22k-slots5-k100-seed1.jsonl", '"loss": ', '"loss": 1', "sweep-small-training"),
        ("sweep-pairs.jsonl", '"ppl_token": 32.10', '"ppl_token": 32.11', "sweep-pairs"),
        ("sweep-pairs.jsonl", '"ppl_token": 58.82', '"ppl_token": 58.84', "sweep-pairs-pg19"),
        *(
            (f"analyses/{analysis}-seed0/analysis.json", old, r"\g<1>9", name)
            for analysis, sign, way, view in (
                ("much-width192", "", "cut", "rereading"),
                ("wiki22k-k200", "-", "replaced", "pairs-wiki22k"),
                ("pg19-k200", "-", "replaced", "pairs-pg19"),
            )
            for old, name in (
                (rf'("binned".*?"gain": \{{\s+"nats": \[ {sign})', f"{view}-where"),
                (rf'("{way}": \{{.*?"increase": \[ )', f"{view}-past"),
            )
        ),
    ],
)
def test_changed_number_in_results_is_noticed(file: str, old: str, new: str, name: str, checkout: Path) -> None:
    """With only the regions of this view on a page."""
    texts = [page.read_text() for page in find_pages(checkout)]
    regions = [each for text in texts for each in REGION.finditer(text) if each["name"].startswith(name)]
    assert regions
    keep_pages(checkout)
    (checkout / "README.md").write_text("".join(f"It has {each[0]}\n" for each in regions))
    assert pages(checkout, check=True) == []
    content = (checkout / "results" / file).read_text()
    changed = re.sub(old, new, content, count=1, flags=re.DOTALL)
    assert changed != content
    (checkout / "results" / file).write_text(changed)
    with pytest.raises(UserError, match=f"'{name}"):
        pages(checkout, check=True)


def test_white_space_is_free_in_a_sentence_and_lines_count_in_a_table() -> None:
    phrase = fill(region("price-of-memory"), RESULTS, "page")
    broken = phrase.replace(" %", "\n%")
    assert broken != phrase
    assert fill(broken, RESULTS, "page") == broken
    right = fill("<!-- results: demo-summary -->\n<!-- end -->\n", RESULTS, "page")
    assert right.startswith("<!-- results: demo-summary -->\n| small models")
    assert right.endswith("|\n<!-- end -->\n")
    assert fill(right, RESULTS, "page") == right
    assert fill(right.replace("|\n|", "| |"), RESULTS, "page") == right


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_gpu:data.tokens:,", "19,752,673"),
        ("train_gpu:revision:.7", "ef77145"),
        ("rivals-pg19:delta.ppl_token:.1f", "89.7"),
        ("rivals-pg19:delta.in-vocabulary ppl_token:.2f", "65.26"),
        ("rivals-wiki:Transformer-XL.nats vs memory (negative: lower loss):.3f", "-0.022"),
    ],
)
def test_single_value(name: str, value: str) -> None:
    assert fill(region(name), RESULTS, "page") == region(name, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a\n{region('demo-txt')}", "page, line 2: .*'demo-txt'.*demo-text"),
        (region("train_gpu:nothing:,"), "line 1: .*'nothing'"),
        (region("train_gpu:what:.2f"), r"line 1: .*'\.2f'"),
        (region("no_file:what:"), r"page, line 1: .*no_file\.json"),
        ("b <!-- results: demo-text -->x", "page: 1 regions .* 0 end"),
        ("b <!-- results: a -->x <!-- results: b -->y<!-- end --> z<!-- end -->", "line 1: 'a' has no <!-- end -->"),
        ("b\n<!-- results: price-of-memory -->x<!-- end --> c", "line 2: 'price-of-memory' begins a line"),
    ],
)
def test_malformed_region_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fill(text, RESULTS, "page")


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("train_gpu.json", "{", "train-gpu"),
        ("train_gpu.json", "[]", "price-of-memory"),
        ("train_gpu.json", '{"step_time_ratios": {"memory / delta": NaN}}', "train_gpu:revision:"),
        ("train_gpu.json", None, "train-gpu"),
        ("demo-text.jsonl", "{", "demo-text"),
        ("demo-text.jsonl", "", "demo-text"),
        ("demo-text.jsonl", None, "demo-text"),
        ("rivals-toy.jsonl", '{"seed": 0}', "rivals-toy"),
        ("rivals-toy.jsonl", "", "rivals-toy"),
        ("logs/fast-step/fast0.jsonl", None, "fast-step"),
        ("logs/sweep-small/wiki22k-slots5-k100-seed1.jsonl", None, "sweep-small-training"),
        ("analyses/pg19-k200-seed0/analysis.json", "{", "pairs-pg19-past"),
    ],
)
def test_damaged_file_is_reported_with_the_region_that_needs_it(
    file: str, content: str | None, name: str, checkout: Path
) -> None:
    path = checkout / "results" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"^page, line 1: .*{path.name}"):
        fill(region(name), checkout / "results", "page")


def test_bug_in_a_view_is_not_blamed_on_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.views.as_markdown", lambda table: table.no_such_attribute)
    with pytest.raises(AttributeError):
        fill(region("demo-text"), RESULTS, "page")


def test_rest_of_a_page_is_not_changed(checkout: Path) -> None:
    summary, other = keep_pages(checkout, "docs/results/summary.md", "docs/own-text.md")
    right = summary.read_bytes().replace(b"\n", b"\r\n")
    summary.write_bytes(right.replace(b"| small models", b"| large models"))
    summary.chmod(0o600)
    other.write_bytes(other.read_bytes() + b"\xff")
    with pytest.raises(UserError, match=r"own-text\.md"):
        pages(checkout)
    other.write_bytes(other.read_bytes()[:-1])
    assert pages(checkout) == [summary]
    assert summary.read_bytes() == right
    assert summary.stat().st_mode & 0o777 == 0o600
    assert not list(checkout.rglob(".*"))


def test_nothing_is_written_if_one_page_is_wrong(checkout: Path) -> None:
    readme, broken = keep_pages(checkout, "README.md", "results/README.md")
    changed = re.sub(r"(price-of-memory -->)", r"\g<1>9", readme.read_text())
    assert changed != readme.read_text()
    readme.write_text(changed)
    with broken.open("a") as page:
        page.write(region("nonsense"))
    with pytest.raises(UserError, match="nonsense"):
        pages(checkout)
    assert readme.read_text() == changed


def test_folder_without_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        pages(tmp_path)
