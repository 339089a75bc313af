"""`logpast paper`: its tables, its figures, ours beside them."""

import copy
import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from logpast.errors import UserError
from logpast.experiments import paper, printed
from logpast.experiments.accounting import accounting
from logpast.experiments.ledger import append
from logpast.experiments.measured import measured
from logpast.experiments.results import results
from logpast.filters import PAPER_SPACING

BANK = {"spacing": PAPER_SPACING, "first_peak": 1.0, "kernel": "paper", "normalize": "none", "reach": 1.0}


def row(slots: int, sharpness: int | None, seed: int, ppl: float, **changes: Any) -> dict[str, Any]:
    """As `ledger.row` makes them, with what is read here."""
    model: dict[str, Any] = {"system": "recent", "window": 256, "slots": slots}
    if sharpness:
        model |= {"system": "log_memory", "sharpness": sharpness, **BANK}
    model |= changes.pop("model", {})
    length = {"steps": 2991, "epochs": None, "batch_size": 64} | changes.pop("length", {})
    made = {
        "run": "r", "trained_at_revision": "0" * 40, "recipe": {"model": model, "seed": seed} | length, "seed": seed,
        "parameters": 124_000_000, "train_tokens": 49_000_000, "train_data": {"name": "wiki22k:train"},
        "test_data": {"name": "wikitext103:test", "tokens": 286_221},
        "scores": {"accounting": "all", "ppl_token": ppl, "ppl_word": 2 * ppl, "bits_per_byte": 1.0},
    }  # fmt: skip
    return made | changes


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    for slots, sharpness, seed, ppl in (
        (5, None, 0, 40.0),
        (5, None, 1, 41.0),
        (53, None, 0, 39.0),
        (5, 100, 0, 38.0),
        (53, 200, 0, 37.0),
    ):
        append(folder / "sweep.jsonl", row(slots, sharpness, seed, ppl))
    return folder


