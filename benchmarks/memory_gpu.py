"""The memory alone on a GPU: our operator, simple implementations and a lower bound on real text, in one run.

    python benchmarks/memory_gpu.py --data STORE_OR_TEXT --out results/memory_gpu.json

B = 64 histories of M tokens into L slots of width 768, from a table of 50,304 rows in bf16; forward, and forward and
backward into the table's gradient. Times are medians of replays of a CUDA graph, with the 10th and the 90th
percentile. Six batches of text take turns, because a single one would stay in the cache.

    fused             ours (memory/fused.py)
    gather+einsum     look up all embeddings, one dense product with the bank, in bf16
    conv1d            depth-wise convolution, as the paper describes it, at the one position that is needed; forward
                      only, on 4 histories, and scaled up
    floor             memory traffic that no implementation can avoid, at the bandwidth of a copy in the same run:
                      forward   the ids (4 B each), a row (2 d B) for each distinct token of each history, the slots
                      backward  the slots' gradient, the table's gradient (2 d B per row of the table)
                      The arithmetic (2·L·d for each such row, twice) takes far less time; it is printed as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from logpast.data import open_tokens
from logpast.filters import FilterBank
from logpast.memory import LogMemory
from logpast.util.environment import describe, revision

BATCH, WIDTH, VOCABULARY, BATCHES = 64, 768, 50304, 6


def milliseconds(work: Callable[[Tensor], Any], ids: list[Tensor], seconds: float = 1.5) -> np.ndarray:
    """Times of `work` on each batch in turn, as a CUDA graph."""
    graphs = []
    for one in ids:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                work(one)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            work(one)
    marks: list[tuple[Any, Any]] = []
    spent = 0.0
    while spent < 1000 * seconds and len(marks) < 300:
        for graph in graphs:
            marks.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[arg-type]
            marks[-1][0].record()
            graph.replay()
            marks[-1][1].record()
        torch.cuda.synchronize()
        spent = sum(begin.elapsed_time(end) for begin, end in marks)
    return np.array([begin.elapsed_time(end) for begin, end in marks])


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.randn(2**29, device="cuda")
    times = milliseconds(lambda _: source.clone(), [source], 0.3)
    return 2 * source.nbytes / float(np.median(times)) * 1000


def implementations(
    memory: LogMemory, table: Tensor, upstream: Tensor
) -> dict[str, dict[str, Callable[[Tensor], Any]]]:
    filters = torch.from_numpy(memory.bank.weights[::-1, ::-1].copy()).to(table)
    leaf = table.detach().requires_grad_()

    def einsum(ids: Tensor, rows: Tensor = table) -> Tensor:
        return torch.einsum("lt,btd->bld", filters, F.embedding(ids, rows))

    def with_backward(forward: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
        return lambda ids: torch.autograd.grad(forward(ids, leaf), leaf, upstream)

    def convolve(ids: Tensor) -> Tensor:
        kernel = filters.repeat(WIDTH, 1).unsqueeze(1)
        return F.conv1d(F.embedding(ids[:4], table).mT, kernel, groups=WIDTH)

    return {
        "fused": {"forward": lambda ids: memory.from_ids(ids, table), "both": with_backward(memory.from_ids)},
        "gather+einsum": {"forward": einsum, "both": with_backward(einsum)},
        "conv1d, 4 of 64": {"forward": convolve},
    }


def measure(name: str, slots: int, ids: list[Tensor], bandwidth: float, all_ways: bool) -> list[dict[str, Any]]:
    memory = LogMemory(WIDTH, FilterBank(slots=slots, sharpness=100), norm=False).cuda()
    length = memory.bank.horizon
    table = torch.randn(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
    assert memory.path_for(table) == "fused", "Triton is missing"
    upstream = torch.randn(BATCH, slots, WIDTH, device="cuda", dtype=torch.bfloat16)
    distinct = float(np.mean([sum(row.unique().numel() for row in one) for one in ids]))
    forward = (4 * BATCH * length + 2 * WIDTH * distinct + 2 * upstream.numel()) / bandwidth * 1000
    backward = (2 * upstream.numel() + 2 * table.numel()) / bandwidth * 1000
    about = {"text": name, "slots": slots, "horizon": length, "distinct_per_history": round(distinct / BATCH)}
    gflop = round(2 * 2 * slots * WIDTH * distinct / 1e9, 1)
    rows = [
        about
        | {"way": "floor", "forward_ms": round(forward, 4), "both_ms": round(forward + backward, 4), "gflop": gflop}
    ]
    for way, parts in implementations(memory, table, upstream).items():
        if way != "fused" and not all_ways:
            continue
        row: dict[str, Any] = about | {"way": way}
        try:
            for part, work in parts.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                work(ids[0])
                row["extra_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
                times = milliseconds(work, ids) * (16 if way.startswith("conv1d") else 1)
                low, median, high = np.percentile(times, [10, 50, 90]).round(4).tolist()
                row |= {f"{part}_ms": median, f"{part}_ms_10": low, f"{part}_ms_90": high}
        except RuntimeError as error:  # most likely out of memory
            row["error"] = str(error).splitlines()[0][:200]
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="token store or text")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    store = open_tokens(args.data)
    stream = torch.from_numpy(store.tokens.astype(np.int32)).cuda()
    bandwidth = copy_bandwidth()
    table: dict[str, Any] = {
        "what": "the memory operator on one GPU, bf16, B = 64, width 768: medians, 10th and 90th percentiles",
        "data": store.identity, "revision": revision(), "hardware": describe(torch.device("cuda")),
        "copy_tb_per_s": round(bandwidth / 1e12, 3), "rows": [],
    }  # fmt: skip
    random = torch.Generator().manual_seed(0)
    for slots in (53, 65, 81):
        length = FilterBank(slots=slots).horizon
        if length >= len(stream):
            continue
        many = BATCHES if slots == 53 else 2
        starts = torch.randint(len(stream) - length, (many, BATCH), generator=random)
        text = [torch.stack([stream[s : s + length] for s in some]) for some in starts.tolist()]
        cases = {store.name: text}
        if slots == 53:
            uniform = torch.randint(VOCABULARY, (many, BATCH, length), device="cuda", dtype=torch.int32)
            cases["uniform over the table"] = list(uniform)
        for name, ids in cases.items():
            rows = measure(name, slots, ids, bandwidth, slots == 53 and name == store.name)
            table["rows"] += rows
            for row in rows:
                print(f"{row['way']:16} M {row['horizon']:>8,}, {row['distinct_per_history']:>6,} distinct: ", end="")
                print({k: v for k, v in row.items() if k.endswith(("_ms", "gib", "error"))}, flush=True)
            if args.out:
                args.out.write_text(json.dumps(table, indent=2) + "\n")
        del text, cases
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
