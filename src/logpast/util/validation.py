"""Types of settings, held to in a notebook as the command line holds to them.

A misspelt choice that goes unnoticed changes a result without a word, so it is an error, wherever it comes from, and so
is half a step; a path may be given as a text, and a text as a path.
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
    """A verb whose arguments are settled before it begins."""

    @wraps(function)
    def settling(*args: P.args, **kwargs: P.kwargs) -> R:
        hints, given = get_type_hints(function), inspect.signature(function).bind(*args, **kwargs)
        given.arguments.update(
            {name: validate_value(name, value, hints[name]) for name, value in given.arguments.items()}
        )
        return function(*given.args, **given.kwargs)

    return settling


def validate_fields(config: Any, before: str = "") -> None:
    """The same for the fields of a frozen dataclass, in its __post_init__; `before` stands before a field's name."""
    hints = get_type_hints(type(config))
    for each in fields(config):
        value = validate_value(before + each.name, getattr(config, each.name), hints[each.name])
        object.__setattr__(config, each.name, value)


def validate_value(name: str, value: Any, kind: Any) -> Any:
    """A setting of this type: a text is one of its choices, a path, a list of one, or wrong; a number is whole where
    it must be; all else is as it is, where there is more than choices.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and type(None) not in kinds and Any not in kinds:
        raise UserError(f"{name} is empty; give it a value, or leave it out")
    if getattr(value, "shape", None) == ():  # a number of NumPy's or torch's
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
    instead = suggest(str(value), choices) if choices else f"it is no text, but {_named(kinds)}"
    raise UserError(f"{name} cannot be {value!r}; {instead}")


def _named(kinds: tuple[Any, ...]) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not type(None))
