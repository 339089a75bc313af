"""The settings of a run. These dataclasses define the keys of a recipe, the options of `train` and their help."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import InstanceOf

from logpast.data.batching import Streams
from logpast.models import LogMemoryConfig, ModelConfig, config_from_dict, config_to_dict
from logpast.util.errors import UserError
from logpast.util.validation import (
    Count,
    Decay,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Seed,
    from_saved,
    validate_fields,
)


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    train: Name
    """training text: a token store, NAME:SPLIT (wikitext103:train), or text files, a folder or a glob"""
    validation: Name | None = None
    """validation text, in the same forms; the best checkpoint is chosen on it"""
    tokenizer: Name | None = None
    """for text: gpt2 (default), bpe-SIZE (trained on the training text), or a folder with a tokenizer.json; ignored
    for a token store, which has its own"""
    streams: Streams = "corpus"
    """corpus: all text is one stream, as in the paper; document: one stream per document, so that no history crosses
    from one document to the next"""
    jitter: bool = False
    """shift the start of the windows by a random amount every epoch; in the paper windows start at the same positions
    in every epoch"""
    validation_tokens: PositiveInt | None = None
    """validate on about this many tokens, from the start of the validation text; default: all"""

    def __post_init__(self) -> None:
        validate_fields(self, "data.")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: NonNegativeFloat = 6e-4
    """peak learning rate, reached after the warm-up"""
    final_learning_rate: NonNegativeFloat = 6e-5
    """learning rate of the last step, where the cosine ends"""
    warmup_steps: Count = 700
    """steps of linear warm-up from 0"""
    weight_decay: NonNegativeFloat = 0.1
    """weight decay of matrices and embeddings; biases and LayerNorm have none"""
    beta1: Decay = 0.9
    """AdamW's β1: decay of the running mean of the gradient"""
    beta2: Decay = 0.95
    """AdamW's β2: decay of the running mean of the squared gradient"""
    clip: NonNegativeFloat = 1.0
    """clip the gradient to this norm; 0 turns clipping off"""

    def __post_init__(self) -> None:
        validate_fields(self, "optimizer.")


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Example: logpast train --config paper-wikitext103 --model.slots 41."""

    run: Path
    """folder of the run, for checkpoints, log.jsonl, TensorBoard files and config.yaml"""
    data: InstanceOf[DataConfig]
    """what to train on"""
    model: InstanceOf[ModelConfig] = field(default_factory=LogMemoryConfig)
    """sizes of the model; --model NAME selects the system"""
    optimizer: InstanceOf[OptimizerConfig] = field(default_factory=OptimizerConfig)
    """AdamW with linear warm-up and cosine decay"""
    steps: PositiveInt | None = None
    """number of optimizer steps; give this or epochs. With --resume, more than before train the run further"""
    epochs: PositiveFloat | None = None
    """number of passes over the training text; give this or steps"""
    batch_size: PositiveInt = 64
    """windows per step (64 windows of 256 tokens make 16,384 loss tokens); for recurrent systems, sequences per step,
    each of model.segments consecutive windows"""
    micro_batch_size: PositiveInt | None = None
    """windows per forward pass, if the whole batch does not fit in memory; gradients are accumulated over the batch"""
    seed: Seed = 0
    """seed of the initial weights, the order of the windows and the jitter; recurrent systems read the text in order,
    whatever the seed"""
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    """floating-point precision; bf16-mixed is the fastest on a GPU"""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: CUDA if available, else Apple's MPS, else the CPU"""
    devices: PositiveInt = 1
    """number of devices, on all nodes; each gets an equal share of every batch. Not needed with torchrun and srun"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """how devices share the model: ddp, each holds all of it; fsdp, each holds its share of the parameters, gradients
    and moments, and all parameters only during a step"""
    timeout: PositiveFloat = 600.0
    """seconds to wait for another process of a run on several devices; if it does not answer, the run ends with an
    error"""
    compile: bool | None = None
    """compile the model with torch.compile; default: only on a CUDA device"""
    validate_every: PositiveInt = 500
    """steps between validations"""
    checkpoint_every: PositiveInt = 500
    """steps between checkpoints"""
    keep: PositiveInt = 2
    """number of latest checkpoints to keep, in addition to the best one"""
    log_every: PositiveInt = 10
    """steps between lines of the log"""
    tensorboard: bool = True
    """also write TensorBoard files"""
    resume: bool | str = False
    """false: start a new run, an error if the run folder holds one; auto: resume from its latest checkpoint, or start
    if there is none; best: resume from its best checkpoint; or the path of a checkpoint to resume from"""
    init_from: Name | None = None
    """start from the weights of a run, of a checkpoint or of a Hugging Face GPT-2 (a folder or a name such as gpt2);
    without --config, its settings are the defaults"""
    freeze: list[str] = field(default_factory=list)
    """parameters or modules that are not trained, by name or pattern, such as table or 'blocks.*'; with ! in front,
    all but these: '!memory'"""

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.batch_size % self.devices:
            raise UserError(f"batch_size ({self.batch_size}) must be a multiple of devices ({self.devices})")
        if self.strategy == "fsdp" and self.compile:
            raise UserError("compile=true does not work with strategy=fsdp; give --compile false, or --strategy ddp")
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"steps and epochs are both given ({self.steps} and {self.epochs:g}); give one of them")
        if self.steps is None and self.epochs is None:
            raise UserError("the length of the training is missing; give steps or epochs")

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

    def to_yaml(self) -> str:
        """The same as the text of config.yaml."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        values = dict(values)
        values["model"] = config_from_dict(values["model"])
        values["data"] = from_saved(DataConfig, values["data"], "data.")
        values["optimizer"] = from_saved(OptimizerConfig, values["optimizer"], "optimizer.")
        return from_saved(cls, values)


#: Settings that may change when a run is resumed: up to rounding, they do not affect the weights.
FREE_TO_CHANGE = {
    "run", "micro_batch_size", "accelerator", "devices", "strategy", "timeout", "compile", "validate_every",
    "checkpoint_every", "keep", "log_every", "tensorboard", "resume",
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
