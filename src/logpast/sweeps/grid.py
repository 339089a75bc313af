"""From the YAML file of a sweep to its cells: grids over any fields of a recipe."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt

from logpast.data import is_store
from logpast.data.prepare import TO_TRAIN
from logpast.ledger.row import hash_recipe
from logpast.training.config import TrainConfig, recorded_settings
from logpast.training.recipes import config_from_recipe, find_recipe, read_recipe, read_yaml, validate_recipe
from logpast.util.errors import UserError
from logpast.util.serialization import flatten
from logpast.util.validation import NonNegativeFloat, validate_section

FINEST = 0.0001  # smallest fraction of a core or a GPU that Ray can assign
RESERVED = ("run", "resume", "devices")  # set by the sweep: each cell has its own folder, resumes, and has one device
MAX_CELLS = 10_000  # of all grids
MAX_NAME = 200  # bytes of a cell's name: file systems allow 255, and names of logs and temporary folders are longer


@dataclass(frozen=True)
class SweepConfig:
    """The keys of a YAML file for `logpast sweep`."""

    grids: list[Any]
    """each maps a field of the recipe to its values, or a name to variants that set several fields; a grid has all
    combinations as cells, and a sweep the cells of all its grids, each once"""
    recipe: str | dict[str, Any] | None = None
    """a recipe for `train`: a file next to this one, or its keys"""
    test: str | None = None
    """text to score on"""
    set: dict[str, Any] = field(default_factory=dict)
    """fields of the recipe to change in all cells"""
    cpus: Annotated[float, Ge(FINEST), Lt(math.inf)] = 1
    """with Ray: cores per cell"""
    gpus: NonNegativeFloat | None = None
    """with Ray: GPUs per cell, 0.5 for two cells on one; by default 1 if the cluster has any"""

    @property
    def combinations(self) -> int:
        """Number of points of all grids, including those that are the same cell."""
        return sum(math.prod(map(len, grid.values())) for grid in self.grids)


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    name: str
    choices: dict[str, Any]
    config: TrainConfig
    test: str

    @cached_property
    def key(self) -> str:
        """A hash of what decides the result."""
        return hash_recipe([recorded_settings(self.config), self.test])

    @property
    def texts(self) -> dict[str, tuple[str | None, ...]]:
        """Field of the row -> what determines the text: equal values should mean equal tokens."""
        data = self.config.data
        own = is_store(data.train) or TO_TRAIN.fullmatch(data.tokenizer or "")  # tokenizer made from the training text
        names = {"train_data": data.train, "validation_data": data.validation, "test_data": self.test}
        return {part: (name, data.tokenizer, data.train if own else None) for part, name in names.items()}


def read_config(path: Path) -> SweepConfig:
    """Read and validate the YAML file of a sweep."""
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("grids"), list) or not values["grids"]:
        raise UserError(f"{path} is not a sweep: it needs a list of grids, as in the recipe sweep-toy")
    config = validate_section(SweepConfig, values, path)
    gpus = config.gpus or 0
    if 0 < gpus < FINEST or (gpus > 1 and gpus % 1):
        raise UserError(f"{path}: gpus must be 0, from {FINEST} to 1, or a whole number, got {config.gpus}")
    return config


def cells_of(config: SweepConfig, file: Path, out: Path) -> list[Cell]:
    """All cells in the order of the grids, each once, named by the first grid that has it.

    Args:
        config: the sweep.
        file: its file: recipes are found next to it, and errors name it.
        out: folder of the sweep.
    """
    by_key, by_name = dict[str, Cell](), dict[str, Cell]()
    recipes: dict[str, dict[str, Any]] = {}
    if wrong := [grid for grid in config.grids if not isinstance(grid, dict) or not grid]:
        raise UserError(f"{file}: a grid must map fields to their values, got {wrong[0]!r}")
    grids = [[_choices(axis, values, file) for axis, values in grid.items()] for grid in config.grids]
    if (count := sum(math.prod(map(len, axes)) for axes in grids)) > MAX_CELLS:
        raise UserError(f"{file}: its grids have {count:.6g} combinations, more than {MAX_CELLS:,}; split the sweep")
    for axes in grids:
        points = [(picked, _cell(config, picked, file, out, recipes)) for picked in product(*axes)]
        for index, choices in enumerate(axes):
            if any(choice.settings != choices[0].settings for choice in choices) and _has_no_effect(index, points):
                raise UserError(f"{file}: {choices[0].axis} changes no cell; remove it, or move it to set")
        for _, cell in points:
            if cell.key in by_key:
                continue
            if cell.name in by_name:
                raise UserError(f"{file}: two different cells are called {cell.name}; rename the variants")
            by_key[cell.key] = by_name[cell.name] = cell
    return list(by_key.values())


@dataclass(frozen=True)
class Choice:
    """One value of an axis, and the settings that it stands for."""

    axis: str
    value: Any
    label: str
    settings: dict[str, Any]


def _has_no_effect(index: int, points: list[tuple[tuple[Choice, ...], Cell]]) -> bool:
    """Whether all choices on this axis of a grid give the same cell."""
    keys = defaultdict[tuple[str, ...], set[str]](set)
    for picked, cell in points:
        others = tuple(choice.label for choice in (*picked[:index], *picked[index + 1 :]))
        keys[others].add(cell.key)
    return all(len(same) == 1 for same in keys.values())


def _choices(axis: Any, values: Any, file: Path) -> list[Choice]:
    if not isinstance(axis, str):
        raise UserError(f"{file}: keys of a grid must be fields such as model.slots, or names, got {axis!r}")
    if isinstance(values, dict) and values and all(isinstance(value, dict) for value in values.values()):
        return [Choice(axis, name, str(name), _settings(variant, file)) for name, variant in values.items()]
    if isinstance(values, list) and values and not any(isinstance(value, dict | list) for value in values):
        short = axis.rpartition(".")[2]
        once = {repr(value): value for value in values}.values()
        return [Choice(axis, value, f"{short}{value}", {axis: value}) for value in once]
    raise UserError(f"{file}: {axis} needs a list of values, or named variants that each set some fields")


def _cell(
    config: SweepConfig, picked: tuple[Choice, ...], file: Path, out: Path, recipes: dict[str, dict[str, Any]]
) -> Cell:  # fmt: skip
    chosen: dict[str, Any] = {}
    for choice in picked:
        if twice := sorted(set(choice.settings) & set(chosen)):
            raise UserError(f"{file}: {twice[0]} is set by {choice.axis} and by another axis of its grid; remove one")
        chosen |= choice.settings
    settings = {"recipe": config.recipe, "test": config.test} | _settings(config.set, file) | chosen
    if reserved := sorted(set(RESERVED) & set(settings)):
        raise UserError(f"{file}: {reserved[0]} is set by the sweep; remove it")
    base, test = settings.pop("recipe"), settings.pop("test")
    if base is None or test is None:
        raise UserError(f"{file}: a cell has no {'recipe' if base is None else 'test'}; add it")
    if not isinstance(test, str):
        raise UserError(f"{file}: test cannot be {test!r}; give the name of a text")
    if isinstance(base, str):
        if base not in recipes:
            try:
                recipes[base] = read_recipe(find_recipe(Path(base), file.parent))
            except UserError as error:
                raise UserError(f"{file}: recipe: {error}") from None
        base = recipes[base]
    values = validate_recipe(_apply(validate_recipe(deepcopy(base), file), settings, file), file)
    labels = [choice.label for choice in picked if choice.axis != "seed"]
    name = re.sub(r"[^\w.+-]+", "_", "-".join([*labels, f"seed{values.get('seed', 0)}"]))
    if len(name.encode()) > MAX_NAME:
        raise UserError(f"{file}: the cell name {name[:40]}… is too long; give variants shorter names")
    try:
        own = {"run": str(out / "runs" / name), "resume": "auto", "devices": 1}
        train_config = config_from_recipe(values | own, file)
    except UserError as error:
        raise UserError(f"{error} (cell {name})") from None
    return Cell(name, {choice.axis: choice.value for choice in picked}, train_config, test)


def _settings(values: dict[str, Any], file: Path) -> dict[str, Any]:
    try:
        return flatten(values)
    except ValueError as error:
        raise UserError(f"{file}: {error}; remove one of the two") from None


def _apply(recipe: dict[str, Any], settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """A recipe with some fields, named like model.slots, changed in place."""
    for key, value in settings.items():
        if value is None and isinstance(recipe.get(key), dict):
            raise UserError(f"{file}: {key} is empty; give it some settings, or remove it")
        *parents, last = key.split(".")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise UserError(f"{file}: unknown key {key!r}; {parent} is not a section")
        section[last] = value
    return recipe
