"""The models by name, as in recipes and on the command line."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from logpast.models.base import LanguageModel, ModelConfig
from logpast.models.baselines.compressive import CompressiveTransformer
from logpast.models.baselines.recurrent_memory import RecurrentMemoryTransformer, TransformerXLRecurrentMemory
from logpast.models.baselines.time_local import TimeLocalTransformer
from logpast.models.baselines.transformer_xl import TransformerXL
from logpast.models.log_memory import LogMemoryTransformer
from logpast.models.recent import RecentTransformer
from logpast.util.errors import UserError, suggest
from logpast.util.validation import from_saved

SYSTEMS: dict[str, type[LanguageModel]] = {
    "log_memory": LogMemoryTransformer,
    "recent": RecentTransformer,
    "transformer_xl": TransformerXL,
    "recurrent_memory": RecurrentMemoryTransformer,
    "transformer_xl_recurrent_memory": TransformerXLRecurrentMemory,
    "compressive": CompressiveTransformer,
    "time_local": TimeLocalTransformer,
}


def known_system(name: str) -> str:
    """The name, if there is such a model."""
    if name not in SYSTEMS:
        raise UserError(f"unknown model {name!r}; {suggest(name, list(SYSTEMS))}")
    return name


def system_of(config: ModelConfig) -> str:
    """The name of a config's model: `log_memory`, `recent`, …; `attached` for a memory of a pretrained model."""
    return next((name for name, model in SYSTEMS.items() if model.Config is type(config)), "attached")


def build(config: ModelConfig, tokens: int | None = None) -> LanguageModel:
    """The model of a config. `tokens`, the tokenizer's size, sets the vocabulary if the config does not."""
    if config.vocabulary is None and tokens is not None:
        config = replace(config, vocabulary=-(-tokens // 64) * 64)
    if tokens is not None and config.vocabulary is not None and config.vocabulary < tokens:
        raise UserError(f"model.vocabulary ({config.vocabulary}) is too small for a tokenizer of {tokens} tokens")
    return SYSTEMS[system_of(config)](config)


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The config as recipes and checkpoints store it: the model's name under `system`, and the fields."""
    fields = {name: value for name, value in asdict(config).items() if config.recall or not name.startswith("recall")}
    return {"system": system_of(config), **fields}


def config_from_dict(values: dict[str, Any]) -> ModelConfig:
    """The inverse of `config_to_dict`; by default a `log_memory`."""
    system = known_system(values.get("system", "log_memory"))
    return from_saved(SYSTEMS[system].Config, {k: value for k, value in values.items() if k != "system"}, "model.")
