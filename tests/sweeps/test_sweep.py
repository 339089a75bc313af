"""Sweeps: a page becomes cells; none is lost or doubled, whatever is killed when; failures and time boxes."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.data.prepare import prepare
from logpast.ledger import row as ledger
from logpast.models import LogMemoryConfig, RecentConfig
from logpast.sweeps import cell as cells_module
from logpast.sweeps import runners
from logpast.sweeps import sweep as sweeps
from logpast.sweeps.cell import run_cell, work
from logpast.sweeps.grid import Cell, cells_of, read_page
from logpast.sweeps.runners import Cluster, Processes
from logpast.sweeps.sweep import sweep
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, TrainConfig
from logpast.training.log import read_log
from logpast.training.recipes import SHIPPED
from logpast.util.errors import UserError
from logpast.util.files import exclusive_lock

RECIPES = SHIPPED
SYSTEMS = {"delta": {"model.system": "recent"}, "k20": {"model.sharpness": 20}}
Changed = Callable[..., Path]


@pytest.fixture
def page(tmp_path: Path, store: TokenStore) -> Changed:
    """Writes a page of six cells of a second; keys given take the place of its own."""

    def write(**values: Any) -> Path:
        recipe = {
            "data": {"train": str(store.path), "validation": str(store.path)},
            "model": {"window": 8, "layers": 1, "heads": 2, "width": 16},
            "optimizer": {"learning_rate": 3e-3, "final_learning_rate": 3e-4, "warmup_steps": 5},
            "steps": 60, "batch_size": 4, "accelerator": "cpu", "tensorboard": False,
            "checkpoint_every": 10, "validate_every": 30, "keep": 1, "log_every": 1,
        }  # fmt: skip
        grids = [{"model.slots": [5, 9, 17], "system": SYSTEMS}]
        place = tmp_path / "page.yaml"
        page = {"recipe": recipe, "test": str(store.path), "grids": grids} | values
        place.write_text(yaml.safe_dump(page, sort_keys=False))
        return place

    return write


def cells(page: Path) -> list[Cell]:
    return cells_of(read_page(page), page, page.parent / "out")


def test_what_a_cell_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of speeds the first, in which all is compiled, does not count; of time, what was spent before a stop does."""
    records = [{"step": step, "tokens_per_second": speed} for step, speed in enumerate([1.0, 10.0, 30.0])]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"step": 2, "validation_loss": 1}]))
    assert cells_module.tokens_per_second(tmp_path) == 20
    log.write_text(json.dumps(records[0]))
    assert cells_module.tokens_per_second(tmp_path) == 1
    monkeypatch.setattr(cells_module, "run_cell", lambda *_: {"train_seconds": 200, "scores": {"seconds": 5}})
    whole = SimpleNamespace(state={"seconds": 1000})  # the best weights came early
    monkeypatch.setattr(cells_module, "find_checkpoint", lambda run, which: {"latest": whole}[which])
    config = TrainConfig(tmp_path, DataConfig("text"), steps=1).to_dict()
    assert work({"config": config, "test": "text", "log": str(tmp_path / "log")})["seconds"] == 1005


def test_a_cell_goes_on_as_it_was_validated(train_config: TrainConfig) -> None:
    """Or its best weights would be others than those of the settings that its row names."""
    run_cell(replace(train_config, steps=4), train_config.data.train)
    changed = replace(train_config, steps=4, validate_every=7, resume="auto")
    with pytest.raises(UserError, match="it was run with validate_every=10, now it is 7; change that back"):
        run_cell(changed, train_config.data.train)
    free = replace(
        train_config, steps=4, run=train_config.run.with_name("free"), data=DataConfig(train_config.data.train)
    )
    run_cell(free, train_config.data.train)
    run_cell(replace(free, validate_every=7, resume="auto"), train_config.data.train)


def test_a_grid_is_all_combinations(page: Changed) -> None:
    found = cells(page())
    assert [cell.name for cell in found] == [
        f"slots{slots}-{system}-seed0" for slots in (5, 9, 17) for system in ("delta", "k20")
    ]
    delta, memory = found[2:4]
    assert memory.choices == {"model.slots": 9, "system": "k20"}
    assert (type(delta.config.model).__name__, delta.config.model.slots) == ("RecentConfig", 9)  # type: ignore[attr-defined]
    assert (memory.config.model.slots, memory.config.model.sharpness) == (9, 20)  # type: ignore[attr-defined]
    assert memory.config.model.layers == 1
    assert memory.config.run == page().parent / "out" / "runs" / memory.name
    assert memory.config.resume == "auto"