def test_figures_are_drawn(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (
        paper.fig1(tmp_path / "1.svg"),
        paper.fig_a1(tmp_path / "a1.svg"),
        paper.results_figure(tmp_path / "none.svg", results=tmp_path),
        paper.results_figure(tmp_path / "ours.svg", "ppl_word", ledger),
    ):
        assert out.read_text().startswith("<?xml")
    assert (tmp_path / "1.svg").stat().st_size < (tmp_path / "a1.svg").stat().st_size
    assert (tmp_path / "none.svg").stat().st_size < (tmp_path / "ours.svg").stat().st_size
    assert "printed values alone" in capsys.readouterr().out


def test_figure_a1_goes_on_where_figure_1_ends(tmp_path: Path, drawn: list[Figure]) -> None:
    paper.fig1(tmp_path / "1.png")
    paper.fig_a1(tmp_path / "a1.png")
    assert ["".join(axis.get_title("left") for axis in figure.axes) for figure in drawn] == ["ABC", "DEFGHI"]
    sharpness = [axis.get_ylabel().partition("k = ")[2] for figure in drawn for axis in figure.axes[::3]]
    assert sharpness == ["50", "10", "100"]


def test_results_figure_draws_what_is_printed_and_what_was_measured(
    tmp_path: Path, ledger: Path, drawn: list[Figure]
) -> None:
    paper.results_figure(tmp_path / "f.png", results=ledger)
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
    paper.results_figure(tmp_path / "f.png", results=ledger)
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
    paper.results_figure(tmp_path / "f.png", results=Path(__file__).parents[2] / "results")
    drawn[0].draw_without_rendering()
    for axis in drawn[0].axes:
        right = axis._left_title.get_window_extent().x1
        assert right <= drawn[0].bbox.x1
        assert len(axis.get_title("left")) > 20


def test_of_ours_only_what_is_asked_for(
    ledger: Path, tmp_path: Path, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {one.name for one in paper.measured(printed.sweep("A1"), ledger)}
    assert {"delta", "k = 100"} < everything
    assert [one.name for one in paper.measured(printed.sweep("A1"), ledger, ["k=100", "seed=0"])] == ["k = 100"]
    paper.results_figure(tmp_path / "f.png", results=ledger, where=["k=100"])
    assert [text.get_text() for text in drawn[0].axes[2].get_legend().get_texts()] == ["k = 100"]
    assert {line[2] for line in paper.table_a1(results=ledger, where=["k=100"]).rows if "¹" in line[2]} == {"k = 100¹"}
    for table in (paper.table_a1, paper.table_a2):
        with pytest.raises(UserError, match="none of the"):
            table(results=ledger, where=["k=7"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder results"):
        paper.table_a1(where=["k=7"])


def test_a_single_seed_is_white_and_told(tmp_path: Path, ledger: Path, drawn: list[Figure]) -> None:
    paper.results_figure(tmp_path / "f.png", results=ledger)
    ours = drawn[0].axes[2]
    small = [line for line in ours.lines if line.get_markersize() == 2.5]
    alone = [line for line in small if line.get_color() == "white"]
    assert 0 < len(alone) < len(small)
    assert ours.get_title("left").endswith("small points: single seeds; white: one seed alone")


def test_only_what_belongs_stands_beside_the_table(ledger: Path) -> None:
    table = printed.sweep("A1")
    for entry in (
        row(5, 100, 9, 1.0, test_data={"name": "wikitext103:validation", "tokens": 1}),
        row(5, 100, 9, 1.0, test_data={"name": "wikitext103:test[:5]", "tokens": 1}),
        row(5, 100, 9, 1.0, model={"window": 128}),
        row(5, 100, 9, 1.0, model={"reach": 3.0}),
        row(6, 100, 9, 1.0),
        row(5, 100, 9, 1.0, comparison={"system": "memory"}),
        row(5, 100, 9, 1.0, model={"system": "transformer_xl"}),
        row(5, 100, 9, 1.0, scores={"accounting": "paper", "ppl_token": 1.0, "ppl_word": 1.0, "bits_per_byte": 1.0}),
    ):
        append(ledger / "other.jsonl", entry)
    found = paper.measured(table, ledger)
    assert [(one.name, sorted(one.points)) for one in found] == [
        ("delta", [5, 53]),
        ("k = 100", [5]),
        ("k = 200", [53]),
    ]
    assert [one.values(5, "ppl_token") for one in found[:2]] == [[40.0, 41.0], [38.0]]
    assert paper.measured(printed.sweep("A2"), ledger) == []


def test_recipes_are_told_apart_and_parts_of_a_test_set_named(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(53, 100, 0, 35.0, model={"normalize": "area"}))
    names = [one.name for one in paper.measured(printed.sweep("A1"), ledger)]
    assert names == ["delta", "k = 100, model.normalize = area", "k = 100, model.normalize = none", "k = 200"]
    append(ledger / "books.jsonl", row(53, 100, 0, 35.0, test_data={"name": "pg19:test", "tokens": 10_000_000}))
    (one,) = paper.measured(printed.sweep("A2"), ledger)
    assert "10,000,000 tokens: not the official set" in one.about


def test_each_of_a_kind_stands_beside_the_printed_figure(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(5, 100, 0, 35.0, model={"normalize": "area"}))
    append(ledger / "other.jsonl", row(5, 100, 0, 36.0, train_data={"name": "books", "tokens": 49_000_000}))
    append(ledger / "other.jsonl", row(5, 50, 0, 37.0))
    table = paper.ours("A1", ledger)
    assert table
    lines = [dict(zip(table.heads, line, strict=True)) for line in table.rows if line[0] == "5"]
    assert [(line["τ*max"], line["system"], line["printed"], line["ours"]) for line in lines] == [
        ("2", "delta¹", "19.26/30.78", "40.50 ± 0.71/81.00 ± 1.41 (2 seeds)"),
        ("2", "k = 100²", "19.74/31.31", "36.00/72.00"),
        ("2", "k = 100, model.normalize = area¹", "19.74/31.31", "35.00/70.00"),
        ("2", "k = 100, model.normalize = none¹", "19.74/31.31", "38.00/76.00"),
        ("2", "k = 50¹", "", "37.00/74.00"),
    ]


def test_the_same_row_twice_counts_once(ledger: Path) -> None:
    append(ledger / "sweep.jsonl", row(5, 100, 0, 38.0))
    found = {one.name: one for one in paper.measured(printed.sweep("A1"), ledger)}
    assert found["k = 100"].values(5, "ppl_token") == [38.0]


def test_a_second_row_never_replaces_the_first(ledger: Path) -> None:
    anew = row(5, 100, 0, 99.0, run="anew")
    anew["scores"]["streams"] = "document"
    append(ledger / "other.jsonl", anew)
    found = {one.name: one for one in paper.measured(printed.sweep("A1"), ledger)}
    assert found["k = 100, scores.streams = document"].values(5, "ppl_token") == [99.0]
    assert found["k = 100, scores.streams = None"].values(5, "ppl_token") == [38.0]
    anew["scores"]["ppl_token"] = 98.0
    append(ledger / "other.jsonl", anew)
    with pytest.raises(UserError, match=r"other\.jsonl, run 'anew': .*L = 5, k = 100, seed 0.*remove one"):
        paper.measured(printed.sweep("A1"), ledger)


def test_damaged_and_diverged_rows(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(9, 100, 0, float("inf")))
    found = {one.name: one for one in paper.measured(printed.sweep("A1"), ledger)}
    assert found["k = 100"].values(9, "ppl_word") == [float("inf")]
    append(ledger / "other.jsonl", row(9, 100, 1, 1.0, parameters=None))
    with pytest.raises(UserError, match=r"other\.jsonl, run 'r' is not a row .*mend or remove"):
        paper.table_a1(results=ledger)


def test_tables_in_three_forms(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper.table_a1(tmp_path / "a1.csv", ledger)
    with (tmp_path / "a1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13 * 4
    assert (rows[-1]["system"], rows[-1]["printed"]) == ("k = 200¹", "16.76/23.56")
    assert rows[-1]["printed − delta"] == f"{math.log(16.76 / 17.98):+.3f}"
    assert (rows[0]["system"], rows[0]["ours"]) == ("delta¹", "40.50 ± 0.71/81.00 ± 1.41 (2 seeds)")
    assert (rows[0]["printed"], rows[0]["printed − delta"]) == ("19.26/30.78", "")
    assert [(row["system"], row["ours"]) for row in rows[2:5]] == [("k = 150", ""), ("k = 200", ""), ("delta", "")]
    below = capsys.readouterr().out.split("beside the printed:\n")[1].splitlines()
    assert [line.split("  ")[0].strip() for line in below[1:4]] == ["5", "5", "53"]
    assert "k = 150" not in "".join(below)
    paper.table_a2(tmp_path / "a2.json", ledger)
    assert json.loads((tmp_path / "a2.json").read_text())["rows"][43]["printed"] == "17.82/79.40"
    assert "ours" not in capsys.readouterr().out
    paper.table1(tmp_path / "1.md")
    assert "| Scale-Invariant Compression Filters | 124M | 309 | 23.56 | 26.73 † |" in (tmp_path / "1.md").read_text()
    notes = (tmp_path / "1.md").read_text().split("\n\n")[2:]
    assert len(notes) == 2
    assert "are like the rest" in notes[1]
    assert r"\<unk>" in notes[1]
    accounting(tmp_path / "accounting.md")
    assert "\n\n\\* outside what" in (tmp_path / "accounting.md").read_text()
    assert "trained on 49.0M tokens of wiki22k:train, 124M weights" in "".join(below)


def with_documents(made: dict[str, Any], nats: list[float]) -> dict[str, Any]:
    """Its perplexity becomes what they add up to."""
    documents = {"nats": nats, "tokens": [100, 100, 200], "unseen": [2, 1, 2]}  # 2 % of the first
    summed = {} if None in nats else {"ppl_token": math.exp(sum(nats) / 400)}
    return made | {"scores": made["scores"] | {"by_document": documents} | summed}


def test_filters_that_are_not_the_papers_are_named_where_all_are_alike(tmp_path: Path) -> None:
    for slots in (5, 53):
        append(tmp_path / "s.jsonl", row(slots, 100, 0, 40.0, model={"normalize": "area", "kernel": "paper"}))
    (series,) = measured(printed.sweep("A1"), tmp_path)
    assert series.name == "k = 100, model.normalize = area"


def test_a_memory_stands_beside_the_control_of_its_length_and_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        append(tmp_path / "s.jsonl", with_documents(row(5, None, seed, 40.0), [300.0, 400.0, 800.0]))
        append(tmp_path / "s.jsonl", with_documents(row(53, None, seed, 40.0), [300.0, 400.0, 800.0]))
    append(tmp_path / "s.jsonl", with_documents(row(53, 200, 1, 39.0), [700.0, 390.0, 788.0]))
    table = paper.table_a1(results=tmp_path)
    lines = {(line[0], line[2]): dict(zip(table.heads, line, strict=True)) for line in table.rows}
    # e^(1200 / 300), of the two familiar ones
    assert lines["53", "delta¹"]["ours"] == f"{math.exp(1500 / 400):.2f} ± 0.00/80.00 ± 0.00 (2 seeds)"
    assert lines["53", "delta¹"]["ours, familiar"] == "54.60 ± 0.00"
    assert [lines["53", "k = 200¹"][head] for head in ("ours", "ours, familiar")] == ["109.40/78.00", "50.74"]
    assert "±: standard deviation over seeds" in table.notes
    assert lines["53", "k = 200¹"]["ours − delta"].startswith("+0.9450 [")
    assert lines["53", "k = 200¹"]["ours − delta, familiar"] == "-0.0733 [-0.1000, -0.0600]"
    assert {where for where, line in lines.items() if line["ours − delta"]} == {("53", "k = 200¹")}
    assert "never has (2 of 3¹)" in "".join(table.notes)
    (series,) = (one for one in measured(printed.sweep("A1"), tmp_path) if one.name == "delta")
    assert series.values(5, "ppl_familiar") == pytest.approx([math.exp(4)] * 2)
    assert series.values(5, "ppl_token") == [math.exp(1500 / 400)] * 2


def test_what_a_state_takes_stands_beside(tmp_path: Path) -> None:
    for k, kib in ((None, 1000), (100, 1032), (200, 1032)):
        append(tmp_path / "s.jsonl", row(53, k, 0, 40.0, state_bytes=kib * 1024))
        append(tmp_path / "s.jsonl", row(5, k, 0, 40.0, state_bytes=900 * 1024))
    append(tmp_path / "s.jsonl", row(9, None, 0, 40.0))  # a row of before
    table = paper.table_a1(results=tmp_path)
    place = table.heads.index("state KiB")
    found = [(line[0], line[2], line[place]) for line in table.rows if line[place]]
    assert found[0] == ("5", "delta¹", "900")
    assert found[-3:] == [("53", "delta¹", "1,000"), ("53", "k = 100¹", "1,032"), ("53", "k = 200¹", "1,032")]
    assert table.notes[-1].startswith("state: what must be kept")


def test_how_much_the_scored_weights_have_seen_stands_beside(tmp_path: Path) -> None:
    """Which may be less than the training, and another length with each seed, of what is still one training."""
    for k, seed, seen in ((None, 0, 49_000_000), (None, 1, 30_000_000), (200, 0, 12_340_000)):
        append(tmp_path / "s.jsonl", row(53, k, seed, 40.0, train_tokens=seen))
    table = paper.table_a1(results=tmp_path)
    place = table.heads.index("tokens seen")
    found = [(line[2], line[place]) for line in table.rows if line[place]]
    assert found == [("delta¹", "30.0M–49.0M"), ("k = 200¹", "12.3M")]
    assert table.notes[-1].startswith("tokens seen: by the weights")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("recipe", "batch_size"), 8),
        (("recipe", "model", "layers"), 9),
        (("train_data", "sha256"), "another"),
        (("test_data", "sha256"), "another"),
    ],
)
def test_a_control_that_is_not_alike_is_none(tmp_path: Path, place: tuple[str, ...], value: object) -> None:
    other, memory = row(53, None, 0, 40.0, model={"layers": 2}), row(53, 200, 0, 39.0, model={"layers": 2})
    rows = [with_documents(each, [300.0, 400.0, 800.0]) for each in (copy.deepcopy(other), memory)]
    for each in rows:
        append(tmp_path / "same" / "s.jsonl", each)
    assert "ours − delta" in paper.table_a1(results=tmp_path / "same").heads
    part: Any = rows[0]
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    for each in rows:
        append(tmp_path / "other" / "s.jsonl", each)
    assert "ours − delta" not in paper.table_a1(results=tmp_path / "other").heads


def test_texts_of_one_name_are_two_series(tmp_path: Path) -> None:
    for number, ppl in enumerate((39.0, 99.0)):
        test = {"name": "wikitext103:test", "tokens": 286_221, "sha256": str(number)}
        append(tmp_path / "s.jsonl", row(53, 200, 0, ppl, test_data=test))
    table = paper.table_a1(results=tmp_path)
    assert [line[-2] for line in table.rows[-2:]] == ["39.00/78.00", "99.00/198.00"]


def test_of_two_rows_of_a_run_the_one_that_tells_more_counts(tmp_path: Path) -> None:
    newer = with_documents(row(53, 200, 0, 39.0), [700.0, 390.0, 788.0])
    older = newer | {"scores": {name: value for name, value in newer["scores"].items() if name != "by_document"}}
    for each in (older, newer, older):
        append(tmp_path / "s.jsonl", each)
    assert paper.table_a1(results=tmp_path).rows[-1][-3:] == ["109.40/78.00", "50.74", "49.0M"]


def test_documents_that_a_model_gives_no_chance(tmp_path: Path) -> None:
    append(tmp_path / "s.jsonl", with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]))
    append(tmp_path / "s.jsonl", with_documents(row(53, 200, 0, 39.0), [700.0, None, 788.0]))  # type: ignore[list-item]
    table = paper.table_a1(results=tmp_path)
    assert table.rows[-1][-3:] == ["39.00/78.00", "?", "49.0M"]
    assert "ours − delta" not in table.heads


@pytest.mark.parametrize(
    "documents",
    [{"nats": [1.0]}, {"tokens": [1, 2]}, {"nats": [1.0], "tokens": [1, 2]}, {"nats": [1.0], "tokens": [None]}, []],
)
def test_damaged_documents_are_told(tmp_path: Path, documents: object) -> None:
    made = row(53, 200, 0, 39.0)
    append(tmp_path / "s.jsonl", made | {"scores": made["scores"] | {"by_document": documents}})
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' is not a row of a scored run"):
        paper.table_a1(results=tmp_path)


@pytest.mark.parametrize("ppl", [12.0, 0.0, None])
def test_documents_that_add_up_to_something_else_are_told(tmp_path: Path, ppl: float | None) -> None:
    made = with_documents(row(53, 200, 0, 39.0), [300.0, 400.0, 800.0])
    append(tmp_path / "s.jsonl", made | {"scores": made["scores"] | {"ppl_token": ppl}})
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' .* add up to another perplexity"):
        paper.table_a1(results=tmp_path)


def test_documents_of_another_text_are_told(tmp_path: Path) -> None:
    other = with_documents(row(53, None, 1, 40.0), [300.0, 400.0])
    other["scores"]["by_document"] |= {"tokens": [100, 100], "unseen": [0, 0]}
    for made in (with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]), other):
        append(tmp_path / "s.jsonl", made)
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' .* has other documents than rows of the same text"):
        paper.table_a1(results=tmp_path)


