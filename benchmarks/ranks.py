"""How far training on several processes is from training on one: losses, scores and weights, in float64.

    python benchmarks/ranks.py --out results/ranks.json

Small models on a CPU, 50 steps with the same batches. One process is compared with 2 and 4, which `logpast train
--devices N` or torchrun starts, with DDP and with FSDP. An error is the largest absolute difference from one process:

    loss        over all steps, in nats per token
    score       of the validations, in nats per token
    weight      over all weights after the last step
    held        bytes of parameters and moments that a process holds between two steps, the most of all processes, as a
                part of what one process alone holds
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.tensor import DTensor

from logpast.data.prepare import prepare
from logpast.models import LogMemoryConfig, ModelConfig, RecentConfig, RecurrentMemoryConfig, TransformerXLConfig
from logpast.training import loop
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.log import read_log
from logpast.util.environment import describe, revision

SIZES: dict[str, Any] = {"window": 16, "layers": 2, "heads": 2, "width": 32}
SYSTEMS: dict[str, ModelConfig] = {
    "memory and recall": LogMemoryConfig(slots=25, sharpness=50, recall=64, **SIZES),
    "control": RecentConfig(slots=9, **SIZES),
    "Transformer-XL": TransformerXLConfig(memory=16, segments=2, **SIZES),
    "RMT": RecurrentMemoryConfig(memory_tokens=3, segments=2, **SIZES),
}
STRATEGIES = ("ddp", "fsdp")
STEPS = 50
PAGES = Path(__file__).resolve().parents[1] / "docs"


def recipe(system: str, store: Path, folder: Path) -> TrainConfig:
    """One process, which the others are compared with; gradients are accumulated over micro-batches."""
    return TrainConfig(
        run=folder / system,
        data=DataConfig(train=str(store), validation=str(store), validation_tokens=2000),
        model=SYSTEMS[system],
        optimizer=OptimizerConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=5),
        steps=STEPS,
        batch_size=16,
        micro_batch_size=2,
        precision="64-true",
        validate_every=10,
        checkpoint_every=10,
        log_every=1,
        accelerator="cpu",
        tensorboard=False,
    )


class Measured(loop.Run):
    """Each process writes next to the run folder how many bytes it holds at the end."""

    def close(self) -> None:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        held = sum(local_bytes(tensor) for tensor in (*self.bare.parameters(), *moments))
        self.config.run.with_suffix(f".{self.fabric.global_rank}.held").write_text(str(held))
        super().close()


def local_bytes(tensor: Tensor) -> int:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.numel() * here.element_size()


def train_each(recipes: list[Path]) -> None:
    """In each of the processes: they take longer to start than to train, so they train all recipes."""
    loop.Run = Measured  # type: ignore[misc]
    for path in recipes:
        loop.train(TrainConfig.from_dict(yaml.safe_load(path.read_text())))


def start(launcher: str, ranks: int, configs: list[TrainConfig]) -> None:
    """Train on so many processes, which `launcher` starts."""
    recipes = [config.run.with_suffix(".yaml") for config in configs]
    for file, config in zip(recipes, configs, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(replace(config, devices=1 if launcher == "torchrun" else ranks).to_dict()))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    how = torchrun if launcher == "torchrun" else []
    command = [sys.executable, *how, __file__, "--recipes", *map(str, recipes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def compare(one: Path, several: Path, ranks: int) -> dict[str, float]:
    """The largest differences between a run on one process and on several."""
    logs, weights = [read_log(run) for run in (one, several)], [load_weights(run) for run in (one, several)]
    held = [[int(run.with_suffix(f".{rank}.held").read_text()) for rank in range(n)] for run, n in
            ((one, 1), (several, ranks))]  # fmt: skip
    return {
        "loss": largest(*([record["loss"] for record in log if "loss" in record] for log in logs)),
        "score": largest(*([r["validation_loss"] for r in log if "validation_loss" in r] for log in logs)),
        "weight": max(float((weights[1][name] - value).abs().max()) for name, value in weights[0].items()),
        "held": round(max(held[1]) / max(held[0]), 4),
    }


def load_weights(run: Path) -> dict[str, Tensor]:
    return find_checkpoint(run, "latest").weights()


def largest(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def measure(folder: Path, launchers: dict[str, tuple[int, ...]], systems: list[str]) -> Iterator[dict[str, Any]]:
    """One row per launcher, number of processes, strategy and system."""
    (store,) = prepare([str(PAGES / "*.md")], folder / "store", tokenizer="bpe-300", workers=1)
    configs = [recipe(system, store.path, folder / "one") for system in systems]
    start("logpast", 1, configs)
    for launcher, numbers in launchers.items():
        for ranks in numbers:
            where = {strategy: folder / f"{launcher}-{ranks}-{strategy}" for strategy in STRATEGIES}
            several = [
                replace(config, run=where[strategy] / config.run.name, strategy=strategy)
                for strategy in STRATEGIES
                for config in configs
            ]
            start(launcher, ranks, several)
            for config in several:
                errors = compare(folder / "one" / config.run.name, config.run, ranks)
                about = {"system": config.run.name, "strategy": config.strategy, "ranks": ranks, "launcher": launcher}
                yield about | errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=Path, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    if args.recipes:
        return train_each(args.recipes)
    started, rows = time.perf_counter(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), {"logpast": (2, 4), "torchrun": (2, 4)}, list(SYSTEMS)):
            print(row, flush=True)
            rows.append(row)
    if args.out:
        about = {
            "what": "largest absolute difference from one process, in float64",
            "steps": STEPS, "seconds": round(time.perf_counter() - started, 1),
            "revision": revision(), "hardware": describe(torch.device("cpu")),
        }  # fmt: skip
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
