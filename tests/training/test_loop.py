"""The training loop: it learns, accumulated gradients equal the large batch, resuming is exact to the bit."""

import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Batches
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.models import SYSTEMS, ModelConfig, RecentConfig, RecurrentConfig, State, TimeLocalConfig, build
from logpast.training import loop, memory_check
from logpast.training.checkpoint import find_checkpoint, open_checkpoint, sorted_checkpoints
from logpast.training.config import OptimizerConfig, TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train
from logpast.training.optimizer import learning_rate
from logpast.util import environment
from logpast.util.environment import cpu_threads
from logpast.util.errors import Diverged, UserError
from logpast.util.progress import progress_bar
from training.helpers import COMPRESSIVE, RECURRENT, assert_bit_equal, weights


def test_training_learns_and_writes_all_files(train_config: TrainConfig) -> None:
    config = replace(train_config, tensorboard=True)
    state = train(config)
    records = read_log(config.run)
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 30
    assert losses[0] == pytest.approx(math.log(320), abs=0.3)  # an untrained model
    assert losses[-1] < losses[0] - 0.5
    validations = {r["step"]: r["validation_ppl"] for r in records if "validation_ppl" in r}
    assert list(validations) == [10, 20, 30]
    assert state["best"]["ppl_token"] == min(validations.values())
    assert state["step"] == 30
    assert state["tokens"] == records[-2]["tokens"] > 29 * 16 * 7
    assert {"epoch", "ppl", "learning_rate", "gradient_norm", "tokens_per_second"} <= set(records[0])
    found = find_checkpoint(config.run)
    assert found.step == state["best"]["step"]
    assert sorted(file.name for file in found.path.iterdir()) == [
        "SHA256SUMS", "config.yaml", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json",
    ]  # fmt: skip
    assert yaml.safe_load((config.run / "config.yaml").read_text())["seed"] == 0
    assert list((config.run / "tensorboard").iterdir())


@pytest.mark.parametrize("model", [None, RECURRENT], ids=["stateless", "recurrent"])
def test_nothing_is_rounded_in_double_precision(train_config: TrainConfig, model: ModelConfig | None) -> None:
    """The losses that are logged, and the loss of a validation; fabric casts what a model returns to float32."""
    run = loop.Run(replace(train_config, model=model or train_config.model, precision="64-true"))
    batch = next(run.batches_to_come())
    with torch.no_grad():
        carried = [] if run.carried is None else [run.carried]
        output = run.model(*batch.inputs[:3], *carried, *batch.inputs[3:])
    parts = [output] if run.carried is None else [output[0], *output[1].values()]
    assert {part.dtype for part in parts if part.is_floating_point()} == {torch.float64}
    run.step(batch)
    assert float(run.loss) != float(run.loss.float())