def test_grids_are_united(page: Changed) -> None:
    grids = [{"model.slots": [5, 9]}, {"model.slots": [9], "seed": [0, 1]}, {"many": {"nine": {"model.slots": 9}}}]
    assert [cell.name for cell in cells(page(grids=grids))] == ["slots5-seed0", "slots9-seed0", "slots9-seed1"]


def test_a_setting_that_a_system_lacks_makes_no_cell(page: Changed) -> None:
    grids = [{"model.system": ["recent", "log_memory"], "model.sharpness": [20, 30]}]
    assert len(cells(page(grids=grids))) == 3


@pytest.mark.parametrize("idle", [{"model.memory": [16, 32]}, {"checkpoint_every": [1, 2]}])
def test_an_axis_that_makes_no_cells_is_told(idle: dict[str, list[int]], page: Changed) -> None:
    (axis,) = idle
    for grid in (idle, {"model.slots": [5, 9]} | idle):
        with pytest.raises(UserError, match=f"{axis} makes no cell another one; take it out"):
            cells(page(grids=[grid]))
    assert len(cells(page(grids=[{axis: idle[axis][:1], "model.slots": [5, 9, 9]}]))) == 2  # nothing to choose


def test_variants_choose_recipe_and_text(page: Changed, tmp_path: Path) -> None:
    one = yaml.safe_load(page().read_text())["recipe"]
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(one))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(one | {"batch_size": 7}))
    corpora = {name: {"recipe": f"{name}.yaml", "test": f"{name}.txt"} for name in ("one", "two")}
    found = cells(page(recipe="one.yaml", grids=[{"corpus": corpora}], set={"model": {"layers": 3}}))
    assert [(cell.config.batch_size, cell.test) for cell in found] == [(4, "one.txt"), (7, "two.txt")]
    assert {cell.config.model.layers for cell in found} == {3}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"grid": []}, "unknown key 'grid'; did you mean grids"),
        ({"grids": []}, "needs grids"),
        ({"grids": [5]}, "a grid should map fields"),
        ({"grids": [{"model.slots": 5}]}, "list of values, or named variants"),
        ({"grids": [{"model.slotz": [5]}]}, r"unknown key 'model.slotz'; did you mean model.slots\? \(cell slotz5"),
        ({"grids": [{"model.slots": ["many"]}]}, "model.slots cannot be 'many'"),
        ({"grids": [{"model.slots": [-1]}]}, "model.slots .* got -1"),
        ({"grids": [{"model.slots": [5], "a": {"b": {"model.slots": 9}}}]}, "model.slots is set by a and by another"),
        ({"grids": [{"a": {"x": {"steps": 1}}}, {"a": {"x": {"steps": 2}}}]}, "two different cells .* called x-seed0"),
        ({"grids": [{"run": ["a", "b"]}]}, "run is the sweep's"),
        ({"set": {"steps": {"many": 3}}}, "unknown key 'steps.many'"),
        ({"grids": [{"xyz": [5]}]}, "unknown key 'xyz'; known: run, "),
        ({"set": {"model.slots": 5, "model": {"slots": 9}}}, "model.slots is given twice; take one of the two out"),
        ({"grids": [{"a": {"b": {"model.slots": 5, "model": {"slots": 9}}}}]}, "model.slots is given twice"),
        ({"recipe": "none.yaml"}, "cannot read .*none.yaml"),
        ({"recipe": {"model": 5}}, "model should hold settings"),
        ({"set": {"model.system": "rnn"}}, "unknown model 'rnn'"),
        ({"test": 5}, "test cannot be 5"),
        ({"gpus": "all"}, "gpus cannot be 'all'"),
        ({"grids": [{"seed": [None, 1]}]}, "seed is empty; give it a value, or leave it out"),
        ({"cpus": 0.00001}, "cpus must be at least 0.0001, got 1e-05"),
        ({"cpus": float("nan")}, "cpus must be at least 0.0001, got nan"),
        ({"cpus": True}, "cpus cannot be True"),
        ({"gpus": -0.5}, "gpus must be 0, from 0.0001 to 1"),
        ({"gpus": 1.5}, "gpus must be 0, from 0.0001 to 1, or a whole number, got 1.5"),
        ({"gpus": 0.00001}, "gpus must be 0, from 0.0001 to 1"),
        ({"grids": [{}]}, "a grid should map fields"),
        ({"grids": [{"model": [5]}]}, "model should hold settings"),
        ({"grids": [{"model.system": [5]}]}, "model should hold settings"),
        ({"set": {"optimizer": None}}, "optimizer has nothing under it"),
        ({"grids": [{5: [5]}]}, "keys should be fields .* not 5"),
        ({"grids": [{None: [5]}]}, "keys should be fields .* not None"),
        ({"grids": [{"steps": [0]}]}, r"steps must be at least 1, got 0 \(cell steps0-seed0\)"),
        ({"set": {"epochs": 2}}, "either steps or epochs, and not both"),
        ({"grids": [{"test": [5]}]}, "test cannot be 5"),
        ({"grids": [{"data": [5]}]}, "data"),
        ({"grids": [{"a": {"ü" * 101: {"steps": 1}}}]}, "too long for the name of a cell"),
    ],
)
def test_mistakes_in_a_page_are_told(values: dict[str, Any], told: str, page: Changed) -> None:
    if "set" in values and "grids" not in values:
        values = values | {"grids": [{"seed": [0]}]}
    with pytest.raises(UserError, match=told):
        cells(page(**values))


