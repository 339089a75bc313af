"""A sweep's page -> its cells: grids over any fields of a recipe, united."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from logpast.data import is_store
from logpast.data.prepare import TO_TRAIN
from logpast.ledger import row as ledger
from logpast.training.config import TrainConfig, recorded_settings
from logpast.training.recipes import config_from_recipe, read_recipe, read_yaml, validate_recipe
from logpast.util.errors import UserError, suggest
from logpast.util.serialization import flatten

FINEST = 0.0001  # part of a core or a GPU that Ray can deal out
OURS = ("run", "resume", "devices")  # not for a page to set: a cell has its own folder, resumes, and has one device
LONGEST = 200  # bytes of a cell's name: file systems take 255, and names of logs and unfinished folders are longer


@dataclass(frozen=True)
class Page:
    """What is swept over: the keys of a page for `logpast sweep`."""

    grids: list[dict[str, Any]]
    """each maps a field of the recipe to its values, or a name to variants that set several fields; the cells of a
    grid are all combinations, and the cells of all grids are united"""
    recipe: str | dict[str, Any] | None = None
    """a recipe for `train`: a file beside the page, or its keys"""
    test: str | None = None
    """the text to score on"""
    set: dict[str, Any] = field(default_factory=dict)
    """fields of the recipe that all cells change"""
    cpus: float = 1
    """with Ray: cores of a cell"""
    gpus: float | None = None
    """with Ray: GPUs of a cell, 0.5 for two cells on each; by default 1 where the cluster has any"""

    @property
    def combinations(self) -> int:
        """How many points the grids have, those that are the same cell counted each."""
        return sum(math.prod(map(len, grid.values())) for grid in self.grids)


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    name: str
    choices: dict[str, Any]
    config: TrainConfig
    test: str

    @property
    def key(self) -> str:
        """Equal where the same would be learned and scored."""
        return ledger.hash_recipe([recorded_settings(self.config), self.test])

    @property
    def texts(self) -> dict[str, tuple[str | None, ...]]:
        """By their names in a row: equal where the same name and tokenizer should mean the same tokens."""
        data = self.config.data
        own = is_store(data.train) or TO_TRAIN.fullmatch(data.tokenizer or "")  # a tokenizer of the training text
        names = {"train_data": data.train, "validation_data": data.validation, "test_data": self.test}
        return {part: (name, data.tokenizer, data.train if own else None) for part, name in names.items()}


def read_page(path: Path) -> Page:
    values = read_yaml(path)
    known = [f.name for f in fields(Page)]
    if not isinstance(values, dict) or not isinstance(values.get("grids"), list) or not values["grids"]:
        raise UserError(f"{path} is not a sweep: it needs grids, a list; see sweep-toy")
    for name in values:
        if name not in known:
            raise UserError(f"{path}: unknown key {name!r}; {suggest(str(name), known)}")
    for name, kinds in (
        ("set", dict),
        ("test", str),
        ("recipe", (str, dict)),
        ("cpus", (int, float)),
        ("gpus", (int, float)),
    ):
        if name in values and (not isinstance(values[name], kinds) or isinstance(values[name], bool)):
            raise UserError(f"{path}: {name} cannot be {values[name]!r}")
    plan = Page(**values)
    if not FINEST <= plan.cpus < math.inf:
        raise UserError(f"{path}: cpus must be at least {FINEST}, got {plan.cpus}")
    gpus = plan.gpus or 0
    if not 0 <= gpus < math.inf or 0 < gpus < FINEST or (gpus > 1 and gpus % 1):
        raise UserError(f"{path}: gpus must be 0, from {FINEST} to 1, or a whole number, got {plan.gpus}")
    return plan


def cells_of(plan: Page, page: Path, out: Path) -> list[Cell]:
    """All cells in the grids' order, each once; the first grid that has a cell names it."""
    found, named = dict[str, Cell](), dict[str, Cell]()
    recipes: dict[str, dict[str, Any]] = {}
    for grid in plan.grids:
        if not isinstance(grid, dict) or not grid:
            raise UserError(f"{page}: a grid should map fields to their values, not be {grid!r}")
        axes = [_choices(axis, values, page) for axis, values in grid.items()]
        points = [(picked, _cell(plan, picked, page, out, recipes)) for picked in product(*axes)]
        for place, choices in enumerate(axes):
            if any(choice.settings != choices[0].settings for choice in choices) and _is_idle(place, points):
                raise UserError(f"{page}: {choices[0].axis} makes no cell another one; take it out, or put it into set")
        for _, cell in points:
            if cell.key in found:
                continue
            if cell.name in named:
                raise UserError(f"{page}: two different cells would be called {cell.name}; give variants other names")
            found[cell.key] = named[cell.name] = cell
    return list(found.values())


