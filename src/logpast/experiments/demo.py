"""`make demo`: does the memory help? Two answers in a few minutes, one on real text, one where the truth is known.

Each part trains the memory model and its control, the same transformer whose slots are the preceding tokens, side
by side with equal size, data and steps, by the same verbs that a user has: prepare, train, eval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from logpast.data import prepare
from logpast.errors import UserError
from logpast.experiments.evaluation import evaluate
from logpast.experiments.report import write_report
from logpast.experiments.topics import Topics
from logpast.generation import generate
from logpast.progress import meter
from logpast.training.log import read_log

RECIPES = Path(__file__).parents[3] / "recipes"
SYSTEMS = {"memory": "log_memory", "control": "recent"}
STREAMS = {"train": (100, 25_000), "validation": (1, 20_000), "test": (1, 100_000)}  # of topics: how many, how long


@dataclass(frozen=True)
class Part:
    """One half of the demo: a text in splits, and the recipe to train on it."""

    name: str
    recipe: str
    tokenizer: str


TEXT = Part("text", "demo", "bpe-2048")
TOPICS = Part("topics", "demo-topics", "bpe-265")  # 256 bytes, end-of-text and 8 merges: each symbol is one token


def demo(
    out: Path,
    seed: int = 0,
    record: Path | None = None,
    parts: tuple[Part, ...] = (TEXT, TOPICS),
    train_options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run the demo into a new folder; returns what stands in its report.json.

    Args:
        out: the folder to make.
        seed: of the weights and of the order of the windows, for both models.
        record: a ledger to add the scores to.
        parts: TEXT, TOPICS or both.
        train_options: more options for `logpast train`, such as ("--steps", "100").
    """
    if out.exists():
        raise UserError(f"{out} exists already; delete it, or give another folder with --out")
    results: dict[str, Any] = {"seed": seed}
    for part in parts:
        home = out / part.name
        facts = (prepare_chapters if part is TEXT else prepare_topics)(home)
        seconds = train_side_by_side(part, home, seed, train_options)
        results[part.name] = facts | {"seconds": seconds} | compare(home, record)
    if TEXT in parts:
        results["text"]["sample"] = generate(
            out / "text" / "memory", prompt="And it came to pass", tokens=150, seed=seed, device="cpu"
        )
    (out / "report.json").write_text(json.dumps(results, indent=2) + "\n")
    write_report(out, results)
    return results


def prepare_chapters(home: Path) -> dict[str, Any]:
    """The King James text; whole chapters, drawn at random, are held out for scoring."""
    stores = prepare(["kjv"], home / "data", TEXT.tokenizer)
    return {"source": "King James text", "chapters": {store.path.name: len(store.documents) for store in stores}}


def prepare_topics(home: Path) -> dict[str, Any]:
    """Streams of drifting topics as text, a letter a token, and the best possible losses on the test stream."""
    source, folder, data = Topics(), home / "raw", home / "data"
    model = yaml.safe_load((RECIPES / f"{TOPICS.recipe}.yaml").read_text(encoding="utf-8"))["model"]
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


def train_side_by_side(part: Part, home: Path, seed: int, options: tuple[str, ...]) -> float:
    """Both models at once, each on one core; shows how far they are. Returns the seconds taken."""
    recipe = RECIPES / f"{part.recipe}.yaml"
    steps = yaml.safe_load(recipe.read_text(encoding="utf-8"))["steps"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started, running = time.monotonic(), {}
    for name, system in SYSTEMS.items():
        words = ["train", "--config", recipe, "--model", system, "--run", home / name, "--seed", seed]
        words += ["--data.train", home / "data" / "train", "--data.validation", home / "data" / "validation", *options]
        with (home / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", "logpast", *map(str, words)]
            running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        with meter(f"training on {part.name}", 2 * steps) as progress:
            while None in (codes := [process.poll() for process in running.values()]) and not any(codes):
                last = {name: next(iter(read_log(home / name)[-1:]), {"step": 0}) for name in running}
                losses = " ".join(f"{n} {r['loss']:.3f}" for n, r in last.items() if "loss" in r)
                progress.update(sum(r["step"] for r in last.values()), losses)
                time.sleep(1)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    for name, code in zip(running, codes, strict=True):  # from before the other was ended because of it
        if code:
            raise UserError(f"training the {name} model failed; {home / f'{name}.log'} tells why")
    return round(time.monotonic() - started, 1)


def compare(home: Path, record: Path | None) -> dict[str, Any]:
    """Both models' figures on the held-out text, and the difference between them."""
    test = str(home / "data" / "test")
    control = evaluate(home / "control", test, save_nats=home / "control.npy", record=record, device="cpu")
    memory = evaluate(home / "memory", test, against=home / "control.npy", record=record, device="cpu")
    return {"memory": memory, "control": control}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to make (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of the windows")
    parser.add_argument("--record", type=Path, help="append the scores to this ledger")
    parser.add_argument("--only", choices=["text", "topics"], help="run one part alone")
    words = parser.parse_args()
    parts = tuple(part for part in (TEXT, TOPICS) if words.only in (None, part.name))
    try:
        demo(words.out, words.seed, words.record, parts)
    except UserError as error:
        sys.exit(f"logpast: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"\nopen {words.out / 'report.html'}")


if __name__ == "__main__":
    main()
