"""What each kernel of ours is worth: the training step with it switched off, in one run.

    python benchmarks/kernels_gpu.py --data STORE_OR_TEXT --out results/kernels_gpu.json

GPT-2 Small with 53 slots over 8,192 tokens, 64 windows of 256, bf16-mixed, torch.compile, through the trainer (the case
`memory` of train_gpu.py). Every kernel (`logpast.kernels.dispatch.KERNELS`) is switched off alone; then the
least useful ones together, one more at a time, until all are off. `off: none` is timed at the beginning and at the end:
the difference between the two is the noise.

Then, whether it pays to keep a compiled model for the next run of the same sizes (`training/compile.py`): seconds to
the fifth step of a first run, of a run that takes over the kept model, and of a run for which none was kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_gpu import TOY, Sizes, model_of, ours, time_steps

from logpast.data import TokenStore, open_tokens
from logpast.kernels.dispatch import KERNELS, disable
from logpast.training import compile as compile_module
from logpast.util.environment import describe, pick_device, revision
from logpast.util.files import ensure_writable

WARM_UP, TIMED = 20, 120  # steps at most


def steps_of(sizes: Sizes, store: TokenStore, count: int) -> Any:
    model = model_of("memory", sizes, -(-store.tokenizer.size // 64) * 64)
    return ours("memory", model, sizes.batch, store, count, {})


def measure(off: tuple[str, ...], sizes: Sizes, store: TokenStore) -> dict[str, Any]:
    """Milliseconds of a step without these kernels."""
    torch.compiler.reset()
    compile_module._kept.clear()
    gc.collect()
    with disable(*off), closing(steps_of(sizes, store, 1 + WARM_UP + TIMED)) as steps:
        times, first, loss = time_steps(steps, WARM_UP, TIMED)
    low, median, high = np.percentile(times, [10, 50, 90])
    return {
        "off": list(off), "ms": round(median, 3), "ms_10": round(low, 3), "ms_90": round(high, 3),
        "steps": len(times), "first_step_s": round(first, 1), "loss": round(float(loss), 3),
    }  # fmt: skip


def seconds_to_step(sizes: Sizes, store: TokenStore, number: int = 5) -> float:
    """From nothing to the end of a step."""
    started = time.perf_counter()
    with closing(steps_of(sizes, store, 100)) as steps:
        for _ in range(number):
            float(next(steps))
        seconds = time.perf_counter() - started
    return round(seconds, 2)


def compiled_models(sizes: Sizes, store: TokenStore) -> dict[str, float]:
    torch.compiler.reset()
    compile_module._kept.clear()
    seconds = {"first": seconds_to_step(sizes, store), "kept": seconds_to_step(sizes, store)}
    compile_module._kept.clear()
    return seconds | {"not_kept": seconds_to_step(sizes, store)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a token store or a text")
    parser.add_argument("--out", type=Path, required=True, help="the table, as JSON; replaced")
    parser.add_argument("--toy", action="store_true", help="tiny models, to rehearse on a CPU")
    words = parser.parse_args()
    sizes, store = TOY if words.toy else Sizes(), open_tokens(words.data)
    ensure_writable(words.out)
    table: dict[str, Any] = {
        "what": "a training step with kernels of ours switched off",
        "data": store.identity, "revision": revision(), "hardware": describe(pick_device("auto")), "rows": [],
    }  # fmt: skip

    def row(*off: str) -> float:
        found = measure(off, sizes, store)
        table["rows"].append(found)
        baseline = table["rows"][0]["ms"]
        found["longer"] = round(found["ms"] / baseline - 1, 4)
        print(f"off: {', '.join(off) or 'none':50} {found['ms']:8.2f} ms  {found['longer']:+.1%}", flush=True)
        words.out.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        return found["ms"]

    row()
    alone = {kernel: row(kernel) for kernel in KERNELS}
    order = sorted(KERNELS, key=alone.__getitem__)  # least useful first
    for count in range(2, len(order) + 1):
        row(*order[:count])
    row()
    table["seconds_to_step_5"] = compiled_models(sizes, store)
    print(table["seconds_to_step_5"])
    words.out.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
