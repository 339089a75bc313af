"""The run folder: when training starts, resumes or is refused, and what a resumed run must share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.models import RecentConfig
from logpast.training import loop
from logpast.training.checkpoint import checkpoint_path, find_checkpoint, sorted_checkpoints
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train
from logpast.training.optimizer import learning_rate
from logpast.training.resume import DECISIONS, Action, Contents, Request, find_resumption
from logpast.util import files
from logpast.util.errors import Diverged, UserError
from training.helpers import WORSENING, assert_bit_equal, weights


def write_config(config: TrainConfig) -> None:
    config.run.mkdir(parents=True)
    (config.run / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))


def write_notes(config: TrainConfig) -> None:
    config.run.mkdir(parents=True)
    (config.run / "config.yaml").write_text("model: gpt2\n")


def write_leftovers(config: TrainConfig) -> None:
    config.run.mkdir(parents=True)
    (config.run / files.LOCK).touch()
    (config.run / ".config.yaml.01234567.unfinished").write_text("run")


FOLDERS: dict[str, Callable[[TrainConfig], object]] = {
    "no folder": lambda config: None,
    "leftovers of a kill": write_leftovers,
    "this run, started": write_config,
    "another run, started": lambda config: write_config(replace(config, seed=5)),
    "a run with checkpoints": lambda config: train(replace(config, resume=False)),
    "not a run": write_notes,
}
OUTCOMES = {  # "--resume": what happens in each of FOLDERS
    "false": ["start", "start", "--resume auto", "other settings", "--resume auto", "not a run"],
    "auto": ["start", "start", "start", "other settings", "resume", "not a run"],
    "best": ["no checkpoint", "no checkpoint", "no checkpoint", "other settings", "resume", "not a run"],
    "path": ["resume", "resume", "resume", "another run", "another run", "another run"],
}


@pytest.mark.parametrize(
    ("resume", "folder", "outcome"),
    [(resume, *pair) for resume, found in OUTCOMES.items() for pair in zip(FOLDERS, found, strict=True)],
)
def test_what_happens_in_each_folder(
    train_config: TrainConfig, store: TokenStore, resume: str, folder: str, outcome: str
) -> None:
    config = replace(train_config, steps=2, checkpoint_every=1, resume={"false": False}.get(resume, resume))
    if resume == "path":
        source = replace(config, run=config.run.with_name("source"), resume=False)
        train(source)
        config = replace(config, resume=str(sorted_checkpoints(source.run)[0]))  # the folder may have a later one
    FOLDERS[folder](config)
    if outcome == "start":
        assert find_resumption(config, store, store) is None
    elif outcome == "resume":
        found = find_resumption(config, store, store)
        assert found is not None
        assert found.path == (Path(str(config.resume)) if resume == "path" else sorted_checkpoints(config.run)[-1])
    else:
        with pytest.raises(UserError, match=f"{config.run} .*{outcome}"):
            find_resumption(config, store, store)


def test_every_case_has_a_decision() -> None:
    for request, decisions in DECISIONS.items():
        possible = set(Contents) if request is Request.PATH else set(Contents) - {Contents.SOURCE}
        assert decisions.keys() == possible
        assert all(isinstance(d, Action) or "{run}" in d for d in decisions.values())
    assert DECISIONS.keys() == set(Request)


def test_a_file_is_not_a_run_folder(train_config: TrainConfig) -> None:
    train_config.run.write_text("precious")
    with pytest.raises(UserError, match=f"{train_config.run} is a file"):
        train(train_config)
    assert train_config.run.read_text() == "precious"


def test_an_existing_run_is_refused_and_left_as_it_is(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=2)
    train(config)
    before = weights(config.run)
    with pytest.raises(UserError, match=str(config.run)):
        train(config)
    assert_bit_equal(before, weights(config.run))


def test_retrying_a_diverged_run_with_other_settings_is_refused(train_config: TrainConfig) -> None:
    """A run that diverges early leaves a folder without a checkpoint."""
    wild = replace(train_config, optimizer=replace(train_config.optimizer, learning_rate=1e30, warmup_steps=0))
    with pytest.raises(Diverged):
        train(replace(wild, checkpoint_every=1000, validate_every=1000))
    for resume in (False, "auto"):
        with pytest.raises(UserError, match=r"other settings.*delete it"):
            train(replace(train_config, resume=resume))
    with pytest.raises(UserError, match="--resume auto"):
        train(wild)


def test_leftovers_of_a_killed_run_are_removed(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=2, resume="auto")
    write_leftovers(config)
    assert train(config)["step"] == 2
    assert not list(config.run.glob(".*"))


def test_one_run_at_a_time_in_a_folder(train_config: TrainConfig, tmp_path: Path) -> None:
    """With several processes only the first knows that the folder is locked, and all must end."""
    train(replace(train_config, steps=2))
    again = replace(train_config, steps=2, resume="auto")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(replace(again, devices=2).to_dict()))
    command = [sys.executable, "-m", "logpast", "train", "--config", str(recipe)]
    before = (train_config.run / "log.jsonl").read_bytes()
    with files.exclusive_lock(train_config.run):
        with pytest.raises(UserError, match=f"{train_config.run} .*{os.getpid()}"):
            train(again)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert str(train_config.run) in done.stderr
    assert str(os.getpid()) in done.stderr
    assert "Traceback" not in done.stderr
    assert (train_config.run / "log.jsonl").read_bytes() == before


def test_resuming_a_finished_run_changes_nothing(train_config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(train_config, steps=3)
    train(config)
    before = sorted(file.stat().st_mtime_ns for file in config.run.rglob("*.safetensors"))
    capsys.readouterr()
    train(replace(config, resume="auto"))
    assert sorted(file.stat().st_mtime_ns for file in config.run.rglob("*.safetensors")) == before
    assert "already finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"seed": 1}, "seed=0, now it is 1"),
        ({"batch_size": 8}, "batch_size=16, now it is 8"),
        ({"freeze": ["table"]}, "freeze=None, now it is .'table'"),
        ({"init_from": "runs/a"}, "init_from=None, now it is runs/a"),
        ({"optimizer": OptimizerConfig(final_learning_rate=3e-4)}, "optimizer.learning_rate=0.003, now it is 0.0006"),
        ({"model": RecentConfig(slots=17)}, "model.system=log_memory, now it is recent"),
        ({"precision": "64-true"}, "precision=32-true, now it is 64-true"),
    ],
)
def test_resuming_with_other_settings_is_refused(
    train_config: TrainConfig, change: dict[str, object], setting: str
) -> None:
    config = replace(train_config, steps=5)
    train(config)
    with pytest.raises(UserError, match=setting):
        train(replace(config, resume="auto", **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["train", "validation"])
def test_resuming_on_other_text_is_refused(
    part: str, train_config: TrainConfig, tmp_path: Path, store: TokenStore
) -> None:
    """Also on another validation text: losses on two texts cannot be compared to find the best checkpoint."""
    copy = tmp_path / "store"
    shutil.copytree(store.path, copy)
    config = replace(train_config, steps=2, data=replace(train_config.data, **{part: str(copy)}))
    train(config)
    shutil.rmtree(copy)
    (tmp_path / "other.txt").write_text("something else entirely, and long enough for a window of eight tokens " * 9)
    prepare([str(tmp_path / "other.txt")], copy, tokenizer=str(store.path))
    with pytest.raises(UserError, match={"train": "trained on", "validation": "validated on"}[part]):
        train(replace(config, resume="auto"))


def test_resuming_from_a_path_in_another_folder(train_config: TrainConfig) -> None:
    config = replace(train_config, keep=10, steps=12)
    train(config)
    middle = sorted_checkpoints(config.run)[2]
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(middle))
    train(elsewhere)
    assert_bit_equal(weights(config.run), weights(elsewhere.run))


@pytest.mark.parametrize("resume", ["best", "path"])
def test_resuming_from_an_earlier_checkpoint_keeps_the_later_ones_elsewhere(
    train_config: TrainConfig, resume: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By path twice: the second time the names are taken."""
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, optimizer=WORSENING, steps=10, validate_every=2, checkpoint_every=1, data=data)
    best = train(config)["best"]["step"]
    earlier = checkpoint_path(config.run, best)
    *_, before_last, last = sorted_checkpoints(config.run)
    assert earlier < before_last
    whole, kept = weights(config.run), (last / "model.safetensors").read_bytes()
    for name in [last.name, f"{last.name}-2"][: 1 if resume == "best" else 2]:
        train(replace(config, resume="best" if resume == "best" else str(earlier)))
        assert_bit_equal(whole, weights(config.run))
        assert (config.run / "abandoned" / name / "model.safetensors").read_bytes() == kept
    assert f"{config.run / 'abandoned'}: {before_last.name}, {last.name}" in capsys.readouterr().err
    steps = [record["step"] for record in read_log(config.run) if "loss" in record]
    assert steps == list(range(1, 11))