def test_a_state_that_is_no_number_is_told(tmp_path: Path) -> None:
    append(tmp_path / "s.jsonl", row(53, None, 0, 40.0, state_bytes="x"))
    with pytest.raises(UserError, match=r"s\.jsonl, run 'r' is not a row of a scored run"):
        paper.table_a1(results=tmp_path)


def test_more_kinds_of_runs_than_single_digits(tmp_path: Path) -> None:
    for steps in range(1, 13):
        append(tmp_path / "s.jsonl", row(53, None, 0, 40.0, length={"steps": 1000 * steps}))
    table = paper.table_a1(results=tmp_path)
    marks = [line[2].removeprefix("delta") for line in table.rows if line[table.heads.index("ours")]]
    assert len(marks) == len(set(marks)) == 12
    assert {"⁹", "¹⁰", "¹²"} < set(marks)
    assert all(any(note.startswith(f"{mark} trained on") for note in table.notes) for mark in marks)


def test_tables_are_not_written_among_rows(ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="would be read as rows"):
        paper.table_a1(ledger / "t.json", ledger)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    for make in (paper.table1, accounting, partial(paper.table_a1, results=ledger)):
        with pytest.raises(UserError, match="would be read as rows of results"):
            make(Path("results/t.json"))


def test_tables_are_not_written_over_what_a_ledger_keeps(ledger: Path) -> None:
    kept = [ledger / "README.md", ledger / "analyses" / "a" / "analysis.json", ledger / "logs" / "a.jsonl"]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("kept")
        with pytest.raises(UserError, match=f"{file.name} is among what {ledger} keeps; write to another file"):
            results(folder=ledger, csv=str(file))
    for file in kept[:2]:
        with pytest.raises(UserError, match="write to another file"):
            paper.table_a1(file, ledger)
    assert {file.read_text() for file in kept} == {"kept"}
    for _ in range(2):  # an older table is no evidence
        results(folder=ledger, csv=str(ledger / "table.csv"))


