"""`logpast demo`: does a memory help? On real text, and on a synthetic stream whose best possible loss is known.

Each part trains a few systems side by side on the same data for the same steps, in the way of the commands `data
prepare`, `train` and `eval`: a control (a transformer with the preceding tokens in its slots), the paper's memory and,
on the text, the control with recall.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from logpast.data.prepare import prepare
from logpast.demo.example import as_text, find_example
from logpast.demo.page import write_report
from logpast.demo.topics import Topics
from logpast.evaluation.evaluate import evaluate
from logpast.generation import generate
from logpast.training.checkpoint import find_checkpoint
from logpast.training.log import read_log
from logpast.training.recipes import read_recipe
from logpast.util.errors import UserError
from logpast.util.progress import progress_bar
from logpast.util.validation import validate_arguments

#: streams of topics in each split: their number, and the length of each
STREAMS = {"train": (100, 25_000), "validation": (1, 20_000), "test": (1, 100_000)}


@dataclass(frozen=True)
class Part:
    """One part of the demo: its folder, the recipe to train with, the tokenizer and the systems.

    Each system has a name and options for `train`. The first is the control that the others are compared with.
    """

    name: str
    recipe: str
    tokenizer: str
    systems: dict[str, list[str]]


CONTROL, MEMORY = {"control": ["--model=recent"]}, {"memory": ["--model=log_memory"]}
RECALL = {"recall": ["--model=recent", "--model.recall=4096"]}
TEXT = Part("text", "demo", "bpe-2048", CONTROL | MEMORY | RECALL)
#: 256 bytes, end-of-text and 8 merges: each symbol is one token
TOPICS = Part("topics", "demo-topics", "bpe-265", CONTROL | MEMORY)


@validate_arguments
def demo(
    out: Path = Path("runs/demo"),
    seed: int = 0,
    only: Literal["text", "topics"] | None = None,
    record: Path | None = None,
    train_options: list[str] | None = None,
) -> dict[str, Any]:
    """Does a memory help? Train small models with and without it side by side, score them, write a report.

    The first part is real text (the King James Bible; `pip install 'logpast[demo]'`): a control, the paper's memory and
    recall. The second is a synthetic stream whose best possible loss is known: control and memory. Takes about five
    minutes on two cores; the report is OUT/report.html.

    Examples:
        logpast demo
        logpast demo --only topics --out runs/topics
        logpast demo --train_options "[--steps=100]"        # a quick look

    Args:
        out: the folder to create.
        seed: seed of the initial parameters and of the order of the windows, for all models.
        only: run one of the two parts.
        record: append the scores to this ledger (.jsonl).
        train_options: more options for `logpast train`, such as "[--steps=100, --model.layers=1]".

    Returns:
        The content of OUT/report.json.
    """
    parts = [part for part in (TEXT, TOPICS) if only in (None, part.name)]
    if out.exists():
        raise UserError(f"{out} exists already; delete it, or give another folder with --out")
    options = [word for option in train_options or [] for word in shlex.split(option)]
    if options:
        _check_options(parts[0], options)
    facts = {part.name: (prepare_chapters if part is TEXT else prepare_topics)(out / part.name) for part in parts}
    results: dict[str, Any] = {"seed": seed, "seconds": train_side_by_side(parts, out, seed, options)}
    for part in parts:
        results[part.name] = facts[part.name] | score(part, out / part.name, record)
    if TEXT in parts:
        example = find_example(out / "text")
        print("\n" + as_text(example))
        sample = generate(out / "text" / "recall", prompt="And it came to pass", tokens=150, seed=seed, device="cpu")
        results["text"] |= {"example": example, "sample": sample}
    (out / "report.json").write_text(json.dumps(results, indent=2) + "\n")
    write_report(out, results)
    print(f"\nopen {out / 'report.html'}")
    return results


def prepare_chapters(home: Path) -> dict[str, Any]:
    """Prepare the King James text; random whole chapters are held out for scoring."""
    stores = prepare(["kjv"], home / "data", TEXT.tokenizer)
    return {"source": "King James text", "chapters": {store.path.name: len(store.documents) for store in stores}}


def prepare_topics(home: Path) -> dict[str, Any]:
    """Write streams of drifting topics as text, one letter per token; compute the best losses on the test stream."""
    source, folder, data = Topics(), home / "raw", home / "data"
    model = read_recipe(Path(TOPICS.recipe))["model"]
    for seed, (split, (count, length)) in enumerate(STREAMS.items()):
        (folder / split).mkdir(parents=True)
        for number in range(count):
            tokens = source.draw(length, np.random.SeedSequence([seed, number])).tokens
            text = "".join(f" {'abcdefgh'[token]}" for token in tokens)
            (folder / split / f"{number:03d}.txt").write_text(text)
        prepare([str(folder / split)], data / split, str(data / "train") if split != "train" else TOPICS.tokenizer)
    return {
        "source": "drifting topics",
        "parameters": asdict(source),
        "optimum_given_all": float(source.nats_given_all(tokens).mean()),
        "optimum_given_recent": float(source.nats_given_recent(tokens, model["slots"], model["window"]).mean()),
    }


def _train_commands(part: Part, options: list[str]) -> dict[str, list[str]]:
    """For each system of a part, the command that trains it with these options."""
    train = [sys.executable, "-m", "logpast", "train", "--config", part.recipe]
    return {name: [*train, *system, *options] for name, system in part.systems.items()}


def _check_options(part: Part, options: list[str]) -> None:
    """A UserError for options that `train` does not know, before anything is prepared."""
    checks = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in _train_commands(part, [*options, "--print_config"]).values()
    ]
    errors = [check.communicate()[1] for check in checks]
    for check, error in zip(checks, errors, strict=True):
        if check.returncode:
            raise UserError(f"--train_options: {error.strip().splitlines()[-1].removeprefix('logpast: ')}")


def _steps(options: list[str]) -> int | None:
    """The number of steps that options for `train` ask for, if they do: --steps=100 or --steps 100."""
    found = re.search(r"--steps[= ](\d+)", " ".join(options))
    return int(found[1]) if found else None


def train_side_by_side(parts: list[Part], out: Path, seed: int, options: list[str]) -> float:
    """Train all models at once, each with one thread, behind one progress bar. Returns the seconds taken."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started, total = time.monotonic(), 0
    running: dict[Path, subprocess.Popen[bytes]] = {}
    for part in parts:
        home = out / part.name
        total += len(part.systems) * (_steps(options) or read_recipe(Path(part.recipe))["steps"])
        data = [f"--data.{split}={home / 'data' / split}" for split in ("train", "validation")]
        for name, command in _train_commands(part, [f"--seed={seed}", *data, *options]).items():
            with (home / f"{name}.log").open("w") as log:
                running[home / name] = subprocess.Popen(
                    [*command, f"--run={home / name}"], env=environment, stdout=log, stderr=subprocess.STDOUT
                )
    try:
        with progress_bar(f"training {len(running)} models", total) as progress:
            while None in (codes := [process.poll() for process in running.values()]) and not any(codes):
                logs = {run: [row for row in read_log(run) if "loss" in row] for run in running}
                losses = " ".join(f"{run.name} {rows[-1]['loss']:.2f}" for run, rows in logs.items() if rows)
                progress.update(sum(rows[-1]["step"] for rows in logs.values() if rows), losses)
                time.sleep(1)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    for run, code in zip(running, codes, strict=True):  # exit codes from before the others were terminated
        if code:
            raise UserError(f"training the {run.name} model failed; see {run}.log for the reason")
    return round(time.monotonic() - started, 1)


def score(part: Part, home: Path, record: Path | None) -> dict[str, Any]:
    """Score all models on the held-out text, each against the control."""
    results: dict[str, Any] = {}
    for name in part.systems:
        print(f"\n{part.name}, {name}:")
        control = home / "control.npy" if results else None
        results[name] = evaluate(
            home / name, str(home / "data" / "test"), against=control, save_nats=home / f"{name}.npy", record=record,
            device="cpu",
        ) | {"train_seconds": find_checkpoint(home / name).state["seconds"]}  # fmt: skip
    return results
