"""The table and plot of a comparison."""

import copy
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from ledger_rows import scored_row
from logpast.cli import main
from logpast.comparison import table as comparison_table
from logpast.comparison.table import COLOURS, COLUMNS, draw, show, table, values
from logpast.util.errors import UserError

VS_A = "nats vs a (negative: lower loss)"
CELL = {"budget": "tokens", "attention_length": 9, "learning_rate": 0.1}


def compared_row(
    system: str, seed: int = 0, nats: Any = (1.0, 2.0, 3.0), unseen: Any = (0, 0, 0), times: int = 5
) -> dict[str, Any]:
    """A row of a test text with three documents, each `times` times."""
    documents = {"nats": [*nats] * times, "tokens": [100, 100, 200] * times, "unseen": [*unseen] * times}
    scores = {"ppl_token": math.exp(sum(nats) / 400), "ppl_word": 30.0, "bits_per_byte": 1.5}
    return scored_row(
        seed=seed,
        recipe={"model": {"system": "recent"}, "steps": 5, "seed": seed},
        comparison=CELL | {"system": system},
        peak_bytes=None,
        tokens_per_second=9.0 + seed,
        state_bytes=2048,
        scores=scores | {"by_document": documents},
    )


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def cells(rows: list[dict[str, Any]], system: str) -> dict[str, str]:
    """The line of a system: head -> text."""
    found = table(rows)
    return next(dict(zip(found.heads, line, strict=True)) for line in found.rows if line[0] == system)


def test_values_are_the_numbers_of_the_table() -> None:
    rows = [compared_row("a"), compared_row("b", 0, [100.0, 110.0, 240.0]), compared_row("b", 1, [90.0, 100.0, 200.0])]
    numbers = values(rows)
    assert list(numbers) == ["a", "b"]
    assert set(numbers["b"]) == {*table(rows).heads} - {"system", "seeds"}
    assert set(numbers["a"]) == set(numbers["b"]) - {VS_A}
    assert numbers["b"]["ppl_token"] == pytest.approx((math.exp(450 / 400) + math.exp(390 / 400)) / 2)
    assert numbers["b"][VS_A] == pytest.approx(444 / 400)
    assert numbers["b"]["tokens/s"] == 10  # of the faster seed
    assert numbers["b"]["state KiB"] == 2
    assert cells(rows, "b")["tokens/s"] == "10"


def test_columns_are_in_the_order_of_their_list() -> None:
    rows = [compared_row(name, 0, nats, [2, 1, 2]) for name, nats in (("a", [9.0, 1.0, 2.0]), ("b", [1.0, 1.1, 2.4]))]
    for row in rows:
        row["peak_bytes"], row["comparison"]["budget"] = 2**20, "time"
    assert list(table(rows).heads) == ["system", "seeds", *(column.head.format(first="a") for column in COLUMNS)]


def test_rows_without_documents_have_no_differences() -> None:
    rows = [compared_row("a"), compared_row("b", nats=[101.0, 102.0, 203.0])]
    with_documents = [copy.deepcopy(row) for row in rows]
    for row in rows:
        del row["scores"]["by_document"]
    heads = table(rows).heads
    assert "peak MiB" not in heads
    assert not any("nats vs" in head for head in heads)
    assert table([with_documents[0], rows[1]]).heads == heads
    line = cells([with_documents[0], with_documents[1], rows[1] | {"seed": 1}], "b")
    assert line[VS_A] == "+1.0000 [+1.0000, +1.0000] (seed 0)"


