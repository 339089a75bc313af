"""The folder of a run: what may be begun or gone on with in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


def find_resumption(config: TrainConfig, store: TokenStore, validation: TokenStore | None) -> Checkpoint | None:
    """The checkpoint to go on from, if that is what the config asks for; refuses what would overwrite a run."""
    run, found = config.run, None
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; give another --run folder")
    taken = run.exists() and not all(path.match(UNFINISHED) or path.name == LOCK for path in run.iterdir())
    if config.resume is True or config.resume == "auto":
        if sorted_checkpoints(run):
            found = find_checkpoint(run, "latest")
        elif taken and not _is_beginning_of(config):
            raise UserError(_in_the_way(run))
    elif config.resume is not False:
        found = find_checkpoint(Path(config.resume), "latest")
        later = [c for c in sorted_checkpoints(run) if step_of(c) > found.step]
        elsewhere = run.resolve() != found.path.resolve().parents[1]
        brought = {checkpoint_path(run, best["step"]) for best in [found.state["best"]] if best}
        begun = {*sorted_checkpoints(run)} <= brought and _is_beginning_of(config)  # by this command, and killed
        if taken and (later or (elsewhere and not begun)):
            raise UserError(f"{run} holds another run, or a later part of this one; give another --run folder")
    elif taken and (sorted_checkpoints(run) or _is_beginning_of(config)):
        raise UserError(f"{run} exists already; go on with it by --resume auto, or give another --run folder")
    elif taken:
        raise UserError(_in_the_way(run))
    if found is None:
        return None
    for name, (theirs, ours) in _apart(found.config, config).items():
        wrong = f"it was run with {name}={theirs}, now it is {ours}"
        raise UserError(f"cannot resume {found.path}: {wrong}; change that back, or work in another folder")
    for part, text, use in (("data", store, "trained"), ("validation_data", validation, "validated")):
        before = found.state.get(part)  # those of earlier versions do not tell of validation
        if text and before and before["sha256"] != text.sha256:
            raise UserError(
                f"cannot resume {found.path}: {text.name} holds other tokens than it was {use} on; bring it back, "
                "or work in another folder"
            )
    return found


def _apart(theirs: TrainConfig, ours: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings, of those that decide what is learned, in which a run that was begun differs from ours."""
    begun, wanted = flatten(training_settings(theirs)), flatten(training_settings(ours))
    if ours.model.vocabulary is None:  # still open
        wanted["model.vocabulary"] = begun.get("model.vocabulary")
    if is_store(ours.data.train):  # which has its own
        wanted["data.tokenizer"] = begun.get("data.tokenizer")
    names = [name for name in begun | wanted if begun.get(name) != wanted.get(name)]
    return {name: (begun.get(name), wanted.get(name)) for name in names}


def _begun(run: Path) -> TrainConfig | None:
    """What was begun in a folder, if it was a run."""
    try:
        return TrainConfig.from_dict(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None


def _is_beginning_of(config: TrainConfig) -> bool:
    """Whether the run's folder is what the same run leaves if it is killed before its first checkpoint."""
    theirs = _begun(config.run)
    return theirs is not None and not _apart(theirs, config)


def _in_the_way(run: Path) -> str:
    if _begun(run):
        held, way = "the beginning of a run with other settings, and no checkpoint", "delete it, or work in"
    else:
        held, way = "something else than a run", "work in"
    return f"{run} exists already and holds {held}; {way} another folder"


@contextmanager
def entered(config: TrainConfig, resumed: Checkpoint | None) -> Iterator[None]:
    """Have the run's folder to oneself: make it, clear from it what a killed run left, bring a resumed run's best."""
    config.run.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(config.run, "--run"):
        remove_leftovers(config.run)
        remove_leftovers(config.run / "checkpoints")
        for folder in sorted_checkpoints(config.run):
            if resumed is None:
                raise UserError(f"another run has come to stand in {config.run}; give another --run folder")
            if step_of(folder) > resumed.step:  # later than where we go on: it was found damaged
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
