"""`logpast sweep`: no cell is lost or done twice, whatever is killed when; failures and time limits."""

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

from ledger_rows import scored_row
from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.data.prepare import prepare
from logpast.ledger import row as ledger
from logpast.sweeps import sweep as sweeps
from logpast.sweeps.cell import run_cell, work
from logpast.sweeps.grid import cells_of, read_config
from logpast.sweeps.runners import Processes
from logpast.sweeps.sweep import sweep
from logpast.training.log import read_log
from logpast.util.errors import UserError
from logpast.util.files import exclusive_lock

SYSTEMS = {"delta": {"model.system": "recent"}, "k20": {"model.sharpness": 20}}
SweepFile = Callable[..., Path]


# --- real sweeps, killed


def start(file: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "logpast", "sweep", str(file), "--out", str(file.parent / "out"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(process: "subprocess.Popen[str]", met: Callable[[], Any]) -> None:
    """Wait until a running sweep has done something."""
    end = time.monotonic() + 300
    while not met():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def processes_of(out: Path) -> set[int]:
    """Every process that has run a cell, from the logs."""
    logs = "".join(log.read_text() for log in out.glob("logs/*.log"))
    return {int(number) for number in re.findall(r"^process (\d+) on", logs, re.M)}


def check(file: Path) -> None:
    """Every cell is in the ledger once, with the scores and losses of an undisturbed run."""
    wanted = cells_of(read_config(file), file, file.parent / "out")
    rows = ledger.read(file.parent / "out" / "ledger.jsonl")
    assert sorted(row["sweep"]["cell"] for row in rows) == sorted(cell.name for cell in wanted)
    found = {row["sweep"]["cell"]: row for row in rows}
    kept = [path.name for path in (file.parent / "out" / "runs").rglob("*.safetensors")]
    assert set(kept) == {"model.safetensors"}
    for cell in cells_of(read_config(file), file, file.parent / "alone"):
        alone, row = run_cell(replace(cell.config, checkpoint_every=60), cell.test), found[cell.name]
        assert row["scores"]["nats"] == alone["scores"]["nats"]
        assert (row["recipe_hash"], row["step"]) == (alone["recipe_hash"], alone["step"])
        assert row["sweep"]["choices"] == cell.choices
        assert row["state_bytes"] == alone["state_bytes"] > 0
        interrupted, undisturbed = (
            [(r["step"], r["loss"]) for r in read_log(folder / "runs" / cell.name) if "loss" in r]
            for folder in (file.parent / "out", file.parent / "alone")
        )
        assert interrupted == undisturbed


@pytest.mark.parametrize(
    ("way", "slots"),
    [
        ("--address local", [5]),
        pytest.param("--jobs 2", [5, 9, 17], marks=pytest.mark.slow),
        pytest.param("--jobs 1", [5, 9, 17], marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_middle_and_resumed(way: str, slots: list[int], sweep_file: SweepFile) -> None:
    """kill -9 of the sweep when some cells are finished; with Ray, also of a process of the resumed sweep."""
    one_at_a_time = os.cpu_count()  # cells of a cluster
    file = sweep_file(grids=[{"model.slots": slots, "system": SYSTEMS}], cpus=one_at_a_time)
    out, count = file.parent / "out", 2 * len(slots)
    first = start(file, *way.split())
    until(first, (out / "ledger.jsonl").exists)
    time.sleep(random.Random(way).uniform(0, 0.3))  # less than a cell takes
    first.kill()
    first.communicate()
    before = (out / "ledger.jsonl").read_text()
    assert 1 <= before.count("\n") < count
    known = set(processes_of(out))

    second = start(file, *way.split())
    if "--address" in way:  # Ray restarts a cell whose process is lost
        until(second, lambda: processes_of(out) - known)
        os.kill((processes_of(out) - known).pop(), signal.SIGKILL)
    output, _ = second.communicate(timeout=180)
    assert second.returncode == 0, output
    assert f"{count} of {count} cells finished" in output
    assert (out / "ledger.jsonl").read_text().startswith(before)  # finished rows are unchanged
    check(file)


class InThisProcess(Processes):
    """Runs cells in this process."""

    def start(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        try:
            future.set_result(work(job))
        except UserError as error:
            future.set_exception(error)
        return future


def test_a_failing_cell_does_not_stop_the_others(
    sweep_file: SweepFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "Processes", InThisProcess)
    rates = {"wild": {"optimizer.learning_rate": 1e30}, "calm": {"optimizer.learning_rate": 1e-3}}
    file = sweep_file(grids=[{"rate": rates}])
    out = file.parent / "out"
    for _ in range(2):  # only the failed cell is tried again
        with pytest.raises(SystemExit) as stop:
            main(["sweep", str(file), "--out", str(out)])
        assert stop.value.code == 2
        printed = capsys.readouterr().err.splitlines()
        assert [line for line in printed if line.startswith("wild-seed0: failed: the loss became")]
        assert printed[-1].startswith("logpast: cell wild-seed0 failed: the loss became")
        assert str(out / "logs") in printed[-1]
        assert [row["sweep"]["cell"] for row in ledger.read(out / "ledger.jsonl")] == ["calm-seed0"]
    assert not [line for line in printed if line.startswith("calm")]


# --- decisions of the sweep, with simulated cells


class Simulated:
    """Cells that take `seconds` of a simulated clock; `endless` ones end only when they are stopped."""

    def __init__(
        self, max_started: int = 1, seconds: float = 60, endless: tuple[str, ...] = (), parallel: int | None = None
    ) -> None:
        self.max_started, self.seconds, self.endless = max_started, seconds, endless
        self.parallel = parallel or max_started
        self.now, self.started, self.stopped, self.closed = 1000.0, list[str](), False, False
        self.pending: list[Future[dict[str, Any]]] = []

    def monotonic(self) -> float:
        self.now += 0.01  # so that waiting ends
        return self.now

    def start(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        name = Path(job["log"]).stem
        self.started.append(name)
        self.now += self.seconds
        if name in self.endless:
            self.pending.append(future)
        else:
            data = job["config"]["data"]
            texts = {"train_data": data["train"], "validation_data": data["validation"], "test_data": job["test"]}
            found = {part: open_tokens(name, None).identity for part, name in texts.items() if name}
            future.set_result(scored_row(seconds=self.seconds, **found))
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
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Simulated]:
    def install(**how: Any) -> Simulated:
        runner = Simulated(**how)
        monkeypatch.setattr(sweeps, "Processes", lambda jobs: runner)
        monkeypatch.setattr(sweeps, "time", SimpleNamespace(monotonic=runner.monotonic))
        monkeypatch.setattr(sweeps, "GRACE_SECONDS", 0.1)
        return runner

    return install


def test_finished_cells_are_not_run_again(sweep_file: SweepFile, simulate: Callable[..., Simulated]) -> None:
    out = sweep_file().parent / "out"
    simulate()
    assert len(sweep(sweep_file(grids=[{"model.slots": [5, 9]}]), out)) == 2
    more = simulate()
    rows = sweep(sweep_file(grids=[{"model.slots": [9, 5, 17]}]), out)
    assert more.started == ["slots17-seed0"]
    assert [row["sweep"]["cell"] for row in rows] == ["slots9-seed0", "slots5-seed0", "slots17-seed0"]
    assert len(ledger.read(out / "ledger.jsonl")) == 3
    simulate()
    swapped = {"slots9": {"model.slots": 5}, "slots5": {"model.slots": 9}}
    assert len(sweep(sweep_file(grids=[{"of": swapped}]), out)) == 2  # both are finished, under other names
    renamed = {"slots9": {"model.slots": 5}, "slots5": {"model.slots": 13}}  # one is finished, the other is not
    for changed in (sweep_file(grids=[{"model.slots": [5]}], set={"steps": 70}), sweep_file(grids=[{"of": renamed}])):
        with pytest.raises(UserError, match=r"slots\d-seed0"):
            sweep(changed, out)
    ledger.append(out / "ledger.jsonl", {"recorded": "by hand"})
    with pytest.raises(UserError, match=r"ledger\.jsonl, line 4 .* sweep"):
        sweep(sweep_file(), out)


def test_a_text_that_changed_is_reported_by_the_cell(
    sweep_file: SweepFile,
    simulate: Callable[..., Simulated],
    store: TokenStore,
    books: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finished cells were scored on the old text. Each cell checks, wherever it runs."""
    folder, own = sweep_file().parent, {}
    for part in ("train", "validation", "test"):
        shutil.copytree(str(store.path), own.setdefault(part, folder / part))
    out, settings = folder / "out", {"data": {part: str(own[part]) for part in ("train", "validation")}}
    first = {"model.slots": [5]}
    grids = [first, {"model.slots": [9], "data.jitter": [True]}]  # which does not change the text
    simulate()
    sweep(sweep_file(grids=[first], set=settings, test=str(own["test"])), out)
    for part, text in own.items():
        kept = text.rename(folder / "kept")
        prepare([str(books / "1.txt")], text, tokenizer=str(store.path), workers=1)
        monkeypatch.setattr(sweeps, "Processes", InThisProcess)
        with pytest.raises(UserError, match=f"slots9.*{part} has changed since slots5-seed0"):
            sweep(sweep_file(grids=grids, set=settings, test=str(own["test"])), out)
        assert not (out / "runs").exists()
        shutil.rmtree(text)
        kept.rename(text)
    assert len(sweep(sweep_file(grids=grids, set=settings, test=str(own["test"])), out)) == 2


def test_cells_scored_on_different_texts_are_reported(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], store: TokenStore, books: Path
) -> None:
    """Each was the only cell of its sweep; a third sweep has both."""
    folder = sweep_file().parent
    text, out = folder / "text", folder / "out"
    simulate()
    for slots in (5, 9):
        prepare([str(books / f"{slots // 4}.txt")], text, tokenizer=str(store.path), workers=1)
        sweep(sweep_file(grids=[{"model.slots": [slots]}], test=str(text)), out)
        shutil.rmtree(text)
    with pytest.raises(UserError, match=r"text .*slots9-seed0 than for slots5-seed0"):
        sweep(sweep_file(grids=[{"model.slots": [5, 9]}], test=str(text)), out)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"sweep": 3}, "sweep"), ({"sweep": {"cell": "x"}}, "sweep.key"), ({"seconds": "1"}, "seconds"),
        ({"scores": {"ppl_token": 2.0}}, "scores.ppl_word"), ({"train_data": {}}, "train_data.name"),
        ({"validation_data": "x"}, "validation_data"),
    ],
)  # fmt: skip
def test_damaged_rows_are_reported_before_any_cell_starts(
    part: dict[str, Any], name: str, sweep_file: SweepFile, simulate: Callable[..., Simulated]
) -> None:
    file, runner = sweep_file(), simulate()
    row = scored_row(sweep={"cell": "x", "key": "y"}, seconds=1.0)
    for each in (row, row | part):
        ledger.append(file.parent / "out" / "ledger.jsonl", each)
    with pytest.raises(UserError, match=rf"ledger\.jsonl, line 2 .*{name}"):
        sweep(file, file.parent / "out", dry_run=True)
    assert not runner.started


def test_rows_without_line_break_or_score_are_read(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(grids=[{"model.slots": [5]}])
    out = file.parent / "out"
    simulate()
    sweep(file, out)
    ledger_file = out / "ledger.jsonl"
    row = json.loads(ledger_file.read_text())
    row["scores"]["ppl_token"] = None  # infinity, in JSON
    del row["crc32"]
    ledger_file.write_text(json.dumps(row))
    before = ledger_file.read_text()
    sweep(file, out, dry_run=True)
    assert capsys.readouterr().out.splitlines()[-1] == "1 cell, 1 finished"
    assert ledger_file.read_text() == before  # a dry run changes nothing
    runner = simulate()
    assert len(sweep(sweep_file(grids=[{"model.slots": [5, 9]}]), out)) == 2
    assert runner.started == ["slots9-seed0"]
    assert ledger_file.read_text().startswith(before + "\n")
    assert len(ledger.read(ledger_file)) == 2


def test_duplicate_combinations_are_counted(sweep_file: SweepFile, capsys: pytest.CaptureFixture[str]) -> None:
    grids = [{"model.system": ["recent", "log_memory"], "model.sharpness": [20, 30]}]
    file = sweep_file(grids=grids)
    sweep(file, file.parent / "out", dry_run=True)
    assert capsys.readouterr().out.splitlines()[-1] == "3 cells (duplicate combinations left out: 1), 0 finished"


def test_a_dry_run_starts_nothing(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], capsys: pytest.CaptureFixture[str]
) -> None:
    file, runner = sweep_file(), simulate()
    sweep(file, file.parent / "out", dry_run=True)
    assert capsys.readouterr().out.splitlines()[-1] == "6 cells, 0 finished"
    assert not runner.started
    assert not (file.parent / "out").exists()


def test_time_limit(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file()
    out = file.parent / "out"
    runner = simulate()
    assert len(sweep(file, out, minutes=3.5)) == 3  # a fourth would not finish in time
    assert len(runner.started) == 3
    assert not runner.stopped
    assert runner.closed
    assert "3 of 6 cells finished" in capsys.readouterr().out
    runner = simulate(endless=("slots9-k20-seed0",))
    assert len(sweep(file, out, minutes=0.5)) == 3  # one starts in any case, and is stopped
    assert runner.started == ["slots9-k20-seed0"]
    assert runner.stopped
    printed = capsys.readouterr()
    assert "3 left: run the same command again" in printed.out
    assert "time is up" in printed.err
    simulate()
    sweep(file, out, minutes=0.5)  # a cell that finishes too late
    assert "time is up" not in capsys.readouterr().err
    simulate()
    assert len(sweep(file, out)) == 6


def test_queued_cells_do_not_count_as_running(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell runs at a time, another is queued: the time left is estimated from the running one."""
    file = sweep_file()
    simulate(max_started=2, parallel=1)
    sweep(file, file.parent / "out")
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in printed[:2]] == ["started", "queued"]
    assert "1 of 6 cells, about 5:00 left" in printed[2]
    simulate()
    assert len(sweep(file, file.parent / "other", minutes=1.5)) == 1
    runner = simulate(max_started=2, parallel=1)
    sweep(file, file.parent / "other", minutes=0.5)
    assert len(runner.started) == 1  # one starts in any case, the next would not finish in time


def test_dry_run_reports_how_much_of_a_cell_is_saved(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell resumes from its checkpoint, however long its log is; a damaged log counts as none."""
    file = sweep_file()
    out = file.parent / "out"
    cell, *_, last = cells_of(read_config(file), file, out)
    steps = cell.config.steps
    record = {"step": steps, "epoch": 1.0, "loss": 2.0, "tokens_per_second": 3.0}
    for each, damage in ((cell, {}), (last, {"step": "x"})):
        (each.config.run / "checkpoints" / f"step-{steps // 2:08d}").mkdir(parents=True)
        (each.config.run / "log.jsonl").write_text(json.dumps(record | damage) + "\n")
    sweep(file, out, dry_run=True)
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split()[1:] == ["50%", "trained"]
    assert [line.split()[1:] for line in listed[1:6]] == [["not", "started"]] * 5
    (cell.config.run / "checkpoints" / f"step-{steps // 2:08d}").rmdir()
    sweep(file, out, dry_run=True)
    assert capsys.readouterr().out.splitlines()[0].split()[1:] == ["not", "started"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interruptions_and_errors_let_cells_save(
    error: type[BaseException],
    sweep_file: SweepFile,
    simulate: Callable[..., Simulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = sweep_file()
    out = file.parent / "out"
    runner, real, calls = simulate(max_started=2, endless=("slots5-k20-seed0",)), sweeps.wait, []

    def interrupted(*arguments: Any, **words: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return real(*arguments, **words)

    monkeypatch.setattr(sweeps, "wait", interrupted)
    with pytest.raises(error):
        sweep(file, out)
    assert runner.stopped
    assert runner.closed
    assert [row["sweep"]["cell"] for row in ledger.read(out / "ledger.jsonl")] == ["slots5-delta-seed0"]


def test_cells_save_if_a_row_cannot_be_written(
    sweep_file: SweepFile, simulate: Callable[..., Simulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("the disk is full")

    file, runner = sweep_file(), simulate(max_started=2, endless=("slots5-delta-seed0",))
    monkeypatch.setattr(ledger, "append", full)
    with pytest.raises(UserError, match="the disk is full"):
        sweep(file, file.parent / "out")
    assert runner.stopped


def test_only_one_sweep_runs_in_a_folder(sweep_file: SweepFile, simulate: Callable[..., Simulated]) -> None:
    file, runner = sweep_file(), simulate()
    out = file.parent / "out"
    out.mkdir()
    with exclusive_lock(out), pytest.raises(UserError, match=f"{out} .process {os.getpid()} on"):
        sweep(file, out)
    assert not runner.started
    sweep(file, out)
    assert len(runner.started) == 6


def test_wrong_options_are_reported(sweep_file: SweepFile) -> None:
    file = sweep_file()
    for options, problem in (
        ({"jobs": 0}, "jobs .* 0"),
        ({"minutes": -1}, "minutes .* -1"),
        ({"minutes": math.nan}, "minutes .* nan"),
        ({"jobs": 2, "address": "local"}, "--jobs .*--address"),
    ):
        with pytest.raises(UserError, match=problem):
            sweep(file, file.parent / "out", **options)  # type: ignore[arg-type]
