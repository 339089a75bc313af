"""How far each code path of the memory is from its definition, by length of the history and scale of the embeddings.

    python benchmarks/memory_accuracy.py --out results/memory_accuracy_cpu.json

53 slots, a horizon of 8,192, random tokens and embeddings. An error is the largest absolute difference, after the
LayerNorm, from the definition in float64 with the same table (in bf16: the table rounded to bf16). The LayerNorm gives
slots a standard deviation of 1, except where only very small weights are in sight.

    short       a batch of histories of this length
    padded      a row of this length, padded with negative ids before its tokens, in a batch with rows of other lengths
    rounding    the error of the definition when only its result is rounded to the type
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logpast.filters import FilterBank
from logpast.kernels.ops import HAS_TRITON
from logpast.memory import LogMemory
from logpast.util.environment import describe, pick_device, revision

BANK = FilterBank(slots=53, sharpness=100)
LENGTHS = (0, 1, 7, 53, 300, 1000, 4096, BANK.horizon, 2 * BANK.horizon)
SCALES = (0.02, 1, 30, 1000)  # standard deviation of the embeddings: GPT-2's initialisation, PyTorch's, and large ones
TYPES = (torch.float64, torch.float32, torch.bfloat16)
BATCH, WIDTH, VOCABULARY = 2, 64, 2000


def slots(path: str, dtype: torch.dtype, ids: Tensor, table: Tensor) -> Tensor:
    memory = LogMemory(WIDTH, BANK, path=path).to(table.device, dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        return memory.from_ids(ids, table.to(dtype)).double()


def largest(error: Tensor) -> float:
    return float(f"{error.abs().max():.2g}")


def measure(dtype: torch.dtype, scale: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row per path and length."""
    paths = ["naive", "bag", "support"]
    if device.type == "cuda" and HAS_TRITON and dtype != torch.float64:
        paths.append("fused")
    random = torch.Generator().manual_seed(0)
    table = (scale * torch.randn(VOCABULARY, WIDTH, generator=random)).to(device, dtype).double()
    ids = torch.randint(VOCABULARY, (len(LENGTHS), LENGTHS[-1]), generator=random).to(device)
    padded = ids.clone()
    for row, length in enumerate(LENGTHS):
        padded[row, : LENGTHS[-1] - length] = -1
    exact_padded = slots("naive", torch.float64, padded, table)
    short = [ids[:BATCH, LENGTHS[-1] - length :] for length in LENGTHS]
    exact = [slots("naive", torch.float64, some, table) for some in short]
    for path in paths:
        of_padded = (slots(path, dtype, padded, table) - exact_padded).abs()
        for row, length in enumerate(LENGTHS):
            of_short = slots(path, dtype, short[row], table) - exact[row]
            yield {
                "path": path, "type": str(dtype).removeprefix("torch."), "scale": scale, "length": length,
                "short": largest(of_short), "padded": largest(of_padded[row]),
                "rounding": largest(exact[row].to(dtype) - exact[row]),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    device, started, rows = pick_device(args.device), time.perf_counter(), []
    for dtype in TYPES:
        for scale in SCALES:
            new = list(measure(dtype, scale, device))
            rows += new
            worst = {row["path"]: 0.0 for row in new}
            for row in new:
                worst[row["path"]] = max(worst[row["path"]], row["short"], row["padded"])
            print(
                f"{new[0]['type']:9} scale {scale:<6g}",
                *(f"{path} {error:.1e}" for path, error in worst.items()),
                flush=True,
            )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "what": "largest absolute error of normalised slots from the definition in float64",
            "shape": {"batch": BATCH, "width": WIDTH, "vocabulary": VOCABULARY},
            "slots": BANK.slots, "sharpness": BANK.sharpness, "horizon": BANK.horizon,
            "seconds": round(time.perf_counter() - started, 1),
            "revision": revision(), "hardware": describe(device),
        }  # fmt: skip
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
