"""Recipes: settings in YAML files. Finds shipped ones by name, and turns them into validated configs.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from logpast.util.errors import UserError, suggest
from logpast.util.serialization import flatten, unflatten
from logpast.util.validation import default_of, types_of, validate_value
from logpast.util.yaml_text import parse_yaml

if TYPE_CHECKING:
    from logpast.training.config import TrainConfig  # imports torch, which the help of `train` does without

SHIPPED = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> list[str]:
    """The names of all recipes that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def find_recipe(name: Path, folder: Path = Path()) -> Path:
    """The path of a recipe: the file if there is one, else a shipped recipe by its name, such as `small-cpu`."""
    if (folder / name).exists() and not (folder / name).is_dir():  # the demo's folder may be called demo
        return folder / name
    if name.stem in shipped_recipes() and name.name == str(name):
        return SHIPPED / f"{name.stem}.yaml"
    raise UserError(f"there is no file and no shipped recipe {name}; {suggest(name.stem, shipped_recipes())}")


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, or of a shipped recipe."""
    file = find_recipe(file)
    try:
        return parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split()).replace('in "<unicode string>", ', "")
        raise UserError(f"{file} is not YAML: {problem}") from None


def read_recipe(file: Path) -> dict[str, Any]:
    """A recipe for `train`, as written; `model` is added if it is missing."""
    values = read_yaml(file)
    for key, command in (("grids", "sweep"), ("systems", "compare")):
        if isinstance(values, dict) and key in values:
            raise UserError(f"{file} is not a recipe for train, but for {command}: use `logpast {command} {file}`")
    return validate_recipe(values, file)


def validate_recipe(values: Any, place: object) -> dict[str, Any]:
    """The values, if they have the form of a recipe; `place` is their file, for error messages."""
    if not isinstance(values, dict):
        raise UserError(f"{place} is not a recipe: it must have keys such as run, model and data")
    for section, example in (("model", "slots: 53"), ("data", "train: my.txt"), ("optimizer", "learning_rate: 6e-4")):
        if values.get(section) is None:  # an empty section is the same as none
            values.pop(section, None)
        elif not isinstance(values[section], dict):
            raise UserError(f"{place}: {section} must hold settings, such as {example}")
    if not isinstance(values.setdefault("model", {}).get("system", ""), str):
        raise UserError(f"{place}: model.system must be a name, such as log_memory")
    return values


def setting_types(system: str) -> dict[str, Any]:
    """The types of all settings of a run of this system, by names such as model.slots."""
    return {name: types_of(kind)[each.name] for name, (kind, each) in _settings(system).items()}


def default_settings(system: str) -> dict[str, Any]:
    """The settings of a run of this system that have a default."""
    defaults = {name: default_of(each) for name, (_, each) in _settings(system).items()}
    return {name: value for name, value in defaults.items() if value is not MISSING}


def _settings(system: str) -> dict[str, tuple[type, Field[Any]]]:
    """All settings of a run of this system, by names such as model.slots: the dataclass and its field."""
    from logpast.models import SYSTEMS
    from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig

    sections = {"": TrainConfig, "data": DataConfig, "optimizer": OptimizerConfig, "model": SYSTEMS[system].Config}
    return {
        f"{section}.{each.name}".removeprefix("."): (kind, each)
        for section, kind in sections.items()
        for each in fields(kind)
        if section or each.name not in sections
    }


def recipe_settings(
    recipe: dict[str, Any], system: str, place: object, overridden: Container[str] = ()
) -> dict[str, Any]:
    """The recipe as {model.slots: 5, …}, without the settings that only other systems have, or that are overridden.

    Types are checked.
    """
    from logpast.models import SYSTEMS

    kinds = setting_types(system)
    others = {"model.system"} | {f"model.{f.name}" for other in SYSTEMS.values() for f in fields(other.Config)}
    try:
        found = {key: value for key, value in flatten(recipe).items() if key in kinds or key not in others}
    except ValueError as error:
        raise UserError(f"{place}: {error}; remove one of the two") from None
    for key in found.keys() - kinds.keys():
        raise UserError(f"{place}: unknown key {key!r}; {suggest(key, list(kinds))}")
    return {
        key: validate_value(f"{place}: {key}", value, kinds[key], text=True)
        for key, value in found.items()
        if key not in overridden
    }


def config_from_settings(settings: dict[str, Any], system: str) -> TrainConfig:
    """The config of settings such as {model.slots: 5, …}."""
    from logpast.training.config import TrainConfig

    for name in ("run", "data.train"):
        if name not in settings:
            raise UserError(f"{name} is missing; give it in the recipe, or as the option --{name}")
    values = unflatten(settings)
    return TrainConfig.from_dict({"optimizer": {}} | values | {"model": values.get("model", {}) | {"system": system}})


def config_from_recipe(recipe: dict[str, Any], place: object) -> TrainConfig:
    """The config of a recipe, with types checked."""
    from logpast.models import known_system

    try:
        system = known_system(recipe["model"].get("system", "log_memory"))
    except UserError as error:
        raise UserError(f"{place}: model.system: {error}") from None
    settings = _converted_defaults(system) | recipe_settings(recipe, system, place)
    try:
        return config_from_settings(settings, system)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


@cache  # a sweep needs them for each of its cells
def _converted_defaults(system: str) -> dict[str, Any]:
    """The defaults in the types of their settings: 100 becomes 100.0, as in the hashes of rows."""
    return recipe_settings(default_settings(system), system, "the defaults")
