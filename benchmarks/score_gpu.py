"""Time to score a test set on a GPU: GPT-2 Small with the paper's memory, every token once, after warm-up.

    python benchmarks/score_gpu.py --data wikitext103:test --out results/score_gpu.json

The parameters are random, which does not change the time. The times are those of `logpast.evaluation.scoring.score`,
including making batches and copying losses to the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from logpast.data import open_tokens
from logpast.evaluation.scoring import score
from logpast.models import LogMemoryConfig, build
from logpast.util.environment import describe, pick_device, revision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wikitext103:test", help="a text, a token store or a split of a corpus")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick test")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    store, device = open_tokens(args.data), pick_device("auto")
    torch.manual_seed(0)
    model = build(LogMemoryConfig(slots=53, sharpness=100, layers=args.layers), store.tokenizer.size).to(device)
    rows: list[dict[str, Any]] = []
    for precision in ("bfloat16", "float32"):
        for batch_size in (16, 64, 256):
            arithmetic = torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
            times = []
            for _ in range(1 + args.repeats):
                started = time.perf_counter()
                with arithmetic:
                    nats = score(model, store, model.window, model.history, batch_size, device=device)
                times.append(time.perf_counter() - started)
            rows.append({
                "precision": precision, "batch_size": batch_size, "seconds": round(statistics.median(times[1:]), 3),
                "fastest": round(min(times[1:]), 3), "slowest": round(max(times[1:]), 3), "nats": float(nats.sum()),
            })  # fmt: skip
            print(rows[-1], flush=True)
    if args.out:
        about = {"what": "seconds to score a text, after warm-up", "data": store.identity, "revision": revision()}
        args.out.write_text(json.dumps(about | {"hardware": describe(device), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