class NoDoubles(TorchDispatchMode):
    """Fails on any float64 tensor: Apple's MPS has none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            assert not (isinstance(value, Tensor) and value.ndim and value.dtype == torch.float64), function
        return result


def test_nothing_on_the_device_is_in_double_precision(train_config: TrainConfig) -> None:
    run = loop.Run(train_config)
    with NoDoubles(), progress_bar("test", 1) as progress:
        run.step(next(run.batches_to_come()))
        run.report()
        run.validate(progress)


@pytest.mark.parametrize("micro", [1, 3, 5])
@pytest.mark.parametrize("model", [None, RECURRENT, COMPRESSIVE], ids=["stateless", "recurrent", "compressive"])
def test_accumulated_gradients_equal_the_large_batch(
    train_config: TrainConfig, micro: int, model: ModelConfig | None
) -> None:
    """Also if windows differ in their number of loss tokens, and micro-batches in their number of windows."""
    config = replace(train_config, steps=6, data=replace(train_config.data, validation_tokens=50))
    if model is not None:
        config = replace(config, model=model, batch_size=7)
    train(config)
    train(replace(config, run=config.run.with_name("micro"), micro_batch_size=micro))
    runs = config.run, config.run.with_name("micro")
    for file in ["model.safetensors", *(["carried.safetensors"] if model else [])]:
        whole, accumulated = (load_file(sorted_checkpoints(run)[-1] / file) for run in runs)
        for name, value in whole.items():
            torch.testing.assert_close(accumulated[name], value, rtol=1e-4, atol=2e-6 if "model" in file else 1e-5)


def test_seed_decides_the_run(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=4)
    runs = [
        config,
        replace(config, run=config.run.with_name("b")),
        replace(config, run=config.run.with_name("c"), seed=1),
    ]
    for each in runs:
        train(each)
    assert_bit_equal(weights(runs[0].run), weights(runs[1].run))
    assert not torch.equal(weights(runs[0].run)["table.weight"], weights(runs[2].run)["table.weight"])


def test_first_steps_equal_adamw_written_out(train_config: TrainConfig, store: TokenStore) -> None:
    """Three steps of a run, with clipping, compared with PyTorch's AdamW on the same batches."""
    adamw = OptimizerConfig(learning_rate=0.01, final_learning_rate=0.01, warmup_steps=0, beta2=0.5, clip=0.05)
    config = replace(train_config, steps=3, optimizer=adamw)
    train(config)
    torch.manual_seed(config.seed)
    model = build(config.model, store.tokenizer.size)
    batches = Batches(store, model.window, model.history, config.batch_size, config.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.5))
    for step in range(3):
        batch = batches.at(step)
        (model(*batch).sum() / (batch.targets >= 0).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05  # otherwise clipping would have no effect
        optimizer.step()
        optimizer.zero_grad()
    trained = weights(config.run)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    ("system", "jitter"),
    [*((system, False) for system in SYSTEMS), ("log_memory", True), ("transformer_xl", True)],
)
def test_resuming_is_exact_to_the_bit(
    train_config: TrainConfig,
    control_config: RecentConfig,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    jitter: bool,
) -> None:
    config = replace(train_config, data=replace(train_config.data, jitter=jitter, validation_tokens=100))
    if system == "recent":
        config = replace(config, model=control_config)
    recurrent = issubclass(SYSTEMS[system].Config, RecurrentConfig)
    if recurrent:
        sizes = {"window": 8, "layers": 2, "heads": 2, "width": 16, "segments": 2}
        config = replace(config, model=SYSTEMS[system].Config(**sizes), batch_size=3)  # seven steps per epoch
    crashes = [0, 3, 4, 9, 11, 26]
    if system not in ("log_memory", "transformer_xl"):  # the others differ only in the state that they carry
        config, crashes = replace(config, steps=14), [9, 11]
    train(config)
    broken = replace(config, run=config.run.with_name("broken"), resume="auto")
    original = loop.learning_rate
    for crash_at in crashes:

        def crash(*arguments: object, at: int = crash_at) -> float:
            if arguments[1] == at:
                raise Crash
            return original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "learning_rate", crash)
        with pytest.raises(Crash):
            train(broken)
    monkeypatch.setattr(loop, "learning_rate", original)
    train(broken)
    assert_bit_equal(weights(config.run), weights(broken.run))
    for file in ["optimizer", *(["carried"] if recurrent else [])]:
        last = [load_file(find_checkpoint(r, "latest").path / f"{file}.safetensors") for r in (config.run, broken.run)]
        assert_bit_equal(*last)
    keep = ("step", "loss", "validation_loss", "learning_rate", "tokens")
    uninterrupted, resumed = (
        [{k: r[k] for k in keep if k in r} for r in read_log(run)] for run in (config.run, broken.run)
    )
    assert uninterrupted == resumed  # no record twice, none missing
    assert find_checkpoint(config.run).step == find_checkpoint(broken.run).step


