"""A cell: one run, trained and scored. Comparisons and sweeps are made of these.

A sweep starts each in a process of its own, `python -m logpast.sweeps.cell`, so that whatever one does to its
process, a crash, a full GPU, a leak, harms no other. The job comes as a line of JSON on standard input, which then
stays open: where it ends, the sweep has died, and the cell saves and ends too. The row goes to standard output as JSON.
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
from logpast.evaluation.vocabulary import unseen
from logpast.ledger import row as ledger
from logpast.models import build
from logpast.training.checkpoint import find_checkpoint, sorted_checkpoints
from logpast.training.config import TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import open_data, train
from logpast.util.errors import UserError
from logpast.util.files import try_lock

ARITHMETIC: dict[str, Precision] = {"bf16-mixed": "bfloat16", "64-true": "float64"}
PATIENCE = 60.0  # seconds that a process which was told to stop has for it; its successor waits longer


def run_cell(config: TrainConfig, test: str, batch_size: int | None = None) -> dict[str, Any]:
    """Train, or go on, or find it done; score on the test text in the arithmetic of the training, which is how the
    validation chose the checkpoint. Returns the ledger's row, with how many of each document's tokens the training
    text never has, `state_bytes`, what must be kept of a stream to go on with it, `tokens_per_second` of the training,
    and `peak_bytes`, the most memory that it took; None where a part of it was done before, by another process.
    """
    if begun := bool(sorted_checkpoints(config.run)):
        every = find_checkpoint(config.run, "latest").config.validate_every
        if config.data.validation and every != config.validate_every:  # other weights might be the best
            wrong = f"it was run with validate_every={every}, now it is {config.validate_every}"
            raise UserError(f"cannot go on with {config.run}: {wrong}; change that back, or work in another folder")
    _forget_peak()
    train(config)
    peak = None if begun else _peak_bytes()
    size = batch_size or config.micro_batch_size or config.batch_size
    precision = ARITHMETIC.get(config.precision, "float32")
    scores = evaluate(config.run, test, batch_size=size, device=config.accelerator, precision=precision)
    found = find_checkpoint(config.run)
    scored = open_tokens(test, found.load_tokenizer())
    if "by_document" in scores:
        trained_on, _ = open_data(config.data)
        scores["by_document"]["unseen"] = unseen(trained_on, scored).tolist()
    entry = ledger.row(found, scored, scores)
    with torch.device("meta"):
        state_bytes = build(found.config.model).eval().state_bytes  # as it was scored
    speed = tokens_per_second(config.run)
    return entry | {"state_bytes": state_bytes, "tokens_per_second": speed, "peak_bytes": peak}


def tokens_per_second(run: Path) -> float:
    """Training tokens a second, the first report, in which all was built and compiled, left out."""
    speeds = [record["tokens_per_second"] for record in read_log(run) if "tokens_per_second" in record]
    return statistics.median(speeds[1:] or speeds)


def free_memory() -> None:
    """Of earlier runs in this process: each is a cycle of objects, which stays until it is collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _forget_peak() -> None:
    """Begin to watch how much memory is used at most: a GPU's, or this process's (on Linux)."""
    free_memory()  # what is left of an earlier run would be counted
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int | None:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job: {config, test, log, texts}. All that is printed goes to the log.

    `texts` has, of train_data, validation_data and test_data, the sha256 that another cell found, and that cell's name,
    where one did: they must be the same here. Returns the row, with `seconds` it took.
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
        # a run that was resumed took longer than this last piece of it, and went on after its best weights
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
            raise UserError(
                f"{name} is another text than when {other} was finished; bring that back, or give another --out"
            )


@contextmanager
def _logging_to(log: Path) -> Iterator[None]:
    """Standard output and error into the log, at the level of file descriptors, for libraries' last words too.

    The log is locked meanwhile: what a killed sweep has left running may still be about to end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as lock, log.open("ab") as file:  # two, for processes that we start get the second
        end = time.monotonic() + 2 * PATIENCE
        while not try_lock(lock):
            if time.monotonic() > end:
                problem = f"another process is at work on this cell ({log} is locked); end it first"
                os.write(lock.fileno(), f"logpast: {problem}\n".encode())  # nobody hears us yet but the log
                raise UserError(problem)
            time.sleep(0.1)
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, handle in enumerate(kept, start=1):
                os.dup2(handle, number)
                os.close(handle)


def _end_with_parent() -> None:
    """Standard input ends when whoever started us does, however that came about: save what there is, and stop."""
    while os.read(0, 1024):  # sys.stdin cannot be left half read by a thread when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        entry = work(job)
    except (Exception, KeyboardInterrupt):
        sys.exit(1)  # the log has told why
    print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
