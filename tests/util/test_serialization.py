"""JSON and flat settings."""

import json
import math

import pytest

from logpast.util.serialization import flatten, json_safe, to_json, unflatten


def test_json_safe_replaces_what_json_cannot_represent() -> None:
    value = {"a": [1.5, math.nan, math.inf], "b": (1, "x", None, True)}
    assert json_safe(value) == {"a": [1.5, None, None], "b": [1, "x", None, True]}


def test_json_safe_rounds_floats_only() -> None:
    assert json_safe({"a": [1.23456, 7]}, digits=2) == {"a": [1.23, 7]}


def test_to_json_writes_a_list_of_numbers_on_one_line() -> None:
    value = {"numbers": [1, 2.5, math.nan], "names": ["é", "b"]}
    text = to_json(value)
    assert '"numbers": [ 1, 2.5, null ]' in text
    assert '"names": [\n' in text
    assert "é" in text
    assert json.loads(text) == {"numbers": [1, 2.5, None], "names": ["é", "b"]}


def test_flatten_joins_nested_keys() -> None:
    assert flatten({"model": {"slots": 5, "a": {"b": 1}}, "steps": 2}) == {"model.slots": 5, "model.a.b": 1, "steps": 2}


def test_flatten_refuses_a_key_in_both_forms() -> None:
    with pytest.raises(ValueError, match=r"model\.slots"):
        flatten({"model.slots": 5, "model": {"slots": 9}})


def test_unflatten_is_the_inverse_of_flatten() -> None:
    values = {"steps": 1, "model": {"slots": 5, "width": 8}, "data": {"train": "x"}}
    assert unflatten(flatten(values)) == values
