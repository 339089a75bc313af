"""Recipes: settings in YAML files. Finds shipped ones by name, and turns them into validated configs."""

from __future__ import annotations

from argparse import ArgumentError
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from logpast.models import SYSTEMS, known_system
from logpast.training.config import TrainConfig
from logpast.util.errors import UserError, one_line, suggest
from logpast.util.serialization import flatten

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

T = TypeVar("T")
SHIPPED = Path(__file__).parents[1] / "recipes"


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects a key that occurs twice. Plain YAML silently takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def shipped_recipes() -> list[str]:
    """The names of all recipes that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def find_recipe(name: Path, folder: Path = Path()) -> Path:
    """The path of a recipe: the file if there is one, else a shipped recipe by its name, such as `small-cpu`."""
    if (folder / name).exists():
        return folder / name
    if name.stem in shipped_recipes() and name.name == str(name):
        return SHIPPED / f"{name.stem}.yaml"
    raise UserError(f"there is no file and no shipped recipe {name}; {suggest(name.stem, shipped_recipes())}")


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, or of a shipped recipe."""
    file = find_recipe(file)
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _UniqueKeyLoader)
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


def add_settings(parser: ArgumentParser, system: str) -> None:
    """Add all settings of a run of this system to the parser."""
    parser.add_class_arguments(TrainConfig, skip={"model"}, fail_untyped=True)
    parser.add_class_arguments(SYSTEMS[system].Config, "model", fail_untyped=True)


def fit_to_system(recipe: dict[str, Any], system: str, parser: ArgumentParser, place: object) -> dict[str, Any]:
    """The recipe without model settings that only other systems have; a key that no system has is an error."""
    ours = {f.name for f in fields(SYSTEMS[system].Config)}
    others = {f.name for other in SYSTEMS.values() for f in fields(other.Config)} - ours
    model = {name: value for name, value in recipe["model"].items() if name not in others and name != "system"}
    fitting = recipe | {"model": model}
    known = [action.dest for action in parser._actions if action.dest != "help"]
    for key in flatten(fitting):
        if key not in known:
            raise UserError(f"{place}: unknown key {key!r}; {suggest(key, known)}")
    return fitting


def config_from_recipe(recipe: dict[str, Any], place: object) -> TrainConfig:
    """The config of a recipe, with types checked."""
    system = known_system(recipe["model"].get("system", "log_memory"))
    parser = _parser_of(system)
    try:
        values = parser.parse_object(fit_to_system(deepcopy(recipe), system, parser, place)).as_dict()
    except ArgumentError as error:
        raise UserError(f"{place}: {one_line(error)}") from None
    values["model"]["system"] = system
    return TrainConfig.from_dict(values)


@cache
def _parser_of(system: str) -> ArgumentParser:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    add_settings(parser, system)
    return parser


def validate_section(kind: type[T], values: dict[str, Any], place: str) -> T:
    """A dataclass from a section of a recipe, with names and types checked; empty values count as left out."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=True)
    known = [action.dest for action in parser._actions if action.dest != "help"]
    for name in values:
        if name not in known:
            raise UserError(f"{place}: unknown key {name!r}; {suggest(str(name), known)}")
    try:
        given = {name: value for name, value in values.items() if value is not None}
        return kind(**parser.parse_object(given).as_dict())
    except ArgumentError as error:
        raise UserError(f"{place}: {one_line(error)}") from None
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
