"""Checkpoints: save, find, load, delete. Each is one folder, written under another name and renamed when complete.

runs/NAME/
  config.yaml                     the recipe as run
  log.jsonl                       one line per logged step and per validation
  checkpoints/step-00000500/
    model.safetensors             weights
    optimizer.safetensors         AdamW's two moments of each weight
    carried.safetensors           recurrent systems only: their state for each row of the batch
    state.json                    step, tokens, seconds, best validation so far, size and hash of log.jsonl, hardware,
                                  revision
    config.yaml, tokenizer.json   what is needed to use the weights elsewhere
    SHA256SUMS                    hashes of all files above, which `sha256sum -c` verifies, as we do
  abandoned/step-00000600/        checkpoints that a resumed run did not use: damaged, or later than --resume asked for

Sweeps and comparisons delete optimizer and carried state when a run is finished. Early versions have no SHA256SUMS, but
`sizes` and mostly `sums` in state.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Optional, TypeVar

import torch
import yaml
from pydantic import NonNegativeInt, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logpast.data import Tokenizer, load_tokenizer
from logpast.models import LanguageModel, State, build
from logpast.training.config import TrainConfig, recorded_settings
from logpast.training.devices import shard_like
from logpast.util.checksums import SUMS, read_sums, sums_text, verify, write_sums
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder, atomic_write, remove_folder
from logpast.util.schema import parse_json, reading, schema, validate
from logpast.util.yaml_text import parse_yaml

T = TypeVar("T")
STEP = re.compile(r"step-\d{8,}")
ATTACHED = "logpast.json"  # a folder with it is of `logpast attach`
OTHER = "use another checkpoint"
FOR_TRAINING = ("optimizer.safetensors", "carried.safetensors")  # needed to train further, not to score or generate
CONFIG = TypeAdapter(dict[str, Any])
STATE: TypeAdapter[dict[str, Any]] = TypeAdapter(
    schema({
        **dict.fromkeys(("step", "total_steps", "tokens", "parameters"), NonNegativeInt),
        "seconds": float, "best": Optional[schema({"step": NonNegativeInt, "nats_per_token?": float})],  # noqa: UP045
        "data": {"tokenizer": str}, "validation_data?": dict | None, "revision": str, "hardware": dict,
        "init_from?": dict, "extended?": [dict], "sizes?": dict[str, int], "sums?": dict[str, str],
        "log?": Optional[schema({"bytes": NonNegativeInt, "sha256": str})],  # noqa: UP045
    })
)  # fmt: skip


@dataclass
class Checkpoint:
    """A complete checkpoint folder."""

    path: Path
    state: dict[str, Any]
    config: TrainConfig

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer."""
        return str(self.state["data"]["tokenizer"])

    @property
    def vocabulary(self) -> int | None:
        return self.config.model.vocabulary

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that decided the result, for the ledger."""
        return recorded_settings(self.config)

    def weights(self) -> dict[str, Tensor]:
        return self._load("model.safetensors")

    def load_model(self) -> LanguageModel:
        self._check_sizes()
        model = build(self.config.model)
        self.load_weights(model)
        return model

    def _check_sizes(self) -> None:
        """A UserError if config.yaml is of a larger model than the weights, before that is allocated."""
        sizes, shapes = self.config.model, {name: tensor.shape for name, tensor in self.weights().items()}
        found, longest = shapes.get("table.weight"), max(chain((0,), *shapes.values()))
        if found != (sizes.vocabulary, sizes.width) or sizes.layers > len(shapes) or (sizes.mlp or 0) > longest:
            raise UserError(
                f"{self.path}: model.safetensors does not fit config.yaml: it has {len(shapes)} tensors, and "
                f"{list(found or ())} as table.weight; use another checkpoint"
            )

    def load_weights(self, model: LanguageModel) -> None:
        """Load the weights into a model of the same sizes, which takes on their precision."""
        weights = self.weights()
        kinds = {tensor.dtype for tensor in weights.values()}
        if not all(kind.is_floating_point for kind in kinds) or not kinds:
            raise UserError(
                f"{self.path}: model.safetensors has no weights, or some that are no floating-point numbers"
            )
        model.to(next(iter(weights.values())).dtype)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            problem = " ".join(str(error).split())[:200]
            raise UserError(f"{self.path}: model.safetensors does not fit config.yaml: {problem}") from None

    def load_tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.path)
        if tokenizer.fingerprint != self.fingerprint:
            raise UserError(f"{self.path / 'tokenizer.json'} is not the tokenizer that the model was trained with")
        return tokenizer

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors = self._load("optimizer.safetensors")
        for name, parameter in model.named_parameters():
            found = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{name}/")}
            if parameter.requires_grad:
                optimizer.state[parameter] = {key: shard_like(value, parameter) for key, value in found.items()}

    def carried(self) -> State:
        """The state of a recurrent system after the last step, for all rows of the batch."""
        return self._load("carried.safetensors")

    def _load(self, name: str) -> dict[str, Tensor]:
        file = self.path / name
        if name in FOR_TRAINING and not file.exists():
            raise UserError(
                f"{self.path} has no {name}: it can be scored, but not trained further; start a new run from its "
                f"weights with --init_from {self.path}, in another --run folder"
            )
        try:
            return load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}); use another checkpoint") from None


def open_checkpoint(path: Path, for_training: bool = False) -> Checkpoint:
    """Read one checkpoint folder and verify its files; a UserError names the one that is damaged.

    Files that only training needs may be missing. They are verified only `for_training`.
    """
    if not path.is_dir():
        raise UserError(f"{path} does not exist; use another checkpoint")
    state = _read_state(path)
    sizes, sums = state.pop("sizes", {}), state.pop("sums", {})  # of early versions
    if (path / SUMS).exists():
        sums = read_sums(path / SUMS, OTHER)
    elif not sizes:
        print(f"logpast: warning: {path} has no {SUMS}, so its files are not verified", file=sys.stderr)
    skipped = [name for name in FOR_TRAINING if not (for_training and (path / name).exists())]
    for name in sizes | sums:
        if name not in skipped:
            verify(path / name, sums.get(name), OTHER, sizes.get(name))
    config = _parse(path / "config.yaml", lambda text: TrainConfig.from_dict(validate(CONFIG, parse_yaml(text))))
    try:
        with safe_open(path / "model.safetensors", "pt"):
            pass  # the header can be read
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path / 'model.safetensors'} cannot be read ({error}); use another checkpoint") from None
    return Checkpoint(path, state, config)


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json, verified."""
    file = path / "state.json"
    if (path / SUMS).exists():
        verify(file, read_sums(path / SUMS, OTHER).get(file.name), OTHER)
    return _parse(file, lambda text: validate(STATE, parse_json(text, finite=False)))