def test_a_cell_needs_a_text(page: Changed) -> None:
    place = page()
    values = yaml.safe_load(place.read_text())
    place.write_text(yaml.safe_dump({name: value for name, value in values.items() if name != "test"}))
    with pytest.raises(UserError, match="lacks its test text"):
        cells(place)


def test_the_papers_grid() -> None:
    found = cells(RECIPES / "sweep-paper.yaml")
    assert len(found) == 13 * 4 * 2
    models = {(cell.test, cell.config.model.slots, getattr(cell.config.model, "sharpness", None)) for cell in found}  # type: ignore[attr-defined]
    lengths, kinds = range(5, 54, 4), (None, 100, 150, 200)
    assert models == {(f"{c}:test", slots, k) for c in ("wikitext103", "pg19") for slots in lengths for k in kinds}
    assert {(cell.test, cell.config.data.train, cell.config.epochs) for cell in found} == {
        ("wikitext103:test", "wikitext103:train", 90), ("pg19:test", "pg19:train", 4),
    }  # fmt: skip


def test_the_grid_in_small() -> None:
    found = cells(RECIPES / "sweep-small.yaml")
    wanted = [(slots, k, seed) for slots in (53, 5) for k in (None, 100) for seed in (0, 1)]
    wanted += [(53, 200, 0), (53, 200, 1), *((slots, k, 0) for slots in (37, 21) for k in (None, 100))]
    for train, test in (("wiki22k:train", "wikitext103:test"), ("pg19:train", "pg19:test")):
        some = [c for c in found if c.config.data.train == train]
        points = [(c.config.model.slots, getattr(c.config.model, "sharpness", None), c.config.seed) for c in some]  # type: ignore[attr-defined]
        assert points == wanted
        assert {(c.test, c.config.steps, c.config.epochs) for c in some} == {(test, 9000, None)}
    assert len(found) == 2 * len(wanted)
    assert len(cells(RECIPES / "sweep-toy.yaml")) == 6


def test_the_pairs_are_the_papers_best_cell_and_its_control() -> None:
    found = [(cell.config.data.train, cell.config.model) for cell in cells(RECIPES / "sweep-pairs.yaml")]
    assert [(train, type(model), model.slots, getattr(model, "sharpness", 0)) for train, model in found] == [  # type: ignore[attr-defined]
        ("wiki22k:train", RecentConfig, 53, 0), ("wiki22k:train", LogMemoryConfig, 53, 200),
        ("pg19:train", RecentConfig, 53, 0), ("pg19:train", LogMemoryConfig, 53, 200),
    ]  # fmt: skip


# --- the real thing, killed


