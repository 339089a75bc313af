"""The sketch of a stream of vectors: its state and its error, by sharpness, moments and horizon.

    python benchmarks/sketch_cpu.py --out results/sketch_cpu.json

`vectors`: how many vectors of the input's width are kept, the most over all lengths of the stream that were tried;
`exact_vectors`: the horizon, which the memory itself needs. `bound`: the largest error of a filter, as `Sketch.error`
defines it, over these lengths. `noise`: for streams of random vectors up to a horizon of 2^14, the largest difference
of a slot from the exact one, as a share of the exact one's norm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from logpast import FilterBank, LogMemory, Sketch
from logpast.util.environment import describe, revision


def row(slots: int, sharpness: float, blocks: int, moments: int, reach: float) -> dict[str, Any]:
    bank = FilterBank(slots=slots, sharpness=sharpness, normalize="area", reach=reach)
    sketch = Sketch(bank, 1, blocks=blocks, moments=moments)
    bound, vectors = 0.0, 0
    lengths = max(3, 2**20 // bank.horizon)  # between one and two horizons
    for sketch.length in torch.linspace(bank.horizon, 2 * bank.horizon, lengths).long().tolist():
        bound = max(bound, float(sketch.error().max()))
        vectors = max(vectors, sketch.vectors)
    found = {"slots": slots, "reach": reach, "sharpness": sharpness, "blocks": blocks, "moments": moments}
    found |= {"exact_vectors": bank.horizon, "vectors": vectors, "bound": float(f"{bound:.2g}")}
    if bank.horizon <= 2**14:
        found["noise"] = float(f"{noise(bank, blocks, moments):.2g}")
    return found


def noise(bank: FilterBank, blocks: int, moments: int) -> float:
    inputs = torch.randn(1, bank.horizon + 1000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sketch = Sketch(bank, 64, blocks=blocks, moments=moments, dtype=torch.float64)
    sketch.push(inputs)
    exact = LogMemory(64, bank, norm=False).double()(inputs)
    return float(((sketch.slots() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    cases = [(53, k, 24, moments, 1.5) for k in (50, 100, 200) for moments in (2, 3)]
    cases += [(53, 200, 24, 3, 1.0), (53, 200, 12, 3, 1.5), (53, 200, 48, 3, 1.5), (81, 200, 24, 3, 1.5)]
    rows = []
    for case in cases:
        rows.append(row(*case))
        print(rows[-1], flush=True)
    if args.out:
        about = {"what": "the sketch", "revision": revision(), "hardware": describe(torch.device("cpu"))}
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
