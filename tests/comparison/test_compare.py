"""Rivals side by side: equal weights and tokens, nothing done twice, a table and a plot."""

import copy
import gc
import json
import math
import os
import re
import shutil
import weakref
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.text import Text

from logpast.cli import main
from logpast.comparison import compare as comparison
from logpast.comparison import table as comparison_table
from logpast.comparison.compare import compare
from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Batches, Lanes
from logpast.ledger import row as ledger
from logpast.models import SYSTEMS, RecentConfig, TransformerXLConfig
from logpast.sweeps import cell
from logpast.training.config import TrainConfig
from logpast.util.errors import Diverged, UserError
from logpast.util.files import exclusive_lock

TRAIN, TEST = {"name": "a", "sha256": "1"}, {"name": "b", "sha256": "2"}


@pytest.fixture
def page(tmp_path: Path, books: Path) -> Path:
    """A comparison of seconds."""
    values = {
        "train": str(books), "validation": str(books), "test": str(books), "tokenizer": "bpe-300",
        "tokens": 600, "seconds": 0.5, "tokens_per_step": 100, "learning_rates": [1e-3, 1e-2], "search_tokens": 300,
        "model": {"window": 8, "layers": 1, "heads": 2, "width": 16},
        "systems": {
            "memory": {"system": "log_memory", "slots": 9},
            "full": {"system": "recent", "slots": 0, "window": 24},
            "xl": {"system": "transformer_xl", "memory": 8, "memory_when_scoring": 12, "segments": 2},
        },
    }  # fmt: skip
    place = tmp_path / "rivals.yaml"
    place.write_text(yaml.safe_dump(values, sort_keys=False))
    return place


def told_by(page: Path) -> str:
    """As earlier versions told of a recipe: without its texts."""
    plan = comparison._read(page)
    return json.dumps({f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "seeds"})


def changed(page: Path, **values: object) -> Path:
    page.write_text(yaml.safe_dump(yaml.safe_load(page.read_text()) | values, sort_keys=False))
    return page


