"""The systems of a comparison, with equal numbers of parameters and equal numbers of tokens per step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from logpast.comparison.recipe import Recipe, file_name
from logpast.data import TokenStore
from logpast.data.batching import Lanes, Windows
from logpast.models import SYSTEMS, ModelConfig, RecurrentConfig, known_system
from logpast.training.memory_check import measure
from logpast.util.errors import UserError
from logpast.util.validation import validate_section

TOLERANCE = 0.02  # largest relative difference in the number of parameters


@dataclass(frozen=True)
class System:
    """A system of the recipe, ready to train."""

    name: str
    model: ModelConfig
    parameters: int
    attention_length: int
    batch_size: int
    tokens_per_step: float
    """on average: the last window of a document has fewer tokens than positions"""

    @property
    def file_name(self) -> str:
        return file_name(self.name)


def equal_systems(recipe: Recipe, store: TokenStore) -> list[System]:
    """All systems of a recipe. Where `mlp` is not set, its width makes the number of parameters that of the first."""
    found: list[System] = []
    for name, own in recipe.systems.items():
        settings = {"system": "log_memory"} | recipe.model | own
        kind = SYSTEMS[known_system(str(settings.pop("system")))].Config
        config = validate_section(kind, settings, f"system {name}")
        one_layer, count, _ = measure(config, store.tokenizer.size)
        if found and config.mlp is None:
            config = replace(config, mlp=_matching_mlp(config, found[0].parameters - count))
            one_layer, count, _ = measure(config, store.tokenizer.size)
        if found and abs(count / found[0].parameters - 1) > TOLERANCE:
            raise UserError(
                f"system {name} has {count:,} parameters, {found[0].name} {found[0].parameters:,}; "
                "change mlp or other sizes until they are equal"
            )
        config = replace(config, vocabulary=one_layer.config.vocabulary)
        batch = _batch_size(recipe, config, store)
        found.append(System(name, config, count, one_layer.eval().attention_length, *batch))
    return found


def _batch_size(recipe: Recipe, model: ModelConfig, store: TokenStore) -> tuple[int, float]:
    """The batch size closest to `tokens_per_step`, and how many tokens it has on average."""
    windows = len(Windows(store, model.window, 0, recipe.streams))
    if isinstance(model, RecurrentConfig):
        rows = max(1, round(recipe.tokens_per_step * windows / len(store) / model.segments))
        lanes = Lanes(store, model.window, rows, model.segments, 0, recipe.streams)
        return rows, len(store) / lanes.steps_per_epoch
    rows = max(1, round(recipe.tokens_per_step * windows / len(store)))
    return rows, rows * len(store) / windows


def _matching_mlp(config: ModelConfig, missing: int) -> int:
    """The width of the MLP, a multiple of 8, that comes closest to adding the missing parameters."""
    width = config.mlp or 4 * config.width
    per_unit = config.layers * (2 * config.width + 1)
    return max(8, 8 * round((width + missing / per_unit) / 8))