def test_extending_a_run(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice, by steps and by epochs, and again in another folder with an interruption: equal to the bit."""
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, steps=4, checkpoint_every=2, data=data, keep=9)
    state = train(config)
    windows = 4 * config.batch_size / read_log(config.run)[-2]["epoch"]
    longer = replace(config, steps=8, resume="auto")
    longest = replace(longer, steps=None, epochs=10 * config.batch_size / windows)
    train(longer)
    assert yaml.safe_load((config.run / "config.yaml").read_text())["steps"] == 8
    rates = [learning_rate(config.optimizer, step, total) for step, total in ((3, 4), (4, 8))]
    assert (
        "8 steps instead of 4: the learning rate goes from {:.3g} to {:.3g}".format(*rates) in capsys.readouterr().err
    )
    whole = train(longest)
    assert whole["extended"] == [{"step": 4, "total_steps": 4}, {"step": 8, "total_steps": 8}]
    assert "extended" not in state
    records = [record for record in read_log(config.run) if "loss" in record]
    totals = [4] * 4 + [8] * 4 + [10] * 2
    expected = [learning_rate(config.optimizer, step, total) for step, total in enumerate(totals)]
    assert [record["learning_rate"] for record in records] == expected

    other = config.run.with_name("other")
    train(replace(config, run=other))
    elsewhere = replace(longer, run=config.run.with_name("elsewhere"), resume=str(other))
    for crash_at in (5, 7):  # before and after the first checkpoint
        with monkeypatch.context() as patch:
            rate = Mock(side_effect=lambda o, s, t, at=crash_at: 1 / (s != at) and learning_rate(o, s, t))
            patch.setattr(loop, "learning_rate", rate)
            with pytest.raises(ZeroDivisionError):
                train(elsewhere if crash_at == 5 else replace(elsewhere, resume="auto"))
        if crash_at == 5:
            shutil.rmtree(other)
    train(replace(elsewhere, resume="auto"))
    again = train(replace(longest, run=elsewhere.run))
    assert again["extended"] == whole["extended"]
    assert_bit_equal(weights(config.run), weights(elsewhere.run))


def test_fewer_steps_than_trained_are_refused(train_config: TrainConfig) -> None:
    train(replace(train_config, steps=5))
    before = {file: file.read_bytes() for file in train_config.run.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=f"{train_config.run}.*trained for 5 of 5 steps, now 4"):
        train(replace(train_config, steps=4, resume="auto"))
    assert {file: file.read_bytes() for file in train_config.run.rglob("*") if file.is_file()} == before


def test_a_best_checkpoint_that_is_gone_is_replaced_by_a_later_one(
    train_config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single checkpoint of a run was moved, its best one is not there."""
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, optimizer=WORSENING, steps=10, validate_every=2, checkpoint_every=1, data=data)
    best = train(config)["best"]["step"]
    moved = tmp_path / "moved" / "checkpoints" / "step-00000009"
    shutil.copytree(checkpoint_path(config.run, 9), moved)
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(moved))
    assert train(elsewhere)["best"]["step"] == 10 > best
    assert f"of step {best}, is missing" in capsys.readouterr().err
    assert find_checkpoint(elsewhere.run).step == 10


