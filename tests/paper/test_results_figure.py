"""`logpast paper results-figure`."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from logpast.ledger.row import append
from logpast.paper import printed
from logpast.paper.results_figure import results_figure
from logpast.reporting import palette
from paper_rows import row, with_documents

RESULTS = Path(__file__).parents[2] / "results"


def test_without_rows_only_the_printed_values_are_plotted(
    tmp_path: Path, ledger: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    results_figure(tmp_path / "none.svg", results=tmp_path)
    assert f"no row of {tmp_path}" in capsys.readouterr().out
    results_figure(tmp_path / "ours.svg", "ppl_word", ledger)
    assert "no row" not in capsys.readouterr().out
    assert [len(figure.axes) for figure in drawn] == [2, 4]


def test_plots_printed_and_measured_values(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
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


def test_per_word_values_are_plotted_for_ppl_word(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    results_figure(tmp_path / "f.png", "ppl_word", ledger)
    wiki, _, ours, _ = drawn[0].axes
    assert list(wiki.lines[0].get_ydata()) == [row.delta.word for row in printed.sweep("A1").rows]
    assert list(ours.lines[0].get_ydata()) == [81.0, 78.0]
    assert {axis.get_ylabel() for axis in (wiki, ours)} == {"test perplexity per word"}


def test_conditions_select_our_rows(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    results_figure(tmp_path / "f.png", results=ledger, where=["k=100"])
    legend = drawn[0].axes[2].get_legend()
    assert legend
    assert [text.get_text() for text in legend.get_texts()] == ["k = 100"]


def test_series_of_two_trainings_have_footnotes_and_markers(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    books = {"length": {"steps": None, "epochs": 2.0}, "train_data": {"name": "books", "tokens": 49_000_000}}
    for slots in (5, 53):
        append(ledger / "other.jsonl", row(slots, 100, 0, 30.0, **books))
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


def test_titles_stay_within_the_figure(tmp_path: Path, drawn: list[Figure]) -> None:
    """With the longest title that our own rows make: a part of PG-19's test set."""
    results_figure(tmp_path / "f.png", results=RESULTS)
    figure = drawn[0]
    figure.draw_without_rendering()
    for axis in figure.axes:
        text = axis.get_title("left")
        (title,) = [artist for artist in axis.get_children() if getattr(artist, "get_text", str)() == text]
        assert len(text) > 20
        assert title.get_window_extent().x1 <= figure.bbox.x1


def test_single_seed_is_a_white_point(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    results_figure(tmp_path / "f.png", results=ledger)
    ours = drawn[0].axes[2]
    points = [line for line in ours.lines if line.get_markersize() == 2.5]
    white = [line for line in points if line.get_color() == palette.PAPER]
    assert 0 < len(white) < len(points)
    assert "white" in ours.get_title("left").splitlines()[-1]


def test_panel_says_if_no_row_has_documents(ledger: Path, tmp_path: Path, drawn: list[Figure]) -> None:
    results_figure(tmp_path / "f.png", "ppl_in_vocabulary", ledger)
    ours, none = drawn[0].axes[2:]
    assert ["in-vocabulary" in text.get_text() for text in ours.texts] == [True]
    assert [text.get_text() for text in none.texts] == ["not measured yet"]
    assert not ours.lines
    assert ours.get_ylabel() == "test perplexity per token"


def test_in_vocabulary_documents_only(tmp_path: Path, save: Callable[..., Path], drawn: list[Figure]) -> None:
    without_documents = row(5, None, 0, 41.0)
    folder = save(with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]), without_documents)
    results_figure(tmp_path / "f.png", "ppl_in_vocabulary", folder)
    printed_panel, _, ours, _ = drawn[0].axes
    assert printed_panel.get_ylabel() == "test perplexity per token"
    assert ours.get_ylabel() == "test perplexity per token, in-vocabulary documents"
    title = ours.get_title(loc="left").replace("\n", " ")
    assert "in-vocabulary documents only: 2 of 3; not plotted: 1 of 2 runs" in title
    assert ours.lines[0].get_xydata().tolist() == [pytest.approx([53, math.exp(4)])]
