"""Wording of error messages."""

import pytest
from torch.distributed import DistNetworkError

from logpast.util.errors import LONGEST, Diverged, UserError, is_lost_process, suggest


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
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."), True),
        (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv"), True),
        (DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("a bug"), False),
    ],
)
def test_a_lost_process_is_told_from_a_bug(error: Exception, lost: bool) -> None:
    assert is_lost_process(error) == lost


def test_messages_are_one_line_that_can_be_printed() -> None:
    assert str(UserError("no file 'a\nb\x1b[2J\u2028\ud800': give τ × 2")) == (
        r"no file 'a\nb\x1b[2J\u2028\ud800': give τ × 2"
    )


def test_long_messages_keep_their_start_and_their_fix() -> None:
    message = str(UserError(f"file.yaml: unknown key {'x' * 10**6}; remove it"))
    assert len(message) < 2 * LONGEST
    assert message.startswith("file.yaml: unknown key xxx")
    assert message.endswith("xxx; remove it")