@pytest.mark.parametrize("recurrent", [False, True], ids=["stateless", "recurrent"])
def test_frozen_parameters_keep_their_values(train_config: TrainConfig, recurrent: bool) -> None:
    """The others are trained, and resuming is exact."""
    config = replace(train_config, freeze=["!norm", "!blocks.1.mlp_in"], steps=4, checkpoint_every=2, keep=9)
    if recurrent:
        config = replace(config, model=RECURRENT, batch_size=3)
    run = loop.Run(replace(config, run=config.run.with_name("initial")))
    before = {name: value.clone() for name, value in run.bare.state_dict().items()}
    assert "0.0M parameters (1,120 of them trained)" in run.start_summary()
    run.close()
    train(config)
    after = weights(config.run)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    trained = {"norm.weight", "norm.bias", "blocks.1.mlp_in.weight", "blocks.1.mlp_in.bias"}
    assert changed == trained
    first, last = sorted_checkpoints(config.run)
    assert {name.partition("/")[0] for name in load_file(last / "optimizer.safetensors")} == trained
    again = replace(config, run=config.run.with_name("again"), resume=str(first))
    train(again)
    assert_bit_equal(after, weights(again.run))


def test_resuming_uses_the_carried_state(train_config: TrainConfig) -> None:
    """With another state the result differs, so the tests above would notice a lost one."""
    config = replace(train_config, model=RECURRENT, batch_size=3, steps=6, checkpoint_every=4)
    train(config)
    (first, _) = sorted_checkpoints(config.run)
    state = load_file(first / "carried.safetensors")
    assert {name: tuple(value.shape) for name, value in state.items()} == {"memory": (3, 2, 8, 16), "filled": (3,)}
    assert state["filled"].tolist() == [8, 8, 8]
    save_file({name: 0 * value for name, value in state.items()}, first / "carried.safetensors")
    with pytest.raises(UserError, match=r"carried.safetensors has changed"):
        train(replace(config, run=config.run.with_name("other"), resume=str(first)))
    (first / "SHA256SUMS").unlink()
    train(replace(config, run=config.run.with_name("other"), resume=str(first)))
    assert not torch.equal(weights(config.run)["table.weight"], weights(config.run.with_name("other"))["table.weight"])


STRATEGIES: tuple[Any, ...] = ("ddp", "fsdp")
TRAIN_EACH = """
import sys
from logpast.cli import run
for recipe in sys.argv[1:]:
    run(["train", "--config", recipe])
"""


