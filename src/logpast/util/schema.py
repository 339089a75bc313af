"""Files of JSON that people and other programs write: parsed strictly, and validated once by pydantic.

Validated values stay dictionaries. Errors are one line that names the field.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

from logpast.util.errors import UserError

__all__ = ["Columns", "describe", "parse_json", "reading", "schema", "validate"]

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # no conversions; unknown keys are kept


class Columns(dict[str, Any]):
    """An object whose lists must all have the same length, at least 1."""


def schema(kind: Any) -> Any:
    """The type that pydantic validates: of a dict an object with these keys, of [kind] a list, else `kind` itself.

    A key that ends with ? may be missing. Keys that are not listed are allowed.
    """
    if isinstance(kind, list):
        return list[schema(kind[0])]  # type: ignore[misc]
    if not isinstance(kind, dict):
        return kind
    optional = {name.removesuffix("?"): NotRequired[schema(each)] for name, each in kind.items() if name.endswith("?")}
    keys = optional | {name: schema(each) for name, each in kind.items() if not name.endswith("?")}
    found = with_config(STRICT)(TypedDict("Object", keys))  # type: ignore[operator]
    return Annotated[found, AfterValidator(partial(_check_lengths, kind))] if isinstance(kind, Columns) else found


def _check_lengths(kind: Columns, value: dict[str, Any]) -> dict[str, Any]:
    lengths = sorted({len(column) for column in _columns(kind, value)})
    if lengths[0] == 0 or len(lengths) > 1:
        raise ValueError(f"its columns should be equally long, and have {lengths} values")
    return value


def _columns(kind: Any, value: Any) -> Iterator[list[Any]]:
    if isinstance(kind, list):
        yield value
    elif isinstance(kind, dict):
        for name, each in kind.items():
            if (key := name.removesuffix("?")) in value:
                yield from _columns(each, value[key])


def validate(adapter: TypeAdapter[T], value: Any) -> T:
    """The value as it is. A ValueError names the first field that is missing or wrong."""
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(describe(error)) from None
    found: T = value
    return found


def describe(error: ValidationError) -> str:
    """The first problem that pydantic found, with the name of the field, as one line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "missing":
        return f"it has no {name}"
    if first["type"] == "value_error":  # of our own validators
        return f"{name}: {first['ctx']['error']}"
    problem = first["msg"].replace("Input should", "it should")
    return f"{name} is {reprlib.repr(first['input'])}, but {problem[0].lower()}{problem[1:]}"


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """Strict JSON. Raises ValueError, or OverflowError.

    Args:
        text: the JSON.
        finite: whether all numbers must be finite: Python would also accept NaN, Infinity, 1e999 and integers of any
            length. Checkpoints and logs may have some.
    """
    try:
        if not finite:
            return json.loads(text)
        return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is not a number in JSON; write null")
    return value


def _integer(word: str) -> int:
    float(value := int(word))  # an OverflowError if it is too large to compute with
    return value


@contextmanager
def reading(problem: str, fix: str = "fix or remove it") -> Iterator[None]:
    """Use around parsing and validating a file, and nothing else: what is wrong with it becomes one UserError.

    Args:
        problem: what is wrong with the file, by its name: "FILE is not a ledger".
        fix: what the user can do.
    """
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{problem}: it has no {error.args[0]}; {fix}") from None
    except OSError as error:
        if error.filename is None or isinstance(error, FileNotFoundError):
            raise  # the caller knows better what to say of a missing file
        raise UserError(f"{error.filename}: {error.strerror}; it must be a readable file") from None
    except (ArithmeticError, AttributeError, IndexError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{problem}: {' '.join(str(error).split())}; {fix}") from None