@dataclass(frozen=True)
class Choice:
    """A value of an axis: what it is called, and the settings that it means."""

    axis: str
    value: Any
    label: str
    settings: dict[str, Any]


def _is_idle(place: int, points: list[tuple[tuple[Choice, ...], Cell]]) -> bool:
    """Whether the same is learned and scored whatever is chosen on this axis of a grid."""
    keys = defaultdict[tuple[str, ...], set[str]](set)
    for picked, cell in points:
        others = tuple(choice.label for choice in (*picked[:place], *picked[place + 1 :]))
        keys[others].add(cell.key)
    return all(len(same) == 1 for same in keys.values())


def _choices(axis: Any, values: Any, page: Path) -> list[Choice]:
    if not isinstance(axis, str):
        raise UserError(f"{page}: a grid's keys should be fields such as model.slots, or names, not {axis!r}")
    if isinstance(values, dict) and values and all(isinstance(value, dict) for value in values.values()):
        return [Choice(axis, name, str(name), _settings(variant, page)) for name, variant in values.items()]
    if isinstance(values, list) and values and not any(isinstance(value, dict | list) for value in values):
        short = axis.rpartition(".")[2]
        return [Choice(axis, value, f"{short}{value}", {axis: value}) for value in values]
    raise UserError(f"{page}: {axis} should have a list of values, or named variants that each set some fields")


def _cell(
    plan: Page, picked: tuple[Choice, ...], page: Path, out: Path, recipes: dict[str, dict[str, Any]]
) -> Cell:  # fmt: skip
    chosen: dict[str, Any] = {}
    for choice in picked:
        if twice := sorted(set(choice.settings) & set(chosen)):
            raise UserError(f"{page}: {twice[0]} is set by {choice.axis} and by another part of the same grid")
        chosen |= choice.settings
    settings = {"recipe": plan.recipe, "test": plan.test} | _settings(plan.set, page) | chosen
    if ours := sorted(set(OURS) & set(settings)):
        raise UserError(f"{page}: {ours[0]} is the sweep's to set; take it out")
    base, test = settings.pop("recipe"), settings.pop("test")
    if base is None or test is None:
        raise UserError(f"{page}: a cell lacks its {'recipe' if base is None else 'test text'}; set it in the page")
    if not isinstance(test, str):
        raise UserError(f"{page}: test cannot be {test!r}; name a text")
    if isinstance(base, str):
        if base not in recipes:
            recipes[base] = read_recipe(page.parent / base)
        base = recipes[base]
    values = validate_recipe(_with(validate_recipe(deepcopy(base), page), settings, page), page)
    labels = [choice.label for choice in picked if choice.axis != "seed"]
    name = re.sub(r"[^\w.+-]+", "_", "-".join([*labels, f"seed{values.get('seed', 0)}"]))
    if len(name.encode()) > LONGEST:
        raise UserError(f"{page}: {name[:40]}… is too long for the name of a cell; name variants in fewer letters")
    try:
        config = config_from_recipe(values | {"run": str(out / "runs" / name), "resume": "auto", "devices": 1}, page)
    except UserError as error:
        raise UserError(f"{error} (cell {name})") from None
    return Cell(name, {choice.axis: choice.value for choice in picked}, config, test)


def _settings(values: dict[str, Any], page: Path) -> dict[str, Any]:
    with ledger.reading(f"{page} is not a sweep", "take one of the two out"):
        return flatten(values)


def _with(values: dict[str, Any], settings: dict[str, Any], page: Path) -> dict[str, Any]:
    """A recipe with some fields, named like model.slots, changed."""
    for key, value in settings.items():
        if value is None and isinstance(values.get(key), dict):
            raise UserError(f"{page}: {key} has nothing under it; name its settings, or take it out")
        *rooms, last = key.split(".")
        place = values
        for room in rooms:
            place = place.setdefault(room, {})
            if not isinstance(place, dict):
                raise UserError(f"{page}: unknown key {key!r}; {room} is no group of settings")
        place[last] = value
    return values
