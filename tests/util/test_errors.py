"""Wording of error messages."""

import pytest

from logpast.util.errors import LONGEST, Diverged, UserError, suggest


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


def test_messages_are_one_line_that_can_be_printed() -> None:
    assert str(UserError("no file 'a\nb\x1b[2J\u2028\ud800': give τ × 2")) == (
        r"no file 'a\nb\x1b[2J\u2028\ud800': give τ × 2"
    )


def test_long_messages_keep_their_start_and_their_fix() -> None:
    message = str(UserError(f"file.yaml: unknown key {'x' * 10**6}; remove it"))
    assert len(message) < 2 * LONGEST
    assert message.startswith("file.yaml: unknown key xxx")
    assert message.endswith("xxx; remove it")
