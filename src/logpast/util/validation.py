"""Checks the types of settings that come from Python code, as the command line's parser checks its options.

A misspelt choice or a fractional number of steps is an error. A path may be given as a string, and the reverse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from logpast.util.errors import UserError, suggest

P = ParamSpec("P")
R = TypeVar("R")


def validate_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: validate the arguments against their annotations before the call."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        hints, given = get_type_hints(function), inspect.signature(function).bind(*args, **kwargs)
        for name, value in given.arguments.items():
            given.arguments[name] = validate_value(name, value, hints[name])
        return function(*given.args, **given.kwargs)

    return wrapper


def validate_fields(config: Any, prefix: str = "") -> None:
    """Validate the fields of a frozen dataclass in its __post_init__; messages put `prefix` before a field's name."""
    hints = get_type_hints(type(config))
    for each in fields(config):
        value = validate_value(prefix + each.name, getattr(config, each.name), hints[each.name])
        object.__setattr__(config, each.name, value)


def from_saved(kind: Callable[..., R], values: dict[str, Any], prefix: str = "") -> R:
    """A dataclass from its saved settings. One that is unknown is of a newer version."""
    unknown = values.keys() - {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise UserError(
            f"{prefix}{min(unknown)} is no setting of this version; upgrade logpast if a newer one wrote it"
        )
    return kind(**values)


def validate_value(name: str, value: Any, kind: Any) -> Any:
    """The value, converted to the type `kind`: a string to a Path or a list of one, a path to a string, 5.0 to 5.

    Only None, strings, choices and whole numbers are checked; other values are returned as they are.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and type(None) not in kinds and Any not in kinds:
        raise UserError(f"{name} is empty; give it a value, or leave it out")
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch
        value = value.item()
    number = isinstance(value, Real) and not isinstance(value, bool)
    if isinstance(value, Path) and Path not in kinds:
        value = str(value)
    elif isinstance(value, list | tuple) and list[str] in kinds:
        value = [str(each) if isinstance(each, Path) else each for each in value]
    elif number and int in kinds and float not in kinds:
        if value % 1:
            raise UserError(f"{name} cannot be {value}; it must be a whole number")
        value = int(value)
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    others = [each for each in kinds if get_origin(each) is not Literal and each is not type(None)]
    if value is None or (others and not isinstance(value, str)):
        return value
    if str in kinds or Any in kinds or value in choices:
        return value
    if Path in kinds:
        return Path(value)
    if list[str] in kinds:
        return [value]
    names = " or ".join(getattr(each, "__name__", str(each)) for each in others)
    fix = suggest(str(value), choices) if choices else f"it must be {names}, not a string"
    raise UserError(f"{name} cannot be {value!r}; {fix}")
