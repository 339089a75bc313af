"""How much each kernel saves: the training step with kernels switched off, in one run.

    python benchmarks/kernels_gpu.py --data STORE_OR_TEXT --out results/kernels_gpu.json

GPT-2 Small with 53 slots over 8,192 tokens, 64 windows of 256, bf16-mixed, torch.compile, in the trainer (the case
`memory` of train_gpu.py). Each kernel of `logpast.kernels.dispatch.KERNELS` is switched off alone; then the least
useful ones together, one more at a time, until all are off. The row with nothing off is measured at the beginning and
at the end: the difference between the two is the noise.
"""

from __future__ import annotations

import argparse
import gc
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_gpu import TOY, Sizes, model_config, our_steps, time_steps

from logpast.data import TokenStore, open_tokens
from logpast.kernels.dispatch import KERNELS, disable
from logpast.util.environment import describe, pick_device, revision
from logpast.util.files import ensure_writable

WARM_UP, TIMED = 20, 120  # steps at most


def measure(off: tuple[str, ...], sizes: Sizes, store: TokenStore) -> dict[str, Any]:
    """Milliseconds per step without these kernels."""
    torch.compiler.reset()
    gc.collect()
    model = model_config("memory", sizes, -(-store.tokenizer.size // 64) * 64)
    steps = our_steps("memory", model, sizes.batch, store, 1 + WARM_UP + TIMED, {})
    with disable(*off), closing(steps):
        times, first, loss = time_steps(steps, WARM_UP, TIMED)
    low, median, high = np.percentile(times, [10, 50, 90])
    return {
        "off": list(off), "ms": round(median, 3), "ms_10": round(low, 3), "ms_90": round(high, 3),
        "steps": len(times), "first_step_s": round(first, 1), "loss": round(float(loss), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="token store or text")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the table; replaced")
    parser.add_argument("--toy", action="store_true", help="tiny models, to try the script on a CPU")
    args = parser.parse_args()
    sizes, store = TOY if args.toy else Sizes(), open_tokens(args.data)
    ensure_writable(args.out)
    table: dict[str, Any] = {
        "what": "a training step with GPU kernels switched off",
        "data": store.identity, "revision": revision(), "hardware": describe(pick_device("auto")), "rows": [],
    }  # fmt: skip

    def add_row(*off: str) -> float:
        row = measure(off, sizes, store)
        table["rows"].append(row)
        row["longer"] = round(row["ms"] / table["rows"][0]["ms"] - 1, 4)
        print(f"off: {', '.join(off) or 'none':50} {row['ms']:8.2f} ms  {row['longer']:+.1%}", flush=True)
        args.out.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        return row["ms"]

    add_row()
    alone = {kernel: add_row(kernel) for kernel in KERNELS}
    least_useful_first = sorted(KERNELS, key=alone.__getitem__)
    for count in range(2, len(KERNELS) + 1):
        add_row(*least_useful_first[:count])
    add_row()


if __name__ == "__main__":
    main()
