"""Sweeps: a grid over any fields of a recipe, each cell trained and scored, none twice, whatever happens between.

    logpast sweep sweep-toy

    OUT/ledger.jsonl     a row a finished cell (`sweep` in it names cell and choices): what stands here is finished
    OUT/runs/CELL/       its run, from whose last checkpoint a cell goes on that was interrupted; of one that is
                         finished, weights are kept and optimizer states are not
    OUT/logs/CELL.log    what it printed

Only the sweep itself writes rows, and only one sweep may work in a folder, so no cell can be lost or doubled.
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
from logpast.sweeps.cell import PATIENCE
from logpast.sweeps.grid import Cell, cells_of, read_page
from logpast.sweeps.runners import Cluster, Processes, Row, Runner
from logpast.training.checkpoint import drop_optimizer_state, sorted_checkpoints, step_of
from logpast.training.log import last_record
from logpast.training.loop import open_data
from logpast.training.recipes import find_recipe
from logpast.util.errors import UserError
from logpast.util.files import ensure_writable, exclusive_lock
from logpast.util.progress import JobBoard, format_seconds, job_board
from logpast.util.validation import validate_arguments


@validate_arguments
def sweep(
    page: Path,
    out: Path | None = None,
    jobs: int | None = None,
    address: str | None = None,
    minutes: float | None = None,
    dry_run: bool = False,
) -> list[dict[str, Any]]:
    """Train and score every cell of a grid; go on where a sweep was interrupted.

    Examples:
        logpast sweep sweep-toy
        logpast sweep sweep-paper --dry_run              # which cells, and which of them are finished
        logpast sweep sweep-small --minutes 28           # the same again goes on
        logpast sweep sweep-paper --address auto         # on the Ray cluster that this machine is part of

    Args:
        page: a page that names a recipe, grids over its fields and the text to score on; see sweep-toy.
        out: folder for ledger.jsonl, runs and logs; by default runs/ and the page's name. What is finished there is
            not done again. On a cluster, all machines must see it under this name.
        jobs: cells at a time on this machine; by default one on each GPU, or one on the CPU. CUDA_VISIBLE_DEVICES
            chooses GPUs.
        address: run the cells through Ray, which then decides where and how many at a time: auto or HOST:PORT for the
            cluster that this machine is part of (`ray start`), local to start one here for this sweep alone.
        minutes: stop after so long. Cells then under way save, to be gone on with; none is begun that would not end
            in time, to go by the longest so far.
        dry_run: only list the cells.

    Returns:
        The rows of all finished cells.
    """
    for name, value in (("jobs", jobs), ("minutes", minutes)):
        if value is not None and not value > 0:
            raise UserError(f"{name} must be above 0, got {value}")
    if jobs and address is not None:
        raise UserError("--jobs is for cells without Ray; with --address, set cpus and gpus of a cell in the page")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    page = find_recipe(page)
    out = (out or Path("runs") / page.stem).absolute()
    plan = read_page(page)
    cells = cells_of(plan, page, out)
    done = _finished(cells, out)
    if dry_run:
        _list(cells, done, plan.combinations - len(cells))
        return list(done.values())
    ensure_writable(out / "ledger.jsonl")
    with exclusive_lock(out):
        done = _finished(cells, out)  # once more, now that nobody else can be at it
        left = [cell for cell in cells if cell.key not in done]
        failed: dict[str, str] = {}
        if left:
            if address is None:
                _prepare_texts(left)
            runner: Runner = Processes(jobs) if address is None else Cluster(address, plan.cpus, plan.gpus)
            failed = _Sweep(cells, done, out, runner, deadline).run()
        _texts_of(cells, done, out)  # they were of different pages, or ran at once
    _tell(cells, done, failed, out)
    return [done[cell.key] for cell in cells if cell.key in done]


def _finished(cells: list[Cell], out: Path) -> dict[str, Row]:
    """The row of each cell that has one, by the cell's key."""
    place, found, made = out / "ledger.jsonl", dict[str, Row](), dict[str, str]()
    keys = {cell.key for cell in cells}
    for number, row in enumerate(ledger.read(place) if place.exists() else [], 1):
        if "sweep" not in row:
            raise UserError(f"{place} has rows that are no sweep's; give another --out")
        if not _is_whole(row):
            raise UserError(
                f"{place}: row {number} lacks a part of what a sweep writes; remove it, or give another --out"
            )
        name, key = row["sweep"]["cell"], row["sweep"]["key"]
        made[name] = key
        if key in keys:
            found[key] = row
    for cell in cells:
        if cell.key not in found and cell.name in made:  # where it would go on is another's
            raise UserError(f"{place} has a cell {cell.name} that was made by other settings; give another --out")
    return found


