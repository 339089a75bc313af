"""Compiled models: nothing is compiled twice, and losses are the same as without compiling."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from logpast.models import SYSTEMS, RecentConfig, Recurrent, RecurrentConfig, TimeLocalConfig, build
from logpast.training import compile as compiling
from logpast.training.config import TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The graphs that were captured. They run as they are, which saves the minutes of the compiler."""
    graphs: list[object] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiling, "_options", lambda model, device: {"dynamic": False, "backend": keep})
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


def losses(config: TrainConfig) -> list[float]:
    train(config)
    return [record["loss"] for record in read_log(config.run) if "loss" in record]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_second_run_of_the_same_sizes_compiles_nothing(
    train_config: TrainConfig, system: str, captured: list[object]
) -> None:
    kind = SYSTEMS[system].Config
    own: dict[str, Any] = {"segments": 2} if issubclass(kind, RecurrentConfig) else {"slots": 9}
    model = kind(window=8, layers=1, heads=2, width=16, **own)
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, data=data, model=model, steps=6, batch_size=3)
    first = losses(replace(config, run=config.run.with_name("first"), compile=True))
    count = len(captured)
    assert count
    for seed in (0, 1):
        plain = losses(replace(config, run=config.run.with_name(f"plain{seed}"), compile=False, seed=seed))
        again = losses(replace(config, run=config.run.with_name(f"again{seed}"), compile=True, seed=seed))
        assert again == plain
        assert (again == first) == (seed == 0)
    assert len(captured) == count


def test_returning_to_earlier_sizes_compiles_nothing(train_config: TrainConfig, captured: list[object]) -> None:
    config = replace(train_config, steps=2, compile=True)
    for number, (slots, more) in enumerate([(3, 1), (4, 1), (3, 0), (4, 0)]):
        before = len(captured)
        train(replace(config, run=config.run.with_name(str(number)), model=replace(small(), slots=slots)))
        assert len(captured) == before + more


@pytest.mark.parametrize(
    ("system", "each"),
    [("recent", 2), ("recurrent_memory", 2), pytest.param("time_local", 4, marks=pytest.mark.slow)],
)
@torch._dynamo.config.patch(recompile_limit=2)
def test_many_sizes_do_not_reach_the_recompile_limit(
    train_config: TrainConfig, system: str, each: int, captured: list[object]
) -> None:
    """At its limit, here 2 graphs, PyTorch would stop compiling and only log it."""
    own: dict[str, Any] = {"slots": 5} if system == "recent" else {"segments": 2}
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, data=data, steps=2, compile=True, batch_size=3, micro_batch_size=2)  # two and one
    graphs = []
    for number in range(3):
        before = len(captured)
        model = SYSTEMS[system].Config(window=8, layers=1, heads=2, width=16, mlp=8 + number, **own)
        train(replace(config, run=train_config.run.with_name(str(number)), model=model))
        graphs.append(len(captured) - before)
    assert graphs == [each] * 3


@pytest.mark.parametrize("system", ["transformer_xl", "recurrent_memory"])
def test_a_copy_of_a_compiled_model_uses_its_own_weights(system: str, captured: list[object]) -> None:
    torch.manual_seed(0)
    model = build(SYSTEMS[system].Config(window=8, layers=1, heads=2, width=16, vocabulary=20, segments=2))
    assert isinstance(model, Recurrent)
    ids = torch.randint(0, 20, (2, 2, 8))
    given = ids, ids, torch.tensor([[True, False]] * 2), model.start(2)
    model.compile(**compiling._options(model, torch.device("cpu")))
    nats = model(*given)[0]
    assert captured
    other = copy.deepcopy(model)
    for weight in other.blocks.parameters():
        weight.data.mul_(3)
    assert not torch.allclose(other(*given)[0], nats)
    assert torch.equal(model(*given)[0], nats)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # from the compiler
def test_compiling_changes_no_number_beyond_rounding(train_config: TrainConfig) -> None:
    """With the real compiler, which rounds less often."""
    plain, rounded = in_bf16(train_config)
    assert rounded == [pytest.approx(pair, rel=5e-3) for pair in plain]


@pytest.mark.usefixtures("captured")
def test_float32_parts_have_a_float32_backward_pass(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default PyTorch would run it in bf16. Operator by operator, the result equals that without compiling."""
    monkeypatch.setattr(compiling, "_options", lambda model, device: {"dynamic": False, "backend": "aot_eager"})
    plain, exact = in_bf16(train_config)
    assert exact == plain


def in_bf16(config: TrainConfig) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of a model with a float32 part: not compiled, and compiled."""
    model = TimeLocalConfig(window=64, layers=1, heads=2, width=32, slots=4, sharpness=1)
    config = replace(config, model=model, steps=3, batch_size=2, log_every=1, precision="bf16-mixed")
    found = []
    for compile in (False, True):
        train(replace(config, run=config.run.with_name(str(compile)), compile=compile))
        records = [record for record in read_log(config.run.with_name(str(compile))) if "loss" in record]
        found.append([(record["loss"], record["gradient_norm"]) for record in records])
    return found


def small() -> RecentConfig:
    return RecentConfig(slots=0, window=8, layers=1, heads=2, width=16)
