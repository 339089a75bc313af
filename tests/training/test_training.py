"""Training: it learns, accumulation is the large batch, resuming is exact, nothing is overwritten."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Batches
from logpast.data.prepare import prepare
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.models import (
    SYSTEMS,
    CompressiveConfig,
    ModelConfig,
    RecentConfig,
    RecurrentConfig,
    State,
    TimeLocalConfig,
    TransformerXLConfig,
    build,
)
from logpast.training import loop
from logpast.training.checkpoint import drop_optimizer_state, find_checkpoint, open_checkpoint, sorted_checkpoints
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.log import Log, last_record, read_log
from logpast.training.loop import train
from logpast.training.optimizer import build_optimizer, learning_rate
from logpast.util import files
from logpast.util.errors import Diverged, UserError
from logpast.util.progress import progress_bar


def weights(run: Path) -> dict[str, Tensor]:
    """Copies: the loaded ones are the file itself, mapped into memory."""
    return {name: value.clone() for name, value in find_checkpoint(run, "latest").weights().items()}


def assert_bit_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


RISING = OptimizerConfig(learning_rate=3e-3, final_learning_rate=10.0, warmup_steps=5, clip=0)  # the model gets worse


def test_it_learns_and_leaves_readable_files(train_config: TrainConfig) -> None:
    config = replace(train_config, tensorboard=True)
    state = train(config)
    records = read_log(config.run)
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 30
    assert losses[0] == pytest.approx(math.log(320), abs=0.3)  # an untrained model knows nothing
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
        "config.yaml", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json",
    ]  # fmt: skip
    assert yaml.safe_load((config.run / "config.yaml").read_text())["seed"] == 0
    assert list((config.run / "tensorboard").iterdir())


def test_best_checkpoint_is_kept_and_old_ones_go(train_config: TrainConfig) -> None:
    """A model that gets worse: the best stays although it is old."""
    config = replace(train_config, optimizer=RISING, validate_every=5)
    state = train(config)
    assert state["best"]["step"] < 30
    steps = [int(c.name[5:]) for c in sorted_checkpoints(config.run)]
    assert len(steps) <= 3
    assert state["best"]["step"] in steps
    assert steps[-1] == 30
    assert find_checkpoint(config.run).step == state["best"]["step"]
    assert find_checkpoint(config.run, "latest").step == 30


class NoDoubles(TorchDispatchMode):
    """Apple's MPS has no float64."""

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


READS_ON = TransformerXLConfig(window=8, layers=2, heads=2, width=16, memory=8, segments=2)
COMPRESSES = CompressiveConfig(window=8, layers=1, heads=2, width=16, memory=8, compressed=4, rate=2)


