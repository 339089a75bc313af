"""Values as plain data: what JSON can say, and settings one level deep."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def json_safe(value: Any, digits: int | None = None) -> Any:
    """The same with None in place of what JSON has no word for: infinity, and what is not a number.

    Other numbers may be rounded to so many decimals.
    """
    if isinstance(value, dict):
        return {name: json_safe(part, digits) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(part, digits) for part in value]
    if not isinstance(value, float):
        return value
    return None if not math.isfinite(value) else value if digits is None else round(value, digits)


def to_json(value: Any) -> str:
    """JSON to be read by people, too: a list of numbers is a line."""
    text = json.dumps(json_safe(value), indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n[^][{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{model: {slots: 5}} as {model.slots: 5}; a ValueError where both are given."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        new = flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        if twice := sorted(found.keys() & new.keys()):
            raise ValueError(f"{twice[0]} is given twice")
        found |= new
    return found