def test_fewer_than_ten_documents_have_no_intervals_also_in_rows_of_earlier_versions(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    for times, given in ((5, True), (3, False)):
        rows = [compared_row(name, nats=nats, times=times) for name, nats in (("a", [1, 2, 3]), ("b", [101, 110, 203]))]
        for row in rows:
            row["scores"]["interval"] = {"ppl_token": [1.0, 9.0]}
        found = table(rows)
        assert {"[" in cells(rows, "b")[head] for head in ("ppl_token", VS_A)} == {given}
        assert ("too few documents (9) for an interval" in " ".join(found.notes)) != given
        draw(rows, tmp_path / "p.png")
        assert ("too few documents" in drawn[-1].axes[0].get_xlabel()) != given
    for row in rows:
        row["scores"]["interval"] = None
    assert cells(rows, "b")["ppl_token"] == cells(rows, "b")["ppl_token"].partition(" [")[0]


def test_systems_scored_on_training_text_are_named() -> None:
    rows = [compared_row("a"), compared_row("b")]
    assert not any("trained on" in note for note in table(rows).notes)
    rows[1]["scores"]["training_overlap"] = "it is the training text"
    assert "scored on text that they were trained on: b" in table(rows).notes


def test_in_vocabulary_documents_have_their_own_columns_and_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        compared_row(name, seed, nats, [2, 1, 2])  # 2 % of the first document
        for name, nats in (("a", [900.0, 100.0, 200.0]), ("b", [100.0, 110.0, 240.0]))
        for seed in (0, 1)
    ]
    line = cells(rows, "b")
    assert line[VS_A].startswith("-1.8750 ")
    assert line[f"in-vocabulary {VS_A}"] == "+0.1667 ± 0.0000 [+0.1333, +0.1889]"
    assert line["in-vocabulary ppl_token"] == f"{math.exp(350 / 300):.2f} ± 0.00"
    assert values(rows)["b"][f"in-vocabulary {VS_A}"] == pytest.approx(0.5 / 3)

    words = "--plot", tmp_path / "p.png", "--out", tmp_path / "t.md"
    with pytest.raises(SystemExit, match="0"):
        main(["results", "comparison", *map(str, [write(tmp_path, rows), *words])])
    shown = capsys.readouterr().out
    assert "in-vocabulary: 10 of 15 documents" in shown
    assert shown.count(VS_A) == 1  # only that on in-vocabulary documents
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert (tmp_path / "t.md").read_text().count(VS_A) == 2

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **words: drawn.append(figure))
    draw(rows, tmp_path / "p.png")
    left, right = drawn[0].axes
    points = [
        line.get_xydata().tolist()
        for line in left.lines
        if line.get_color() == COLOURS["in-vocabulary"] and len(line.get_xdata())
    ]
    assert points == [[[pytest.approx(math.exp(350 / 300)), 0]] * 2, [[pytest.approx(math.e), 1]] * 2]
    assert [line.get_xydata().tolist() for line in right.lines] == [
        [[2, pytest.approx(math.exp(350 / 300))]], [[2, pytest.approx(math.e)]],
    ]  # fmt: skip

    for row in rows:
        row["scores"]["by_document"]["unseen"] = [0] * 15
    assert not any("in-vocabulary" in text for text in (*table(rows).heads, *table(rows).notes))


def test_rows_that_do_not_say_which_documents_are_in_vocabulary() -> None:
    rows = [compared_row(name, unseen=[2, 1, 2]) for name in ("a", "b")]
    assert not any("recorded" in note for note in table(rows).notes)
    del rows[1]["scores"]["by_document"]
    assert "in-vocabulary: not recorded in the rows of b" in table(rows).notes
    del rows[0]["scores"]["by_document"]["unseen"]
    assert "in-vocabulary: the rows do not say which documents are" in table(rows).notes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no rows"),
        ('{"scores": {"ppl_token": 3}}\n', "line 1 .* comparison"),
        ("not JSON", "line 1"),
    ],
)
def test_files_that_are_not_a_comparison_are_reported(tmp_path: Path, text: str, problem: str) -> None:
    (file := tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"rows\.jsonl.*{problem}"):
        show(file, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def test_a_bug_in_drawing_is_not_reported_as_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(comparison_table, "draw", broken)
    with pytest.raises(KeyError):
        show(write(tmp_path, [compared_row("a")]), tmp_path / "p.png")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("comparison", "budget"), "time", "2 budgets"),
        (("train_data", "sha256"), "another", "2 training texts"),
        (("test_data", "sha256"), "another", "2 test texts"),
    ],
)
def test_rows_that_cannot_be_compared_are_reported(
    tmp_path: Path, path: tuple[str, str], value: str, problem: str
) -> None:
    rows = [compared_row("a", seed) for seed in (0, 1)]
    rows[1][path[0]] = rows[1][path[0]] | {path[1]: value}
    with pytest.raises(UserError, match=f"rows of {problem}"):
        show(write(tmp_path, rows), tmp_path / "p.png")


def test_rows_with_different_documents_are_reported(tmp_path: Path) -> None:
    rows = [compared_row("a"), compared_row("b")]
    rows[1]["scores"]["by_document"]["tokens"][:3] = [200, 100, 100]
    with pytest.raises(UserError, match=r"rows\.jsonl has rows of 2 sets of documents"):
        show(write(tmp_path, rows), tmp_path / "p.png")


