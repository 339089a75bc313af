"""Recipes: a run's settings as YAML, and how they become a checked config, for whoever starts runs."""

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


class _EachKeyOnce(yaml.SafeLoader):
    """Of two values under one key plain YAML takes the last, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def find_recipe(name: Path) -> Path:
    """A file as it is, or a shipped recipe by its name: `small-cpu`."""
    if name.exists() or name.suffix or name.name != str(name):
        return name
    if name.name not in shipped_recipes():
        raise UserError(f"no recipe {name}; {suggest(name.name, shipped_recipes())}, or give the path of a YAML file")
    return SHIPPED / f"{name}.yaml"


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, or of a shipped recipe that is given by name."""
    file = find_recipe(file)
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _EachKeyOnce)  # a kind of safe loader
    except OSError as error:
        raise UserError(
            f"cannot read {file}: {error.strerror}; give a YAML file or one of {', '.join(shipped_recipes())}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None


def read_recipe(file: Path) -> dict[str, Any]:
    """A recipe for `train` as it is written, model always in it."""
    return validate_recipe(read_yaml(file), file)


def validate_recipe(values: Any, place: object) -> dict[str, Any]:
    """The same values if they look like a recipe; `place` is where they come from."""
    if not isinstance(values, dict):
        raise UserError(f"{place} is not a recipe: it should hold keys such as run, model and data")
    for section, such in (("model", "slots: 53"), ("data", "train: my.txt"), ("optimizer", "learning_rate: 6e-4")):
        if values.get(section) is None:  # nothing under it: as if left out
            values.pop(section, None)
        elif not isinstance(values[section], dict):
            raise UserError(f"{place}: {section} should hold settings, such as {such}")
    if not isinstance(values.setdefault("model", {}).get("system", ""), str):
        raise UserError(f"{place}: model should hold settings, such as system: log_memory and slots: 53")
    return values


def add_settings(parser: ArgumentParser, system: str) -> None:
    """Everything that a recipe of this system may hold, as options of the parser."""
    parser.add_class_arguments(TrainConfig, skip={"model"}, fail_untyped=True)
    parser.add_class_arguments(SYSTEMS[system].Config, "model", fail_untyped=True)


def fit_to_system(recipe: dict[str, Any], system: str, parser: ArgumentParser, place: object) -> dict[str, Any]:
    """The recipe without model settings that only other systems have; a key that none has is an error."""
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
    """The config that a recipe stands for, each value of the type that it should have."""
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
    """What the values stand for, each known and of the type that it should have; an empty one is as if left out."""
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