def test_all_systems_in_one_table(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    rows = compare(page, out, seeds=[0, 1, 0])
    assert [(row["comparison"]["system"], row["seed"]) for row in rows] == [
        ("memory", 0), ("memory", 1), ("full", 0), ("full", 1), ("xl", 0), ("xl", 1),
    ]  # fmt: skip
    for row in rows:
        assert abs(row["parameters"] / rows[0]["parameters"] - 1) < 0.02
        assert row["train_tokens"] == pytest.approx(600, rel=0.25)  # whole batches of a text of three small documents
        assert row["scores"]["unscored"] == 0
        assert row["scores"]["by_document"]["unseen"] == [0] * 3  # trained and scored on the same text
        assert row["comparison"]["learning_rate"] in (1e-3, 1e-2)
        assert row["comparison"]["tokens_per_second"] > 0
        assert row["recipe_hash"] == ledger.hash_recipe(row["recipe"])
        optimizer = row["recipe"]["optimizer"]
        assert optimizer["learning_rate"] == row["comparison"]["learning_rate"]
        assert optimizer["final_learning_rate"] == pytest.approx(optimizer["learning_rate"] / 10)
    lengths = {row["comparison"]["system"]: row["comparison"]["attention_length"] for row in rows}
    assert lengths == {"memory": 17, "full": 24, "xl": 20}  # as they are scored
    states = {row["comparison"]["system"]: row["comparison"]["state_bytes"] for row in rows}
    assert states == {
        "memory": 2 * 4 * 16 * 17 + 4 * 4,
        "full": 2 * 4 * 16 * 24,
        "xl": 2 * 4 * 16 * 8 + 4 * 16 * 12 + 8,
    }
    table = (out / "table.md").read_text()
    assert re.search(r"\| memory \| 0, 1 \| [\d.]+ ± [\d.]+ \[[\d.]+, [\d.]+\] \|", table)
    assert (out / "plot.png").stat().st_size > 10_000
    assert {path.name for path in out.rglob("*.safetensors")} == {"model.safetensors"}
    assert table.startswith("**")
    of_table = [line for line in table.splitlines() if line.startswith("|")]
    heads, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in of_table)
    column = heads.index("nats against memory")
    assert lines[0][column] == ""
    nats = {name: sum(r["scores"]["nats"] for r in rows if r["comparison"]["system"] == name) for name in lengths}
    wanted = (nats["xl"] - nats["memory"]) / 2 / rows[0]["scores"]["tokens"]
    mean, low, high = (float(number) for number in re.findall(r"[+-][\d.]+", lines[2][column]))
    assert mean == pytest.approx(wanted, abs=1e-4)
    assert low < mean < high

    def never(*arguments: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(comparison, "train", never)
    monkeypatch.setattr(comparison, "run_cell", never)
    assert compare(page, out, seeds=[0, 1]) == rows


def test_the_search_takes_the_better_rate(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(changed(page, learning_rates=[1e-9, 3e-3]), tmp_path / "out", systems=["memory"])
    told = " ".join("".join(capsys.readouterr()).split())
    assert "memory: best with the highest rate tried; one beyond 0.003 in learning_rates might do better" in told
    found = json.loads((tmp_path / "out" / "search" / "memory.json").read_text())
    assert found["learning_rate"] == 3e-3
    assert found["tried"]["0.003"] < found["tried"]["1e-09"]


def test_an_interrupted_search_goes_on(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, begun, real = changed(page, learning_rates=[1e-3, 2e-3, 3e-3]), list[str](), comparison.train

    def interrupted(config: TrainConfig) -> dict[str, Any]:
        if config.run.name == "memory-0.003" and len(begun) == 2:
            raise KeyboardInterrupt
        result = real(config)
        begun.append(config.run.name)
        return result

    monkeypatch.setattr(comparison, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(page, tmp_path / "out", systems=["memory"])
    logs = {name: tmp_path / "out" / "search" / name / "log.jsonl" for name in begun}
    written = {name: log.read_bytes() for name, log in logs.items()}
    assert list(written) == ["memory-0.001", "memory-0.002"]

    def once(config: TrainConfig) -> dict[str, Any]:
        result = real(config)
        assert written.get(config.run.name) in (None, (config.run / "log.jsonl").read_bytes())  # with its speeds
        return result

    monkeypatch.setattr(comparison, "train", once)
    compare(page, tmp_path / "out", systems=["memory"])
    assert set(json.loads((tmp_path / "out" / "search" / "memory.json").read_text())["tried"]) == {
        "0.001",
        "0.002",
        "0.003",
    }
    assert [path.name for path in (tmp_path / "out" / "search").iterdir()] == ["memory.json"]


@pytest.mark.parametrize("damaged", ["", "{}", "[]", '{"learning_rate": null, "tokens_per_second": 1}'])
def test_a_damaged_search_is_done_again(page: Path, tmp_path: Path, damaged: str) -> None:
    place = tmp_path / "out" / "search" / "memory.json"
    place.parent.mkdir(parents=True)
    place.write_text(damaged)
    compare(changed(page, learning_rates=[1e-3]), tmp_path / "out", systems=["memory"])
    assert json.loads(place.read_text())["learning_rate"] == 1e-3


@pytest.mark.parametrize("row", ["{}", "[]", "3", '{"comparison": {}, "seed": 0, "scores": {}}'])
def test_rows_of_something_else_are_told(page: Path, tmp_path: Path, row: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    comparison.atomic_write(tmp_path / "recipe.json", told_by(page))
    with pytest.raises(UserError, match=r"a row that is no comparison's|is not a row"):
        compare(page, tmp_path)
    assert not (tmp_path / "search").exists()


def test_a_rate_that_diverges_is_passed_over(page: Path, tmp_path: Path) -> None:
    compare(changed(page, learning_rates=[1e30, 3e-3]), tmp_path / "out", systems=["memory"])
    found = json.loads((tmp_path / "out" / "search" / "memory.json").read_text())
    assert list(found["tried"]) == ["0.003"]
    with pytest.raises(UserError, match=r"diverged: memory, seed 0\. Of learning_rates, add smaller ones"):
        compare(changed(page, learning_rates=[1e30]), tmp_path / "none", systems=["memory"])
    assert len(compare(changed(page, learning_rates=[3e-3]), tmp_path / "none", systems=["memory"])) == 1


def test_a_search_that_diverged_is_not_made_for_each_seed(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"diverged: memory, seed 0; memory, seed 1\."):
        compare(changed(page, learning_rates=[1e30]), tmp_path, systems=["memory"], seeds=[0, 1])
    assert capsys.readouterr().out.count("memory: learning rate") == 1


def test_a_cell_that_diverges_stops_no_other(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cell = comparison.run_cell

    def some(config: TrainConfig, *given: Any) -> dict[str, Any]:
        if config.model.window == 24:
            raise Diverged("the loss became nan by step 3")
        return run_cell(config, *given)

    monkeypatch.setattr(comparison, "run_cell", some)
    with pytest.raises(UserError, match="diverged: full, seed 0"):
        compare(changed(page, learning_rates=[1e-3]), tmp_path)
    rows = ledger.read(tmp_path / "rows.jsonl")
    assert [row["comparison"]["system"] for row in rows] == ["memory", "xl"]
    assert "| xl |" in (tmp_path / "table.md").read_text()


def test_texts_that_changed_are_not_mixed(page: Path, books: Path, tmp_path: Path) -> None:
    shutil.copytree(books, test := tmp_path / "test")
    compare(changed(page, test=str(test), learning_rates=[1e-3]), tmp_path / "out", systems=["memory"])
    (test / "0.txt").write_text("another text, of other words\n" * 9)
    with pytest.raises(UserError, match=r"another recipe \(texts\)"):
        compare(page, tmp_path / "out")
    (tmp_path / "out" / "recipe.json").write_text(told_by(page))
    with pytest.raises(UserError, match="rows of another test text than there is now"):
        compare(page, tmp_path / "out")
    assert len(ledger.read(tmp_path / "out" / "rows.jsonl")) == 1


def test_rows_by_hand(page: Path, tmp_path: Path) -> None:
    """A last line without its end, as editors leave it; a system that the recipe has not; rows without a recipe."""
    out = tmp_path / "out"
    compare(changed(page, learning_rates=[1e-3]), out, systems=["memory"])
    (place := out / "rows.jsonl").write_text((out / "rows.jsonl").read_text().rstrip("\n"))
    assert [row["comparison"]["system"] for row in compare(page, out, systems=["xl"])] == ["memory", "xl"]
    assert len(place.read_text().splitlines()) == 2
    kept = place.read_text()
    place.write_text(kept.replace('"system": "xl"', '"system": "zzz"'))
    with pytest.raises(UserError, match="the recipe has no 'zzz'; remove it"):
        compare(page, out)
    place.write_text(kept)
    (out / "recipe.json").unlink()
    with pytest.raises(UserError, match=r"no recipe.json that tells of what"):
        compare(page, out)


def test_equal_time_gives_the_faster_more_tokens(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And tells of one whose speed is not that of its search."""
    monkeypatch.setattr(cell, "tokens_per_second", lambda run: 3000.0)
    for name, speed in (("memory", 3000), ("full", 6000)):
        place = tmp_path / "out" / "search" / f"{name}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"learning_rate": 1e-3, "tokens_per_second": speed, "tried": {}}))
    slow, fast = compare(page, tmp_path / "out", budget="time", systems=["memory", "full"])
    assert slow["train_tokens"] == pytest.approx(1500, rel=0.1)
    assert fast["train_tokens"] == pytest.approx(3000, rel=0.1)
    told = "".join(capsys.readouterr())
    assert "memory, seed 0: trained for" not in told
    assert re.search(r"full, seed 0: trained for (0\.9\d*|1|1\.0\d*) s in place of 0\.5: its speed was another", told)


def test_one_comparison_at_a_time(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("trained beside another")

    monkeypatch.setattr(comparison, "train", never)
    out = tmp_path / "out"
    out.mkdir()
    with exclusive_lock(out), pytest.raises(UserError, match=f"at work in {out} .process {os.getpid()} on"):
        compare(page, out)
    assert not (out / "recipe.json").exists()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"streams": "x"}, "rivals.yaml: streams cannot be 'x'; it may be 'corpus', 'document'"),
        ({"precision": "16-true"}, "precision cannot be '16-true'; it may be '32-true', 'bf16-mixed'"),
        ({"tokens": -5}, "tokens must be above 0, got -5"),
        ({"tokens": "many"}, "tokens cannot be 'many'"),
        ({"tokens_per_step": 0}, "tokens_per_step must be above 0"),
        ({"seconds": float("nan")}, "seconds must be above 0"),
        ({"search_tokens": 0}, "search_tokens must be above 0"),
        ({"validation_tokens": 0}, "validation_tokens must be above 0"),
        ({"batch_size_when_scoring": 0}, "batch_size_when_scoring must be above 0"),
        ({"learning_rates": 0.001}, "learning_rates cannot be '0.001'"),
        ({"learning_rates": []}, "learning_rates is empty"),
        ({"learning_rates": [0.0]}, "each of learning_rates must be above 0"),
        ({"seeds": 0}, "seeds cannot be '0'"),
        ({"seeds": ["a"]}, "seeds cannot be 'a'"),
        ({"seeds": [-1]}, "each of seeds must be from 0"),
        ({"systems": {}}, "systems is empty"),
        ({"systems": {"a": None}}, "systems cannot be 'None'"),
        ({"systems": {5: {}}}, "the system 5 should have a name; put it in quotes"),
        ({"systems": {"a": {"slotz": 9}}}, "system a: unknown key 'slotz'; did you mean slots?"),
        ({"systems": {"a": {"slots": "x"}}}, "system a: slots cannot be 'x'"),
        ({"systems": {"a": {"slots": 9, "heads": 5}}}, "system a: model.width .* must be a multiple"),
        ({"systems": {"a": {"system": 5}}}, "unknown model '5'"),
        ({"systems": {"a/b": {}, "a_b": {}}}, "files of a/b and a_b would have the same names; rename one"),
        ({"model": 3}, "model cannot be '3'"),
        ({"test": None}, "lacks test"),
        ({"test": "nope"}, "nope"),
        ({"validation": "nope"}, "nope"),
    ],
)
def test_a_wrong_recipe_costs_no_training(page: Path, tmp_path: Path, values: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        compare(changed(page, **values), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [({"seeds": []}, "seeds is empty"), ({"seeds": [-1]}, "from 0 to"), ({"systems": []}, "--systems is empty")],
)
def test_nothing_to_do_is_told(page: Path, tmp_path: Path, words: dict[str, list[Any]], told: str) -> None:
    with pytest.raises(UserError, match=told):
        compare(page, tmp_path / "out", **words)  # type: ignore[arg-type]


def test_what_it_says(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = {"memory [b]": {"system": "log_memory", "slots": 9}}
    compare(changed(page, systems=systems), tmp_path / "out")
    said = capsys.readouterr().out
    assert len(re.findall(r"memory \[b\]: validation ppl [\d.]+\n", said)) == 2
    assert said.count("next: ") == 1  # of the run that is kept


def test_no_name_leads_out_of_the_folder(page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    systems = {"../Tü/XL + a": {"system": "log_memory", "slots": 9}}
    (row,) = compare(changed(page, systems=systems, learning_rates=[1e-3]), out)
    assert row["comparison"]["system"] == "../Tü/XL + a"
    assert row["run"] == ".._Tü_XL + a-tokens-0"
    assert [path.name for path in (out / "runs").iterdir()] == [row["run"]]
    assert [path.name for path in (out / "search").iterdir()] == [".._Tü_XL + a.json"]


def test_other_texts_in_place_of_the_recipes(page: Path, store: TokenStore, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("And God said, Let there be light: and there was light. " * 9)
    values = changed(page, learning_rates=[1e-3])
    (row,) = compare(values, tmp_path / "out", systems=["memory"], validation=str(other), test=str(other))
    assert row["train_data"]["name"] == yaml.safe_load(page.read_text())["train"]
    assert row["validation_data"]["name"] == row["test_data"]["name"] == str(other)
    with pytest.raises(UserError, match=r"another recipe \(.*\); give another --out"):
        compare(values, tmp_path / "out", systems=["memory"])


def test_killed_before_its_row_a_cell_is_scored_again(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its optimizer's state is gone then, and its training is done."""

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(comparison.ledger, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            compare(page, out, systems=["xl"])
    assert {path.name for path in out.rglob("*.safetensors")} == {"model.safetensors"}
    (row,) = compare(page, out, systems=["xl"])
    assert row["step"] > 0
    assert {path.name for path in out.rglob("*.safetensors")} == {"model.safetensors"}


def test_rows_without_documents_have_no_column_against() -> None:
    cell = {
        "budget": "tokens",
        "peak_bytes": None,
        "tokens_per_second": 9.0,
        "attention_length": 9,
        "state_bytes": 9,
        "learning_rate": 0.1,
    }
    scores = {"ppl_token": 20.0, "ppl_word": 30.0, "bits_per_byte": 1.5}
    rows = [
        {"seed": 0, "scores": scores, "parameters": 9, "train_tokens": 9, "comparison": cell | {"system": name}}
        | {"train_data": TRAIN, "test_data": TEST, "train_seconds": 3.0}
        for name in ("a", "b")
    ]
    heads, lines, *_ = comparison_table.table(rows)
    assert "peak MiB" not in heads
    assert not any("against" in head for head in heads)
    assert [len(line) for line in lines] == [len(heads)] * 2
    rows[0]["scores"] = scores | {"by_document": {"nats": [1.0, 2.0], "tokens": [3, 4]}}
    assert comparison_table.table(rows).heads == heads
    rows.append(rows[1] | {"seed": 1})
    rows[1] = rows[1] | {"scores": scores | {"by_document": {"nats": [1.5, 2.9], "tokens": [3, 4]}}}
    found = comparison_table.table(rows)
    assert found.rows[1][list(found.heads).index("nats against a")] == "+0.2000 [+0.1667, +0.2250] (seed 0)"


def with_documents(system: str, seed: int, nats: list[float], unseen: list[int]) -> dict[str, Any]:
    cell = {"peak_bytes": None, "tokens_per_second": 9.0 + seed, "attention_length": 9, "state_bytes": 2048}
    documents = {"nats": nats, "tokens": [100, 100, 200], "unseen": unseen}
    return {
        "seed": seed, "parameters": 9, "train_tokens": 9, "train_seconds": 3.0, "train_data": TRAIN, "test_data": TEST,
        "recipe": {"steps": 5, "seed": seed},
        "comparison": cell | {"system": system, "budget": "tokens", "learning_rate": 0.1},
        "scores": {"ppl_token": math.exp(sum(nats) / 400), "ppl_word": 30.0, "bits_per_byte": 1.5,
                   "by_document": documents},
    }  # fmt: skip


def test_documents_unlike_the_training_text_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        with_documents(name, seed, nats, [2, 1, 2])  # of the first document, 2 % are new
        for name, nats in (("a", [900.0, 100.0, 200.0]), ("b", [100.0, 110.0, 240.0]))
        for seed in (0, 1)
    ]
    heads, lines, *_ = comparison_table.table(rows)
    line = dict(zip(heads, lines[1], strict=True))
    assert line["nats against a"].startswith("-1.8750 ")
    assert line["familiar nats against a"] == "+0.1667 ± 0.0000 [+0.1000, +0.2000]"
    assert line["familiar ppl_token"] == f"{math.exp(350 / 300):.2f} ± 0.00"
    assert line["tokens/s"] == "10"  # the faster seed's

    (place := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "--plot", tmp_path / "p.png", "--out", tmp_path / "t.md"
    with pytest.raises(SystemExit, match="0"):
        main(["results", "comparison", *map(str, [place, *words])])
    shown = capsys.readouterr().out
    assert "familiar: 2 of 3 documents" in shown
    assert shown.count("nats against a") == 1  # of two, the one that tells more
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert (tmp_path / "t.md").read_text().count("nats against a") == 2

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *arguments, **words: drawn.append(figure))
    comparison_table.draw(rows, tmp_path / "p.png")
    left, right = drawn[0].axes
    orange = [line.get_xydata().tolist() for line in left.lines if line.get_color() == "tab:orange"]
    assert orange == [[[pytest.approx(math.exp(350 / 300)), 0]] * 2, [[pytest.approx(math.e), 1]] * 2]
    assert [line.get_xydata().tolist() for line in right.lines] == [
        [[2, pytest.approx(math.exp(350 / 300))]], [[2, pytest.approx(math.e)]],
    ]  # fmt: skip

    for row in rows:
        row["scores"]["by_document"]["unseen"] = [0, 0, 0]
    assert not any("familiar" in head for head in comparison_table.table(rows).heads)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no rows; wait"),
        ('{"scores": {"ppl_token": 3}}\n', "holds no comparison"),
        ("not JSON", "rows.jsonl"),
    ],
)
def test_what_is_no_comparison_is_told(tmp_path: Path, text: str, told: str) -> None:
    (place := tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=told):
        comparison_table.show(place, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("comparison", "budget"), "time", "2 budgets"),
        (("train_data", "sha256"), "another", "2 training texts"),
        (("test_data", "sha256"), "another", "2 test texts"),
    ],
)
def test_what_cannot_be_compared_is_not(tmp_path: Path, place: tuple[str, str], value: str, told: str) -> None:
    rows = [with_documents("a", seed, [1.0, 2.0, 3.0], [0, 0, 0]) for seed in (0, 1)]
    rows[1][place[0]] = rows[1][place[0]] | {place[1]: value}
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=f"rows of {told}"):
        comparison_table.show(file, tmp_path / "p.png")


@pytest.mark.parametrize(("option", "name"), [("plot", "p.txt"), ("out", "rows.jsonl"), ("out", "rows.json")])
def test_rows_are_not_written_over(tmp_path: Path, option: str, name: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(with_documents("a", 0, [1.0, 2.0, 3.0], [0, 0, 0])) + "\n")
    before = file.read_bytes()
    with pytest.raises(UserError, match=r"must end in|another --out"):
        comparison_table.show(file, **{"plot": tmp_path / "p.png", option: tmp_path / name})  # type: ignore[arg-type]
    assert file.read_bytes() == before


def test_a_row_twice_counts_once_and_never_as_another_seed() -> None:
    rows = [with_documents(name, 0, [1.0, 2.0, 3.0], [0, 0, 0]) for name in ("a", "b")]
    assert comparison_table.table([*rows, rows[1]]) == comparison_table.table(rows)
    older = copy.deepcopy(rows[1])
    del older["scores"]["by_document"]
    assert comparison_table.table([rows[0], older, rows[1]]) == comparison_table.table(rows)
    older["scores"]["ppl_token"] = 21.0
    with pytest.raises(UserError, match="two rows of b, seed 0"):
        comparison_table.table([*rows, older])


def test_of_both_budgets_one_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [with_documents(name, 0, [1.0, 2.0, 3.0], [0, 0, 0]) for name in ("a", "b")]
    rows[1]["comparison"]["budget"] = "time"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison_table.show(tmp_path, tmp_path / "p.png", budget="time")
    shown = capsys.readouterr().out
    assert "1 seconds of training" in shown  # 9 tokens at 9 a second
    assert "training s" in shown
    assert "\nb " in shown
    assert "\na " not in shown


@pytest.mark.parametrize(
    ("tokens", "told"),
    [((40_000_000, 39_992_916), "40M training"), ((40_100_000, 50_123_456), "40.1 to 50.1M training")],
)
def test_how_much_was_trained_on(tokens: tuple[int, int], told: str) -> None:
    names = ("a", "b")
    rows = [with_documents(name, 0, [1.0, 2.0, 3.0], [0, 0, 0]) for name in names]
    for row, number in zip(rows, tokens, strict=True):
        row["train_tokens"] = number
    assert f"weights, {told} tokens" in comparison_table.table(rows).title


def test_seeds_of_two_recipes_are_not_averaged(tmp_path: Path) -> None:
    rows = [with_documents("a", seed, [1.0, 2.0, 3.0], [0, 0, 0]) for seed in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison_table.show(tmp_path, tmp_path / "p.png")
    rows[1]["recipe"]["steps"] = 6
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="rows of a differ in more than their seeds; put those"):
        comparison_table.show(tmp_path, tmp_path / "p.png")


def test_differences_have_the_spread_of_seeds() -> None:
    """Two seeds that disagree, while each alone is sure of all documents."""
    nats = [100.0, 100.0, 200.0]
    rows = [with_documents("a", seed, nats, [0, 0, 0]) for seed in (0, 1)]
    rows += [with_documents("b", seed, [n * share for n in nats], [0, 0, 0]) for seed, share in ((0, 1.1), (1, 0.8))]
    found = comparison_table.table(rows)
    assert found.rows[1][list(found.heads).index("nats against a")] == "-0.0500 ± 0.2121 [-0.0500, -0.0500]"


def test_systems_that_gave_something_no_chance(tmp_path: Path) -> None:
    rows = [with_documents(name, 0, [1.0, 2.0, 3.0], [2, 1, 2]) for name in ("a", "b")]
    rows[1]["scores"] |= {
        "ppl_token": None,
        "interval": {"ppl_token": [3.0, None]},
        "by_document": rows[1]["scores"]["by_document"] | {"nats": [1, None, 3]},
    }
    heads, lines, *_ = comparison_table.table(rows)
    found = dict(zip(heads, lines[1], strict=True))
    assert found["ppl_token"] == "inf"
    assert not found["familiar ppl_token"]
    comparison_table.draw(rows, tmp_path / "p.png")


def test_what_lies_close_is_told_apart(tmp_path: Path, drawn: list[Figure]) -> None:
    common = {"seed": 0, "scores": {"ppl_token": 20.0}, "train_tokens": 9, "parameters": 9}
    texts = {"train_data": TRAIN, "test_data": TEST}
    rows = [
        common | texts | {"comparison": {"system": str(kib), "budget": "tokens", "state_bytes": kib * 1024}}
        for kib in (5.1, 5.6, 6.2)
    ]
    comparison_table.draw(rows, tmp_path / "plot.png")
    drawn[0].draw_without_rendering()
    ticks = [label.get_text() for label in drawn[0].axes[1].get_xticklabels()]
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks)
    names = drawn[0].axes[1].texts
    assert {(name.get_text(), name.xy) for name in names} == {(str(x), (x, 20.0)) for x in (5.1, 5.6, 6.2)}
    boxes = [Text.get_window_extent(name) for name in names]  # without the line to the spot
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_key_left_empty_has_its_default(page: Path) -> None:
    assert comparison._read(changed(page, tokens=None)).tokens == 1_000_000


def test_a_store_of_another_tokenizer_is_told(page: Path, books: Path, tmp_path: Path) -> None:
    store = open_tokens(books, "bpe-280")
    with pytest.raises(UserError, match="was made with the tokenizer bpe-280"):
        compare(changed(page, train=str(store.path)), tmp_path / "out")


def test_a_plan_is_the_same_however_numbers_are_written(page: Path, tmp_path: Path) -> None:
    plan = comparison._read(changed(page, seconds=20))
    comparison._same_plan(plan, {}, tmp_path)
    (tmp_path / "rows.jsonl").touch()
    kept = tmp_path / "recipe.json"
    kept.write_text(kept.read_text().replace("20.0", "20"))
    comparison._same_plan(plan, {}, tmp_path)
    turned = replace(plan, systems=dict(reversed(plan.systems.items())))
    with pytest.raises(UserError, match=r"another recipe \(systems\)"):  # the first sets the number of weights
        comparison._same_plan(turned, {}, tmp_path)
    kept.write_text("{")
    with pytest.raises(UserError, match=r"recipe.json is damaged"):
        comparison._same_plan(plan, {}, tmp_path)


def test_mistakes_are_told(page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"unknown systems rnn; .* has memory, full, xl"):
        compare(page, out, systems=["rnn"])
    compare(page, out, systems=["memory"])
    with pytest.raises(UserError, match=r"another recipe \(.*\); give another --out"):
        compare(changed(page, tokens=700), out)
    with pytest.raises(UserError, match="unknown key 'tokns'"):
        compare(changed(page, tokns=700), out)
    with pytest.raises(UserError, match="cannot read"):
        compare(tmp_path / "none.yaml")
    big = {"memory": {"system": "log_memory", "slots": 9}, "xl": {"system": "transformer_xl", "mlp": 400}}
    page.write_text(
        yaml.safe_dump({k: v for k, v in yaml.safe_load(page.read_text()).items() if k != "tokns"}, sort_keys=False)
    )
    with pytest.raises(UserError, match="set its sizes alike"):
        compare(changed(page, systems=big), tmp_path / "big")


@pytest.mark.parametrize("recipe", ["rivals-toy", "rivals-small"])
def test_recipes_have_every_system_at_equal_size(recipe: str) -> None:
    plan = comparison._read(Path(recipe))
    assert {settings["system"] for settings in plan.systems.values()} == set(SYSTEMS)
    sizes = {"rivals-toy": 2048, "rivals-small": 50257}
    store = TokenStore.in_memory([[1] * 1000], sizes[recipe], 0)
    found = comparison._contestants(plan, store)
    for each in found:
        assert abs(each.parameters / found[0].parameters - 1) < 0.02


def test_what_an_earlier_run_left_is_gone_when_memory_is_watched(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is a cycle of objects, which stays, on a GPU, until garbage is collected: the search's were counted."""
    left = type("Left", (), {})()
    left.itself = left
    gone = weakref.ref(left)
    del left
    seen = []

    def watched(config: TrainConfig) -> None:
        seen.append(gone())
        raise KeyboardInterrupt

    monkeypatch.setattr(cell, "train", watched)
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            cell.run_cell(train_config, "kjv:test")
    finally:
        gc.enable()
    assert seen == [None]


def test_a_step_has_as_many_tokens_as_it_is_said_to(tmp_path: Path) -> None:
    """Of documents whose last segments are mostly padding, too: budgets are counted in these."""
    store = TokenStore.in_memory([[1] * length for length in (3, 61, 9, 17, 5, 33)], size=5, eot=4)
    plan = SimpleNamespace(tokens_per_step=40, streams="document")
    for config in (RecentConfig(slots=0, window=8), TransformerXLConfig(window=8, memory=8, segments=2)):
        rows, tokens = comparison._pace(plan, config, store)  # type: ignore[arg-type]
        batches: Any = (
            Lanes(store, 8, rows, 2, 0, "document")
            if isinstance(config, TransformerXLConfig)
            else Batches(store, 8, 0, rows, 0, "document")
        )
        steps = batches.steps_per_epoch if isinstance(batches, Lanes) else 3 * batches.windows_per_epoch
        seen = [int((batches.at(step, slice(None)).targets >= 0).sum()) for step in range(steps)]
        assert sum(seen) / steps == pytest.approx(tokens, rel=1e-6)


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_an_empty_name_is_not_the_recipes(page: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is empty"):
        compare(page, tmp_path / "out", systems=["memory"], **{name: ""})  # type: ignore[arg-type]
