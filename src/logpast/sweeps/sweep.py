"""`logpast sweep`: train and score every cell of a grid over any fields of a recipe; resume what was interrupted.

    logpast sweep sweep-toy

    OUT/ledger.jsonl     one row per finished cell; its field `sweep` names the cell and its choices
    OUT/runs/CELL/       the run, from whose last checkpoint an interrupted cell resumes; a finished one keeps its model
                         but not its optimizer state
    OUT/logs/CELL.log    what the cell printed

Only the sweep writes rows, and only one sweep may run in a folder, so no cell is lost or counted twice.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from logpast.data import open_tokens
from logpast.ledger import row as ledger
from logpast.reporting.tables import Table, as_text
from logpast.sweeps.cell import GRACE_SECONDS
from logpast.sweeps.grid import Cell, cells_of, read_config
from logpast.sweeps.runners import Cluster, Processes, Row, Runner
from logpast.training.checkpoint import drop_optimizer_state, sorted_checkpoints, step_of
from logpast.training.log import last_record
from logpast.training.recipes import find_recipe
from logpast.training.setup import open_data
from logpast.util.errors import UserError
from logpast.util.files import ensure_writable, exclusive_lock
from logpast.util.progress import JobBoard, format_seconds, job_board
from logpast.util.validation import PositiveFloat, PositiveInt, validate_arguments


@validate_arguments
def sweep(
    recipe: Path,
    out: Path | None = None,
    jobs: PositiveInt | None = None,
    address: str | None = None,
    minutes: PositiveFloat | None = None,
    dry_run: bool = False,
) -> list[dict[str, Any]]:
    """Train and score every cell of a grid, or resume an interrupted sweep.

    Examples:
        logpast sweep sweep-toy
        logpast sweep sweep-paper --dry_run              # list the cells, and which of them are finished
        logpast sweep sweep-small --minutes 28           # run it again to resume
        logpast sweep sweep-paper --address auto         # on the Ray cluster that this machine is part of

    Args:
        recipe: YAML file that names a recipe, grids over its fields and the text to score on, or a shipped one such as
            sweep-toy.
        out: folder for ledger.jsonl, runs and logs; by default runs/ and the name of the YAML file. What is finished
            there is not done again. On a cluster, all machines must see it under this path.
        jobs: cells that run at a time on this machine; by default one per GPU, or one on the CPU. CUDA_VISIBLE_DEVICES
            chooses GPUs.
        address: run the cells with Ray, which then decides where and how many at a time: auto or HOST:PORT for the
            cluster that this machine is part of (`ray start`), local to start one here for this sweep.
        minutes: stop after this time. Running cells then save, to be resumed later; a cell is not started if it would
            not finish in time, judging by the longest one so far.
        dry_run: only list the cells.

    Returns:
        The rows of all finished cells.
    """
    if jobs and address is not None:
        raise UserError("--jobs is for sweeps without Ray; with --address, set cpus and gpus in the YAML file")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    file = find_recipe(recipe)
    out = (out or Path("runs") / file.stem).absolute()
    config = read_config(file)
    cells = cells_of(config, file, out)
    done = _finished(cells, out)
    if dry_run:
        _print_cells(cells, done, config.combinations - len(cells))
        return list(done.values())
    ensure_writable(out / "ledger.jsonl")
    with exclusive_lock(out):
        done = _finished(cells, out)  # again, now that no other sweep can write here
        left = [cell for cell in cells if cell.key not in done]
        failed: dict[str, str] = {}
        if left:
            if address is None:
                _prepare_texts(left)
            runner: Runner = Processes(jobs) if address is None else Cluster(address, config.cpus, config.gpus)
            failed = _Sweep(cells, done, out, runner, deadline).run()
        _known_texts(cells, done, out)  # cells of different sweeps, or that ran at the same time, may disagree
    _print_summary(cells, done, failed, out)
    return [done[cell.key] for cell in cells if cell.key in done]


def _finished(cells: list[Cell], out: Path) -> dict[str, Row]:
    """Rows of finished cells, by the cell's key."""
    file = out / "ledger.jsonl"
    rows = ledger.read(file, "sweep", "seconds") if file.exists() else []
    keys, names = {cell.key for cell in cells}, {row["sweep"]["cell"]: row["sweep"]["key"] for row in rows}
    found = {row["sweep"]["key"]: row for row in rows if row["sweep"]["key"] in keys}
    for cell in cells:
        if cell.key not in found and cell.name in names:  # its run folder belongs to the other cell
            raise UserError(f"{file} has a cell {cell.name} with other settings; give another --out")
    return found


