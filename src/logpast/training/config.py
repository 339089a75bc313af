"""The settings of a run. These dataclasses define the keys of a recipe, the options of `train` and their help."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from logpast.data.batching import Streams
from logpast.models import LogMemoryConfig, ModelConfig, config_from_dict, config_to_dict
from logpast.util.errors import UserError
from logpast.util.validation import from_saved, validate_fields


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    train: str
    """training text: a token store, NAME:SPLIT (wikitext103:train), or text files, a folder or a glob"""
    validation: str | None = None
    """validation text, in the same forms; the best checkpoint is chosen on it"""
    tokenizer: str | None = None
    """for text: gpt2 (default), bpe-SIZE (trained on the training text), or a folder with a tokenizer.json; ignored
    for a token store, which has its own"""
    streams: Streams = "corpus"
    """corpus: all text is one stream, as in the paper; document: one stream per document, so that no history crosses
    from one document to the next"""
    jitter: bool = False
    """shift the start of the windows by a random amount every epoch; in the paper windows start at the same positions
    in every epoch"""
    validation_tokens: int | None = None
    """validate on about this many tokens, from the start of the validation text; default: all"""

    def __post_init__(self) -> None:
        validate_fields(self, "data.")
        for name in ("train", "validation", "tokenizer"):
            if getattr(self, name) == "":
                raise UserError(f"data.{name} is empty; give a value, or leave it out")
        if self.validation_tokens is not None and self.validation_tokens < 1:
            raise UserError(f"data.validation_tokens must be at least 1, got {self.validation_tokens}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = 6e-4
    """peak learning rate, reached after the warm-up"""
    final_learning_rate: float = 6e-5
    """learning rate of the last step, where the cosine ends"""
    warmup_steps: int = 700
    """steps of linear warm-up from 0"""
    weight_decay: float = 0.1
    """weight decay of matrices and embeddings; biases and LayerNorm have none"""
    beta1: float = 0.9
    """AdamW's β1: decay of the running mean of the gradient"""
    beta2: float = 0.95
    """AdamW's β2: decay of the running mean of the squared gradient"""
    clip: float = 1.0
    """clip the gradient to this norm; 0 turns clipping off"""

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
    """All settings of a run. Example: logpast train --config paper-wikitext103 --model.slots 41."""

    run: Path
    """folder of the run, for checkpoints, log.jsonl, TensorBoard files and config.yaml"""
    data: DataConfig
    """what to train on"""
    model: ModelConfig = field(default_factory=LogMemoryConfig)
    """sizes of the model; --model NAME selects the system"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW with linear warm-up and cosine decay"""
    steps: int | None = None
    """number of optimizer steps; give this or epochs. With --resume, more than before train the run further"""
    epochs: float | None = None
    """number of passes over the training text; give this or steps"""
    batch_size: int = 64
    """windows per step (64 windows of 256 tokens make 16,384 loss tokens); for recurrent systems, sequences per step,
    each of model.segments consecutive windows"""
    micro_batch_size: int | None = None
    """windows per forward pass, if the whole batch does not fit in memory; gradients are accumulated over the batch"""
    seed: int = 0
    """seed of the initial weights, the order of the windows and the jitter; recurrent systems read the text in order,
    whatever the seed"""
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    """floating-point precision; bf16-mixed is the fastest on a GPU"""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA if available, else Apple's MPS, else the CPU"""
    devices: int = 1
    """number of devices; each gets an equal share of every batch"""
    compile: bool | None = None
    """compile the model with torch.compile; default: only on a CUDA device"""
    validate_every: int = 500
    """steps between validations"""
    checkpoint_every: int = 500
    """steps between checkpoints"""
    keep: int = 2
    """number of latest checkpoints to keep, in addition to the best one"""
    log_every: int = 10
    """steps between lines of the log"""
    tensorboard: bool = True
    """also write TensorBoard files"""
    resume: bool | str = False
    """false: start a new run, an error if the run folder holds one; auto: resume from its latest checkpoint, or start
    if there is none; best: resume from its best checkpoint; or the path of a checkpoint to resume from"""
    init_from: str | None = None
    """start from the weights of a run, of a checkpoint or of a Hugging Face GPT-2 (a folder or a name such as gpt2);
    without --config, its settings are the defaults"""
    freeze: list[str] = field(default_factory=list)
    """parameters or modules that are not trained, by name or pattern, such as table or 'blocks.*'; with ! in front,
    all but these: '!memory'"""

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
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"steps and epochs are both given ({self.steps} and {self.epochs:g}); give one of them")
        if self.steps is None and self.epochs is None:
            raise UserError("the length of the training is missing; give steps or epochs")
        if self.init_from == "":
            raise UserError("init_from is empty; give a checkpoint, or leave it out")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise UserError(f"epochs must be above 0, got {self.epochs}")

    def total_steps(self, windows: int) -> int:
        """Optimizer steps of the whole run, for a training text of this many windows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        steps = round(self.epochs * windows / self.batch_size)
        if steps < 1:
            raise UserError(f"epochs={self.epochs} of this text are {steps} steps; give more epochs, or give steps")
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in a recipe: what config.yaml holds."""
        values = asdict(self)
        return values | {"run": str(self.run), "model": config_to_dict(self.model)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        values = dict(values)
        values["model"] = config_from_dict(values["model"])
        values["data"] = from_saved(DataConfig, values["data"], "data.")
        values["optimizer"] = from_saved(OptimizerConfig, values["optimizer"], "optimizer.")
        return from_saved(cls, values)


#: Settings that may change when a run is resumed: up to rounding, they do not affect the weights.
FREE_TO_CHANGE = {
    "run", "micro_batch_size", "accelerator", "devices", "compile", "validate_every", "checkpoint_every", "keep",
    "log_every", "tensorboard", "resume",
}  # fmt: skip
#: The length of a training: a resumed run may have another one, with the learning rates of that length.
LENGTH = {"steps", "epochs"}
#: Left out where they are not used, as in the recipes and their hashes of earlier versions.
OPTIONAL = {"init_from", "freeze"}


def training_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide what is learned. Resuming compares them (`resume.check_resumable`)."""
    values = config.to_dict()
    names = [each.name for each in fields(config) if each.name not in FREE_TO_CHANGE]
    return {name: values[name] for name in names if name not in OPTIONAL or values[name]}


def recorded_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that the ledger hashes: those that decide what is learned and which checkpoint is the best."""
    return training_settings(config) | ({"validate_every": config.validate_every} if config.data.validation else {})