@pytest.mark.parametrize("micro", [1, 3, 5])
@pytest.mark.parametrize("model", [None, READS_ON, COMPRESSES], ids=["stateless", "reads on", "compresses"])
def test_accumulated_gradients_equal_the_large_batch(
    train_config: TrainConfig, micro: int, model: ModelConfig | None
) -> None:
    """Also where windows of a batch differ in how many tokens they score, and pieces in how many windows."""
    config = replace(train_config, steps=6, data=replace(train_config.data, validation_tokens=50))
    if model is not None:
        config = replace(config, model=model, batch_size=7)
    train(config)
    train(replace(config, run=config.run.with_name("micro"), micro_batch_size=micro))
    runs = config.run, config.run.with_name("micro")
    kinds = ["model.safetensors"] + (["carried.safetensors"] if model else [])
    for file in kinds:
        whole, pieces = (load_file(sorted_checkpoints(run)[-1] / file) for run in runs)
        for name, value in whole.items():
            torch.testing.assert_close(pieces[name], value, rtol=1e-4, atol=2e-6 if file == kinds[0] else 1e-5)


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


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    ("system", "jitter"),
    [*((system, False) for system in SYSTEMS), ("log_memory", True), ("transformer_xl", True)],  # what reads on, too
)
def test_resume_is_exact_wherever_it_broke_off(
    train_config: TrainConfig,
    control_config: RecentConfig,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    jitter: bool,
) -> None:
    config = replace(train_config, data=replace(train_config.data, jitter=jitter, validation_tokens=100))
    if system == "recent":
        config = replace(config, model=control_config)
    carries = system not in ("log_memory", "recent")
    if carries:
        sizes = {"window": 8, "layers": 2, "heads": 2, "width": 16, "segments": 2}
        config = replace(config, model=SYSTEMS[system].Config(**sizes), batch_size=3)  # seven steps an epoch
    train(config)
    broken = replace(config, run=config.run.with_name("broken"), resume="auto")
    original = loop.learning_rate
    for crash_at in (0, 3, 4, 9, 11, 26):

        def break_off(*arguments: object, at: int = crash_at) -> float:
            if arguments[1] == at:
                raise Crash
            return original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "learning_rate", break_off)
        with pytest.raises(Crash):
            train(broken)
    monkeypatch.setattr(loop, "learning_rate", original)
    train(broken)
    assert_bit_equal(weights(config.run), weights(broken.run))
    for file in ["optimizer", *(["carried"] if carries else [])]:
        last = [load_file(find_checkpoint(r, "latest").path / f"{file}.safetensors") for r in (config.run, broken.run)]
        assert_bit_equal(*last)
    keep = ("step", "loss", "validation_loss", "learning_rate", "tokens")
    undisturbed, resumed = (
        [{k: r[k] for k in keep if k in r} for r in read_log(run)] for run in (config.run, broken.run)
    )
    assert undisturbed == resumed  # nothing twice, nothing missing
    assert find_checkpoint(config.run).step == find_checkpoint(broken.run).step


def kill_and_resume(config: TrainConfig, kills: int, seed: int) -> int:
    """Run as a user would, kill -9 at random moments, resume; returns how many kills hit a live run."""
    recipe = config.run.with_name("recipe.yaml")
    values = replace(config, resume="auto").to_dict()
    recipe.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "logpast", "train", "--config", str(recipe)]
    chance = random.Random(seed)
    log, hits = config.run / "log.jsonl", 0
    while True:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        size = log.stat().st_size if log.exists() else 0
        while process.poll() is None and not (log.exists() and log.stat().st_size > size):
            time.sleep(0.005)
        if hits < kills:
            time.sleep(chance.uniform(0, 0.15))
            if process.poll() is None:
                process.kill()
                hits += 1
        errors = process.communicate()[1]
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, errors
            return hits


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(train_config: TrainConfig, kills: int) -> None:
    """Over many epochs' ends, with a checkpoint at every other step, so that kills hit the writing of them too."""
    config = replace(train_config, steps=100 * kills, checkpoint_every=2, validate_every=50)
    train(config)
    killed = replace(config, run=config.run.with_name("killed"))
    assert kill_and_resume(killed, kills, seed=kills) == kills
    assert_bit_equal(weights(config.run), weights(killed.run))
    assert [r["loss"] for r in read_log(config.run) if "loss" in r] == [
        r["loss"] for r in read_log(killed.run) if "loss" in r
    ]


def test_the_carried_state_matters(train_config: TrainConfig) -> None:
    """A run resumed with another state goes another way, so that the test above can see whether it is kept."""
    config = replace(train_config, model=READS_ON, batch_size=3, steps=6, checkpoint_every=4)
    train(config)
    (first, _) = sorted_checkpoints(config.run)
    state = load_file(first / "carried.safetensors")
    assert {name: tuple(value.shape) for name, value in state.items()} == {"memory": (3, 2, 8, 16), "filled": (3,)}
    assert state["filled"].tolist() == [8, 8, 8]
    save_file({name: 0 * value for name, value in state.items()}, first / "carried.safetensors")
    with pytest.raises(UserError, match="its bytes are not those that were saved"):
        train(replace(config, run=config.run.with_name("other"), resume=str(first)))
    about = json.loads((first / "state.json").read_text())
    (first / "state.json").write_text(json.dumps({name: about[name] for name in about.keys() - {"sums"}}))
    train(replace(config, run=config.run.with_name("other"), resume=str(first)))
    assert not torch.equal(weights(config.run)["table.weight"], weights(config.run.with_name("other"))["table.weight"])


