"""Speed of `logpast data prepare` with GPT-2's tokenizer, compared with tiktoken on one core.

    python benchmarks/prepare_cpu.py --text train.raw --out results/prepare_cpu.json

logpast reads, splits, tokenizes, counts words, lines and bytes, writes, syncs and verifies. tiktoken only encodes a
text in memory, with `encode_ordinary` (its usual call, which gives a list) and `encode_to_numpy` (its fastest call).
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
    parser.add_argument("--megabytes", type=int, default=60, help="how much of the text to use")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    with args.text.open(encoding="utf-8", newline="") as file:
        text = file.read(args.megabytes * 10**6)
    ranks = {token: i for i, token in enumerate(load_tokenizer("gpt2").vocabulary[:-1])}  # without end-of-text
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={ENDOFTEXT: len(ranks)}
    )
    lines = text.splitlines(keepends=True)
    parts = ["".join(lines[i : i + 5000]) for i in range(0, len(lines), 5000)]  # tiktoken is slower on one long text
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "text.txt")
        source.write_text(text, encoding="utf-8", newline="")
        count = iter(range(10**6))

        def ours() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                prepare([str(source)], Path(folder, f"store{next(count)}"), workers=args.workers)

        cases: dict[str, Callable[[], object]] = {
            f"logpast, {args.workers} workers": ours,
            "tiktoken encode_ordinary, 1 core": lambda: [encoding.encode_ordinary(part) for part in parts],
            "tiktoken encode_to_numpy, 1 core": lambda: [
                encoding.encode_to_numpy(part, disallowed_special=()) for part in parts
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.repeats):  # in turn, so that a slow phase of the machine affects all cases
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
    if args.out:
        about = {"text": args.text.name, "megabytes": args.megabytes, "revision": revision()}
        hardware = describe(torch.device("cpu"))
        args.out.write_text(json.dumps(about | {"hardware": hardware, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