def _texts_of(cells: list[Cell], done: dict[str, Row], out: Path) -> dict[tuple[str | None, ...], tuple[str, str]]:
    """What finished cells found under the names of their texts: the sha256 of each, and whose it is."""
    known: dict[tuple[str | None, ...], tuple[str, str]] = {}
    for cell in cells:
        row = done.get(cell.key, {})
        for part, text in cell.texts.items():
            if row.get(part):
                sha256, other = known.setdefault(text, (row[part]["sha256"], cell.name))
                if sha256 != row[part]["sha256"]:
                    raise UserError(
                        f"{out / 'ledger.jsonl'}: {text[0]} was another text for {cell.name} than for {other}; remove "
                        "the row and the run of one of them, or give another --out"
                    )
    return known


def _is_whole(row: Row) -> bool:
    """Whether a row has all that is read of it here; scores may be None, which is how JSON has infinity."""
    made, scores = row["sweep"], row.get("scores")
    if not isinstance(made, dict) or not isinstance(scores, dict):
        return False
    return (
        all(isinstance(made.get(name), str) for name in ("cell", "key"))
        and all(isinstance(scores.get(name, ""), int | float | None) for name in ("ppl_token", "bits_per_byte"))
        and all(isinstance(row.get(name), int | float) for name in ("seconds", "train_tokens"))
        and all(
            isinstance(text, dict) and "sha256" in text
            for text in (row.get("train_data"), row.get("test_data"), row.get("validation_data") or {"sha256": None})
        )
    )


def _prepare_texts(cells: list[Cell]) -> None:
    """Tokenise every text once, here, before cells that run at the same time would each do so."""
    for data, test in dict.fromkeys((cell.config.data, cell.test) for cell in cells):
        store, _ = open_data(data)
        open_tokens(test, store.path)


class _Sweep:
    """A sweep under way."""

    def __init__(
        self, cells: list[Cell], done: dict[str, Row], out: Path, runner: Runner, deadline: float | None
    ) -> None:
        self.cells, self.done, self.out, self.runner = cells, done, out, runner
        self.waiting = deque(cell for cell in cells if cell.key not in done)
        self.running: dict[Future[Row], Cell] = {}
        self.failed: dict[str, str] = {}
        self.begun, self.stopping = 0, False
        self.deadline = deadline

    def run(self) -> dict[str, str]:
        """Work until all cells are done or have failed, or time is up. Returns why cells failed, by name."""
        try:
            with job_board("cell", "trained", "loss", "tokens/s") as progress:
                try:
                    self._work(progress)
                except BaseException:  # whatever it was, what cells have learned is kept
                    progress.say("stopping: cells under way save first (Ctrl-C again: stop at once)")
                    self._stop(progress)
                    raise
        finally:
            self.runner.close()
        return self.failed

    def _work(self, progress: JobBoard) -> None:
        while True:
            while self.waiting and self._may_begin():
                self._begin(self.waiting.popleft(), progress)
            if not self.running:
                return
            self._collect(progress)
            if self.deadline and time.monotonic() > self.deadline:
                if self.running:
                    progress.say("time is up: cells under way save, to be gone on with by the same command")
                self._stop(progress)
                return

    def _may_begin(self) -> bool:
        if len(self.running) >= self.runner.width:
            return False
        # the first in each place is always begun: a cell may take longer than all the time that is given at once
        in_time = self.deadline is None or time.monotonic() + self._longest() < self.deadline
        return in_time or self.begun < self.runner.places

    def _longest(self) -> float:
        return max((row["seconds"] for row in self.done.values()), default=0.0)

    def _begin(self, cell: Cell, progress: JobBoard) -> None:
        known = _texts_of(self.cells, self.done, self.out)
        job = {
            "config": cell.config.to_dict(),
            "test": cell.test,
            "log": str(self._log(cell.name)),
            "texts": {part: known[text] for part, text in cell.texts.items() if text in known},
        }
        self.running[self.runner.start(job)] = cell
        self.begun += 1
        how = "begins" if len(self.running) <= self.runner.places else "waits for a place"
        share = _share(cell, saved=True)
        progress.say(f"{cell.name}: {how}" + (f" at {share:.0%}" if share else ""))

    def _collect(self, progress: JobBoard) -> None:
        """Wait a moment, and note what has ended in it."""
        for future in wait(self.running, timeout=0.5, return_when=FIRST_COMPLETED).done:
            self._note(self.running.pop(future), future, progress)
        rows = []
        for cell in self.running.values():
            record = last_record(cell.config.run)
            figures = [f"{record['loss']:.3f}", f"{record['tokens_per_second']:,.0f}"] if record else ["", ""]
            rows.append([cell.name, f"{_share(cell):.0%}", *figures])
        progress.update(self._count(), rows)

    def _count(self) -> str:
        """How far the sweep is, and for how long it will go on if cells take as long as those finished."""
        text = f"{len(self.done)} of {len(self.cells)} cells" + (f", {len(self.failed)} failed" if self.failed else "")
        left = [1 - _share(cell) for cell in self.running.values()]
        left += [1 - _share(cell, saved=True) for cell in self.waiting]
        if self.done and left:
            each = statistics.mean(row["seconds"] for row in self.done.values())
            text += f", about {format_seconds(each * sum(left) / min(self.runner.places, len(left)))} left"
        return text

    def _note(self, cell: Cell, future: Future[Row], progress: JobBoard) -> None:
        try:
            row = future.result()
        except Exception as error:
            if not self.stopping:  # else it did as it was told, and will go on another time
                self.failed[cell.name] = self.runner.reason(error)
                progress.say(f"{cell.name}: failed: {self.failed[cell.name]} ({self._log(cell.name)})")
            return
        row["sweep"] = {"cell": cell.name, "choices": cell.choices, "test": cell.test, "key": cell.key}
        drop_optimizer_state(cell.config.run)  # before the row, for a cell that has one is not looked at again
        ledger.append(self.out / "ledger.jsonl", row)
        self.done[cell.key] = row
        figure = _shown(row["scores"]["ppl_token"], 2)
        progress.say(f"{cell.name}: ppl_token {figure} in {row['seconds']:,.0f} s; {self._count()}")

    def _stop(self, progress: JobBoard) -> None:
        self.stopping = True
        self.runner.stop()
        end = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < end:
            self._collect(progress)

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"


