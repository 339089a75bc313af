"""Wording of error messages."""

import pytest

from logpast.util.errors import Diverged, UserError, suggest


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