EACH = """
import sys
from logpast.cli import run
for recipe in sys.argv[1:]:
    run(["train", "--config", recipe])
"""


def test_two_processes_equal_one(train_config: TrainConfig, tmp_path: Path) -> None:
    """The same two for each system: they take longer to start than to train."""
    config = replace(train_config, run=tmp_path / "log_memory", steps=6, micro_batch_size=3)
    local = TimeLocalConfig(window=8, layers=1, heads=2, width=16, slots=4)
    rivals = {"compressive": COMPRESSES, "time_local": local}
    configs = [config] + [
        replace(config, run=tmp_path / name, model=model, batch_size=4, micro_batch_size=None)
        for name, model in rivals.items()
    ]
    recipes = list[str]()
    for each in configs:
        train(each)
        recipes.append(str(tmp_path / f"{each.run.name}.yaml"))
        double = replace(each, run=in_two(each), devices=2)
        Path(recipes[-1]).write_text(yaml.safe_dump(double.to_dict()))
    (tmp_path / "each.py").write_text(EACH)
    command = [sys.executable, str(tmp_path / "each.py"), *recipes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for each in configs:
        assert_two_equal_one(each, carries=each is not config)


def in_two(config: TrainConfig) -> Path:
    return config.run.with_name(f"{config.run.name} in two")


def assert_two_equal_one(config: TrainConfig, carries: bool) -> None:
    """What reads on has one stream to validate on, so the second process scores nothing there."""
    double = replace(config, run=in_two(config))
    one, two = weights(config.run), weights(double.run)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=2e-6)
    losses = [[r["loss"] for r in read_log(run) if "loss" in r] for run in (config.run, double.run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    best = [find_checkpoint(run).state["best"]["nats_per_token"] for run in (config.run, double.run)]
    assert best[1] == pytest.approx(best[0], rel=1e-5)
    if carries:
        states = [load_file(sorted_checkpoints(run)[-1] / "carried.safetensors") for run in (config.run, double.run)]
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-5)


def test_one_run_at_a_time_in_a_folder(train_config: TrainConfig, tmp_path: Path) -> None:
    """Of several processes only one knows that the folder is taken, and all must end."""
    train(replace(train_config, steps=2))
    again = replace(train_config, steps=2, resume="auto")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(replace(again, devices=2).to_dict()))
    command = [sys.executable, "-m", "logpast", "train", "--config", str(recipe)]
    before = (train_config.run / "log.jsonl").read_bytes()
    with files.exclusive_lock(train_config.run):
        with pytest.raises(UserError, match=f"another command is at work in {train_config.run} .process {os.getpid()}"):
            train(again)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"another command is at work in {train_config.run} (process {os.getpid()}" in done.stderr
    assert "Traceback" not in done.stderr
    assert (train_config.run / "log.jsonl").read_bytes() == before


