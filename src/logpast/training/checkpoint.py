"""Checkpoints: a folder each, written beside its place and renamed into it, so that it is whole or not there.

runs/NAME/
  config.yaml                     the recipe as run
  log.jsonl                       a line per logged step and per validation
  checkpoints/step-00000500/
    model.safetensors             weights
    optimizer.safetensors         AdamW's two running means per weight
    state.json                    step, tokens, seconds, the best validation so far, hardware, revision
    config.yaml, tokenizer.json   all that is needed to use the weights elsewhere
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logpast.data import Tokenizer, load_tokenizer
from logpast.errors import UserError
from logpast.files import remove, whole_or_absent
from logpast.models import Transformer, build
from logpast.training.config import TrainConfig

STEP = re.compile(r"step-(\d{8,})")


@dataclass
class Checkpoint:
    """A checkpoint folder that was found whole."""

    path: Path
    state: dict[str, Any]
    config: TrainConfig

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def weights(self) -> dict[str, Tensor]:
        return _load(self.path / "model.safetensors")

    def load_model(self) -> Transformer:
        weights = self.weights()
        model = build(self.config.model)
        model.load_state_dict(weights)
        return model

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors = _load(self.path / "optimizer.safetensors")
        for name, parameter in model.named_parameters():
            found = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{name}/")}
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in found.items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint folder, or raise UserError with what is wrong with it."""
    try:
        state = json.loads((path / "state.json").read_text())
        config = TrainConfig.from_dict(yaml.safe_load((path / "config.yaml").read_text()))
        for name, size in state["sizes"].items():
            if (path / name).stat().st_size != size:
                raise UserError(f"{path / name} is truncated")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not a whole checkpoint: {type(error).__name__}: {error}") from None
    return Checkpoint(path, state, config)


def find_checkpoint(path: Path, which: str = "best") -> Checkpoint:
    """The checkpoint at `path`: a checkpoint's own folder, or a run's, whose `best` or `latest` is taken.

    A damaged one is passed over for the one before, with a warning.
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
        return open_checkpoint(checkpoint_path(path, best["step"]))
    raise UserError("; ".join([f"no whole checkpoint in {path}", *problems]))


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def sorted_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, earliest first."""
    found = [folder for folder in (run / "checkpoints").glob("step-*") if STEP.fullmatch(folder.name)]
    return sorted(found, key=lambda folder: int(STEP.fullmatch(folder.name)[1]))  # type: ignore[index]


def save_checkpoint(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    state: dict[str, Any],
) -> Path:
    """Write a checkpoint for state["step"], then drop those that are neither among the latest nor the best."""
    run = config.run
    place = checkpoint_path(run, state["step"])
    if not place.exists():  # a resumed run may come by again
        with whole_or_absent(place) as folder:
            save_file(_on_cpu(model.state_dict()), folder / "model.safetensors")
            moments = {
                f"{name}/{key}": value
                for name, parameter in model.named_parameters()
                for key, value in optimizer.state[parameter].items()
            }
            save_file(_on_cpu(moments), folder / "optimizer.safetensors")
            (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
            tokenizer.save(folder)
            sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
            (folder / "state.json").write_text(json.dumps(state | {"sizes": sizes}, indent=2) + "\n")
    best = (state.get("best") or {}).get("step")
    for old in sorted_checkpoints(run)[: -config.keep]:
        if old != checkpoint_path(run, best or -1):
            remove(old)
    return place


def _on_cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); use another checkpoint of the run") from None