def test_two_processes_equal_one(train_config: TrainConfig, tmp_path: Path) -> None:
    """With both strategies. The same two processes train all systems: they take longer to start than to train."""
    config = replace(train_config, run=tmp_path / "log_memory", steps=6, micro_batch_size=3, precision="64-true")
    local = TimeLocalConfig(window=8, layers=1, heads=2, width=16, slots=4)
    others = {"compressive": COMPRESSIVE, "time_local": local}
    configs = [config] + [
        replace(config, run=tmp_path / name, model=model, batch_size=4, micro_batch_size=None)
        for name, model in others.items()
    ]
    configs[1] = replace(configs[1], freeze=["table"])
    recipes = list[str]()
    for each in configs:
        train(each)
        for strategy in STRATEGIES:
            double = replace(each, run=two_process_run(each, strategy), devices=2, strategy=strategy)
            recipes.append(str(double.run.with_suffix(".yaml")))
            Path(recipes[-1]).write_text(yaml.safe_dump(double.to_dict()))
    (tmp_path / "each.py").write_text(TRAIN_EACH)
    command = [sys.executable, str(tmp_path / "each.py"), *recipes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for each in configs:
        for strategy in STRATEGIES:
            assert_two_equal_one(each, strategy, recurrent=each is not config)


def two_process_run(config: TrainConfig, strategy: str) -> Path:
    return config.run.with_name(f"{config.run.name} in two with {strategy}")


def assert_two_equal_one(config: TrainConfig, strategy: str, recurrent: bool) -> None:
    """A recurrent system validates on a single stream, so the second process scores nothing there."""
    double = replace(config, run=two_process_run(config, strategy))
    one, two = weights(config.run), weights(double.run)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-11)
    losses = [[r["loss"] for r in read_log(run) if "loss" in r] for run in (config.run, double.run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    best = [find_checkpoint(run).state["best"]["nats_per_token"] for run in (config.run, double.run)]
    assert best[1] == pytest.approx(best[0], rel=1e-12)
    if recurrent:
        states = [load_file(sorted_checkpoints(run)[-1] / "carried.safetensors") for run in (config.run, double.run)]
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-11)


def send_signals(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: int) -> None:
    """From now on, these signals arrive during a step."""

    def interrupt(*arguments: Any) -> float:
        if arguments[1] == step:
            for number in numbers:
                signal.raise_signal(number)
        return learning_rate(*arguments)

    monkeypatch.setattr(loop, "learning_rate", interrupt)


HANGUPS = (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP)  # what a logout may send


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM,), HANGUPS], ids=["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_and_stops(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    config = replace(train_config, steps=12, checkpoint_every=1000, validate_every=1000)
    send_signals(monkeypatch, 6, *numbers)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert find_checkpoint(config.run, "latest").step == 7
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    train(replace(config, resume="auto"))
    uninterrupted = replace(config, run=config.run.with_name("uninterrupted"))
    train(uninterrupted)
    assert_bit_equal(weights(uninterrupted.run), weights(config.run))


def test_a_second_signal_stops_at_once(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    send_signals(monkeypatch, 2, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(train_config)
    assert not sorted_checkpoints(train_config.run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_is_done_stops_at_once(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The first step may take minutes, and there is nothing to save."""
    send_signals(monkeypatch, 0, number)
    monkeypatch.setattr(loop.Run, "_update", lambda *_: pytest.fail("the step continues"))
    with pytest.raises(KeyboardInterrupt):
        train(train_config)


def test_a_dropped_connection_saves_a_checkpoint(train_config: TrainConfig) -> None:
    """The command runs in a terminal of its own, which is then closed."""
    recipe = train_config.run.with_name("recipe.yaml")
    config = replace(train_config, steps=100_000, validate_every=100_000, checkpoint_every=100_000)
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    process, terminal = pty.fork()
    if not process:
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
        try:
            main(["train", "--config", str(recipe)])
        except SystemExit as end:
            os._exit(int(end.code or 0))
        finally:
            os._exit(1)
    while not read_log(config.run):
        os.read(terminal, 10_000)  # the process would wait if the terminal were full
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert find_checkpoint(config.run, "latest").step > 0


def test_the_number_of_threads_is_chosen_recorded_and_restored(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for a small model; a resumed run keeps the number of its first part."""
    used = list[int]()

    def count(*arguments: Any) -> float:
        used.append(torch.get_num_threads())
        return learning_rate(*arguments)

    config = replace(train_config, data=replace(train_config.data, validation=None), steps=2, checkpoint_every=1)
    monkeypatch.setattr(loop, "learning_rate", count)
    monkeypatch.delenv("OMP_NUM_THREADS")
    with cpu_threads(2):
        assert train(config)["hardware"]["threads"] == 1
        assert torch.get_num_threads() == 2
        first = sorted_checkpoints(config.run)[0]
        state = json.loads((first / "state.json").read_text())
        state["hardware"]["threads"] = 2
        (first / "state.json").write_text(json.dumps(state))
        (first / "SHA256SUMS").unlink()
        monkeypatch.setattr(environment.os, "cpu_count", lambda: 2)
        train(replace(config, run=config.run.with_name("again"), resume=str(first)))
    assert used == [1, 1, 2]


def test_a_batch_larger_than_the_text_is_noted(train_config: TrainConfig) -> None:
    for size, noted in ((16, False), (1000, True)):
        run = loop.Run(replace(train_config, batch_size=size, run=train_config.run.with_name(str(size))))
        assert ("batch_size (1,000)" in run.start_summary()) == noted
        run.close()


def test_a_finished_run_needs_no_memory_unless_it_is_extended(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been trained on a larger machine."""
    config = replace(train_config, steps=1)
    train(config)
    monkeypatch.setattr(memory_check, "memory_of", lambda device: 0)
    train(replace(config, resume="auto"))
    for more in (replace(config, resume="auto", steps=2), replace(config, run=config.run.with_name("other"))):
        with pytest.raises(UserError, match="training needs"):
            train(more)


def test_speed_excludes_validation_and_seconds_include_earlier_parts(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock on which a step takes one second and a validation 100."""
    now = [0.0]

    def tick(*arguments: Any) -> float:
        now[0] += 1
        return learning_rate(*arguments)

    def scored(*arguments: Any, **settings: Any) -> Any:
        now[0] += 100
        return score(*arguments, **settings)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(loop, "learning_rate", tick)
    monkeypatch.setattr(loop, "score", scored)
    config = replace(train_config, steps=6, validate_every=2, checkpoint_every=4, log_every=1)
    assert train(config)["seconds"] == 306
    records = [record for record in read_log(config.run) if "loss" in record]
    tokens = [0, *(record["tokens"] for record in records)]
    assert [record["tokens_per_second"] for record in records] == [b - a for a, b in pairwise(tokens)]
    now[0] = 10_000
    first = sorted_checkpoints(config.run)[0]
    again = replace(config, run=config.run.with_name("again"), resume=str(first))
    assert train(again)["seconds"] == open_checkpoint(first).state["seconds"] + 102


def test_of_equal_losses_the_first_is_the_best(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "score", lambda *arguments, **settings: np.ones(3))
    best = train(replace(train_config, steps=6, validate_every=2))["best"]
    assert best == {"step": 2, "nats_per_token": 1.0, "ppl_token": pytest.approx(math.e)}


def test_validation_tokens_limits_the_validation_text(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def scored(*arguments: Any, **settings: Any) -> Any:
        lengths.append(len(found := score(*arguments, **settings)))
        return found

    monkeypatch.setattr(loop, "score", scored)
    part = replace(train_config.data, validation_tokens=20)
    train(replace(train_config, steps=1, data=part))
    train(replace(train_config, steps=1, run=train_config.run.with_name("all")))
    assert 20 <= lengths[0] < 40 < lengths[1]


def test_validation_scores_the_validation_text(train_config: TrainConfig, tmp_path: Path, store: TokenStore) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Something else entirely, which does not occur in the training text. " * 20)
    config = replace(train_config, data=replace(train_config.data, validation=str(text)), steps=10)
    found = train(config)["best"]["nats_per_token"]
    assert found == pytest.approx(math.log(evaluate(config.run, str(text))["ppl_token"]), rel=1e-6)
    assert found != pytest.approx(math.log(evaluate(config.run, str(store.path))["ppl_token"]), rel=1e-3)


def test_streams_by_document_in_training_and_validation(train_config: TrainConfig) -> None:
    """Other windows, other losses; resuming is exact; eval uses the same streams by default."""
    config = replace(train_config, data=replace(train_config.data, streams="document"), keep=10)
    state = train(config)
    whole = replace(train_config, run=train_config.run.with_name("corpus"))
    train(whole)
    losses = [[r["loss"] for r in read_log(c.run) if "loss" in r] for c in (config, whole)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    result = evaluate(config.run, config.data.train)
    assert result["streams"] == "document"
    assert math.log(result["ppl_token"]) == pytest.approx(state["best"]["nats_per_token"], rel=1e-6)
    again = replace(config, run=config.run.with_name("again"), resume=str(sorted_checkpoints(config.run)[1]))
    train(again)
    assert_bit_equal(weights(config.run), weights(again.run))


def test_compression_is_trained_by_its_own_loss(train_config: TrainConfig) -> None:
    """No other loss has a gradient for it."""
    model = COMPRESSIVE
    optimizer = replace(train_config.optimizer, weight_decay=0)
    config = replace(train_config, model=model, optimizer=optimizer, batch_size=3, steps=4, validate_every=4)
    torch.manual_seed(config.seed)
    first = build(model, open_tokens(config.data.train, None).tokenizer.size).state_dict()
    train(config)
    last = weights(config.run)
    kernels = [name for name in last if name.endswith("kernel.weight")]
    assert kernels
    assert all(not torch.equal(first[name], last[name]) for name in kernels)


def test_an_infinite_loss_is_never_saved(train_config: TrainConfig) -> None:
    wild = OptimizerConfig(learning_rate=1e30, warmup_steps=0, clip=0)
    config = replace(train_config, optimizer=wild, log_every=8, validate_every=1, checkpoint_every=1)
    with pytest.raises(UserError, match="learning_rate"):
        train(config)
    for folder in sorted_checkpoints(config.run):
        state = open_checkpoint(folder).state
        assert state["best"] is None or math.isfinite(state["best"]["nats_per_token"])


def test_weights_after_an_infinite_gradient_are_not_saved(train_config: TrainConfig) -> None:
    run = loop.Run(train_config)
    run.step(next(run.batches_to_come()))
    run.norm = torch.tensor(math.inf)
    for act in (run.report, run.save):
        with pytest.raises(Diverged, match="gradient norm became inf by step 1"):
            act()
    assert not sorted_checkpoints(train_config.run)


def test_double_precision_is_saved_and_resumed(train_config: TrainConfig) -> None:
    config = replace(train_config, precision="64-true", keep=10)
    train(config)
    found = find_checkpoint(config.run, "latest")
    assert found.load_model().table.weight.dtype == torch.float64
    assert torch.equal(found.load_model().table.weight, found.weights()["table.weight"])
    double, single = (evaluate(config.run, config.data.train, precision=p)["nats"] for p in ("float64", "float32"))  # type: ignore[arg-type]
    assert double == pytest.approx(single, rel=1e-6)
    assert double != single
    again = replace(config, run=config.run.with_name("again"), resume=str(sorted_checkpoints(config.run)[1]))
    train(again)
    assert_bit_equal(weights(config.run), weights(again.run))


def test_batches_are_made_by_the_training_thread_on_a_cpu(train_config: TrainConfig) -> None:
    """A second thread would start its own pool of threads: more than cores, and slower."""
    run, makers = loop.Run(train_config), set()
    make = run.batches.at

    def at(step: int, part: slice) -> Any:
        makers.add(threading.current_thread())
        return make(step, part)

    run.batches.at = at  # type: ignore[method-assign]
    batches = run.batches_to_come()
    for _ in range(3):
        run.step(next(batches))
    assert makers == {threading.current_thread()}


@pytest.mark.parametrize("system", [name for name in SYSTEMS if issubclass(SYSTEMS[name].Config, RecurrentConfig)])
def test_the_carried_state_is_not_cast_to_bf16(train_config: TrainConfig, system: str) -> None:
    """Lightning would cast inputs; a state would lose digits with every step."""
    model = SYSTEMS[system].Config(window=8, layers=2, heads=2, width=16, segments=2)
    config = replace(train_config, model=model, batch_size=3, steps=6)
    both = []
    for precision in ("32-true", "bf16-mixed"):
        run = loop.Run(replace(config, run=config.run.with_name(precision), precision=precision))  # type: ignore[arg-type]
        batches = run.batches_to_come()
        for _ in range(3):
            assert run.carried is not None
            before = {name: value.clone() for name, value in run.carried.items()}
            seen: list[State] = []

            def record(_: object, given: tuple[Any, ...], seen: list[State] = seen) -> None:
                seen.append({name: value.clone() for name, value in given[-1].items()})

            handle = run.bare.register_forward_pre_hook(record)
            run.step(next(batches))
            handle.remove()
            (given,) = seen
            assert all(torch.equal(given[name], value) for name, value in before.items())
        both.append(float(run.loss))
    assert both[1] == pytest.approx(both[0], rel=2e-2)