def test_what_is_timed(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a step takes a second and a validation a hundred: only steps count to the speed, all that
    was done before to the time of a run that goes on."""
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


def test_of_equals_the_first_is_best(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "score", lambda *arguments, **settings: np.ones(3))
    best = train(replace(train_config, steps=6, validate_every=2))["best"]
    assert best == {"step": 2, "nats_per_token": 1.0, "ppl_token": pytest.approx(math.e)}


def test_validation_may_be_on_a_part(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def scored(*arguments: Any, **settings: Any) -> Any:
        lengths.append(len(found := score(*arguments, **settings)))
        return found

    monkeypatch.setattr(loop, "score", scored)
    part = replace(train_config.data, validation_tokens=20)
    train(replace(train_config, steps=1, data=part))
    train(replace(train_config, steps=1, run=train_config.run.with_name("all")))
    assert 20 <= lengths[0] < 40 < lengths[1]


def test_tensorboard_shows_each_step_once(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=6, checkpoint_every=4, validate_every=6, log_every=1, tensorboard=True)
    train(config)
    shutil.rmtree(sorted_checkpoints(config.run)[-1])
    train(replace(config, resume="auto"))
    shown = EventAccumulator(str(config.run / "tensorboard")).Reload()
    assert [point.step for point in shown.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_lock_alone_is_no_run(train_config: TrainConfig) -> None:
    train_config.run.mkdir(parents=True)
    (train_config.run / files.LOCK).touch()
    assert train(replace(train_config, steps=2))["step"] == 2


def test_the_compression_is_taught(train_config: TrainConfig) -> None:
    """By its own loss alone: no other reaches it."""
    model = COMPRESSES
    optimizer = replace(train_config.optimizer, weight_decay=0)
    config = replace(train_config, model=model, optimizer=optimizer, batch_size=3, steps=4, validate_every=4)
    torch.manual_seed(config.seed)
    first = build(model, open_tokens(config.data.train, None).tokenizer.size).state_dict()
    train(config)
    last = weights(config.run)
    kernels = [name for name in last if name.endswith("kernel.weight")]
    assert kernels
    assert all(not torch.equal(first[name], last[name]) for name in kernels)


def test_weights_that_an_infinite_gradient_made_are_not_saved(train_config: TrainConfig) -> None:
    run = loop.Run(train_config)
    run.step(next(run.batches_to_come()))
    run.norm = torch.tensor(math.inf)
    for act in (run.report, run.save):
        with pytest.raises(Diverged, match="the gradient norm became inf by step 1"):
            act()
    assert not sorted_checkpoints(train_config.run)


def test_what_a_kill_left_of_the_first_file_is_no_run(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=2, resume="auto")
    config.run.mkdir()
    (config.run / ".config.yaml.01234567.unfinished").write_text("run")
    train(config)
    assert not list(config.run.glob(".*"))


def test_existing_run_is_refused(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=2)
    train(config)
    before = weights(config.run)
    with pytest.raises(UserError, match="exists already"):
        train(config)
    assert_bit_equal(before, weights(config.run))


def test_a_folder_without_a_checkpoint_is_named_for_what_it_is(train_config: TrainConfig, tmp_path: Path) -> None:
    """As training leaves it that diverged before it saved, and is to be tried again with other settings."""
    wild = replace(train_config, optimizer=replace(train_config.optimizer, learning_rate=1e30, warmup_steps=0))
    with pytest.raises(Diverged):
        train(replace(wild, checkpoint_every=1000, validate_every=1000))
    for resume in (False, "auto"):
        with pytest.raises(UserError, match="beginning of a run with other settings, and no checkpoint; delete it, or"):
            train(replace(train_config, resume=resume))
    with pytest.raises(UserError, match="exists already; go on with it by --resume auto, or give another"):
        train(wild)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.yaml").write_text("model: gpt2\n")
    for resume in (False, "auto"):
        with pytest.raises(
            UserError, match="exists already and holds something else than a run; work in another folder"
        ):
            train(replace(train_config, run=tmp_path / "notes", resume=resume))


def test_a_store_brings_its_tokenizer_whatever_the_recipe_says(train_config: TrainConfig, store: TokenStore) -> None:
    data = replace(train_config.data, tokenizer="bpe-4096")
    train(replace(train_config, steps=2, data=data))
    assert find_checkpoint(train_config.run).config.data.tokenizer == store.tokenizer.name == "bpe-300"
    for tokenizer in ("bpe-4096", "gpt2", None):
        train(replace(train_config, steps=2, data=replace(data, tokenizer=tokenizer), resume="auto"))


def test_resuming_a_finished_run_changes_nothing(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=3)
    train(config)
    before = sorted(file.stat().st_mtime_ns for file in config.run.rglob("*.safetensors"))
    train(replace(config, resume="auto"))
    assert sorted(file.stat().st_mtime_ns for file in config.run.rglob("*.safetensors")) == before


@pytest.mark.parametrize("system", ["log_memory", "transformer_xl"])
def test_weights_alone_are_enough_for_a_finished_run(train_config: TrainConfig, system: str) -> None:
    if system == "transformer_xl":
        train_config = replace(train_config, model=TransformerXLConfig(window=8, layers=1, heads=2, width=16, memory=8))
    config = replace(train_config, steps=4, checkpoint_every=2, validate_every=4, keep=9)
    train(config)
    before = {folder.name: open_checkpoint(folder).weights() for folder in sorted_checkpoints(config.run)}
    first, last = sorted_checkpoints(config.run)
    (first / "model.safetensors").write_bytes(b"")
    drop_optimizer_state(config.run)
    assert (first / "optimizer.safetensors").exists()  # it is damaged, and left as it is
    assert not [*last.glob("optimizer*"), *last.glob("carried*")]
    kept = find_checkpoint(config.run)
    assert all(torch.equal(weight, before[last.name][name]) for name, weight in kept.weights().items())
    kept.load_model()
    assert train(replace(config, resume="auto"))["step"] == 4
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps(state | {"step": 3}))
    with pytest.raises(UserError, match="weights alone, to score or sample; to train, give another --run folder"):
        train(replace(config, resume="auto"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed=0, now it is 1;"),
        ({"batch_size": 8}, "batch_size=16, now it is 8;"),
        ({"steps": 31}, "steps=5, now it is 31;"),
        ({"optimizer": OptimizerConfig(final_learning_rate=3e-4)}, r"optimizer.learning_rate=0.003, now it is 0.0006;"),
        ({"model": RecentConfig(slots=17)}, "model.system=log_memory, now it is recent;"),
        ({"precision": "64-true"}, "precision=32-true, now it is 64-true;"),
    ],
)
def test_resuming_with_another_recipe_is_refused(
    train_config: TrainConfig, change: dict[str, object], named: str
) -> None:
    config = replace(train_config, steps=5)
    train(config)
    with pytest.raises(UserError, match=f"it was run with {named} change that back, or work in another folder"):
        train(replace(config, resume="auto", **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["train", "validation"])
def test_resuming_on_other_data_is_refused(
    part: str, train_config: TrainConfig, tmp_path: Path, store: TokenStore
) -> None:
    """Nor may losses on two texts be compared to find the best weights."""
    copy = tmp_path / "store"
    shutil.copytree(store.path, copy)
    config = replace(train_config, steps=2, data=replace(train_config.data, **{part: str(copy)}))
    train(config)
    shutil.rmtree(copy)
    (tmp_path / "other.txt").write_text("something else entirely, and long enough for a window of eight tokens " * 9)
    prepare([str(tmp_path / "other.txt")], copy, tokenizer=str(store.path))
    used = {"train": "trained", "validation": "validated"}[part]
    with pytest.raises(UserError, match=f"holds other tokens than it was {used} on"):
        train(replace(config, resume="auto"))


def test_a_folder_that_cannot_be_written_is_told(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*where: Any) -> Any:
        if where:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(loop, "Log", locked)
    with pytest.raises(UserError, match=r"cannot write .*run: Permission denied; make room or give another --run"):
        train(train_config)


def test_resume_from_a_path_goes_on_elsewhere(train_config: TrainConfig) -> None:
    config = replace(train_config, keep=10)
    train(config)
    middle = sorted_checkpoints(config.run)[2]
    with pytest.raises(UserError, match="later part"):
        train(replace(config, resume=str(middle)))
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(middle))
    train(elsewhere)
    assert_bit_equal(weights(config.run), weights(elsewhere.run))


@pytest.mark.parametrize("best", [False, True], ids=["nothing", "its best"])
def test_resuming_elsewhere_can_be_killed_before_it_saves(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, best: bool
) -> None:
    text = train_config.data.train
    config = replace(train_config, keep=10, data=DataConfig(train=text, validation=text if best else None))
    train(config)
    middle = sorted_checkpoints(config.run)[2]
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(middle))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", Mock(side_effect=RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train(elsewhere)
    assert len(sorted_checkpoints(elsewhere.run)) == best
    train(elsewhere)
    assert_bit_equal(weights(config.run), weights(elsewhere.run))


def test_an_error_that_is_kept_keeps_no_lock(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=8, keep=2)
    train(config)
    shutil.rmtree(sorted_checkpoints(config.run)[-1])
    log = config.run / "log.jsonl"
    sound = log.read_text()
    log.write_text("damaged\n" + sound)
    with pytest.raises(UserError) as error:
        train(replace(config, resume="auto"))
    log.write_text(sound)
    train(replace(config, resume="auto"))
    assert "log.jsonl" in str(error.value)


def test_infinity_stands_in_the_log_as_json_has_it(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(1, ppl=math.inf, loss=800.0)
    log.close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "ppl": null, "loss": 800.0}\n'


@pytest.mark.parametrize("name", ["train", "validation", "tokenizer"])
def test_a_name_that_is_empty_is_told(name: str) -> None:
    with pytest.raises(UserError, match=f"data.{name} is empty; name one, or leave it out"):
        DataConfig(**({"train": "a.txt"} | {name: ""}))  # type: ignore[arg-type]


def test_resuming_never_touches_another_run(train_config: TrainConfig, tmp_path: Path) -> None:
    config = replace(train_config, steps=8)
    other = replace(config, run=tmp_path / "other", seed=5, steps=4)
    for each in (config, other):
        train(each)
    before = {file: file.read_bytes() for file in other.run.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match="another run"):
        train(replace(config, run=other.run, resume=str(find_checkpoint(config.run).path)))
    assert {file: file.read_bytes() for file in other.run.rglob("*") if file.is_file()} == before
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "config.yaml").write_text("mine: true")
    with pytest.raises(UserError, match="something else"):
        train(replace(config, run=notes, resume="auto"))
    assert (notes / "config.yaml").read_text() == "mine: true"


def test_the_best_comes_along(train_config: TrainConfig) -> None:
    """A model that gets worse, resumed elsewhere after its best: the best is still found there, and remembered."""
    config = replace(train_config, optimizer=RISING, validate_every=4, keep=20)
    best = train(config)["best"]
    after = next(c for c in sorted_checkpoints(config.run) if int(c.name[5:]) > best["step"])
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(after), keep=1)
    assert train(elsewhere)["best"] == best
    assert find_checkpoint(elsewhere.run).step == best["step"]


def test_a_lost_best_is_told(train_config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(train_config, optimizer=RISING, validate_every=4)
    best = train(config)["best"]["step"]
    shutil.rmtree(config.run / "checkpoints" / f"step-{best:08d}")
    assert find_checkpoint(config.run).step == 30
    assert "best checkpoint is gone" in capsys.readouterr().err


def test_double_precision_is_kept(train_config: TrainConfig) -> None:
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


def test_first_steps_are_adamw_by_hand(train_config: TrainConfig, store: TokenStore) -> None:
    """Three steps of the run against PyTorch's own AdamW, clipping and all, on the same batches."""
    how = OptimizerConfig(learning_rate=0.01, final_learning_rate=0.01, warmup_steps=0, beta2=0.5, clip=0.05)
    config = replace(train_config, steps=3, optimizer=how)
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
        assert norm > 0.05  # or clipping would not show
        optimizer.step()
        optimizer.zero_grad()
    ours = weights(config.run)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)


