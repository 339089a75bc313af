"""A compiled model is kept for the next run of the same sizes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from logpast.models import SYSTEMS, RecentConfig, RecurrentConfig
from logpast.training import compiled
from logpast.training.config import TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Graphs that were captured; they are run as they are, without the compiler's minutes."""
    graphs: list[object] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiled, "_how", lambda device: {"dynamic": False, "backend": keep})
    monkeypatch.setattr(compiled, "_kept", {})
    monkeypatch.setattr(compiled, "_made", 0)
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


def losses(config: TrainConfig) -> list[float]:
    train(config)
    return [record["loss"] for record in read_log(config.run) if "loss" in record]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_second_run_compiles_nothing(train_config: TrainConfig, system: str, made: list[object]) -> None:
    kind = SYSTEMS[system].Config
    own: dict[str, Any] = {"segments": 2} if issubclass(kind, RecurrentConfig) else {"slots": 9}
    model = kind(window=8, layers=2, heads=2, width=16, **own)
    config = replace(train_config, model=model, steps=6, batch_size=3)
    first = losses(replace(config, run=config.run.with_name("first"), compile=True))
    captured = len(made)
    assert captured
    for seed in (0, 1):
        plain = losses(replace(config, run=config.run.with_name(f"plain{seed}"), compile=False, seed=seed))
        again = losses(replace(config, run=config.run.with_name(f"again{seed}"), compile=True, seed=seed))
        assert again == plain
        assert (again == first) == (seed == 0)
    assert len(made) == captured


def test_other_sizes_are_compiled_and_kept_beside(train_config: TrainConfig, made: list[object]) -> None:
    config = replace(train_config, steps=2, compile=True)
    for number, (slots, more) in enumerate([(3, 1), (4, 1), (3, 0), (4, 0)]):
        before = len(made)
        train(replace(config, run=config.run.with_name(str(number)), model=replace(small(), slots=slots)))
        assert len(made) == before + more


def test_many_sizes_are_not_too_many(train_config: TrainConfig, made: list[object]) -> None:
    """PyTorch would give up after some."""
    for number in range(compiled.MOST + 3):
        before = len(made)
        model = replace(small(), slots=number)
        train(replace(train_config, steps=2, compile=True, run=train_config.run.with_name(str(number)), model=model))
        assert len(made) == before + 1


def small() -> RecentConfig:
    return RecentConfig(slots=0, window=8, layers=1, heads=2, width=16)