def test_a_panel_of_rows_that_do_not_tell_says_so(ledger: Path, tmp_path: Path, drawn: list[Figure]) -> None:
    paper.results_figure(tmp_path / "f.png", "ppl_familiar", ledger)
    ours, none = drawn[0].axes[2:]
    assert [text.get_text() for axis in (ours, none) for text in axis.texts] == [
        "no row tells of familiar documents", "not measured yet",
    ]  # fmt: skip
    assert not ours.lines


def test_familiar_documents_in_the_figure(tmp_path: Path, drawn: list[Figure]) -> None:
    append(tmp_path / "s.jsonl", with_documents(row(53, None, 0, 40.0), [300.0, 400.0, 800.0]))
    append(tmp_path / "s.jsonl", row(5, None, 0, 41.0))  # which does not tell
    paper.results_figure(tmp_path / "f.png", "ppl_familiar", tmp_path)
    printed_one, _, ours, _ = drawn[0].axes
    assert printed_one.get_ylabel() == "test perplexity per token"
    assert ours.get_ylabel() == "test perplexity per token, familiar documents"
    assert "only 2 of 3 documents, the familiar ones" in ours.get_title(loc="left").replace("\n", " ")
    assert ours.lines[0].get_xydata().tolist() == [pytest.approx([53, math.exp(4)])]


