"""The memory on a CPU: our code paths and simple implementations on real text, in one run.

    python benchmarks/memory_cpu.py --text wiki.test.raw --out results/memory_cpu.json

Forward and backward pass of B histories of M = 8,192 tokens into 53 slots of width 768, with a table of GPT-2's size:

    ids         gather+einsum    look up all embeddings, one dense product with the bank
                bag (ours)       sum the weights of equal tokens, then read each distinct embedding once
    embeddings  einsum           one dense product with the bank
                support (ours)   only where a filter is not negligible
                conv1d           depth-wise convolution, as the paper describes it, at the one position that is needed;
                                 forward only, on one history, and scaled up

On a shared machine absolute times mean little: the table gives medians and their ratio to the simple implementation.
Memory is the increase of the process's resident size beyond inputs and gradients, sampled twice per millisecond, each
case in its own process (Linux only).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from logpast.data import load_tokenizer
from logpast.filters import FilterBank
from logpast.memory import LogMemory
from logpast.util.environment import describe, revision

VOCABULARY, WIDTH = 50_304, 768
CASES = ("gather+einsum", "bag", "einsum", "support", "conv1d")


def histories(text: Path, batch: int, horizon: int) -> Tensor:
    """(B, M) consecutive tokens of a real text."""
    ids = load_tokenizer("gpt2").encode(text.read_text(encoding="utf-8")[: 8 * batch * horizon])
    if len(ids) < batch * horizon:
        sys.exit(f"{text} has {len(ids)} tokens, {batch * horizon} are needed; give a longer text or a smaller --batch")
    return torch.from_numpy(ids[: batch * horizon].astype("int64")).view(batch, horizon)


def job(case: str, ids: Tensor) -> Callable[[], None]:
    """A function that runs the case once, forward and backward."""
    bank = FilterBank(slots=53, sharpness=100)
    table = torch.randn(VOCABULARY, WIDTH).mul_(0.02).requires_grad_()
    upstream = torch.randn(len(ids), bank.slots, WIDTH)
    weights = torch.tensor(bank.weights, dtype=torch.float32)

    if case == "conv1d":
        one = F.embedding(ids[:1], table.detach()).transpose(1, 2)  # (1, d, M)
        kernel = weights.flip(1).repeat(WIDTH, 1).unsqueeze(1)  # depth-wise: L filters for each of d channels

        def convolve() -> None:
            F.conv1d(one, kernel, groups=WIDTH)

        return convolve
    if case in ("gather+einsum", "bag"):
        path = "naive" if case == "gather+einsum" else "bag"
        memory = LogMemory(WIDTH, bank, norm=False, path=path)  # type: ignore[arg-type]

        def from_ids() -> None:
            table.grad = None
            memory.from_ids(ids, table).backward(upstream)

        return from_ids
    memory = LogMemory(WIDTH, bank, norm=False, path="naive" if case == "einsum" else "support")
    embeddings = F.embedding(ids, table.detach()).requires_grad_()

    def from_embeddings() -> None:
        embeddings.grad = None
        memory(embeddings).backward(upstream)

    return from_embeddings


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_memory(case: str, text: Path, batch: int) -> float:
    """Peak MB beyond what every implementation needs: inputs, and the gradient of table or embeddings."""
    once = job(case, histories(text, batch, 8192))
    gradient = 4 * WIDTH * (VOCABULARY if case in ("gather+einsum", "bag") else batch * 8192)
    gradient = 0 if case == "conv1d" else gradient
    highest, done = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident_bytes())
            time.sleep(0.0005)

    before = resident_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    once()
    done.set()
    watcher.join()
    return (highest - before - gradient) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text of at least a few hundred kilobytes")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    parser.add_argument("--memory-of", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(measure_memory(args.memory_of, args.text, args.batch))
        return

    ids = histories(args.text, args.batch, 8192)
    jobs = {case: job(case, ids) for case in CASES}
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for case, once in jobs.items():
        if case != "conv1d":
            once()
    for repeat in range(args.repeats):  # in turn, so that other load on the machine affects all cases alike
        for case, once in jobs.items():
            if case == "conv1d" and repeat:
                continue
            started = time.perf_counter()
            once()
            scale = args.batch if case == "conv1d" else 1
            times[case].append((time.perf_counter() - started) * 1000 * scale)
    baseline = {"bag": "gather+einsum", "support": "einsum", "conv1d": "einsum"}
    rows = []
    for case in CASES:
        options = ["--text", str(args.text), "--batch", str(args.batch), "--memory-of", case]
        command = [sys.executable, __file__, *options]
        extra = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        median, against = statistics.median(times[case]), statistics.median(times[baseline.get(case, case)])
        rows.append({
            "case": case, "milliseconds": round(median, 1), "fastest": round(min(times[case]), 1),
            "slowest": round(max(times[case]), 1), "speed_up": round(against / median, 2),
            "extra_megabytes": round(extra),
        })  # fmt: skip
        line = "{case:14} {milliseconds:9.1f} ms [{fastest:.1f}, {slowest:.1f}]  ×{speed_up:<6} {extra_megabytes} MB"
        print(line.format(**rows[-1]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "what": "memory, forward+backward (conv1d: forward only, one history scaled up), float32",
            "shape": {"batch": args.batch, "horizon": 8192, "slots": 53, "width": WIDTH, "vocabulary": VOCABULARY},
            "text": args.text.name, "distinct_tokens": [len(row.unique()) for row in ids],
            "threads": torch.get_num_threads(), "revision": revision(), "hardware": describe(torch.device("cpu")),
        }  # fmt: skip
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
