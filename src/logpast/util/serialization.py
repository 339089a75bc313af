"""Values as JSON, and nested settings as flat ones."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def json_safe(value: Any, digits: int | None = None) -> Any:
    """The value with None in place of infinity and NaN, which JSON cannot represent.

    With `digits`, floats are rounded to that many decimals.
    """
    if isinstance(value, dict):
        return {name: json_safe(part, digits) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(part, digits) for part in value]
    if not isinstance(value, float):
        return value
    return None if not math.isfinite(value) else value if digits is None else round(value, digits)


def to_json(value: Any) -> str:
    """Indented JSON, with each list of numbers on one line."""
    text = json.dumps(json_safe(value), indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n[^][{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{model: {slots: 5}} as {model.slots: 5}; a ValueError if a key is given in both forms."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        new = flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        if twice := sorted(found.keys() & new.keys()):
            raise ValueError(f"{twice[0]} is given twice")
        found |= new
    return found


def unflatten(values: dict[str, Any]) -> dict[str, Any]:
    """{model.slots: 5} as {model: {slots: 5}}; the inverse of `flatten`, for keys of one or two parts."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found
