"""The command: its page, its summary, mistakes in one line."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from explore.conftest import STRANGE, index_of
from logpast.cli import main
from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.evaluation.evaluate import evaluate
from logpast.explore.explore import explore


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`logpast explore` with these arguments must fail with one line: that line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["explore", *map(str, words)])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("logpast: ")
        assert error.count("\n") == 1
        return error

    return run


class Elements(HTMLParser):
    """What a browser would make of a page: its elements with their attributes."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_is_self_contained(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    elements = Elements(content).found
    assert not [each for each in elements if {"src", "href", "srcset"} & each[1].keys()]
    assert not re.findall(r"\burl\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|\bimport\(", content)
    policies = [attributes["content"] for tag, attributes in elements if "http-equiv" in attributes]
    assert len(policies) == 1
    assert "default-src 'none'" in str(policies[0])


def test_strange_text_stays_within_its_element(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    elements = [tag for tag, _ in Elements(content).found]
    assert elements.count("script") == 3 + len(index_of(page)["types"])  # the theme, the index and the script
    index = content[content.index('id="index">') :]
    assert "<" not in index[len('id="index">') : index.index("</script>")]
    assert "alert(1)" not in re.sub(r'id="index">.*?</script>', "", content, flags=re.S)


def test_text_of_the_page_is_the_text(page: Path) -> None:
    pieces = index_of(page)["pieces"]
    assert {"<", "\U0001f600", "\u05e9"} <= set("".join(pieces["text"]))
    assert "\u202e" not in "".join([*pieces["text"], *pieces["label"].values()])
    assert "\u202e" in STRANGE


def test_means_are_those_of_eval(page: Path, runs: dict[str, Path], store: TokenStore) -> None:
    means = index_of(page)["means"]
    for name, run in (("model", "both"), ("control", "control")):
        scores = evaluate(runs[run], str(store.path), device="cpu")
        assert means[name] == pytest.approx(np.log(scores["ppl_token"]), rel=1e-6)


def test_command_prints_what_it_wrote_and_replaces_a_page(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sub" / "page.html"
    out.parent.mkdir()
    out.write_text("old")
    words = ["explore", runs["recall"], "--data", store.path, "--out", out, "--limit", 300, "--details", 20]
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words), "--device", "cpu"])
    assert stop.value.code == 0
    printed = capsys.readouterr()
    size = out.stat().st_size / 1e6
    assert printed.out == f"300 of {len(store):,} tokens, 20 with details, {size:.1f} MB\nopen {out}\n"
    assert "is not unseen text: it is the training text" in printed.err
    index = index_of(out)
    assert (index["tokens"], index["details"], index["all"]) == (300, 20, len(store))
    assert index["overlap"] == "it is the training text"
    assert index["control"] is None
    assert index["comparisons"] == [["no recall", "the same model without recall"]]


def test_page_has_the_name_of_the_run_by_default(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert explore(runs["memory"], str(store.path), limit=100, device="cpu") == Path("runs/memory-explore.html")
    assert index_of(Path("runs/memory-explore.html"))["comparisons"] == [["no memory", "the same model without memory"]]


def test_recurrent_model(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    index = index_of(explore(runs["xl recall"], str(store.path), out=tmp_path / "xl.html", device="cpu"))
    assert index["memory"] == "state"
    assert index["slots"] is None
    assert index["details"] == len(store)


def test_attached_model(store: TokenStore, books: Path, tmp_path: Path) -> None:
    """A pretrained model with memory, as `attach` writes it; the slots have attention, recall has its weights."""
    pytest.importorskip("peft")
    from logpast.training.attach import attach
    from models.hf.tiny import save_tiny

    save_tiny(tmp_path, [(books / "2.txt").read_text()])
    attach(str(tmp_path), str(books), tmp_path / "out", window=16, recall=64, slots=5, train="slots", steps=2,
           batch_size=2, device="cpu")  # fmt: skip
    text = str(books / "0.txt")
    page = explore(tmp_path / "out", text, out=tmp_path / "page.html", device="cpu")
    index = index_of(page)
    assert index["series"] == ["model", "no recall", "no memory", "neither"]
    assert len(index["slots"]["peaks"]) == 5
    scores = evaluate(tmp_path / "out", text, device="cpu")
    assert index["means"]["model"] == pytest.approx(np.log(scores["ppl_token"]), rel=1e-5)


def test_mistakes_are_one_line(
    error_of: Callable[..., str], runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    run, out = runs["both"], tmp_path / "page.html"
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("And God")
    assert "--data" in error_of(run)
    assert "no checkpoint" in error_of(tmp_path / "none", "--data", store.path)
    assert "empty.txt" in error_of(run, "--data", tmp_path / "empty.txt", "--out", out)
    assert "more than one window of 8" in error_of(run, "--data", tmp_path / "short.txt", "--out", out)
    assert "neither memory nor recall" in error_of(runs["control"], "--data", store.path, "--out", out)
    assert "ends in .html" in error_of(run, "--data", store.path, "--out", tmp_path / "page.txt")
    (tmp_path / "folder.html").mkdir()
    assert "is a folder" in error_of(run, "--data", store.path, "--out", tmp_path / "folder.html")
    (other,) = prepare([str(store.path / "documents.tsv")], tmp_path / "other", tokenizer="bpe-260", workers=1)
    assert "tokenizer" in error_of(run, "--data", other.path, "--out", out)
    assert not out.exists()


def test_control_without_a_past_may_be_explored_against_another(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    page = explore(runs["control"], str(store.path), runs["memory"], tmp_path / "page.html", limit=100, device="cpu")
    assert index_of(page)["comparisons"] == [["control", "the control"]]
