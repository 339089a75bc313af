"""What recall adds to the time of scoring and of generation: the delta control with GPT-2 Small's sizes.

    python benchmarks/recall_gpu.py --data wikitext103:test --past 'wiki22k:rest[:600]' --out results/recall_gpu.json

Scoring: seconds for the whole text in bf16 after warm-up, and seconds to index the text, which is done once.
Generation: median milliseconds per token with 1,000 tokens before it and with a million. Parameters are random, which
does not change the time. Training: train_gpu.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Windows
from logpast.evaluation.scoring import score
from logpast.models import LanguageModel, RecentConfig, build
from logpast.models.stream import Stream
from logpast.util.environment import describe, pick_device, revision


def delta(store: TokenStore, reach: int, layers: int) -> LanguageModel:
    torch.manual_seed(0)
    model = build(RecentConfig(slots=53, layers=layers, recall=reach), store.tokenizer.size).eval()
    if reach:
        for parameter in model.recall.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(pick_device("auto"))


def time_scoring(store: TokenStore, reach: int, repeats: int, layers: int) -> dict[str, Any]:
    model, device, times = delta(store, reach, layers), pick_device("auto"), []
    form, started = model.config.recall_form, time.perf_counter()
    Windows(store, model.window, model.history, device=device, recall=form).batch(np.array([0])).tokens.cpu()
    indexing = time.perf_counter() - started
    for _ in range(1 + repeats):
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            score(model, store, model.window, model.history, 64, device=device, recall=form)
        times.append(time.perf_counter() - started)
    return {"what": "score", "recall": reach, "tokens": len(store), "first_batch_s": round(indexing, 3),
            "seconds": round(statistics.median(times[1:]), 3)}  # fmt: skip


def time_generation(store: TokenStore, reach: int, past: int, tokens: int, layers: int) -> dict[str, Any]:
    model, times = delta(store, reach, layers), list[float]()
    if past + tokens > len(store):
        raise SystemExit(f"--past has {len(store):,} tokens, {past + tokens:,} are needed")
    stream = Stream(model, store.tokenizer.eot)
    stream.push(store.tokens[:past])
    started = time.perf_counter()
    for position in range(past, past + tokens):  # of the text itself: as many matches as text has
        stream.logits().cpu()
        stream.push([int(store.tokens[position])])
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return {
        "what": "generate",
        "recall": reach,
        "past": past,
        "tokens": tokens,
        "first_token_s": round(times[0], 3),
        "ms_per_token": round(1000 * statistics.median(times[1:]), 3),
        "state_bytes": model.state_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wikitext103:test", help="the text to score")
    parser.add_argument("--past", default="wiki22k:rest[:600]", help="the text before generated tokens")
    parser.add_argument("--pasts", type=int, nargs="*", default=[1000, 10**6], help="tokens before generated ones")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick test")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    text, before, rows = open_tokens(args.data), open_tokens(args.past), []
    cases = [lambda reach=reach: time_scoring(text, reach, args.repeats, args.layers) for reach in (0, 2**13, 2**20)]
    cases += [
        lambda reach=reach, past=past: time_generation(before, reach, past, args.tokens, args.layers)
        for reach in (0, 2**20)
        for past in args.pasts
    ]
    about = {"what": __doc__.partition("\n")[0], "data": text.identity, "past": before.identity, "revision": revision()}
    for case in cases:
        rows.append(case())
        print(rows[-1], flush=True)
        if args.out:
            table = about | {"hardware": describe(pick_device("auto")), "rows": rows}
            args.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
