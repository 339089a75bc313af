"""The memory on a CPU: our paths beside the obvious ways to write it, on real text, in one run.

    python benchmarks/memory_cpu.py --text wiki.test.raw --out results/memory_cpu.json

Forward and backward of B histories of M = 8,192 tokens into 53 slots of width 768, table of GPT-2's size:

    ids         gather+einsum    look all embeddings up, one dense product with the bank
                bag (ours)       sum the weights per distinct token, then touch the table
    embeddings  einsum           one dense product with the bank
                support (ours)   only where each filter is not negligible
                conv1d           depth-wise convolution, as the paper words it, at the one position that is needed;
                                 forward only, on one history, and scaled up

A time on a shared machine means nothing alone: the table gives medians and their ratio to the obvious way. Memory is
how far the process's resident size rises beyond inputs and gradients, sampled twice a millisecond, each case in a
process of its own (Linux only).
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
    """A function that does the case once, forward and backward."""
    bank = FilterBank(slots=53, sharpness=100)
    table = torch.randn(VOCABULARY, WIDTH).mul_(0.02).requires_grad_()
    towards = torch.randn(len(ids), bank.slots, WIDTH)
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
            memory.from_ids(ids, table).backward(towards)

        return from_ids
    memory = LogMemory(WIDTH, bank, norm=False, path="naive" if case == "einsum" else "support")
    embeddings = F.embedding(ids, table.detach()).requires_grad_()

    def from_embeddings() -> None:
        embeddings.grad = None
        memory(embeddings).backward(towards)

    return from_embeddings


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_memory(case: str, text: Path, batch: int) -> float:
    """MB at the highest beyond what must be there: inputs, outputs, and the gradient of table or embeddings."""
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
    parser.add_argument("--text", type=Path, required=True, help="a text of a few hundred kilobytes or more")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--memory-of", choices=CASES, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.memory_of:
        print(measure_memory(words.memory_of, words.text, words.batch))
        return

    ids = histories(words.text, words.batch, 8192)
    jobs = {case: job(case, ids) for case in CASES}
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for case, once in jobs.items():
        if case != "conv1d":
            once()
    for repeat in range(words.repeats):  # in turn, so that a slow moment of the machine meets all
        for case, once in jobs.items():
            if case == "conv1d" and repeat:
                continue
            started = time.perf_counter()
            once()
            scale = words.batch if case == "conv1d" else 1
            times[case].append((time.perf_counter() - started) * 1000 * scale)
    baseline = {"bag": "gather+einsum", "support": "einsum", "conv1d": "einsum"}
    rows = []
    for case in CASES:
        command = [
            sys.executable,
            __file__,
            "--text",
            str(words.text),
            "--batch",
            str(words.batch),
            "--memory-of",
            case,
        ]
        extra = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        median, against = statistics.median(times[case]), statistics.median(times[baseline.get(case, case)])
        rows.append({
            "case": case, "milliseconds": round(median, 1), "fastest": round(min(times[case]), 1),
            "slowest": round(max(times[case]), 1), "speed_up": round(against / median, 2),
            "extra_megabytes": round(extra),
        })  # fmt: skip
        line = "{case:14} {milliseconds:9.1f} ms [{fastest:.1f}, {slowest:.1f}]  ×{speed_up:<6} {extra_megabytes} MB"
        print(line.format(**rows[-1]))
    if words.out:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "what": "memory, forward+backward (conv1d: forward only, one history scaled up), float32",
            "shape": {"batch": words.batch, "horizon": 8192, "slots": 53, "width": WIDTH, "vocabulary": VOCABULARY},
            "text": words.text.name, "distinct_tokens": [len(row.unique()) for row in ids],
            "threads": torch.get_num_threads(), "revision": revision(), "hardware": describe(torch.device("cpu")),
        }  # fmt: skip
        words.out.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
