"""The memory that a training or a scoring needs at least: below what was measured, and not far below."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from logpast.data import TokenStore
from logpast.evaluation.evaluate import evaluate
from logpast.ledger import row as ledger
from logpast.models import (
    LogMemoryConfig,
    ModelConfig,
    RecentConfig,
    RecurrentMemoryConfig,
    TransformerXLConfig,
    build,
)
from logpast.sweeps.cell import _peak_memory, _reset_peak_memory
from logpast.training import loop
from logpast.training.config import TrainConfig
from logpast.training.memory_check import Part, format_bytes, measure, min_scoring_memory, min_training_memory
from logpast.training.setup import make_fabric
from logpast.util.errors import UserError

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "results"
ROWS = {row["comparison"]["system"]: row for row in ledger.read(RESULTS / "rivals-pg19.jsonl") if row["peak_bytes"]}


def total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)


def test_estimates_for_a_gpu_are_30_to_100_percent_of_measured_peaks() -> None:
    """Of all systems, compiled, in bf16."""
    assert len(ROWS) == 9
    for row in ROWS.values():
        config = TrainConfig.from_dict(row["recipe"] | {"run": "run"})
        estimate = total(min_training_memory(config, 1, torch.device("cuda"), compiled=True, processes=1))
        assert 0.3 < estimate / row["peak_bytes"] < 1


@pytest.mark.parametrize("width", [2**31, 2**62])
def test_a_model_whose_sizes_overflow_is_refused(width: int) -> None:
    with pytest.raises(UserError, match=r"model\.width"):
        measure(RecentConfig(slots=0, window=8, layers=1, heads=1, width=width), 300)


def peak_of(config: TrainConfig) -> int:
    """Peak memory of two steps of a training, in a process of its own."""
    make_fabric(config)  # imports more than a hundred megabytes of modules
    ours, theirs = os.pipe()
    process = os.fork()
    if not process:
        try:
            _reset_peak_memory()
            before = _peak_memory() or 0
            run = loop.Run(config)
            for batch in run.batches_to_come():
                run.step(batch)
            os.write(theirs, str((_peak_memory() or 0) - before).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(process, 0)
    with open(ours) as file:
        return int(file.read())


SIZES = {"window": 16, "layers": 1, "heads": 1, "width": 16}
LARGE = {
    "logits": LogMemoryConfig(**SIZES, slots=5, normalize="area", vocabulary=40_000),
    "logits of segments": RecurrentMemoryConfig(**SIZES, segments=3, memory_tokens=2, vocabulary=40_000),
    "parameters": RecentConfig(**SIZES | {"width": 768}, slots=5),
    "activations": TransformerXLConfig(**SIZES | {"width": 128, "layers": 4}, memory=16),
}


@pytest.mark.slow  # reliable only in a process that has not trained yet: freed memory is used again
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux")
@pytest.mark.parametrize("part", LARGE)
def test_estimates_for_a_cpu_are_30_to_100_percent_of_measured_peaks(
    part: str, train_config: TrainConfig, store: TokenStore
) -> None:
    rows = {"parameters": 2, "activations": 400}.get(part, 16)
    config = replace(train_config, model=LARGE[part], batch_size=rows, steps=2)
    parts = min_training_memory(config, store.tokenizer.size, CPU, compiled=False, processes=1)
    assert part.split()[0] in max(parts, key=lambda each: each.bytes).purpose
    assert 0.3 < total(parts) / peak_of(config) < 1


@pytest.mark.parametrize("model", [LogMemoryConfig(), TransformerXLConfig(layers=5)])
def test_parameters_are_counted_without_the_model(train_config: TrainConfig, model: ModelConfig) -> None:
    """Four times: gradients and both moments, too."""
    config = replace(train_config, model=model, batch_size=1)
    (trained, *_) = min_training_memory(config, 50_257, CPU, compiled=False, processes=1)
    with torch.device("meta"):
        assert trained.bytes == 16 * build(model, 50_257).parameter_count()


def test_micro_batches_processes_and_precision_count(train_config: TrainConfig) -> None:
    config = replace(train_config, batch_size=1000)

    def by_purpose(config: TrainConfig, processes: int = 1) -> dict[str, int]:
        return {each.purpose: each.bytes for each in min_training_memory(config, 300, CPU, False, processes)}

    whole = by_purpose(config)
    ids, logits, inside = (f"the {name}" for name in (
        "token ids of a batch", "logits of a micro-batch", "activations of a micro-batch"
    ))  # fmt: skip
    parts = by_purpose(replace(config, micro_batch_size=500))
    assert [parts[name] / whole[name] for name in (ids, logits, inside)] == [1, 0.5, 0.5]
    parts = by_purpose(config, processes=4)
    assert [parts[name] / whole[name] for name in (ids, logits, inside)] == [0.25, 0.25, 0.25]
    parts = by_purpose(replace(config, precision="bf16-mixed"))
    assert [parts[name] / whole[name] for name in (ids, logits, inside)] == [1, 1, 0.5]
    parts = by_purpose(replace(config, precision="64-true"))
    assert [parts[name] / whole[name] for name in (ids, logits, inside)] == [1, 2, 2]


def test_a_scoring_batch_is_never_larger_than_the_text(train_config: TrainConfig, store: TokenStore) -> None:
    for model, streams, rows in (
        (train_config.model, "corpus", -(-len(store) // 8)),
        (TransformerXLConfig(**SIZES), "corpus", 1),
        (TransformerXLConfig(**SIZES), "document", 3),
    ):
        built = build(model, store.tokenizer.size)
        one, most, more = (
            min_scoring_memory(built, store, size, streams, "float32")[1].bytes  # type: ignore[arg-type]
            for size in (1, rows, 10**9)
        )
        assert most == more == rows * one


def test_a_huge_batch_size_scores_a_small_text(train_config: TrainConfig, store: TokenStore) -> None:
    loop.train(replace(train_config, steps=1))
    evaluate(train_config.run, str(store.path), batch_size=10**9)


def test_bytes_are_readable() -> None:
    assert [format_bytes(number) for number in (0, 999, 1500, 2.5e9, 3e16)] == [
        "0.0 bytes", "999.0 bytes", "1.5 kB", "2.5 GB", "30,000.0 TB",
    ]  # fmt: skip
