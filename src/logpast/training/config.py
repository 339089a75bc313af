"""A run on one page: these dataclasses are the recipe's YAML and the command line's options."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from logpast.data.batching import Streams
from logpast.models import LogMemoryConfig, ModelConfig, config_from_dict, config_to_dict
from logpast.util.errors import UserError
from logpast.util.validation import validate_fields


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    train: str
    """training text: a token store, NAME:SPLIT (wikitext103:train), or text files, a folder or a glob"""
    validation: str | None = None
    """validation text, in the same forms; the best checkpoint is chosen on it"""
    tokenizer: str | None = None
    """for text: gpt2 (default), bpe-SIZE (trained on the training text), or a folder with a tokenizer.json; a token
    store brings its own"""
    streams: Streams = "corpus"
    """corpus: all text is one stream, as in the paper; document: nothing is seen across document borders"""
    jitter: bool = False
    """draw a new phase of the windows every epoch; the paper's phase is fixed"""
    validation_tokens: int | None = None
    """score only about the first so many validation tokens while training; default: all"""

    def __post_init__(self) -> None:
        validate_fields(self, "data.")
        for name in ("train", "validation", "tokenizer"):
            if getattr(self, name) == "":
                raise UserError(f"data.{name} is empty; name one, or leave it out")
        if self.validation_tokens is not None and self.validation_tokens < 1:
            raise UserError(f"data.validation_tokens must be at least 1, got {self.validation_tokens}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = 6e-4
    """the peak, reached after the warm-up"""
    final_learning_rate: float = 6e-5
    """where the cosine ends, at the last step"""
    warmup_steps: int = 700
    """steps of linear warm-up from 0"""
    weight_decay: float = 0.1
    """on matrices only, not on gains and biases"""
    beta1: float = 0.9
    """decay of the gradient's running mean"""
    beta2: float = 0.95
    """decay of the squared gradient's running mean"""
    clip: float = 1.0
    """largest norm of the gradient; 0 turns clipping off"""

    def __post_init__(self) -> None:
        validate_fields(self, "optimizer.")
        for name in ("learning_rate", "final_learning_rate", "warmup_steps", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"optimizer.{name} must be 0 or above, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name} must be at least 0 and below 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainConfig:
    """Train a model. Example: logpast train --config paper-wikitext103 --model.slots 41."""

    run: Path
    """the run's folder: checkpoints, log.jsonl, TensorBoard, config.yaml"""
    data: DataConfig
    """what to train on"""
    model: ModelConfig = field(default_factory=LogMemoryConfig)
    """sizes of the model; --model NAME chooses the system"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """how to train"""
    steps: int | None = None
    """number of optimizer steps; give this or epochs"""
    epochs: float | None = None
    """number of passes over the training text; give this or steps"""
    batch_size: int = 64
    """windows per step (64 windows of 256 are 16,384 loss tokens); for a system that reads on, places in the text, from
    each of which model.segments windows"""
    micro_batch_size: int | None = None
    """windows per forward pass, for a batch that does not fit; the gradients add up to those of the whole batch"""
    seed: int = 0
    """decides the initial weights and the order of the windows; a system that carries a state reads in the text's order
    whatever the seed, but for jitter"""
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    """arithmetic; bf16-mixed is the fast one on a GPU"""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes CUDA, then Apple's MPS, then the CPU"""
    devices: int = 1
    """how many of them; a batch is dealt out evenly"""
    compile: bool | None = None
    """torch.compile the model; default: on a CUDA device only, where it pays"""
    validate_every: int = 500
    """steps between two validations"""
    checkpoint_every: int = 500
    """steps between two checkpoints"""
    keep: int = 2
    """how many of the latest checkpoints to keep, beside the best"""
    log_every: int = 10
    """steps between two lines of the log"""
    tensorboard: bool = True
    """write TensorBoard files beside log.jsonl"""
    resume: bool | str = False
    """false: start anew, and refuse a run folder that exists; auto: go on from its latest checkpoint if there is
    one; or the path of a checkpoint to go on from"""

    def __post_init__(self) -> None:
        validate_fields(self)
        positive = ("batch_size", "devices", "validate_every", "checkpoint_every", "keep", "log_every")
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UserError(f"micro_batch_size must be at least 1, got {self.micro_batch_size}")
        if self.batch_size % self.devices:
            raise UserError(f"batch_size ({self.batch_size}) must be a multiple of devices ({self.devices})")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be from 0 to 2^32 − 1, got {self.seed}")
        if (self.steps is None) == (self.epochs is None):
            raise UserError("give either steps or epochs, and not both")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise UserError(f"epochs must be above 0, got {self.epochs}")

    def total_steps(self, windows: int) -> int:
        """Optimizer steps of the whole run, for a text of so many windows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        steps = round(self.epochs * windows / self.batch_size)
        if steps < 1:
            raise UserError(f"epochs={self.epochs} of this text come to {steps} steps; give more, or steps instead")
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in a recipe."""
        values = asdict(self)
        return values | {"run": str(self.run), "model": config_to_dict(self.model)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        values = dict(values)
        values["model"] = config_from_dict(values["model"])
        values["data"] = DataConfig(**values["data"])
        values["optimizer"] = OptimizerConfig(**values["optimizer"])
        return cls(**values)


#: What may differ between a run and its resumption: the weights after each step are the same, but for rounding.
FREE_TO_CHANGE = {
    "run", "micro_batch_size", "accelerator", "devices", "compile", "validate_every", "checkpoint_every", "keep",
    "log_every", "tensorboard", "resume",
}  # fmt: skip


def training_settings(config: TrainConfig) -> dict[str, Any]:
    """The part of a config that decides what is learned: what a resumed run must share."""
    values = config.to_dict()
    return {f.name: values[f.name] for f in fields(config) if f.name not in FREE_TO_CHANGE}


def recorded_settings(config: TrainConfig) -> dict[str, Any]:
    """The part that decides which weights are scored, the best of those that were validated: what the ledger hashes."""
    return training_settings(config) | ({"validate_every": config.validate_every} if config.data.validation else {})
