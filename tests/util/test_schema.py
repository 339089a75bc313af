"""Schemas of files: the first wrong field is named in one line."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from logpast.util import schema
from logpast.util.errors import UserError

KIND = {"a": {"b": [int], "c?": float | None}, "columns?": schema.Columns({"x": [int], "y": {"z": [str]}})}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "dictionary"), ({}, "it has no a"), ({"a": {}}, r"it has no a\.b"),
        ({"a": {"b": [1, "2"]}}, r"a\.b\.1 is '2'"),
        ({"a": {"b": [True]}}, r"a\.b\.0"), ({"a": {"b": [], "c": "x"}}, r"a\.c is 'x'"),
        ({"a": {"b": []}, "columns": {"x": [1], "y": {"z": []}}}, "columns: .*equally long"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        schema.validate(TypeAdapter(schema.schema(KIND)), value)


def test_optional_and_unknown_keys_are_accepted() -> None:
    value = {"a": {"b": [1], "c": None, "other": 1}, "columns": {"x": [1], "y": {"z": ["s"]}}}
    assert schema.validate(TypeAdapter(schema.schema(KIND)), value) is value


@pytest.mark.parametrize(
    "error", [KeyError("name"), TypeError("name"), ZeroDivisionError("name"), RecursionError("name")]
)
def test_reading_turns_errors_of_parsing_into_one_line(error: Exception) -> None:
    with (
        pytest.raises(UserError, match=r"^f\.json is damaged: .*name.*; fix it$"),
        schema.reading("f.json is damaged", "fix it"),
    ):
        raise error


@pytest.mark.parametrize("finite", [True, False])
def test_json_that_is_nested_too_deeply_is_a_value_error(finite: bool) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        schema.parse_json("[" * 100_000, finite)


def test_numbers_must_be_finite_unless_a_file_may_have_others() -> None:
    assert schema.parse_json("[1e999, NaN]", finite=False)[0] == math.inf
    for text in ("1e999", "NaN", "1" + "0" * 400):
        with pytest.raises((ValueError, OverflowError)):
            schema.parse_json(text)


def test_reading_leaves_a_missing_file_to_the_caller() -> None:
    with pytest.raises(FileNotFoundError), schema.reading("x"):
        Path("/nowhere").read_text()
