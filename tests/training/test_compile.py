"""A compiled model is kept for the next run of the same sizes."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from logpast.models import SYSTEMS, RecentConfig, Recurrent, RecurrentConfig, TimeLocalConfig, build
from logpast.training import compile as compiled
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

    monkeypatch.setattr(compiled, "_how", lambda model, device: {"dynamic": False, "backend": keep})
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
    model = kind(window=8, layers=1, heads=2, width=16, **own)
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, data=data, model=model, steps=6, batch_size=3)
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


@pytest.mark.parametrize(
    ("system", "each"),
    [("recent", 2), ("recurrent_memory", 2), pytest.param("time_local", 4, marks=pytest.mark.slow)],
)
@torch._dynamo.config.patch(recompile_limit=4)
def test_many_sizes_are_not_too_many(
    train_config: TrainConfig, system: str, each: int, made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would give up after 4 graphs, and say so in a log only: more take a higher limit, or a new beginning."""
    assert each * compiled.MOST <= compiled.TIMES
    monkeypatch.setattr(compiled, "MOST", 3)
    monkeypatch.setattr(compiled, "TIMES", 3 * each)
    own: dict[str, Any] = {"slots": 5} if system == "recent" else {"segments": 2}
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, data=data, steps=2, compile=True, batch_size=3, micro_batch_size=2)  # two and one
    graphs = []
    for number in range(compiled.MOST + 2):
        before = len(made)
        model = SYSTEMS[system].Config(window=8, layers=1, heads=2, width=16, mlp=8 + number, **own)
        train(replace(config, run=train_config.run.with_name(str(number)), model=model))
        graphs.append(len(made) - before)
    assert graphs == [each] * 5


@pytest.mark.parametrize("system", ["transformer_xl", "recurrent_memory"])
def test_a_copy_has_its_own_weights(system: str, made: list[object]) -> None:
    torch.manual_seed(0)
    model = build(SYSTEMS[system].Config(window=8, layers=1, heads=2, width=16, vocabulary=20, segments=2))
    assert isinstance(model, Recurrent)
    ids = torch.randint(0, 20, (2, 2, 8))
    given = ids, ids, torch.tensor([[True, False]] * 2), model.start(2)
    model.compile(**compiled._how(model, torch.device("cpu")))
    nats = model(*given)[0]
    assert made
    other = copy.deepcopy(model)
    for weight in other.blocks.parameters():
        weight.data.mul_(3)
    assert not torch.allclose(other(*given)[0], nats)
    assert torch.equal(model(*given)[0], nats)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # the compiler's own
def test_the_compiler_changes_no_figure(train_config: TrainConfig) -> None:
    """The one that is used, but for what it rounds less often."""
    plain, rounded = in_bf16(train_config)
    assert rounded == [pytest.approx(pair, rel=5e-3) for pair in plain]


@pytest.mark.usefixtures("made")
def test_what_is_in_full_precision_has_a_backward_pass_in_full_precision(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it is taken down to bf16 with the rest. Operators one by one, as it runs plainly: none differs."""
    monkeypatch.setattr(compiled, "_how", lambda model, device: {"dynamic": False, "backend": "aot_eager"})
    plain, exact = in_bf16(train_config)
    assert exact == plain


def in_bf16(config: TrainConfig) -> list[list[tuple[float, float]]]:
    """Losses and gradients' norms of a model with a part in full precision: as it is, and compiled."""
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