def _known_texts(cells: list[Cell], done: dict[str, Row], out: Path) -> dict[tuple[str | None, ...], tuple[str, str]]:
    """Text -> the sha256 that finished cells found, and the name of the first of them."""
    known: dict[tuple[str | None, ...], tuple[str, str]] = {}
    for cell in cells:
        row = done.get(cell.key, {})
        for part, text in cell.texts.items():
            if row.get(part):
                sha256, other = known.setdefault(text, (row[part]["sha256"], cell.name))
                if sha256 != row[part]["sha256"]:
                    raise UserError(
                        f"{out / 'ledger.jsonl'}: {text[0]} was a different text for {cell.name} than for {other}; "
                        "remove the row and the run of one of them, or give another --out"
                    )
    return known


def _prepare_texts(cells: list[Cell]) -> None:
    """Tokenize every text once, before parallel cells would each do it."""
    for data, test in dict.fromkeys((cell.config.data, cell.test) for cell in cells):
        store, _ = open_data(data)
        open_tokens(test, store.path)


class _Sweep:
    """A running sweep."""

    def __init__(
        self, cells: list[Cell], done: dict[str, Row], out: Path, runner: Runner, deadline: float | None
    ) -> None:
        self.cells, self.done, self.out, self.runner = cells, done, out, runner
        self.waiting = deque(cell for cell in cells if cell.key not in done)
        self.running: dict[Future[Row], Cell] = {}
        self.failed: dict[str, str] = {}
        self.started, self.stopping = 0, False
        self.deadline = deadline

    def run(self) -> dict[str, str]:
        """Run until all cells are finished or have failed, or time is up. Returns why cells failed, by name."""
        try:
            with job_board("cell", "trained", "loss", "tokens/s") as progress:
                try:
                    self._run_cells(progress)
                except BaseException:  # running cells save in any case
                    progress.say("stopping: running cells save first (Ctrl-C again: stop at once)")
                    self._stop(progress)
                    raise
        finally:
            self.runner.close()
        return self.failed

    def _run_cells(self, progress: JobBoard) -> None:
        while True:
            while self.waiting and self._may_start():
                self._start(self.waiting.popleft(), progress)
            if not self.running:
                return
            self._collect(progress)
            if self.deadline and time.monotonic() > self.deadline:
                if self.running:
                    progress.say("time is up: running cells save and stop; run the same command again to resume")
                self._stop(progress)
                return

    def _may_start(self) -> bool:
        if len(self.running) >= self.runner.max_started:
            return False
        # as many as run in parallel always start: a cell may take longer than --minutes, and needs several sweeps
        in_time = self.deadline is None or time.monotonic() + self._longest() < self.deadline
        return in_time or self.started < self.runner.parallel

    def _longest(self) -> float:
        return max((row["seconds"] for row in self.done.values()), default=0.0)

    def _start(self, cell: Cell, progress: JobBoard) -> None:
        known = _known_texts(self.cells, self.done, self.out)
        job = {
            "config": cell.config.to_dict(),
            "test": cell.test,
            "log": str(self._log(cell.name)),
            "texts": {part: known[text] for part, text in cell.texts.items() if text in known},
        }
        self.running[self.runner.start(job)] = cell
        self.started += 1
        how = "started" if len(self.running) <= self.runner.parallel else "queued"
        trained = _fraction_trained(cell, saved=True)
        progress.say(f"{cell.name}: {how}" + (f" at {trained:.0%}" if trained else ""))

    def _collect(self, progress: JobBoard) -> None:
        """Wait a moment, record the cells that ended, and update the display."""
        for future in wait(self.running, timeout=0.5, return_when=FIRST_COMPLETED).done:
            self._record(self.running.pop(future), future, progress)
        rows = []
        for cell in self.running.values():
            record = last_record(cell.config.run)
            numbers = [f"{record['loss']:.3f}", f"{record['tokens_per_second']:,.0f}"] if record else ["", ""]
            rows.append([cell.name, f"{_fraction_trained(cell):.0%}", *numbers])
        progress.update(self._status(), rows)

    def _status(self) -> str:
        """How many cells are finished, and the time left if the others take as long as those."""
        text = f"{len(self.done)} of {len(self.cells)} cells" + (f", {len(self.failed)} failed" if self.failed else "")
        left = [1 - _fraction_trained(cell) for cell in self.running.values()]
        left += [1 - _fraction_trained(cell, saved=True) for cell in self.waiting]
        if self.done and left:
            each = statistics.mean(row["seconds"] for row in self.done.values())
            text += f", about {format_seconds(each * sum(left) / min(self.runner.parallel, len(left)))} left"
        return text

    def _record(self, cell: Cell, future: Future[Row], progress: JobBoard) -> None:
        try:
            row = future.result()
        except Exception as error:
            if not self.stopping:  # else it was asked to stop, and will resume later
                self.failed[cell.name] = self.runner.reason(error)
                progress.say(f"{cell.name}: failed: {self.failed[cell.name]} ({self._log(cell.name)})")
            return
        row["sweep"] = {"cell": cell.name, "choices": cell.choices, "test": cell.test, "key": cell.key}
        drop_optimizer_state(cell.config.run)  # before the row: a cell that has a row is finished
        ledger.append(self.out / "ledger.jsonl", row)
        self.done[cell.key] = row
        score = _text(row["scores"]["ppl_token"], 2)
        progress.say(f"{cell.name}: ppl_token {score} in {row['seconds']:,.0f} s; {self._status()}")

    def _stop(self, progress: JobBoard) -> None:
        self.stopping = True
        self.runner.stop()
        end = time.monotonic() + GRACE_SECONDS
        while self.running and time.monotonic() < end:
            self._collect(progress)

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"