@pytest.mark.parametrize(("option", "name"), [("plot", "p.txt"), ("out", "rows.jsonl"), ("out", "rows.json")])
def test_outputs_do_not_overwrite_the_rows(tmp_path: Path, option: str, name: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(compared_row("a")) + "\n")
    before = file.read_bytes()
    with pytest.raises(UserError, match=name):
        show(file, **{"plot": tmp_path / "p.png", option: tmp_path / name})  # type: ignore[arg-type]
    assert file.read_bytes() == before


def test_duplicate_rows_count_once() -> None:
    rows = [compared_row(name) for name in ("a", "b")]
    assert table([*rows, rows[1]]) == table(rows)
    older = copy.deepcopy(rows[1])
    del older["scores"]["by_document"]
    assert table([rows[0], older, rows[1]]) == table(rows)
    older["scores"]["ppl_token"] = 21.0
    with pytest.raises(UserError, match="b, seed 0"):
        table([*rows, older])


def test_budget_selects_rows_of_equal_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [compared_row(name) for name in ("a", "b")]
    rows[1]["comparison"]["budget"] = "time"
    write(tmp_path, rows)
    show(tmp_path, tmp_path / "p.png", budget="time")
    shown = capsys.readouterr().out
    assert "1 seconds of training" in shown  # 9 tokens at 9 a second
    assert "training s" in shown
    assert "\nb " in shown
    assert "\na " not in shown


@pytest.mark.parametrize(
    ("tokens", "amount"),
    [((40_000_000, 39_992_916), "40M training"), ((40_100_000, 50_123_456), "40.1 to 50.1M training")],
)
def test_title_has_the_range_of_training_tokens(tokens: tuple[int, int], amount: str) -> None:
    rows = [compared_row(name) for name in ("a", "b")]
    for row, number in zip(rows, tokens, strict=True):
        row["train_tokens"] = number
    assert f"parameters, {amount} tokens" in table(rows).title


def test_seeds_of_different_recipes_are_not_averaged(tmp_path: Path) -> None:
    rows = [compared_row("a", seed) for seed in (0, 1)]
    write(tmp_path, rows)
    show(tmp_path, tmp_path / "p.png")
    rows[1]["recipe"]["steps"] = 6
    write(tmp_path, rows)
    with pytest.raises(UserError, match="rows of a differ"):
        show(tmp_path, tmp_path / "p.png")


def test_differences_have_the_spread_of_seeds() -> None:
    """Two seeds that disagree, each with the same difference on all documents."""
    nats = [100.0, 100.0, 200.0]
    rows = [compared_row("a", seed, nats) for seed in (0, 1)]
    rows += [compared_row("b", seed, [n * factor for n in nats]) for seed, factor in ((0, 1.1), (1, 0.8))]
    assert cells(rows, "b")[VS_A] == "-0.0500 ± 0.2121 [-0.0500, -0.0500]"


def test_infinite_perplexities_are_shown(tmp_path: Path) -> None:
    rows = [compared_row(name, unseen=[2, 1, 2]) for name in ("a", "b")]
    rows[1]["scores"] |= {
        "ppl_token": None,
        "interval": {"ppl_token": [3.0, None]},
        "by_document": rows[1]["scores"]["by_document"] | {"nats": [1, None, 3] * 5},
    }
    assert cells(rows, "b")["ppl_token"] == "inf"
    assert cells(rows, "b")["in-vocabulary ppl_token"] == ""
    assert values(rows)["b"]["ppl_token"] == math.inf
    draw(rows, tmp_path / "p.png")


def test_labels_of_close_points_do_not_overlap(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [compared_row(str(kib)) for kib in (5.1, 5.6, 6.2)]
    for row in rows:
        row["state_bytes"] = float(row["comparison"]["system"]) * 1024
    ppl = rows[0]["scores"]["ppl_token"]
    draw(rows, tmp_path / "plot.png")
    drawn[0].draw_without_rendering()
    ticks = [label.get_text() for label in drawn[0].axes[1].get_xticklabels()]
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks)
    names = drawn[0].axes[1].texts
    assert {(name.get_text(), name.xy) for name in names} == {(str(x), (x, ppl)) for x in (5.1, 5.6, 6.2)}
    boxes = [Text.get_window_extent(name) for name in names]  # without the line to the point
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
