"""Has training or scoring on a CPU become slower? Two checkouts of logpast in turn, in one run.

    git worktree add ../before REVISION
    python benchmarks/revisions_cpu.py --before ../before --data STORE --out results/revisions_cpu.json

STORE is what `logpast data prepare` makes. The model is that of recipes/small-cpu.yaml, steps are the trainer's own;
scoring is of the first windows, with random weights. Each checkout runs in processes of its own, both taking
turns at being first. Other work on the machine can only add time, so a turn's figure is the fastest it saw, and the
medians of these are compared. The JSON has all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def measure(data: str, steps: int) -> dict[str, float]:
    """In the checkout that is on the path."""
    import numpy as np
    import torch

    from logpast.data import open_tokens
    from logpast.data.windows import Windows
    from logpast.models import LogMemoryConfig, build
    from logpast.training.config import DataConfig, TrainConfig
    from logpast.training.loop import Run

    sizes = LogMemoryConfig(slots=33, normalize="area", window=64, layers=4, heads=4, width=128)
    store = open_tokens(data)
    model = build(sizes, store.tokenizer.size).eval()
    windows = Windows(store, model.window, model.history)

    def score(number: int) -> None:
        with torch.no_grad():
            history, tokens, targets = windows.batch(np.arange(number * 32, number * 32 + 32))
            model(history, tokens, targets)

    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            TrainConfig(
                run=Path(folder) / "run", data=DataConfig(train=data), model=sizes, batch_size=32, steps=steps + 10,
                accelerator="cpu", tensorboard=False,
            )
        )  # fmt: skip
        batches = iter(run.batches_to_come())
        work = {"score": score, "step": lambda number: run.step(next(batches))}
        taken: dict[str, list[float]] = {name: [] for name in work}
        for name, one in work.items():
            for number in range(steps + 10):
                started = time.perf_counter()
                one(number)
                taken[name].append(time.perf_counter() - started)
    return {name: 1000 * min(times[10:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the revision to compare with")
    parser.add_argument("--data", required=True, help="a token store")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        print(json.dumps(measure(words.data, words.steps)))
        return
    places = {"before": words.before, "after": Path(__file__).parents[1]}
    if not words.before or not (words.before / "src" / "logpast").is_dir():
        parser.error("--before must be a checkout of logpast: git worktree add ../before REVISION")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in places}
    for turn in range(words.turns):
        for name in list(places)[:: 1 if turn % 2 else -1]:
            command = [sys.executable, __file__, "--measure", "--data", words.data, "--steps", str(words.steps)]
            environment = os.environ | {"PYTHONPATH": str(places[name].resolve() / "src")}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found[name].append(json.loads(output.splitlines()[-1]))
            print(name, found[name][-1], flush=True)
    rows, ratios = [], {}
    for what in ("step", "score"):
        turns = {name: [round(turn[what], 1) for turn in turns] for name, turns in found.items()}
        before, after = (statistics.median(turns[name]) for name in ("before", "after"))
        rows.append({"work": what, "before_ms": before, "after_ms": after, "turns": turns})
        ratios[what] = round(after / before, 3)
    print("after / before:", ratios)
    if words.out:
        from logpast.data import open_tokens
        from logpast.environment import describe, pick_device

        def revision(place: Path) -> str:
            return subprocess.check_output(["git", "-C", place, "rev-parse", "HEAD"], text=True).strip()

        about: dict[str, Any] = {
            "what": "ms of a training step and of scoring a batch on a CPU: the fastest of each turn, medians of turns"
        }
        about |= {"data": open_tokens(words.data).identity}
        about |= {"revision": revision(places["after"]), "before": revision(places["before"])}
        table = about | {"hardware": describe(pick_device("cpu")), "rows": rows, "ratios": ratios}
        words.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