def test_validation_is_on_the_validation_text(train_config: TrainConfig, tmp_path: Path, store: TokenStore) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Something else altogether, which the training text has not got. " * 20)
    config = replace(train_config, data=replace(train_config.data, validation=str(text)), steps=10)
    found = train(config)["best"]["nats_per_token"]
    assert found == pytest.approx(math.log(evaluate(config.run, str(text))["ppl_token"]), rel=1e-6)
    assert found != pytest.approx(math.log(evaluate(config.run, str(store.path))["ppl_token"]), rel=1e-3)


def test_streams_reach_training_and_validation(train_config: TrainConfig) -> None:
    """One stream per document: other windows, other losses, an exact resume; eval takes the same streams unasked."""
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


def test_swapped_tokenizer_is_noticed(train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
    train(replace(train_config, steps=4))
    found = find_checkpoint(train_config.run)
    prepare([str(books / "1.txt")], tmp_path / "other", tokenizer="bpe-299")
    swapped = (tmp_path / "other" / "tokenizer.json").read_bytes()
    (found.path / "tokenizer.json").write_bytes(swapped)
    state = json.loads((found.path / "state.json").read_text())
    state["sizes"]["tokenizer.json"] = len(swapped)
    (found.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="not the one that the model was trained with"):
        find_checkpoint(train_config.run).load_tokenizer()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "config.yaml"])