def _parse(file: Path, parse: Callable[[str], T]) -> T:
    """What a text file of a checkpoint holds."""
    with reading(f"{file} cannot be used", OTHER):
        try:
            return parse(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, UserError, yaml.YAMLError) as error:
            raise ValueError(getattr(error, "strerror", error)) from None


def find_model(path: Path) -> Checkpoint:
    """What can be scored and generated from: a checkpoint, or a folder that `logpast attach` wrote."""
    if not (path / ATTACHED).is_file():
        return find_checkpoint(path)
    from logpast.training.attach import open_attached  # imports transformers

    return open_attached(path)


def find_checkpoint(path: Path, which: str = "best", for_training: bool = False) -> Checkpoint:
    """The checkpoint at `path`, which is a checkpoint folder or a run folder; of a run, its `best` or its `latest`.

    A damaged checkpoint is skipped in the search for the latest, with a warning. A damaged best one is an error.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"no checkpoint at {path}; give a run folder or one of its checkpoints/step-… folders")
    if STEP.fullmatch(path.name) or (path / "state.json").exists():
        return open_checkpoint(path, for_training)
    folders = sorted_checkpoints(path)[::-1]
    if not folders:
        raise UserError(f"no checkpoint in {path}; {_hint(path)}")
    return _find_best(path, folders, for_training) if which == "best" else _find_latest(path, folders, for_training)


def _hint(path: Path) -> str:
    """What to do with a folder that is no run."""
    if (path / ATTACHED).is_file():
        return "it is a pretrained model with a memory, which only eval, explore, generate and serve take"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if parse_json((path / "config.json").read_text(encoding="utf-8"))["model_type"] == "logpast":
            return f"make a run of this Hugging Face model: logpast export {path} --to logpast --out RUN"
    return "give a run that has saved one"


def _find_latest(run: Path, folders: list[Path], for_training: bool) -> Checkpoint:
    problems = []
    for folder in folders:
        try:
            latest = open_checkpoint(folder, for_training)
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f"logpast: warning: {problem}; using {folder} instead", file=sys.stderr)
        return latest
    raise UserError("; ".join([f"no checkpoint of {run} can be used; give another run", *problems]))


def _find_best(run: Path, folders: list[Path], for_training: bool) -> Checkpoint:
    """The best checkpoint, which the state of the latest one names."""
    try:
        best = _read_state(folders[0])["best"]
        return open_checkpoint(checkpoint_path(run, best["step"]) if best else folders[0], for_training)
    except UserError as error:
        other = next((folder for folder in folders if _is_usable(folder, for_training)), None)
        hint = f"to use another one, give its folder: {other}" if other else "the run has no other one"
        raise UserError(f"the best checkpoint of {run} cannot be used: {error}; {hint}") from None


def _is_usable(folder: Path, for_training: bool) -> bool:
    try:
        open_checkpoint(folder, for_training)
    except UserError:
        return False
    return True


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def sorted_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, earliest first."""
    found = [folder for folder in (run / "checkpoints").glob("step-*") if STEP.fullmatch(folder.name)]
    return sorted(found, key=step_of)


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter: its two moments, and its number of steps."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_checkpoint(
    config: TrainConfig,
    weights: dict[str, Tensor],
    moments: dict[str, Tensor] | None,
    tokenizer: Tokenizer,
    state: dict[str, Any],
    carried: State | None = None,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Write the checkpoint of state["step"], then delete all but the best and the latest `config.keep`.

    `check` raises if `config.run` is no longer the folder of this run. It is called when the checkpoint has a temporary
    folder there: what replaces the run folder after that does not have it, so nothing can get into another run.
    """
    run = config.run
    with atomic_folder(checkpoint_path(run, state["step"])) as folder:
        check()
        save_file(_on_cpu(weights), folder / "model.safetensors")
        if moments is not None:
            save_file(_on_cpu(moments), folder / "optimizer.safetensors")
        if carried is not None:
            save_file(_on_cpu(carried), folder / "carried.safetensors")
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        tokenizer.save(folder)
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        write_sums(folder)
    best = (state.get("best") or {}).get("step")
    for old in sorted_checkpoints(run)[: -config.keep]:
        if old != checkpoint_path(run, best or -1):
            remove_folder(old)


def drop_optimizer_state(run: Path) -> None:
    """Delete what only further training needs, two thirds of each checkpoint, from a finished run."""
    for folder in sorted_checkpoints(run):
        with suppress(UserError):  # damaged, or the disk is full: leave it as it is
            open_checkpoint(folder)
            for name in FOR_TRAINING:
                (folder / name).unlink(missing_ok=True)
            if (file := folder / SUMS).exists():  # so that `sha256sum -c` does not miss the files
                sums = {name: value for name, value in read_sums(file, OTHER).items() if name not in FOR_TRAINING}
                atomic_write(file, sums_text(sums))


def _on_cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
