"""Settings and arguments, validated by pydantic. A mistake is a UserError of one line that names the setting."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError

from logpast.util.errors import UserError, suggest

P = ParamSpec("P")
R = TypeVar("R")

PositiveInt = Annotated[int, Ge(1), Lt(2**63)]
Count = Annotated[int, Ge(0), Lt(2**63)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
LongSeed = Annotated[int, Ge(0), Lt(2**63)]
PositiveFloat = Annotated[float, Gt(0), Lt(math.inf)]
NonNegativeFloat = Annotated[float, Ge(0), Lt(math.inf)]
Share = Annotated[float, Gt(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]

_WORDS = {int: "an int, a whole number", float: "a float, a number", bool: "true or false", str: "text"}


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: validate the arguments against their annotations before the call."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds, given = types_of(function), inspect.signature(function).bind(*args, **kwargs)
        for name, value in given.arguments.items():
            given.arguments[name] = validate_value(name, value, kinds[name])
        return function(*given.args, **given.kwargs)

    return wrapper


def validate_fields(config: Any, prefix: str = "") -> None:
    """Validate the fields of a frozen dataclass in its __post_init__; messages put `prefix` before a field's name."""
    kinds = types_of(config.__class__)
    for name in (each.name for each in fields(config)):
        object.__setattr__(config, name, validate_value(prefix + name, getattr(config, name), kinds[name]))


@cache
def types_of(owner: Any) -> dict[str, Any]:
    """The types of a function's arguments or of a dataclass's fields."""
    return get_type_hints(owner, include_extras=True)


def from_saved(kind: Callable[..., R], values: dict[str, Any], prefix: str = "") -> R:
    """A dataclass from its saved settings. One that is unknown is of a newer version."""
    unknown = values.keys() - {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise UserError(
            f"{prefix}{min(unknown)} is no setting of this version; upgrade logpast if a newer one wrote it"
        )
    return kind(**values)


def validate_section(kind: Callable[..., R], values: dict[str, Any], place: object) -> R:
    """A dataclass from a section of a YAML file; empty values count as left out."""
    kinds = {each.name: types_of(kind)[each.name] for each in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in kinds:
            raise UserError(f"{place}: unknown key {name!r}; {suggest(str(name), list(kinds))}")
    defaults = {each.name: default_of(each) for each in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in defaults.items() if value is not MISSING}
    given |= {name: value for name, value in values.items() if value is not None}
    try:
        return kind(**{name: validate_value(name, value, kinds[name], text=True) for name, value in given.items()})
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def default_of(field: Field[Any]) -> Any:
    """The default of a dataclass's field, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def validate_value(name: str, value: Any, kind: Any, text: bool = False) -> Any:
    """The value, converted to the type `kind`: a string to a Path or a list of one, a path to a string, 5.0 to 5.

    With `text`, a string may be a number, as in options and in YAML, where 6e-4 is a string.
    """
    value = _plain(value)
    if isinstance(value, str) and not text and list[str] in (kind, *get_args(kind)):
        value = [value]
    try:
        found = _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(_message(name, value, kind, error)) from None
    if isinstance(value, bool if text else bool | str) and isinstance(found, int | float) and found is not value:
        raise UserError(_wrong_type(name, value, kind))
    return value if type(value) is int and not text else found  # hashes of settings distinguish 100 and 100.0


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(value: Any) -> Any:
    """Scalars of NumPy and PyTorch as numbers, paths as strings, also in a list."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if getattr(value, "shape", None) == ():
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _message(name: str, value: Any, kind: Any, error: ValidationError) -> str:
    first, *others = error.errors()
    if value is None or first["type"].endswith("too_short"):
        return f"{name} is empty; give it a value, or leave it out"
    if others or not first["type"].startswith(("greater_than", "less_than")):
        return _wrong_type(name, value, kind)
    text = first["msg"].replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{name} must be {text.partition(' should be ')[2]}, got {value!r}"


def _wrong_type(name: str, value: Any, kind: Any) -> str:
    kinds = [each for each in _members(kind) if each is not type(None)]
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    words = [_WORDS.get(each) or f"a {(get_origin(each) or each).__name__}" for each in kinds]
    fix = suggest(str(value), choices) if choices else f"it must be {' or '.join(words)}"
    return f"{name} cannot be {value!r}; {fix}"


def _members(kind: Any) -> list[Any]:
    """The types of a union, without their limits."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (None, Literal, list, dict, tuple):
        return [kind]
    return [member for each in get_args(kind) for member in _members(each)]
