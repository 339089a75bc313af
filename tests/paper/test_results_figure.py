"""`logpast paper results-figure`: what is printed, and ours under it."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from logpast.ledger.row import append
from logpast.paper import printed
from logpast.paper.results_figure import results_figure
from paper_rows import row, with_documents


def test_without_rows_the_printed_figures_alone_are_drawn(
    tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = results_figure(tmp_path / "none.svg", results=tmp_path)
    assert "printed values alone" in capsys.readouterr().out
    ours = results_figure(tmp_path / "ours.svg", "ppl_word", ledger)
    assert none.read_text().startswith("<?xml")
    assert none.stat().st_size < ours.stat().st_size


def test_results_figure_draws_what_is_printed_and_what_was_measured(
    tmp_path: Path, ledger: Path, drawn: list[Figure]
) -> None:
    results_figure(tmp_path / "f.png", results=ledger)
    wiki, books, ours, none = drawn[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in wiki.lines}
    assert lines["delta"] == [row.delta.raw for row in printed.sweep("A1").rows]
    assert lines["k = 200"][-1] == 16.76
    assert {line.get_label(): list(line.get_ydata()) for line in books.lines}["k = 150"][0] == 21.08
    means = {line.get_label(): line.get_xydata().tolist() for line in ours.lines}
    assert means["delta"] == [[5, 40.5], [53, 39.0]]
    assert means["k = 100"] == [[5, 38.0]]
    assert "49.0M tokens of wiki22k:train" in ours.get_title("left").replace("\n", " ")
    assert [text.get_text() for text in none.texts] == ["not measured yet"]


def test_two_kinds_of_runs_in_the_figure(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    epochs = {"steps": None, "epochs": 2.0}
    for slots in (5, 53):
        append(
            ledger / "other.jsonl",
            row(slots, 100, 0, 30.0, length=epochs, train_data={"name": "books", "tokens": 49_000_000}),
        )
    results_figure(tmp_path / "f.png", results=ledger)
    wiki, _, ours, none = drawn[0].axes
    lines = {line.get_label(): line for line in ours.lines if not line.get_label().startswith("_")}
    assert set(lines) == {"delta ¹", "k = 100 ¹", "k = 200 ¹", "k = 100 ²"}
    printed_colour = {line.get_label(): line.get_color() for line in wiki.lines}
    assert all(line.get_color() == printed_colour[label[:-2]] for label, line in lines.items())
    assert lines["k = 100 ¹"].get_marker() != lines["k = 100 ²"].get_marker()
    title = ours.get_title("left").replace("\n", " ")
    assert "¹ trained on 49.0M tokens of wiki22k" in title
    assert "² trained on 98.0M tokens of books" in title
    assert list(none.get_yticks()) == []


def test_titles_of_the_figure_stay_within_it(tmp_path: Path, drawn: list[Figure]) -> None:
    """With the longest that our rows make: a part of PG-19's test set."""
    results_figure(tmp_path / "f.png", results=Path(__file__).parents[2] / "results")
    drawn[0].draw_without_rendering()
    for axis in drawn[0].axes:
        right = axis._left_title.get_window_extent().x1
        assert right <= drawn[0].bbox.x1
        assert len(axis.get_title("left")) > 20


def test_a_single_seed_is_white_and_told(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    results_figure(tmp_path / "f.png", results=ledger)
    ours = drawn[0].axes[2]
    small = [line for line in ours.lines if line.get_markersize() == 2.5]
    alone = [line for line in small if line.get_color() == "white"]
    assert 0 < len(alone) < len(small)
    assert ours.get_title("left").endswith("small points: single seeds; white: one seed alone")


def test_a_panel_of_rows_that_do_not_tell_says_so(ledger: Path, tmp_path: Path, drawn: list[Figure]) -> None:
    results_figure(tmp_path / "f.png", "ppl_familiar", ledger)
    ours, none = drawn[0].axes[2:]
    assert [text.get_text() for axis in (ours, none) for text in axis.texts] == [
        "no row tells of familiar documents", "not measured yet",
    ]  # fmt: skip
    assert not ours.lines


def test_familiar_documents_in_the_figure(tmp_path: Path, drawn: list[Figure]) -> None:
    append(tmp_path / "s.jsonl", with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]))
    append(tmp_path / "s.jsonl", row(5, None, 0, 41.0))  # which does not tell
    results_figure(tmp_path / "f.png", "ppl_familiar", tmp_path)
    printed_one, _, ours, _ = drawn[0].axes
    assert printed_one.get_ylabel() == "test perplexity per token"
    assert ours.get_ylabel() == "test perplexity per token, familiar documents"
    assert "only 2 of 3 documents, the familiar ones" in ours.get_title(loc="left").replace("\n", " ")
    assert ours.lines[0].get_xydata().tolist() == [pytest.approx([53, math.exp(4)])]
