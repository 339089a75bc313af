"""Recipes for `logpast compare`: a corpus, a budget and the systems to compare."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from logpast.data.batching import Streams
from logpast.training.recipes import read_yaml
from logpast.util.errors import UserError
from logpast.util.files import atomic_write
from logpast.util.validation import PositiveFloat, PositiveInt, Seed, validate_fields, validate_section


@dataclass(frozen=True)
class Recipe:
    """The keys of a recipe for `logpast compare`."""

    train: str
    validation: str
    test: str
    systems: Annotated[dict[str, dict[str, Any]], MinLen(1)]
    """name in the table -> settings of a model, as in a recipe for `train`; the first sets the number of parameters"""
    tokenizer: str | None = None
    streams: Streams = "document"
    model: dict[str, Any] = field(default_factory=dict)
    """settings that all systems share"""
    tokens: PositiveInt = 1_000_000
    """training tokens of each system"""
    seconds: PositiveFloat = 60
    """training time of each system, with --budget time"""
    tokens_per_step: PositiveInt = 4096
    learning_rates: Annotated[tuple[PositiveFloat, ...], MinLen(1)] = (1e-3,)
    """rates that the search tries for each system"""
    search_tokens: PositiveInt = 100_000
    """training tokens for each rate of the search"""
    validation_tokens: PositiveInt | None = None
    seeds: Annotated[tuple[Seed, ...], MinLen(1)] = (0,)
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    batch_size_when_scoring: PositiveInt = 16

    def __post_init__(self) -> None:
        validate_fields(self)


def read_recipe(path: Path) -> Recipe:
    """Read and validate a recipe, a YAML file or the name of a shipped one."""
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("systems"), dict):
        raise UserError(f"{path} is not a comparison: it needs train, validation, test and systems")
    if missing := [name for name in ("train", "validation", "test") if values.get(name) is None]:
        raise UserError(f"{path} has no {', '.join(missing)}")
    names = dict[str, str]()
    for name in values["systems"]:
        if not isinstance(name, str):
            raise UserError(f"{path}: the name of system {name} must be text; put it in quotes")
        if (other := names.setdefault(file_name(name), name)) != name:
            raise UserError(f"{path}: systems {other} and {name} would use the same file names; rename one")
    return validate_section(Recipe, values, str(path))


def file_name(system: str) -> str:
    """A system's name as the beginning of file names: without slashes."""
    return re.sub(r"[^\w.+ -]+", "_", system)


def ensure_same_recipe(recipe: Recipe, texts: dict[str, str], out: Path) -> None:
    """Write OUT/recipe.json; a UserError if the folder has results of another recipe or of other texts.

    Args:
        recipe: the recipe; its seeds may change.
        texts: sha256 of the tokens of train, validation and test.
        out: folder of the comparison.
    """
    file, rows = out / "recipe.json", out / "rows.jsonl"
    current = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "seeds"} | {"texts": texts}
    if rows.exists() and not file.exists():
        raise UserError(f"{rows} exists without a recipe.json that says what it is from; give another --out")
    if file.exists() and any(path.exists() for path in (rows, out / "runs", *out.glob("search/*"))):
        try:
            before = dict(_parse(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise UserError(f"{file} is damaged; restore it, or give another --out") from None
        now = dict(_parse(json.dumps(current)))
        before.setdefault("texts", now["texts"])  # earlier versions did not write it
        if changed := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            raise UserError(f"{out} has a comparison with another recipe ({', '.join(changed)}); give another --out")
    atomic_write(file, json.dumps(current, indent=2) + "\n")


def _parse(text: str) -> Any:
    """JSON with objects as lists of pairs: the order of systems matters, 20 and 20.0 are the same."""
    return json.loads(text, object_pairs_hook=list)