def _fraction_trained(cell: Cell, saved: bool = False) -> float:
    """How much of a cell's training is done; with `saved`, up to its last checkpoint, from which it would resume."""
    config, record = cell.config, last_record(cell.config.run)
    if not record:
        return 0.0
    fraction = record["step"] / config.steps if config.steps else record["epoch"] / (config.epochs or 1)
    if saved:
        latest = max(map(step_of, sorted_checkpoints(config.run)), default=0)
        fraction *= min(latest / max(record["step"], 1), 1)
    return float(min(fraction, 1))


def _text(score: float | None, digits: int) -> str:
    return "–" if score is None else f"{score:.{digits}f}"


def _print_cells(cells: list[Cell], done: dict[str, Row], duplicates: int) -> None:
    width = max(len(cell.name) for cell in cells)
    for cell in cells:
        trained = _fraction_trained(cell, saved=True)
        state = "finished" if cell.key in done else f"{trained:.0%} trained" if trained else "not started"
        print(f"{cell.name:{width}}  {state}")
    note = f" (duplicate combinations left out: {duplicates})" if duplicates else ""
    print(f"{len(cells)} cell{'s' if len(cells) > 1 else ''}{note}, {len(done)} finished")


def _print_summary(cells: list[Cell], done: dict[str, Row], failed: dict[str, str], out: Path) -> None:
    """The table of all finished cells; a UserError if any failed."""
    rows = []
    for cell in cells:
        if row := done.get(cell.key):
            scores = _text(row["scores"]["ppl_token"], 2), _text(row["scores"]["bits_per_byte"], 4)
            rows.append([cell.name, *scores, f"{row['train_tokens']:,}", f"{row['seconds']:,.0f}"])
    if rows:
        print(as_text(Table(["cell", "ppl_token", "bits/byte", "tokens", "seconds"], rows)))
    left = len(cells) - len(done) - len(failed)
    resume = f"; {left} left: run the same command again to resume" if left else ""
    print(f"{len(done)} of {len(cells)} cells finished, rows in {out / 'ledger.jsonl'}{resume}")
    if failed:
        name, why = next(iter(failed.items()))
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"cell {name}{more} failed: {why}; see {out / 'logs'}, and run the same command to try again")
