"""Resuming: whether a run starts in its folder, resumes in it, or is refused, and what resuming checks.

- `find_resumption` decides by one table, `DECISIONS`: what was asked, and what the folder holds.
- `check_resumable` checks what a resumed run must share with its checkpoint.
- `locked_run_dir` makes the folder ready and keeps other processes out while training runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any

import yaml

from logpast.data import TokenStore, is_store
from logpast.training.checkpoint import Checkpoint, checkpoint_path, find_checkpoint, sorted_checkpoints, step_of
from logpast.training.config import TrainConfig, training_settings
from logpast.util.errors import UserError
from logpast.util.files import (
    LOCK,
    UNFINISHED,
    atomic_folder,
    atomic_write,
    exclusive_lock,
    remove_folder,
    remove_leftovers,
)
from logpast.util.serialization import flatten


class Request(Enum):
    """What --resume asks for."""

    START = auto()  # false
    AUTO = auto()  # auto, true
    PATH = auto()  # the path of a run or of a checkpoint


class Contents(Enum):
    """What the run folder holds."""

    NOTHING = auto()  # or there is no folder; a lock and the leftovers of a killed process do not count
    STARTED = auto()  # this run, without a checkpoint of its own
    OTHER_STARTED = auto()  # a run with other settings, without a checkpoint
    CHECKPOINTS = auto()  # a run with checkpoints
    SOURCE = auto()  # the run of the checkpoint that --resume PATH names, which is its latest
    FOREIGN = auto()  # anything else


class Action(Enum):
    """What happens, unless the run is refused with an error message."""

    START = auto()  # from step 0
    RESUME = auto()  # from the checkpoint that --resume PATH names, or else from the latest one of the folder


EXISTS = "{run} exists already; resume it with --resume auto, or give another --run folder"
OTHER_SETTINGS = (
    "{run} exists already and holds the start of a run with other settings, without a checkpoint; delete it, or give "
    "another --run folder"
)
NOT_A_RUN = "{run} exists already and is not a run folder; give another --run folder"
IN_USE = "{run} holds another run, or a later part of this one; give another --run folder"

DECISIONS: dict[Request, dict[Contents, Action | str]] = {
    Request.START: {
        Contents.NOTHING: Action.START,
        Contents.STARTED: EXISTS,
        Contents.OTHER_STARTED: OTHER_SETTINGS,
        Contents.CHECKPOINTS: EXISTS,
        Contents.FOREIGN: NOT_A_RUN,
    },
    Request.AUTO: {
        Contents.NOTHING: Action.START,
        Contents.STARTED: Action.START,
        Contents.OTHER_STARTED: OTHER_SETTINGS,
        Contents.CHECKPOINTS: Action.RESUME,
        Contents.FOREIGN: NOT_A_RUN,
    },
    Request.PATH: {
        Contents.NOTHING: Action.RESUME,
        Contents.STARTED: Action.RESUME,
        Contents.OTHER_STARTED: IN_USE,
        Contents.CHECKPOINTS: IN_USE,
        Contents.SOURCE: Action.RESUME,
        Contents.FOREIGN: IN_USE,
    },
}


def find_resumption(config: TrainConfig, store: TokenStore, validation: TokenStore | None) -> Checkpoint | None:
    """The checkpoint to resume from, or None to start from step 0. A UserError if a run would be overwritten."""
    run = config.run
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; give another --run folder")
    request = _request(config)
    given = find_checkpoint(Path(str(config.resume)), "latest") if request is Request.PATH else None
    decision = DECISIONS[request][_contents(config, given)]
    if isinstance(decision, str):
        raise UserError(decision.format(run=run))
    if decision is Action.START:
        return None
    checkpoint = given or find_checkpoint(run, "latest")
    check_resumable(checkpoint, config, store, validation)
    return checkpoint


def check_resumable(
    checkpoint: Checkpoint, config: TrainConfig, store: TokenStore, validation: TokenStore | None
) -> None:
    """What resuming checks: a UserError unless the run shares these with its checkpoint.

    - all settings that decide what is learned: every one but those in `config.FREE_TO_CHANGE`
    - the training tokens and the validation tokens, by their SHA-256
    """
    for name, (before, now) in _changed_settings(checkpoint.config, config).items():
        raise UserError(
            f"cannot resume {checkpoint.path}: it was trained with {name}={before}, now it is {now}; change that "
            "back, or give another --run folder"
        )
    for key, text, use in (("data", store, "trained"), ("validation_data", validation, "validated")):
        before = checkpoint.state.get(key)  # early versions did not save validation_data
        if text and before and before["sha256"] != text.sha256:
            raise UserError(
                f"cannot resume {checkpoint.path}: {text.name} does not hold the tokens that it was {use} on; restore "
                "them, or give another --run folder"
            )


@contextmanager
def locked_run_dir(config: TrainConfig, resumed: Checkpoint | None) -> Iterator[None]:
    """Keep other processes out of the run folder, and make it ready for training.

    Creates it, removes what a killed process left, copies the best checkpoint of a run that resumes in another folder,
    and writes config.yaml.
    """
    config.run.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(config.run, "--run"):
        remove_leftovers(config.run)
        remove_leftovers(config.run / "checkpoints")
        for folder in sorted_checkpoints(config.run):
            if resumed is None:  # another process made it after we decided
                raise UserError(f"another run was started in {config.run}; give another --run folder")
            if step_of(folder) > resumed.step:  # find_checkpoint passed it over: it is damaged
                remove_folder(folder)
        if resumed and resumed.state["best"]:
            best = checkpoint_path(config.run, resumed.state["best"]["step"])
            source = resumed.path.with_name(best.name)
            if source.exists() and not best.exists():
                with atomic_folder(best) as folder:
                    shutil.copytree(source, folder, dirs_exist_ok=True)
        text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
        atomic_write(config.run / "config.yaml", text)
        yield


def _request(config: TrainConfig) -> Request:
    if config.resume is False:
        return Request.START
    return Request.AUTO if config.resume in (True, "auto") else Request.PATH


def _contents(config: TrainConfig, given: Checkpoint | None) -> Contents:
    """What the run folder holds, seen from this run and from the checkpoint that --resume PATH names."""
    run = config.run
    if not run.exists() or all(path.match(UNFINISHED) or path.name == LOCK for path in run.iterdir()):
        return Contents.NOTHING
    saved, copied = set(sorted_checkpoints(run)), set[Path]()
    if given:
        if any(step_of(folder) > given.step for folder in saved):
            return Contents.CHECKPOINTS
        if run.resolve() == given.path.resolve().parents[1]:
            return Contents.SOURCE
        if given.state["best"]:  # copied first when a run resumes in another folder: see locked_run_dir
            copied = {checkpoint_path(run, given.state["best"]["step"])}
    started = _started_config(run)
    if saved <= copied and started and not _changed_settings(started, config):
        return Contents.STARTED
    if saved:
        return Contents.CHECKPOINTS
    return Contents.OTHER_STARTED if started else Contents.FOREIGN


def _started_config(run: Path) -> TrainConfig | None:
    """The config of the run that was started in a folder, if there is one."""
    try:
        return TrainConfig.from_dict(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None


def _changed_settings(before: TrainConfig, now: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that decide what is learned and differ between two configs: name -> (before, now)."""
    old, new = flatten(training_settings(before)), flatten(training_settings(now))
    if now.model.vocabulary is None:  # not known yet
        new["model.vocabulary"] = old.get("model.vocabulary")
    if is_store(now.data.train):  # a token store has its own tokenizer
        new["data.tokenizer"] = old.get("data.tokenizer")
    names = [name for name in old | new if old.get(name) != new.get(name)]
    return {name: (old.get(name), new.get(name)) for name in names}