def test_truncated_checkpoint_falls_back_to_the_one_before(
    train_config: TrainConfig, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(train_config, steps=8, validate_every=100, data=replace(train_config.data, validation=None))
    train(config)
    whole = weights(config.run)
    earlier, last = sorted_checkpoints(config.run)
    content = (last / file).read_bytes()
    (last / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=str(last)):
        open_checkpoint(last)
    assert find_checkpoint(config.run, "latest").path == earlier
    assert "using" in capsys.readouterr().err
    train(replace(config, resume="auto"))
    assert_bit_equal(whole, weights(config.run))
    assert find_checkpoint(config.run, "latest").path == last


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_bytes_that_were_not_saved_are_told(train_config: TrainConfig, file: str) -> None:
    config = replace(train_config, steps=2)
    train(config)
    (folder,) = sorted_checkpoints(config.run)
    content = bytearray((folder / file).read_bytes())
    content[-8:] = bytes(8)
    (folder / file).write_bytes(content)
    with pytest.raises(
        UserError, match=rf"{file} cannot be read \(its bytes are not those that were saved; if that is meant, .*\)"
    ):
        open_checkpoint(folder)._load(file)


@pytest.mark.parametrize(
    "state", [{"sizes": {}}, {"sizes": {}, "step": 1}, {"sizes": {}, "step": None, "data": {"tokenizer": ""}}]
)
def test_a_state_that_lacks_what_is_wanted(train_config: TrainConfig, state: dict[str, Any]) -> None:
    train(replace(train_config, steps=1))
    (folder,) = sorted_checkpoints(train_config.run)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        open_checkpoint(folder)


def test_interrupt_saves_and_stops(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    config = replace(train_config, checkpoint_every=1000, validate_every=1000)
    original = loop.learning_rate

    def interrupt(*arguments: object) -> float:
        if arguments[1] == 6:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "learning_rate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert find_checkpoint(config.run, "latest").step == 7
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(loop, "learning_rate", original)
    train(replace(config, resume="auto"))
    undisturbed = replace(config, run=config.run.with_name("undisturbed"))
    train(undisturbed)
    assert_bit_equal(weights(undisturbed.run), weights(config.run))


def test_a_loss_that_is_not_a_number_is_never_saved(train_config: TrainConfig) -> None:
    wild = OptimizerConfig(learning_rate=1e30, warmup_steps=0, clip=0)
    config = replace(train_config, optimizer=wild, log_every=8, validate_every=1, checkpoint_every=1)
    with pytest.raises(UserError, match="learning_rate"):
        train(config)
    for folder in sorted_checkpoints(config.run):
        state = open_checkpoint(folder).state
        assert state["best"] is None or math.isfinite(state["best"]["nats_per_token"])


def test_text_shorter_than_a_window_is_refused(train_config: TrainConfig, tmp_path: Path, store: TokenStore) -> None:
    (tmp_path / "short.txt").write_text("Hi.")
    config = replace(train_config, data=DataConfig(train=str(tmp_path / "short.txt"), tokenizer=str(store.path)))
    with pytest.raises(UserError, match="less than one window"):
        train(config)
    assert not config.run.exists()


def test_steps_or_epochs(train_config: TrainConfig) -> None:
    assert replace(train_config, steps=None, epochs=2.5).total_steps(160) == 25
    with pytest.raises(UserError, match=r"epochs=0.01 of this text come to 0 steps"):
        replace(train_config, steps=None, epochs=0.01).total_steps(160)
    for wrong in ({"epochs": 1.0}, {"steps": None}, {"steps": 0}):
        with pytest.raises(UserError, match="steps"):
            replace(train_config, **wrong)  # type: ignore[arg-type]
    for epochs in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="epochs must be above 0"):
            replace(train_config, steps=None, epochs=epochs)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"clip": -1.0},
        {"weight_decay": -0.1},
        {"warmup_steps": -5},
        {"beta1": 2.0},
        {"beta2": 1.0},
    ],
)
def test_illegal_optimizers_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        OptimizerConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"devices": 3}, {"micro_batch_size": 0}, {"seed": -1}, {"keep": 0}]
)
def test_illegal_settings_are_refused_by_name(train_config: TrainConfig, wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        replace(train_config, **wrong)  # type: ignore[arg-type]


def test_schedule() -> None:
    config = OptimizerConfig()
    rates = [learning_rate(config, step, 10_000) for step in range(10_000)]
    assert rates[0] == pytest.approx(6e-4 / 700)
    assert max(rates) == rates[699] == rates[700] == 6e-4
    assert rates[-1] == pytest.approx(6e-5)
    assert rates[(700 + 9_999) // 2] == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-3)
    few = replace(config, warmup_steps=4)
    assert [learning_rate(few, step, 8) for step in (3, 4, 7)] == pytest.approx([6e-4, 6e-4, 6e-5])


def test_decay_is_on_matrices_only() -> None:
    model = build(RecentConfig(slots=3, window=4, layers=1, heads=1, width=8, vocabulary=64))
    decayed, spared = build_optimizer(model, OptimizerConfig(), torch.device("cpu")).param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0
    assert all(p.ndim == 2 for p in decayed["params"])
    assert all(p.ndim == 1 for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_config_round_trip(train_config: TrainConfig) -> None:
    assert TrainConfig.from_dict(json.loads(json.dumps(train_config.to_dict()))) == train_config


def test_the_last_record_is_found_from_the_end(tmp_path: Path) -> None:
    assert last_record(tmp_path) == {}
    of_training = {"epoch": 1.5, "tokens_per_second": 2.0}
    lines = [json.dumps({"step": step, "loss": 1 / step} | of_training) for step in range(1, 500)]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"step": 499, "validation_loss": 2}', '{"step": 500, "lo']))
    assert last_record(tmp_path) == {"step": 499, "loss": 1 / 499} | of_training
    assert len(read_log(tmp_path)) == 500  # all but what a kill has cut off
    (tmp_path / "log.jsonl").write_text("\n".join([*lines[:9], '{"step": 10, "lo', *lines[10:]]))
    with pytest.raises(UserError, match=r"log.jsonl, line 10 is damaged: .*; mend or remove it"):
        read_log(tmp_path)
    for damaged in (b"null", b'{"stp": 3}', b'{"step": "x"}', b"\xff\xfe"):
        (tmp_path / "log.jsonl").write_bytes(b"\n".join([lines[0].encode(), damaged, lines[2].encode()]))
        with pytest.raises(UserError, match=r"line 2 is damaged: .*; mend or remove it"):
            read_log(tmp_path)


def test_on_a_cpu_batches_are_made_by_the_thread_that_trains(train_config: TrainConfig) -> None:
    """A second one's operations would bring threads of their own: more than cores, so that all go to sleep in turn."""
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
def test_a_carried_state_is_not_rounded(train_config: TrainConfig, system: str) -> None:
    """Lightning casts inputs to the half precision of products; a state would lose digits with every step."""
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

            def look(_: object, given: tuple[Any, ...], seen: list[State] = seen) -> None:
                seen.append({name: value.clone() for name, value in given[-1].items()})

            handle = run.bare.register_forward_pre_hook(look)
            run.step(next(batches))
            handle.remove()
            (given,) = seen
            assert all(torch.equal(given[name], value) for name, value in before.items())
        both.append(float(run.loss))
    assert both[1] == pytest.approx(both[0], rel=2e-2)
