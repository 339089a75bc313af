"""`logpast compare`: equal conditions, nothing done twice, a table and a plot."""

import json
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from logpast.comparison import compare as comparison
from logpast.comparison.compare import compare
from logpast.comparison.recipe import read_recipe
from logpast.comparison.table import values
from logpast.data import TokenStore, open_tokens
from logpast.ledger import row as ledger
from logpast.sweeps import cell
from logpast.training.config import TrainConfig
from logpast.util.errors import Diverged, UserError
from logpast.util.files import exclusive_lock


def without_texts(recipe: Path) -> str:
    """recipe.json as earlier versions wrote it, without hashes of the texts."""
    plan = read_recipe(recipe)
    return json.dumps({f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "seeds"})


def changed(recipe: Path, **values: object) -> Path:
    """The same file with some keys replaced."""
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | values, sort_keys=False))
    return recipe


def test_all_systems_are_trained_scored_and_written_to_one_table(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    rows = compare(recipe, out, seeds=[0, 1, 0])
    assert [(row["comparison"]["system"], row["seed"]) for row in rows] == [
        ("memory", 0), ("memory", 1), ("full", 0), ("full", 1), ("xl", 0), ("xl", 1),
    ]  # fmt: skip
    for row in rows:
        assert abs(row["parameters"] / rows[0]["parameters"] - 1) < 0.02
        assert row["train_tokens"] == pytest.approx(600, rel=0.25)  # whole batches of a text of three small documents
        assert row["scores"]["unscored"] == 0
        assert row["scores"]["by_document"]["unseen"] == [0] * 3  # trained and scored on the same text
        assert row["comparison"]["learning_rate"] in (1e-3, 1e-2)
        assert row["tokens_per_second"] > 0
        assert row["recipe_hash"] == ledger.hash_recipe(row["recipe"])
        optimizer = row["recipe"]["optimizer"]
        assert optimizer["learning_rate"] == row["comparison"]["learning_rate"]
        assert optimizer["final_learning_rate"] == pytest.approx(optimizer["learning_rate"] / 10)
    lengths = {row["comparison"]["system"]: row["comparison"]["attention_length"] for row in rows}
    assert lengths == {"memory": 17, "full": 24, "xl": 20}  # as they are scored
    states = {row["comparison"]["system"]: row["state_bytes"] for row in rows}
    assert states == {
        "memory": 2 * 4 * 16 * 17 + 4 * 4,
        "full": 2 * 4 * 16 * 24,
        "xl": 2 * 4 * 16 * 8 + 4 * 16 * 12 + 8,
    }
    table = (out / "table.md").read_text()
    assert re.search(r"\| memory \| 0, 1 \| [\d.]+ ± [\d.]+ \|", table)
    assert (out / "plot.png").stat().st_size > 10_000
    assert {path.name for path in out.rglob("*.safetensors")} == {"model.safetensors"}
    assert table.startswith("**")
    nats = {name: sum(r["scores"]["nats"] for r in rows if r["comparison"]["system"] == name) for name in lengths}
    expected = (nats["xl"] - nats["memory"]) / 2 / rows[0]["scores"]["tokens"]
    difference = values(rows)["xl"]["nats vs memory (negative: lower loss)"]
    assert difference == pytest.approx(expected, abs=1e-5)  # rounded in rows
    line = next(line for line in table.splitlines() if line.startswith("| xl |"))
    (mean,) = (float(number) for number in re.findall(r"[+-][\d.]+", line))
    assert mean == pytest.approx(expected, abs=1e-4)
    assert "too few documents (3) for an interval" in table
    assert "scored on text that they were trained on: memory, full, xl" in table

    def never(*arguments: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(comparison, "train", never)
    monkeypatch.setattr(comparison, "run_cell", never)
    assert compare(recipe, out, seeds=[0, 1]) == rows


def test_the_search_takes_the_better_rate_and_warns_at_the_edge(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(changed(recipe, learning_rates=[1e-9, 3e-3]), tmp_path / "out", systems=["memory"])
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "memory: 0.003 is the highest rate tried" in printed
    found = json.loads((tmp_path / "out" / "search" / "memory.json").read_text())
    assert found["learning_rate"] == 3e-3
    assert found["tried"]["0.003"] < found["tried"]["1e-09"]


def test_an_interrupted_search_resumes(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, finished, real = changed(recipe, learning_rates=[1e-3, 2e-3, 3e-3]), list[str](), comparison.train

    def interrupted(config: TrainConfig) -> dict[str, Any]:
        if config.run.name == "memory-0.003" and len(finished) == 2:
            raise KeyboardInterrupt
        result = real(config)
        finished.append(config.run.name)
        return result

    monkeypatch.setattr(comparison, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(recipe, tmp_path / "out", systems=["memory"])
    logs = {name: tmp_path / "out" / "search" / name / "log.jsonl" for name in finished}
    written = {name: log.read_bytes() for name, log in logs.items()}
    assert list(written) == ["memory-0.001", "memory-0.002"]

    def once(config: TrainConfig) -> dict[str, Any]:
        result = real(config)
        assert written.get(config.run.name) in (None, (config.run / "log.jsonl").read_bytes())  # with its speeds
        return result

    monkeypatch.setattr(comparison, "train", once)
    compare(recipe, tmp_path / "out", systems=["memory"])
    assert set(json.loads((tmp_path / "out" / "search" / "memory.json").read_text())["tried"]) == {
        "0.001",
        "0.002",
        "0.003",
    }
    assert [path.name for path in (tmp_path / "out" / "search").iterdir()] == ["memory.json"]


@pytest.mark.parametrize("damaged", ["", "{}", "[]", '{"learning_rate": null, "tokens_per_second": 1}'])
def test_a_damaged_search_is_done_again(recipe: Path, tmp_path: Path, damaged: str) -> None:
    file = tmp_path / "out" / "search" / "memory.json"
    file.parent.mkdir(parents=True)
    file.write_text(damaged)
    compare(changed(recipe, learning_rates=[1e-3]), tmp_path / "out", systems=["memory"])
    assert json.loads(file.read_text())["learning_rate"] == 1e-3


@pytest.mark.parametrize("row", ["{}", "[]", "3", '{"comparison": {}, "seed": 0, "scores": {}}'])
def test_rows_of_something_else_are_reported(recipe: Path, tmp_path: Path, row: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    comparison.atomic_write(tmp_path / "recipe.json", without_texts(recipe))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1"):
        compare(recipe, tmp_path)
    assert not (tmp_path / "search").exists()


def test_a_learning_rate_that_diverges_is_skipped(recipe: Path, tmp_path: Path) -> None:
    compare(changed(recipe, learning_rates=[1e30, 3e-3]), tmp_path / "out", systems=["memory"])
    found = json.loads((tmp_path / "out" / "search" / "memory.json").read_text())
    assert list(found["tried"]) == ["0.003"]
    with pytest.raises(UserError, match=r"memory, seed 0; .*learning_rates"):
        compare(changed(recipe, learning_rates=[1e30]), tmp_path / "none", systems=["memory"])
    assert len(compare(changed(recipe, learning_rates=[3e-3]), tmp_path / "none", systems=["memory"])) == 1


def test_a_search_that_diverged_is_not_repeated_for_each_seed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="memory, seed 0; memory, seed 1"):
        compare(changed(recipe, learning_rates=[1e30]), tmp_path, systems=["memory"], seeds=[0, 1])
    assert capsys.readouterr().out.count("memory: learning rate") == 1


def test_a_cell_that_diverges_does_not_stop_the_others(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell = comparison.run_cell

    def some(config: TrainConfig, *given: Any) -> dict[str, Any]:
        if config.model.window == 24:
            raise Diverged("the loss became nan by step 3")
        return run_cell(config, *given)

    monkeypatch.setattr(comparison, "run_cell", some)
    with pytest.raises(UserError, match="full, seed 0"):
        compare(changed(recipe, learning_rates=[1e-3]), tmp_path)
    rows = ledger.read(tmp_path / "rows.jsonl")
    assert [row["comparison"]["system"] for row in rows] == ["memory", "xl"]
    assert "| xl |" in (tmp_path / "table.md").read_text()


def test_rows_of_a_text_that_changed_are_reported(recipe: Path, books: Path, tmp_path: Path) -> None:
    shutil.copytree(books, test := tmp_path / "test")
    compare(changed(recipe, test=str(test), learning_rates=[1e-3]), tmp_path / "out", systems=["memory"])
    (test / "0.txt").write_text("another text, of other words\n" * 9)
    with pytest.raises(UserError, match=r"\(texts\)"):
        compare(recipe, tmp_path / "out")
    (tmp_path / "out" / "recipe.json").write_text(without_texts(recipe))
    with pytest.raises(UserError, match=r"rows\.jsonl has rows of a test text"):
        compare(recipe, tmp_path / "out")
    assert len(ledger.read(tmp_path / "out" / "rows.jsonl")) == 1


def test_rows_edited_by_hand(recipe: Path, tmp_path: Path) -> None:
    """A last line without line break, a system that the recipe lacks, rows without recipe.json."""
    out = tmp_path / "out"
    compare(changed(recipe, learning_rates=[1e-3]), out, systems=["memory"])
    (file := out / "rows.jsonl").write_text((out / "rows.jsonl").read_text().rstrip("\n"))
    assert [row["comparison"]["system"] for row in compare(recipe, out, systems=["xl"])] == ["memory", "xl"]
    assert len(file.read_text().splitlines()) == 2
    kept = file.read_text()
    file.write_text(re.sub(r', "crc32": "\w+"', "", kept).replace('"system": "xl"', '"system": "zzz"'))
    with pytest.raises(UserError, match="'zzz'"):
        compare(recipe, out)
    file.write_text(kept)
    (out / "recipe.json").unlink()
    with pytest.raises(UserError, match=r"without a recipe\.json"):
        compare(recipe, out)


def test_equal_time_gives_the_faster_system_more_tokens(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a warning if the speed differs from that of the search."""
    monkeypatch.setattr(cell, "tokens_per_second", lambda run: 3000.0)
    for name, speed in (("memory", 3000), ("full", 6000)):
        file = tmp_path / "out" / "search" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"learning_rate": 1e-3, "tokens_per_second": speed, "tried": {}}))
    slow, fast = compare(recipe, tmp_path / "out", budget="time", systems=["memory", "full"])
    assert slow["train_tokens"] == pytest.approx(1500, rel=0.1)
    assert fast["train_tokens"] == pytest.approx(3000, rel=0.1)
    printed = "".join(capsys.readouterr())
    assert "memory, seed 0: trained for" not in printed
    assert re.search(r"full, seed 0: trained for (0\.9\d*|1|1\.0\d*) s instead of 0\.5 s", printed)


def test_only_one_comparison_runs_in_a_folder(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("trained at the same time as another")

    monkeypatch.setattr(comparison, "train", never)
    out = tmp_path / "out"
    out.mkdir()
    with exclusive_lock(out), pytest.raises(UserError, match=f"{out} .process {os.getpid()} on"):
        compare(recipe, out)
    assert not (out / "recipe.json").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [({"seeds": []}, "seeds is empty"), ({"seeds": [-1]}, "seeds .*-1"), ({"systems": []}, "--systems is empty")],
)
def test_empty_and_wrong_options_are_reported(
    recipe: Path, tmp_path: Path, words: dict[str, list[Any]], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        compare(recipe, tmp_path / "out", **words)  # type: ignore[arg-type]


def test_output_names_systems_and_suggests_commands_only_for_kept_runs(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = {"memory [b]": {"system": "log_memory", "slots": 9}}
    compare(changed(recipe, systems=systems), tmp_path / "out")
    printed = capsys.readouterr().out
    assert len(re.findall(r"memory \[b\]: validation ppl [\d.]+\n", printed)) == 2
    assert printed.count("next: ") == 1  # not for the runs of the search


def test_system_names_with_slashes_stay_in_the_folder(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    systems = {"../Tü/XL + a": {"system": "log_memory", "slots": 9}}
    (row,) = compare(changed(recipe, systems=systems, learning_rates=[1e-3]), out)
    assert row["comparison"]["system"] == "../Tü/XL + a"
    assert row["run"] == ".._Tü_XL + a-tokens-0"
    assert [path.name for path in (out / "runs").iterdir()] == [row["run"]]
    assert [path.name for path in (out / "search").iterdir()] == [".._Tü_XL + a.json"]


def test_options_replace_the_texts_of_the_recipe(recipe: Path, store: TokenStore, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("And God said, Let there be light: and there was light. " * 9)
    values = changed(recipe, learning_rates=[1e-3])
    (row,) = compare(values, tmp_path / "out", systems=["memory"], validation=str(other), test=str(other))
    assert row["train_data"]["name"] == yaml.safe_load(recipe.read_text())["train"]
    assert row["validation_data"]["name"] == row["test_data"]["name"] == str(other)
    with pytest.raises(UserError, match=r"\(.*\btest\b.*\)"):
        compare(values, tmp_path / "out", systems=["memory"])


def test_a_cell_killed_before_its_row_is_scored_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its optimizer state is removed by then, and its training is finished."""

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(comparison.ledger, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            compare(recipe, out, systems=["xl"])
    assert {path.name for path in out.rglob("*.safetensors")} == {"model.safetensors"}
    (row,) = compare(recipe, out, systems=["xl"])
    assert row["step"] > 0
    assert {path.name for path in out.rglob("*.safetensors")} == {"model.safetensors"}


def test_a_store_of_another_tokenizer_is_reported(recipe: Path, books: Path, tmp_path: Path) -> None:
    store = open_tokens(books, "bpe-280")
    with pytest.raises(UserError, match="bpe-280"):
        compare(changed(recipe, train=str(store.path)), tmp_path / "out")


def test_another_recipe_in_the_same_folder_is_reported(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(changed(recipe, learning_rates=[1e-3]), out, systems=["memory"])
    with pytest.raises(UserError, match=r"\(tokens\); give another --out"):
        compare(changed(recipe, tokens=700), out)


def test_unknown_systems_and_files_are_reported(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rnn; .* has memory, full, xl"):
        compare(recipe, tmp_path / "out", systems=["rnn"])
    with pytest.raises(UserError, match=r"none\.yaml"):
        compare(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_an_empty_text_name_is_reported(recipe: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is empty"):
        compare(recipe, tmp_path / "out", systems=["memory"], **{name: ""})  # type: ignore[arg-type]