def test_tables_without_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paper.table_a1().heads == ["L", "τ*max", "system", "printed", "printed − delta"]
    with pytest.raises(UserError, match=r"no folder nowhere .*--results"):
        paper.table_a1(results=Path("nowhere"))
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    with pytest.raises(UserError, match=r"must end in \.md, \.csv, \.json"):
        paper.table1(precious)
    assert precious.read_text() == "precious"


def test_accounting_marks_the_cells_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    table = accounting()
    marked = {
        (line[0], int(line[1]), head)
        for line in table.rows
        for head, cell in zip(table.heads, line, strict=True)
        if "*" in cell
    }
    controls = {(name, slots, "delta") for name in ("A1", "A2") for slots in (5, 9, 13, 17)}
    assert marked == controls | {("A1", 9, "k = 150"), ("A2", 21, "k = 100"), ("A2", 41, "k = 200")}
    best = table.rows[12]
    assert best[:4] == ["A1", "53", "15,885 (5.55%)", "1.1207"]
    assert best[-1] == "23.56 → 28.36 (k = 200)"
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[-8:])) <= 118
    text = " ".join(" ".join(lines).split())
    assert "23.56 would read 28.36 on 241,211 words, and 26.73 on 245,569" in text
    assert "inference" in text


def test_accounting_fails_where_a_row_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = copy.deepcopy(printed.page())
    wrong["tableA2"]["rows"][3][150][1] = 89.60  # 98.60 is printed
    monkeypatch.setattr(printed, "page", lambda: wrong)
    with pytest.raises(UserError, match="Table A2, L = 17"):
        accounting()