def start(page: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "logpast", "sweep", str(page), "--out", str(page.parent / "out"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(process: "subprocess.Popen[str]", met: Callable[[], Any]) -> None:
    """Wait for something that a running sweep brings about."""
    end = time.monotonic() + 300
    while not met():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def processes_of(out: Path) -> set[int]:
    """Every process that has worked on a cell, by the logs."""
    logs = "".join(log.read_text() for log in out.glob("logs/*.log"))
    return {int(number) for number in re.findall(r"^process (\d+) on", logs, re.M)}


def check(page: Path) -> None:
    """Every cell stands in the ledger once, with the figures and the losses of a run that nothing disturbed."""
    wanted = cells(page)
    rows = ledger.read(page.parent / "out" / "ledger.jsonl")
    assert sorted(row["sweep"]["cell"] for row in rows) == sorted(cell.name for cell in wanted)
    found = {row["sweep"]["cell"]: row for row in rows}
    kept = [path.name for path in (page.parent / "out" / "runs").rglob("*.safetensors")]
    assert set(kept) == {"model.safetensors"}
    for cell in cells_of(read_page(page), page, page.parent / "alone"):
        alone, row = run_cell(replace(cell.config, checkpoint_every=60), cell.test), found[cell.name]
        assert row["scores"]["nats"] == alone["scores"]["nats"]
        assert (row["recipe_hash"], row["step"]) == (alone["recipe_hash"], alone["step"])
        assert row["sweep"]["choices"] == cell.choices
        assert row["state_bytes"] == alone["state_bytes"] > 0
        broken, whole = (
            [(r["step"], r["loss"]) for r in read_log(place / "runs" / cell.name) if "loss" in r]
            for place in (page.parent / "out", page.parent / "alone")
        )
        assert broken == whole


@pytest.mark.parametrize(
    ("way", "slots"),
    [
        ("--address local", [5, 9, 17]),
        ("--jobs 2", [5, 9]),
        pytest.param("--jobs 2", [5, 9, 17], marks=pytest.mark.slow),
        pytest.param("--jobs 1", [5, 9, 17], marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_and_resumed(way: str, slots: list[int], page: Changed) -> None:
    """kill -9 for the sweep when some cells are finished; with Ray, then for a process of the sweep that goes on."""
    place = page(grids=[{"model.slots": slots, "system": SYSTEMS}])
    out, count = place.parent / "out", 2 * len(slots)
    first = start(place, *way.split())
    until(first, (out / "ledger.jsonl").exists)
    time.sleep(random.Random(way).uniform(0, 1))
    first.kill()
    first.communicate()
    before = (out / "ledger.jsonl").read_text()
    assert 1 <= before.count("\n") < count
    known = set(processes_of(out))

    second = start(place, *way.split())
    if "--address" in way:  # Ray starts a cell again whose process is lost
        until(second, lambda: processes_of(out) - known)
        os.kill((processes_of(out) - known).pop(), signal.SIGKILL)
    told, _ = second.communicate(timeout=180)
    assert second.returncode == 0, told
    assert f"{count} of {count} cells finished" in told
    assert (out / "ledger.jsonl").read_text().startswith(before)  # what was finished is as it was
    check(place)


class Here(Processes):
    """Real cells, but in this process."""

    def start(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        try:
            future.set_result(work(job))
        except UserError as error:
            future.set_exception(error)
        return future


def test_a_failing_cell_stops_no_other(
    page: Changed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "Processes", Here)
    rates = {"wild": {"optimizer.learning_rate": 1e30}, "calm": {"optimizer.learning_rate": 1e-3}}
    place = page(grids=[{"rate": rates}])
    out = place.parent / "out"
    for _ in range(2):  # what failed is tried again, what did not is not
        with pytest.raises(SystemExit) as stop:
            main(["sweep", str(place), "--out", str(out)])
        assert stop.value.code == 2
        told = capsys.readouterr().err.splitlines()
        assert [line for line in told if line.startswith("wild-seed0: failed: the loss became")]
        assert told[-1].startswith("logpast: cell wild-seed0 failed: the loss became")
        assert str(out / "logs") in told[-1]
        assert [row["sweep"]["cell"] for row in ledger.read(out / "ledger.jsonl")] == ["calm-seed0"]
    assert not [line for line in told if line.startswith("calm")]


CHILD = """
import os, signal, sys, time
job = sys.stdin.readline()
print("a word", file=sys.stderr)
if "row" in job: print('{"scores": 1}')
if "bad" in job: sys.exit("logpast: a bad setting; mend it")
if "hog" in job: os.kill(os.getpid(), signal.SIGKILL)
if "long" in job: time.sleep(60)
if "orphan" in job: sys.exit(f"read {len(sys.stdin.read())}")
"""


def test_a_process_that_ends_before_it_reads_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "COMMAND", [sys.executable, "-c", "import sys; sys.exit('logpast: too soon')"])
    start = subprocess.Popen

    def ended(*given: Any, **words: Any) -> subprocess.Popen[bytes]:
        (process := start(*given, **words)).wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", ended)
    with pytest.raises(RuntimeError, match=r"^too soon$"):
        Processes(1).start({"log": str(tmp_path / "log")}).result(20)


def test_a_process_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "COMMAND", [sys.executable, "-c", CHILD])
    runner = Processes(5)
    names = ("row", "bad", "hog", "long", "orphan")
    cases = {name: runner.start({"name": name, "log": str(tmp_path / f"{name}.log")}) for name in names}
    assert cases["row"].result(20) == {"scores": 1}
    assert (tmp_path / "row.log").read_text() == "a word\n"
    for name, told in (("bad", "a bad setting; mend it"), ("hog", r"ended by SIGKILL \(out of memory\?\)")):
        with pytest.raises(RuntimeError, match=f"^{told}$" if name == "bad" else told):
            cases[name].result(20)
    assert len(runner.free) == 3
    assert not cases["orphan"].done()  # its standard input is still open
    runner.stop()
    for name in ("long", "orphan"):
        with pytest.raises(RuntimeError, match="ended by SIGTERM"):
            cases[name].result(20)
    assert sorted(map(id, runner.free)) == sorted({id(place) for place in runner.free})
    runner.close()


# --- what the sweep decides, with cells that are not really run


class Pretended:
    """Cells that take so many seconds of a clock of their own; `endless` ones end when they are told to stop."""

    def __init__(
        self, width: int = 1, seconds: float = 60, endless: tuple[str, ...] = (), places: int | None = None
    ) -> None:
        self.width, self.seconds, self.endless = width, seconds, endless
        self.places = places or width
        self.now, self.begun, self.stopped, self.closed = 1000.0, list[str](), False, False
        self.pending: list[Future[dict[str, Any]]] = []

    def look(self) -> float:
        self.now += 0.01  # patience ends too
        return self.now

    def start(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        name = Path(job["log"]).stem
        self.begun.append(name)
        self.now += self.seconds
        if name in self.endless:
            self.pending.append(future)
        else:
            scores = {"ppl_token": 2.0, "bits_per_byte": 1.0}
            text = open_tokens(job["config"]["data"]["train"], None).identity
            texts = {"train_data": text, "test_data": open_tokens(job["test"], None).identity}
            if validation := job["config"]["data"]["validation"]:
                texts["validation_data"] = open_tokens(validation, None).identity
            future.set_result({"seconds": self.seconds, "train_tokens": 1, "scores": scores} | texts)
        return future

    def stop(self) -> None:
        self.stopped = True
        for future in self.pending:
            future.set_exception(RuntimeError("stopped"))

    def close(self) -> None:
        self.closed = True

    def reason(self, error: BaseException) -> str:
        return str(error)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pretended]:
    def install(**how: Any) -> Pretended:
        runner = Pretended(**how)
        monkeypatch.setattr(sweeps, "Processes", lambda jobs: runner)
        monkeypatch.setattr(sweeps, "time", SimpleNamespace(monotonic=runner.look))
        monkeypatch.setattr(sweeps, "PATIENCE", 0.1)
        return runner

    return install


def test_finished_cells_are_not_run_again(page: Changed, pretend: Callable[..., Pretended]) -> None:
    out = page().parent / "out"
    pretend()
    assert len(sweep(page(grids=[{"model.slots": [5, 9]}]), out)) == 2
    more = pretend()
    rows = sweep(page(grids=[{"model.slots": [9, 5, 17]}]), out)
    assert more.begun == ["slots17-seed0"]
    assert [row["sweep"]["cell"] for row in rows] == ["slots9-seed0", "slots5-seed0", "slots17-seed0"]
    assert len(ledger.read(out / "ledger.jsonl")) == 3
    pretend()
    swapped = {"slots9": {"model.slots": 5}, "slots5": {"model.slots": 9}}
    assert len(sweep(page(grids=[{"of": swapped}]), out)) == 2  # both are there, under other names
    renamed = {"slots9": {"model.slots": 5}, "slots5": {"model.slots": 13}}  # the one is there, the other is not
    for changed in (page(grids=[{"model.slots": [5]}], set={"steps": 70}), page(grids=[{"of": renamed}])):
        with pytest.raises(UserError, match=r"slots\d-seed0 that was made by other settings; give another --out"):
            sweep(changed, out)
    ledger.append(out / "ledger.jsonl", {"recorded": "by hand"})
    with pytest.raises(UserError, match="no sweep's; give another --out"):
        sweep(page(), out)


def test_another_text_under_the_same_name_is_told(
    page: Changed, pretend: Callable[..., Pretended], store: TokenStore, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished cells were scored on the one, the rest would be on the other. Each cell looks, wherever it runs."""
    place, own = page().parent, {}
    for part in ("train", "validation", "test"):
        shutil.copytree(str(store.path), own.setdefault(part, place / part))
    out, settings = place / "out", {"data": {part: str(own[part]) for part in ("train", "validation")}}
    first = {"model.slots": [5]}
    grids = [first, {"model.slots": [9], "data.jitter": [True]}]  # which makes no text another one
    pretend()
    sweep(page(grids=[first], set=settings, test=str(own["test"])), out)
    for part, text in own.items():
        kept = text.rename(place / "kept")
        prepare([str(books / "1.txt")], text, tokenizer=str(store.path), workers=1)
        monkeypatch.setattr(sweeps, "Processes", Here)
        with pytest.raises(
            UserError, match=f"slots9.*{part} is another text than when slots5-seed0 was finished; bring"
        ):
            sweep(page(grids=grids, set=settings, test=str(own["test"])), out)
        assert not (out / "runs").exists()
        shutil.rmtree(text)
        kept.rename(text)
    assert len(sweep(page(grids=grids, set=settings, test=str(own["test"])), out)) == 2


def test_scores_on_different_texts_are_not_set_side_by_side(
    page: Changed, pretend: Callable[..., Pretended], store: TokenStore, books: Path
) -> None:
    """Each on a page of its own, they were alone; a page of both brings them together."""
    place = page().parent
    text, out = place / "text", place / "out"
    pretend()
    for slots in (5, 9):
        prepare([str(books / f"{slots // 4}.txt")], text, tokenizer=str(store.path), workers=1)
        sweep(page(grids=[{"model.slots": [slots]}], test=str(text)), out)
        shutil.rmtree(text)
    with pytest.raises(
        UserError, match=r"text was another text for slots9-seed0 than for slots5-seed0; remove the row"
    ):
        sweep(page(grids=[{"model.slots": [5, 9]}], test=str(text)), out)


WHOLE = {
    "sweep": {"cell": "x", "key": "y"}, "scores": {"ppl_token": 2.0, "bits_per_byte": None},
    "train_data": {"sha256": "1"}, "test_data": {"sha256": "2"},
}  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [
        {"sweep": 3}, {"sweep": {"cell": "x"}}, {"scores": None}, {"scores": {"ppl_token": 2.0}}, {"seconds": "1"},
        {"test_data": None}, {"train_data": {}}, {"validation_data": "x"},
    ],
)  # fmt: skip
def test_damaged_rows_are_told_before_work(
    part: dict[str, Any], page: Changed, pretend: Callable[..., Pretended]
) -> None:
    place, runner = page(), pretend()
    whole = WHOLE | {"seconds": 1.0, "train_tokens": 1}
    for row in (whole, whole | part):
        ledger.append(place.parent / "out" / "ledger.jsonl", row)
    with pytest.raises(UserError, match=r"ledger.jsonl: row 2 lacks a part .* remove it"):
        sweep(place, place.parent / "out", dry_run=True)
    assert not runner.begun


def test_a_row_without_line_break_or_score(
    page: Changed, pretend: Callable[..., Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    place = page(grids=[{"model.slots": [5]}])
    out = place.parent / "out"
    pretend()
    sweep(place, out)
    file = out / "ledger.jsonl"
    row = json.loads(file.read_text())
    row["scores"]["ppl_token"] = None  # infinity, in JSON
    file.write_text(json.dumps(row))
    before = file.read_text()
    sweep(place, out, dry_run=True)
    assert capsys.readouterr().out.splitlines()[-1] == "1 cell, 1 finished"
    assert file.read_text() == before  # who only looks changes nothing
    runner = pretend()
    assert len(sweep(page(grids=[{"model.slots": [5, 9]}]), out)) == 2
    assert runner.begun == ["slots9-seed0"]
    assert file.read_text().startswith(before + "\n")
    assert len(ledger.read(file)) == 2


def test_combinations_that_are_the_same_are_counted(page: Changed, capsys: pytest.CaptureFixture[str]) -> None:
    grids = [{"model.system": ["recent", "log_memory"], "model.sharpness": [20, 30]}]
    place = page(grids=grids)
    sweep(place, place.parent / "out", dry_run=True)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "3 cells (combinations that are the same as another: 1), 0 finished"


def test_listing_runs_nothing(
    page: Changed, pretend: Callable[..., Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    place, runner = page(), pretend()
    sweep(place, place.parent / "out", dry_run=True)
    assert capsys.readouterr().out.splitlines()[-1] == "6 cells, 0 finished"
    assert not runner.begun
    assert not (place.parent / "out").exists()


def test_time_box(page: Changed, pretend: Callable[..., Pretended], capsys: pytest.CaptureFixture[str]) -> None:
    place = page()
    out = place.parent / "out"
    runner = pretend()
    assert len(sweep(place, out, minutes=3.5)) == 3  # a fourth would not end in time
    assert len(runner.begun) == 3
    assert not runner.stopped
    assert runner.closed
    assert "3 of 6 cells finished" in capsys.readouterr().out
    runner = pretend(endless=("slots9-k20-seed0",))
    assert len(sweep(place, out, minutes=0.5)) == 3  # one is begun all the same, and told to stop
    assert runner.begun == ["slots9-k20-seed0"]
    assert runner.stopped
    told = capsys.readouterr()
    assert "3 to do: the same command goes on" in told.out
    assert "time is up: cells under way save" in told.err
    pretend()
    sweep(place, out, minutes=0.5)  # a cell that ends all the same, too late
    assert "time is up" not in capsys.readouterr().err
    pretend()
    assert len(sweep(place, out)) == 6


def test_a_cell_that_waits_is_in_no_place(
    page: Changed, pretend: Callable[..., Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    """One at a time is worked on, another waits with the runner: time is reckoned by the one."""
    place = page()
    pretend(width=2, places=1)
    sweep(place, place.parent / "out")
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in told[:2]] == ["begins", "waits for a place"]
    assert "1 of 6 cells, about 5:00 left" in told[2]
    pretend()
    assert len(sweep(place, place.parent / "other", minutes=1.5)) == 1
    runner = pretend(width=2, places=1)
    sweep(place, place.parent / "other", minutes=0.5)
    assert len(runner.begun) == 1  # one is begun in any case, the next would not end in time


def test_what_is_saved_of_a_cell(
    page: Changed, pretend: Callable[..., Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on from a checkpoint, however far its log goes; a damaged log says nothing."""
    place = page()
    out = place.parent / "out"
    cell, *_, last = cells_of(read_page(place), place, out)
    steps = cell.config.steps
    record = {"step": steps, "epoch": 1.0, "loss": 2.0, "tokens_per_second": 3.0}
    for each, damage in ((cell, {}), (last, {"step": "x"})):
        (each.config.run / "checkpoints" / f"step-{steps // 2:08d}").mkdir(parents=True)
        (each.config.run / "log.jsonl").write_text(json.dumps(record | damage) + "\n")
    sweep(place, out, dry_run=True)
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split()[1:] == ["50%", "trained"]
    assert [line.split()[1:] for line in listed[1:6]] == [["to", "do"]] * 5
    (cell.config.run / "checkpoints" / f"step-{steps // 2:08d}").rmdir()
    sweep(place, out, dry_run=True)
    assert capsys.readouterr().out.splitlines()[0].split()[1:] == ["to", "do"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_ctrl_c_lets_cells_save(
    error: type[BaseException], page: Changed, pretend: Callable[..., Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a mistake of our own."""
    place = page()
    out = place.parent / "out"
    runner, real, calls = pretend(width=2, endless=("slots5-k20-seed0",)), sweeps.wait, []

    def interrupted(*arguments: Any, **words: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return real(*arguments, **words)

    monkeypatch.setattr(sweeps, "wait", interrupted)
    with pytest.raises(error):
        sweep(place, out)
    assert runner.stopped
    assert runner.closed
    assert [row["sweep"]["cell"] for row in ledger.read(out / "ledger.jsonl")] == ["slots5-delta-seed0"]


def test_cells_save_where_a_row_cannot_be_written(
    page: Changed, pretend: Callable[..., Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("the disk is full")

    place, runner = page(), pretend(width=2, endless=("slots5-delta-seed0",))
    monkeypatch.setattr(ledger, "append", full)
    with pytest.raises(UserError, match="the disk is full"):
        sweep(place, place.parent / "out")
    assert runner.stopped


def test_one_sweep_at_a_time(page: Changed, pretend: Callable[..., Pretended]) -> None:
    place, runner = page(), pretend()
    out = place.parent / "out"
    out.mkdir()
    with exclusive_lock(out), pytest.raises(UserError, match=f"at work in {out} .process {os.getpid()} on"):
        sweep(place, out)
    assert not runner.begun
    sweep(place, out)
    assert len(runner.begun) == 6


def test_one_process_at_a_time_on_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "PATIENCE", 0.1)
    log = tmp_path / "cell.log"
    with cells_module._logging_to(log), pytest.raises(UserError, match="another process is at work"):
        work({"log": str(log), "config": {}, "test": ""})
    assert runners._last_line(log).startswith("another process is at work")  # which is what the sweep tells


def test_places_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(runners.torch.cuda, "device_count", lambda: 2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in Processes(None).free] == ["4", "6"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in Processes(3).free] == ["4", "6", "4"]
    monkeypatch.setattr(runners.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(runners.os, "cpu_count", lambda: 8)
    assert Processes(None).free == [{}]
    assert Processes(3).free == [{"OMP_NUM_THREADS": "2"}] * 3


def test_mistakes_in_the_options_are_told(page: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    place = page()
    for options, told in (
        ({"jobs": 0}, "jobs must be above 0"),
        ({"minutes": -1}, "minutes must be above 0"),
        ({"minutes": math.nan}, "minutes must be above 0"),
        ({"jobs": 2, "address": "local"}, "--jobs is for cells without Ray"),
    ):
        with pytest.raises(UserError, match=told):
            sweep(place, place.parent / "out", **options)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'logpast\[ray\]'"):
        Cluster("local", 1, None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "auto", "", "nowhere"])
def test_a_cluster_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("it would try for minutes"))
    if address == "auto":
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=f"no Ray cluster at '{address}' .*--address local"):
        Cluster(address, 1, None)


def test_cells_that_no_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    fake = SimpleNamespace(
        init=lambda *_, **__: None, cluster_resources=lambda: {"CPU": 8.0}, nodes=lambda: nodes,
        shutdown=lambda: closed.append(True), remote=lambda _: SimpleNamespace(options=lambda **_: None),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(runners, "_knock", lambda _: None)
    for cpus, gpus in ((6, None), (1, 1)):
        with pytest.raises(UserError, match=f"no room for cpus: {cpus} and gpus: {gpus or 0}.*set them lower"):
            Cluster("local", cpus, gpus)
    assert closed == [True, True]
    assert Cluster("there:1", 6, None).width == 2  # it may grow
    assert "no machine of the cluster has room for cpus: 6" in capsys.readouterr().err
    Cluster("local", 4, None)
    assert capsys.readouterr().err == ""


def test_a_row_survives_json(page: Changed) -> None:
    """What a process tells on standard output is what `work` returns."""
    (cell, *_) = cells(page(set={"steps": 2}))
    log = cell.config.run.with_name("cell.log")
    row = work({"config": cell.config.to_dict(), "test": cell.test, "log": str(log)})
    assert json.loads(json.dumps(row)) == row
    assert row["seconds"] >= row["train_seconds"]
    assert row["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("training", "scoring"), [("32-true", "float32"), ("bf16-mixed", "bfloat16"), ("64-true", "float64")]
)
def test_a_cell_is_scored_as_it_was_trained(train_config: TrainConfig, training: str, scoring: str) -> None:
    config = replace(train_config, steps=4, precision=training)  # type: ignore[arg-type]
    row = run_cell(config, config.data.train)
    assert row["scores"]["precision"] == scoring
    nats = row["scores"]["nats"] / row["scores"]["tokens"]
    assert nats == pytest.approx(find_checkpoint(config.run).state["best"]["nats_per_token"], rel=1e-6)


def test_a_cell_tells_what_its_training_text_never_has(
    train_config: TrainConfig, store: TokenStore, tmp_path: Path
) -> None:
    """A store has a tokenizer of its own, whatever the recipe says."""
    texts = {"a.txt": "the quick brown fox\n" * 9, "b.txt": "zebra zebra ÿ\n" * 9}
    (folder := tmp_path / "test").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    config = replace(train_config, steps=2, data=replace(train_config.data, tokenizer="gpt2"))
    known = set(store.tokens.tolist())
    documents = run_cell(config, str(folder))["scores"]["by_document"]
    scored = [store.load_tokenizer().encode(text) for text in texts.values()]
    assert documents["tokens"] == [len(ids) for ids in scored]
    assert documents["unseen"] == [sum(token not in known for token in ids) for ids in scored]
    assert documents["unseen"][1] > 9
