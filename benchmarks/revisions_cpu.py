"""Has training or scoring on a CPU become slower? Compares two checkouts of logpast, one step of each in turn.

    git worktree add ../before REVISION
    python benchmarks/revisions_cpu.py --before ../before --data STORE --out results/revisions_cpu.json

STORE is a token store made by `logpast data prepare`. The model is that of the recipe small-cpu. Training steps are
those of `logpast train`; scoring takes windows in order, with random weights. Each checkout runs in its own process and
waits while the other works, so that other load on the machine affects both alike. The table gives the ratio of the
times of neighbouring steps. Both revisions must have the modules that `work` imports.
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

BATCH = 32
WARM_UP = 10


def work(data: str) -> None:
    """In the process of one checkout: print its revision, then for each line of the input the milliseconds it took."""
    import numpy as np
    import torch

    from logpast.data import open_tokens
    from logpast.data.batching import Windows
    from logpast.models import LogMemoryConfig, build
    from logpast.training.config import DataConfig, TrainConfig
    from logpast.training.loop import Run
    from logpast.util.environment import revision

    sizes = LogMemoryConfig(slots=33, normalize="area", window=64, layers=4, heads=4, width=128)
    store = open_tokens(data)
    model = build(sizes, store.tokenizer.size).eval()
    windows, scored = Windows(store, model.window, model.history), 0
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            run=Path(folder) / "run", data=DataConfig(train=data), model=sizes, batch_size=BATCH, steps=10**6,
            accelerator="cpu", tensorboard=False,
        )  # fmt: skip
        run = Run(config)
        batches = iter(run.batches_to_come())
        print(json.dumps([revision()]), flush=True)
        for line in sys.stdin:
            started = time.perf_counter()
            if line.strip() == "step":
                run.step(next(batches))
            else:
                with torch.no_grad():
                    model(*windows.batch(np.arange(scored, scored + BATCH) % len(windows)))
                scored += BATCH
            print(json.dumps([1000 * (time.perf_counter() - started)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the revision to compare with")
    parser.add_argument("--data", required=True, help="a token store")
    parser.add_argument(
        "--pairs", type=int, default=150, help="timed training steps and timed scored batches of each checkout"
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.data)
    checkouts = {"before": args.before, "after": Path(__file__).parents[1]}
    if not args.before or not (args.before / "src" / "logpast").is_dir():
        parser.error("--before must be a checkout of logpast: git worktree add ../before REVISION")
    if args.pairs < 2:
        parser.error("--pairs must be 2 or more")
    command = [sys.executable, __file__, "--work", "--data", args.data]
    workers = {
        name: subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name, checkout in checkouts.items()
    }  # fmt: skip

    def answer(name: str) -> Any:
        for line in workers[name].stdout or ():
            if line.startswith("["):  # other lines are messages of the trainer
                return json.loads(line)[0]
        raise SystemExit(f"the process for {checkouts[name]} has ended; see its output above")

    def ask(name: str, what: str) -> float:
        print(what, file=workers[name].stdin)
        return float(answer(name))

    revisions = {name: answer(name) for name in checkouts}

    rows: list[dict[str, Any]] = []
    for what in ("score", "step"):
        taken: dict[str, list[float]] = {name: [] for name in checkouts}
        for number in range(WARM_UP + args.pairs):
            for name in list(checkouts)[:: 1 if number % 2 else -1]:
                taken[name].append(ask(name, what))
            if number % 10 == 0:
                print(f"{what} {number}/{WARM_UP + args.pairs}", file=sys.stderr, flush=True)
        before, after = (taken[name][WARM_UP:] for name in checkouts)
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        deciles = statistics.quantiles(ratios, n=10)
        rows.append({
            "work": what, "pairs": len(ratios), "before_ms": round(statistics.median(before), 2),
            "after_ms": round(statistics.median(after), 2), "ratio": round(statistics.median(ratios), 3),
            "ratio_10": round(deciles[0], 3), "ratio_90": round(deciles[-1], 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    for worker in workers.values():
        worker.communicate()
    if args.out:
        from logpast.data import open_tokens
        from logpast.util.environment import describe, pick_device

        table = {
            "what": "ms per training step and per scored batch on a CPU: medians, and medians of the pairs' ratios",
            "data": open_tokens(args.data).identity,
            "revision": revisions["after"],
            "before": revisions["before"],
            "hardware": describe(pick_device("cpu")),
            "rows": rows,
            "ratios": {row["work"]: row["ratio"] for row in rows},
        }
        args.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
