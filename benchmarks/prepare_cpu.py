"""Text to token store with GPT-2's BPE: all of `logpast data prepare` beside tiktoken alone on one core, in one run.

    python benchmarks/prepare_cpu.py --text train.raw --out results/prepare_cpu.json

Ours reads, cuts, tokenises, counts words, lines and bytes, writes, syncs and verifies; tiktoken only encodes the text,
already in memory, by `encode_ordinary` (its usual call, a Python list) and `encode_to_numpy` (its fastest).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tiktoken
import torch
from tiktoken_ext.openai_public import ENDOFTEXT, r50k_pat_str

from logpast.data import load_tokenizer
from logpast.data.prepare import prepare
from logpast.util.environment import describe, revision


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=60, help="how much of it to use")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    words = parser.parse_args()
    with words.text.open(encoding="utf-8", newline="") as file:
        text = file.read(words.megabytes * 10**6)
    ranks = load_tokenizer("gpt2")._ranks  # type: ignore[attr-defined]
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: len(ranks)}
    )
    pieces = text.splitlines(keepends=True)
    lines = [
        "".join(pieces[i : i + 5000]) for i in range(0, len(pieces), 5000)
    ]  # one call on all would be unfair to it
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "text.txt")
        source.write_text(text, encoding="utf-8", newline="")
        count = iter(range(10**6))

        def ours() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                prepare([str(source)], Path(folder, f"store{next(count)}"), workers=words.workers)

        cases: dict[str, Callable[[], object]] = {
            f"logpast, {words.workers} workers": ours,
            "tiktoken encode_ordinary, 1 core": lambda: [encoding.encode_ordinary(part) for part in lines],
            "tiktoken encode_to_numpy, 1 core": lambda: [
                encoding.encode_to_numpy(part, disallowed_special=()) for part in lines
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(words.repeats):  # in turn, so that a slow moment of the machine meets all
            for name, work in cases.items():
                times[name].append(seconds(work))
    own = statistics.median(times[next(iter(cases))])
    rows = []
    for name, taken in times.items():
        median = statistics.median(taken)
        rows.append({
            "case": name, "seconds": round(median, 2), "fastest": round(min(taken), 2), "slowest": round(max(taken), 2),
            "megabytes_per_second": round(len(text.encode()) / 1e6 / median, 1),
            "ours_is_faster_by": round(median / own, 2),
        })  # fmt: skip
        line = "{case:34} {seconds:7.2f} s [{fastest}, {slowest}]  {megabytes_per_second} MB/s  ×{ours_is_faster_by}"
        print(line.format(**rows[-1]))
    if words.out:
        about = {"text": words.text.name, "megabytes": words.megabytes, "revision": revision()}
        hardware = describe(torch.device("cpu"))
        words.out.write_text(json.dumps(about | {"hardware": hardware, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
