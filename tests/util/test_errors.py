"""Wording of error messages."""

import pytest

from logpast.util.errors import Diverged, UserError, one_line, suggest


def test_user_errors_are_value_errors() -> None:
    assert issubclass(UserError, ValueError)
    assert issubclass(Diverged, UserError)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("isit", "did you mean isith?"),
        ("PAPER", "did you mean paper?"),
        ("model.slot", "did you mean model.slots?"),
        ("xyz", "known: paper, isith, model.slots"),
    ],
)
def test_suggest_names_the_nearest_or_lists_all(name: str, expected: str) -> None:
    assert suggest(name, ["paper", "isith", "model.slots"]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Parser key "steps": not an int. Got value: many', "--steps cannot be 'many'"),
        ('Parser key "streams": expected one of (corpus, document)\n. Given value: x', "it may be corpus, document"),
        ('Parser key "where": expected list[str]. Given value: a', 'write "[a]"'),
        ("two\n   lines", "two lines"),
    ],
)
def test_a_parsers_error_becomes_one_line(text: str, expected: str) -> None:
    line = one_line(ValueError(text), "--")
    assert expected in line
    assert "\n" not in line
