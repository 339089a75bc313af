"""Resuming: whether a run starts in its folder, resumes in it, or is refused, and what resuming checks.

- `find_resumption` decides by one table, `DECISIONS`: what was asked, and what the folder holds.
- `check_resumable` and `check_length` check what a resumed run must share with its checkpoint.
- `locked_run_dir` makes the folder ready and keeps other processes out while training runs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from logpast.data import TokenStore, is_store
from logpast.training.checkpoint import Checkpoint, checkpoint_path, find_checkpoint, sorted_checkpoints, step_of
from logpast.training.config import LENGTH, TrainConfig, training_settings
from logpast.util.errors import UserError
from logpast.util.files import (
    LOCK,
    UNFINISHED,
    atomic_folder,
    atomic_write,
    exclusive_lock,
    remove_leftovers,
)
from logpast.util.serialization import flatten
from logpast.util.yaml_text import parse_yaml


class Request(Enum):
    """What --resume asks for."""

    START = auto()  # false
    AUTO = auto()  # auto, true
    BEST = auto()  # best
    PATH = auto()  # the path of a run or of a checkpoint


class Contents(Enum):
    """What the run folder holds."""

    NOTHING = auto()  # or there is no folder; a lock and the leftovers of a killed process do not count
    STARTED = auto()  # this run, without a checkpoint of its own
    OTHER_STARTED = auto()  # a run with other settings, without a checkpoint
    CHECKPOINTS = auto()  # a run with checkpoints
    SOURCE = auto()  # the run of the checkpoint that --resume PATH names
    FOREIGN = auto()  # anything else


class Action(Enum):
    """What happens, unless the run is refused with an error message."""

    START = auto()  # from step 0
    RESUME = auto()  # from the checkpoint that --resume names: a path, or else the best or the latest of the folder


EXISTS = "{run} exists already; resume it with --resume auto, or give another --run folder"
OTHER_SETTINGS = (
    "{run} exists already and holds the start of a run with other settings, without a checkpoint; delete it, or give "
    "another --run folder"
)
NOT_A_RUN = "{run} exists already and is not a run folder; give another --run folder"
IN_USE = "{run} holds another run; give another --run folder"
NO_CHECKPOINT = "{run} has no checkpoint to resume from; give the folder of a run, or start one with --resume auto"

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
    Request.BEST: {
        Contents.NOTHING: NO_CHECKPOINT,
        Contents.STARTED: NO_CHECKPOINT,
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


@contextmanager
def reading_run_dir(run: Path) -> Iterator[None]:
    """While it is decided what to do, nothing in the folder changes: an error if another process trains there."""
    with exclusive_lock(run, "--run") if (run / LOCK).is_file() else nullcontext():
        yield


def find_resumption(config: TrainConfig, store: TokenStore, validation: TokenStore | None) -> Checkpoint | None:
    """The checkpoint to resume from, or None to start from step 0. A UserError if a run would be overwritten."""
    run = config.run
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; give another --run folder")
    request = _request(config)
    given = find_checkpoint(Path(str(config.resume)), "latest", True) if request is Request.PATH else None
    decision = DECISIONS[request][_contents(config, given)]
    if isinstance(decision, str):
        raise UserError(decision.format(run=run))
    if decision is Action.START:
        return None
    checkpoint = given or find_checkpoint(run, "best" if request is Request.BEST else "latest", True)
    check_resumable(checkpoint, config, store, validation)
    best = checkpoint.state["best"]
    if best and not any(folder.exists() for folder in _best_paths(run, checkpoint)):
        print(f"logpast: warning: the best checkpoint so far, of step {best['step']}, is missing", file=sys.stderr)
        checkpoint.state["best"] = None  # the best of those that will be saved
    return checkpoint


def _best_paths(run: Path, checkpoint: Checkpoint) -> tuple[Path, Path]:
    """Where the best checkpoint so far is in the run folder, and in the run that is resumed."""
    path = checkpoint_path(run, checkpoint.state["best"]["step"])
    return path, checkpoint.path.with_name(path.name)


def check_resumable(
    checkpoint: Checkpoint, config: TrainConfig, store: TokenStore, validation: TokenStore | None
) -> None:
    """What resuming checks: a UserError unless the run shares these with its checkpoint.

    - all settings that decide what is learned: every one but `config.FREE_TO_CHANGE` and `config.LENGTH`; the
      tokenizer by its fingerprint, wherever it was loaded from
    - the training tokens and the validation tokens, by their SHA-256
    """
    free = LENGTH | ({"data.tokenizer"} if store.tokenizer.fingerprint == checkpoint.fingerprint else set())
    for name, (before, now) in _changed_settings(checkpoint.config, config).items():
        if name not in free:
            raise UserError(
                f"cannot resume {checkpoint.path}: it was trained with {name}={before}, now it is {now}; change that "
                f"back, or start a new run from its weights (--init_from {checkpoint.path}, another --run folder)"
            )
    for key, text, use in (("data", store, "trained"), ("validation_data", validation, "validated")):
        before = checkpoint.state.get(key)  # early versions did not save validation_data
        if text and before and before["sha256"] != text.sha256:
            raise UserError(
                f"cannot resume {checkpoint.path}: {text.name} does not hold the tokens that it was {use} on; restore "
                f"them, or start a new run from its weights (--init_from {checkpoint.path}, another --run folder)"
            )


def check_length(checkpoint: Checkpoint, total: int) -> None:
    """A UserError if the checkpoint has been trained for more steps than the whole run is to have."""
    if checkpoint.step > total:
        raise UserError(
            f"cannot resume {checkpoint.path}: it has been trained for {checkpoint.step} of "
            f"{checkpoint.state['total_steps']} steps, now {total} are asked for; give at least --steps "
            f"{checkpoint.step}, or another --run folder"
        )


def is_finished(checkpoint: Checkpoint, config: TrainConfig) -> bool:
    """Whether nothing is left to train: it is the last step of its run, and no other length is asked for."""
    lengths = [(each.steps, each.epochs) for each in (checkpoint.config, config)]
    return checkpoint.step == checkpoint.state["total_steps"] and lengths[0] == lengths[1]


@contextmanager
def locked_run_dir(config: TrainConfig, resumed: Checkpoint | None) -> Iterator[None]:
    """Keep other processes out of the run folder, and make it ready for training.

    Creates it, removes what a killed process left, moves checkpoints after the one that is resumed to abandoned/,
    copies the best checkpoint of a run that resumes in another folder, and writes config.yaml.
    """
    config.run.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(config.run, "--run"):
        remove_leftovers(config.run)
        remove_leftovers(config.run / "checkpoints")
        later = [each for each in sorted_checkpoints(config.run) if resumed is None or step_of(each) > resumed.step]
        if later and resumed is None:  # another process made them after we decided
            raise UserError(f"another run was started in {config.run}; give another --run folder")
        if later:
            _abandon(config.run, later)
        if resumed and resumed.state["best"]:
            best, source = _best_paths(config.run, resumed)
            if source.exists() and not best.exists():
                with atomic_folder(best) as folder:
                    shutil.copytree(source, folder, dirs_exist_ok=True)
        atomic_write(config.run / "config.yaml", config.to_yaml())
        yield


def _abandon(run: Path, folders: list[Path]) -> None:
    """Move checkpoints that are damaged, or later than the one to resume from, out of the way."""
    (run / "abandoned").mkdir(exist_ok=True)
    for folder in folders[::-1]:  # the latest first: a kill leaves a run without gaps
        target = run / "abandoned" / folder.name
        free = (path for number in count(2) if not (path := target.with_name(f"{target.name}-{number}")).exists())
        folder.rename(next(free) if target.exists() else target)
    names = ", ".join(folder.name for folder in folders)
    print(f"logpast: moved from checkpoints to {run / 'abandoned'}: {names}; delete them if you like", file=sys.stderr)


def _request(config: TrainConfig) -> Request:
    return {False: Request.START, True: Request.AUTO, "auto": Request.AUTO, "best": Request.BEST}.get(
        config.resume, Request.PATH
    )


def _contents(config: TrainConfig, given: Checkpoint | None) -> Contents:
    """What the run folder holds, seen from this run and from the checkpoint that --resume PATH names."""
    run = config.run
    if not run.exists() or all(path.match(UNFINISHED) or path.name == LOCK for path in run.iterdir()):
        return Contents.NOTHING
    saved, copied = set(sorted_checkpoints(run)), set[Path]()
    if given:
        if given.path.resolve().parent == (run / "checkpoints").resolve():
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
        return TrainConfig.from_dict(parse_yaml((run / "config.yaml").read_text(encoding="utf-8")))
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
