"""Checkpoints: save, find, load, delete. Each is one folder, written under another name and renamed when complete.

runs/NAME/
  config.yaml                     the recipe as run
  log.jsonl                       one line per logged step and per validation
  checkpoints/step-00000500/
    model.safetensors             weights
    optimizer.safetensors         AdamW's two moments of each weight
    carried.safetensors           recurrent systems only: their state for each row of the batch
    state.json                    step, tokens, seconds, best validation so far, hardware, revision
    config.yaml, tokenizer.json   what is needed to use the weights elsewhere

Sweeps and comparisons delete optimizer and carried state when a run is finished.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logpast.data import Tokenizer, load_tokenizer
from logpast.models import LanguageModel, State, build
from logpast.training.config import TrainConfig
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder, atomic_write, remove_folder, sha256_of

STEP = re.compile(r"step-\d{8,}")
FOR_TRAINING = ("optimizer.safetensors", "carried.safetensors")  # needed to train further, not to score or generate


@dataclass
class Checkpoint:
    """A complete checkpoint folder."""

    path: Path
    state: dict[str, Any]
    config: TrainConfig

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def weights(self) -> dict[str, Tensor]:
        return self._load("model.safetensors")

    def load_model(self) -> LanguageModel:
        model = build(self.config.model)
        self.load_weights(model)
        return model

    def load_weights(self, model: LanguageModel) -> None:
        """Load the weights into a model of the same sizes, which takes on their precision."""
        weights = self.weights()
        model.to(next(iter(weights.values())).dtype)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            problem = " ".join(str(error).split())[:200]
            raise UserError(f"{self.path}: model.safetensors does not fit config.yaml: {problem}") from None

    def load_tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.path)
        if tokenizer.fingerprint != self.state["data"]["tokenizer"]:
            raise UserError(f"{self.path / 'tokenizer.json'} is not the tokenizer that the model was trained with")
        return tokenizer

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors = self._load("optimizer.safetensors")
        for name, parameter in model.named_parameters():
            found = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{name}/")}
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in found.items()}

    def carried(self) -> State:
        """The state of a recurrent system after the last step, for all rows of the batch."""
        return self._load("carried.safetensors")

    def _load(self, name: str) -> dict[str, Tensor]:
        file = self.path / name
        if name in FOR_TRAINING and not file.exists():
            raise UserError(
                f"{self.path} has no {name}: it can be scored, but not trained further; give another --run folder"
            )
        try:
            saved = self.state.get("sums", {}).get(name)  # early versions saved no checksums
            if saved and saved != sha256_of(file):
                raise ValueError("checksum differs; if you changed it on purpose, remove sums from state.json")
            return load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}); use another checkpoint of the run") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint folder; a UserError says what is wrong with it."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        config = TrainConfig.from_dict(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")))
        for name, size in state["sizes"].items():
            if (path / name).stat().st_size != size:
                raise ValueError(f"{name} is truncated")
        with safe_open(path / "model.safetensors", "pt"):
            pass  # the header can be read
        int(state["step"]), state["data"]["tokenizer"]  # used later
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, SafetensorError) as error:
        raise UserError(f"{path} is not a complete checkpoint ({type(error).__name__}: {error})") from None
    return Checkpoint(path, state, config)


def find_checkpoint(path: Path, which: str = "best") -> Checkpoint:
    """The checkpoint at `path`, which is a checkpoint folder or a run folder; of a run, its `best` or its `latest`.

    A damaged checkpoint is skipped with a warning, in favour of the one before it.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"no checkpoint at {path}; give a run folder or one of its checkpoints/step-… folders")
    if (path / "state.json").exists():
        return open_checkpoint(path)
    problems = []
    for folder in sorted_checkpoints(path)[::-1]:
        try:
            latest = open_checkpoint(folder)
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f"logpast: warning: {problem}; using {folder} instead", file=sys.stderr)
        best = latest.state.get("best")
        if which == "latest" or not best or best["step"] == latest.step:
            return latest
        try:
            return open_checkpoint(checkpoint_path(path, best["step"]))
        except UserError as error:
            print(f"logpast: warning: no best checkpoint ({error}); using {folder} instead", file=sys.stderr)
            return latest
    raise UserError("; ".join([f"no complete checkpoint in {path}; give a run that has saved one", *problems]))


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def sorted_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, earliest first."""
    found = [folder for folder in (run / "checkpoints").glob("step-*") if STEP.fullmatch(folder.name)]
    return sorted(found, key=step_of)


def save_checkpoint(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    state: dict[str, Any],
    carried: State | None = None,
) -> None:
    """Write the checkpoint of state["step"], then delete all but the best and the latest `config.keep`."""
    run = config.run
    with atomic_folder(checkpoint_path(run, state["step"])) as folder:
        save_file(_on_cpu(model.state_dict()), folder / "model.safetensors")
        moments = {
            f"{name}/{key}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()
        }
        save_file(_on_cpu(moments), folder / "optimizer.safetensors")
        if carried is not None:
            save_file(_on_cpu(carried), folder / "carried.safetensors")
        text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        tokenizer.save(folder)
        files = sorted(folder.iterdir())
        sizes = {file.name: file.stat().st_size for file in files}
        sums = {file.name: sha256_of(file) for file in files if file.suffix == ".safetensors"}
        (folder / "state.json").write_text(json.dumps(state | {"sizes": sizes, "sums": sums}, indent=2) + "\n")
    best = (state.get("best") or {}).get("step")
    for old in sorted_checkpoints(run)[: -config.keep]:
        if old != checkpoint_path(run, best or -1):
            remove_folder(old)


def drop_optimizer_state(run: Path) -> None:
    """Delete what only further training needs, two thirds of each checkpoint, from a finished run."""
    for folder in sorted_checkpoints(run):
        with suppress(UserError):  # damaged, or the disk is full: leave it as it is
            state = open_checkpoint(folder).state
            sizes = {name: size for name, size in state["sizes"].items() if name not in FOR_TRAINING}
            # state.json first, so that the checkpoint stays complete
            atomic_write(folder / "state.json", json.dumps(state | {"sizes": sizes}, indent=2) + "\n")
            for name in FOR_TRAINING:
                (folder / name).unlink(missing_ok=True)


def _on_cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
