"""A cell of a sweep or a comparison: one run, trained and scored.

A sweep starts each cell in its own process, `python -m logpast.sweeps.cell`, so that a crash, a full GPU or a memory
leak affects only that cell. The job is one line of JSON on standard input, which then stays open: when it closes, the
sweep has died, and the cell saves a checkpoint and exits. The row is printed to standard output as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from logpast.data import open_tokens
from logpast.evaluation.evaluate import Precision, evaluate
from logpast.ledger import row as ledger
from logpast.models import build
from logpast.training.checkpoint import find_checkpoint, sorted_checkpoints
from logpast.training.config import TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train
from logpast.training.setup import open_data
from logpast.util.errors import UserError
from logpast.util.files import try_lock

SCORING_PRECISION: dict[str, Precision] = {"bf16-mixed": "bfloat16", "64-true": "float64"}
GRACE_SECONDS = 60.0  # for a process to save and stop; a new process for the same cell waits longer


def run_cell(config: TrainConfig, test: str, batch_size: int | None = None) -> dict[str, Any]:
    """Train a run, resume it or find it finished, and score it on the test text.

    The scoring uses the precision of the training, in which validation chose the checkpoint.

    Returns:
        The ledger's row, with `state_bytes`, `tokens_per_second` and `peak_bytes` (None for a resumed run, whose first
        part was not measured).
    """
    if resumed := bool(sorted_checkpoints(config.run)):
        before = find_checkpoint(config.run, "latest").config
        # `train` allows these to change, but the result would not be that of the recipe
        for name in ("steps", "epochs", *(["validate_every"] if config.data.validation else [])):
            if (old := getattr(before, name)) != (new := getattr(config, name)):
                changed = f"it was trained with {name}={old}, now it is {new}"
                raise UserError(f"cannot resume {config.run}: {changed}; change it back, or use another folder")
    _reset_peak_memory()
    train(config)
    peak = None if resumed else _peak_memory()
    size = batch_size or config.micro_batch_size or config.batch_size
    precision = SCORING_PRECISION.get(config.precision, "float32")
    scores = evaluate(config.run, test, batch_size=size, device=config.accelerator, precision=precision)
    found = find_checkpoint(config.run)
    scored = open_tokens(test, found.load_tokenizer())
    entry = ledger.row(found, scored, scores)
    with torch.device("meta"):
        state_bytes = build(found.config.model).eval().state_bytes
    speed = tokens_per_second(config.run)
    return entry | {"state_bytes": state_bytes, "tokens_per_second": speed, "peak_bytes": peak}


def tokens_per_second(run: Path) -> float:
    """Training speed, without the first record, which includes compilation."""
    speeds = [record["tokens_per_second"] for record in read_log(run) if "tokens_per_second" in record]
    return statistics.median(speeds[1:] or speeds)


def free_memory() -> None:
    """Free what earlier runs in this process left: a run has reference cycles, which wait for garbage collection."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reset_peak_memory() -> None:
    """Start measuring peak memory: the GPU's, or that of this process (on Linux)."""
    free_memory()  # or an earlier run would count
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int | None:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Run a cell and write what it prints to its log.

    Args:
        job: config, test, log, and `texts`: for some of train_data, validation_data and test_data, the sha256 that
            another cell found and the name of that cell. The texts must be the same here.

    Returns:
        The row, with `seconds`, the time that the cell took.
    """
    with _logging_to(Path(job["log"])):
        started = time.monotonic()
        print(f"process {os.getpid()} on {socket.gethostname()}", flush=True)
        try:
            config = TrainConfig.from_dict(job["config"])
            if known := job.get("texts"):
                _check_texts(config, job["test"], known)
            entry = run_cell(config, job["test"])
        except UserError as error:
            print(f"logpast: {error}", flush=True)
            raise
        except Exception:
            traceback.print_exc()
            raise
        # with the time before a resumption; the latest checkpoint, because the best may be from before the end
        trained = find_checkpoint(config.run, "latest").state["seconds"]
        seconds = max(time.monotonic() - started, trained + entry["scores"]["seconds"])
        return entry | {"seconds": round(seconds, 3)}


def _check_texts(config: TrainConfig, test: str, known: dict[str, tuple[str, str]]) -> None:
    store, validation = open_data(config.data)
    texts = {
        "train_data": (config.data.train, store),
        "validation_data": (config.data.validation, validation),
        "test_data": (test, open_tokens(test, store.path)),
    }
    for part, (sha256, other) in known.items():
        name, text = texts[part]
        if text and text.sha256 != sha256:
            raise UserError(f"{name} has changed since {other} was finished; restore the text, or give another --out")


@contextmanager
def _logging_to(log: Path) -> Iterator[None]:
    """Redirect standard output and error to the log, as file descriptors, so that libraries are included.

    The log is locked meanwhile: a process that a killed sweep left behind may still be stopping.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as lock, log.open("ab") as file:  # two, because subprocesses inherit the second
        end = time.monotonic() + 2 * GRACE_SECONDS
        while not try_lock(lock):
            if time.monotonic() > end:
                problem = f"another process is running this cell ({log} is locked); stop it first"
                os.write(lock.fileno(), f"logpast: {problem}\n".encode())  # standard error is not redirected yet
                raise UserError(problem)
            time.sleep(0.1)
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, handle in enumerate(saved, start=1):
                os.dup2(handle, number)
                os.close(handle)


def _end_with_parent() -> None:
    """Wait until standard input closes, which happens however the parent ends; then save and stop."""
    while os.read(0, 1024):  # Python could not exit while a thread reads sys.stdin
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        entry = work(job)
    except (Exception, KeyboardInterrupt):
        sys.exit(1)  # the log says why
    print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