def test_resuming_from_the_path_of_its_own_latest_checkpoint(train_config: TrainConfig) -> None:
    config = replace(train_config, keep=10, steps=10)
    train(config)
    whole = weights(config.run)
    shutil.rmtree(sorted_checkpoints(config.run)[-1])
    train(replace(config, resume=str(sorted_checkpoints(config.run)[-1])))
    assert_bit_equal(whole, weights(config.run))


@pytest.mark.parametrize("validated", [False, True], ids=["without a best checkpoint", "with a best checkpoint"])
def test_resuming_in_another_folder_can_be_killed_before_it_saves(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, validated: bool
) -> None:
    """The best checkpoint has been copied by then, but the second attempt is still accepted."""
    text = train_config.data.train
    data = DataConfig(train=text, validation=text if validated else None)
    config = replace(train_config, keep=10, steps=13, data=data)
    train(config)
    middle = sorted_checkpoints(config.run)[2]
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(middle))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", Mock(side_effect=RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train(elsewhere)
    assert len(sorted_checkpoints(elsewhere.run)) == validated
    train(elsewhere)
    assert_bit_equal(weights(config.run), weights(elsewhere.run))


def test_resuming_never_changes_another_run(train_config: TrainConfig, tmp_path: Path) -> None:
    config = replace(train_config, steps=8)
    other = replace(config, run=tmp_path / "other", seed=5, steps=4)
    for each in (config, other):
        train(each)
    before = {file: file.read_bytes() for file in other.run.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=f"{other.run} holds another run"):
        train(replace(config, run=other.run, resume=str(find_checkpoint(config.run).path)))
    assert {file: file.read_bytes() for file in other.run.rglob("*") if file.is_file()} == before
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "config.yaml").write_text("mine: true")
    with pytest.raises(UserError, match=f"{notes} .*not a run folder"):
        train(replace(config, run=notes, resume="auto"))
    assert (notes / "config.yaml").read_text() == "mine: true"


def test_the_best_checkpoint_is_copied_when_resuming_in_another_folder(train_config: TrainConfig) -> None:
    """Of a model that gets worse, resumed after its best checkpoint."""
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, optimizer=WORSENING, validate_every=4, keep=20, steps=20, data=data)
    best = train(config)["best"]
    after = next(c for c in sorted_checkpoints(config.run) if int(c.name[5:]) > best["step"])
    elsewhere = replace(config, run=config.run.with_name("elsewhere"), resume=str(after), keep=1)
    assert train(elsewhere)["best"] == best
    assert find_checkpoint(elsewhere.run).step == best["step"]


def test_a_folder_in_which_another_process_trains_is_not_read(train_config: TrainConfig) -> None:
    """Its checkpoints come and go."""
    train(replace(train_config, steps=4))
    (sorted_checkpoints(train_config.run)[-1] / "model.safetensors").unlink()
    with (
        files.exclusive_lock(train_config.run),
        pytest.raises(UserError, match=f"another command is at work in {train_config.run}"),
    ):
        train(replace(train_config, steps=4, resume="auto"))