def _share(cell: Cell, saved: bool = False) -> float:
    """How much of its training a cell has behind it; or has saved, so that it would go on from there."""
    config, record = cell.config, last_record(cell.config.run)
    if not record:
        return 0.0
    share = record["step"] / config.steps if config.steps else record["epoch"] / (config.epochs or 1)
    if saved:
        latest = max(map(step_of, sorted_checkpoints(config.run)), default=0)
        share *= min(latest / max(record["step"], 1), 1)
    return float(min(share, 1))


def _shown(figure: float | None, digits: int) -> str:
    return "–" if figure is None else f"{figure:.{digits}f}"


def _list(cells: list[Cell], done: dict[str, Row], repeated: int) -> None:
    width = max(len(cell.name) for cell in cells)
    for cell in cells:
        share = _share(cell, saved=True)
        how = "finished" if cell.key in done else f"{share:.0%} trained" if share else "to do"
        print(f"{cell.name:{width}}  {how}")
    same = f" (combinations that are the same as another: {repeated})" if repeated else ""
    print(f"{len(cells)} cell{'s' if len(cells) > 1 else ''}{same}, {len(done)} finished")


def _tell(cells: list[Cell], done: dict[str, Row], failed: dict[str, str], out: Path) -> None:
    """The table of all that is finished; an error if anything failed."""
    rows = []
    for cell in cells:
        if row := done.get(cell.key):
            scores = row["scores"]
            figures = _shown(scores["ppl_token"], 2), _shown(scores["bits_per_byte"], 4)
            rows.append([cell.name, *figures, f"{row['train_tokens']:,}", f"{row['seconds']:,.0f}"])
    if rows:
        print(as_text(Table(["cell", "ppl_token", "bits/byte", "tokens", "seconds"], rows)))
    left = len(cells) - len(done) - len(failed)
    go_on = f"; {left} to do: the same command goes on" if left else ""
    print(f"{len(done)} of {len(cells)} cells finished, rows in {out / 'ledger.jsonl'}{go_on}")
    if failed:
        name, why = next(iter(failed.items()))
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"cell {name}{more} failed: {why}; see {out / 'logs'}; the same command tries again")
