"""Whether a scored text is part of the training text."""

from dataclasses import replace

import pytest

from logpast.data import TokenStore
from logpast.evaluation.overlap import shared_documents, training_overlap, warn

TRAIN = TokenStore.in_memory([[1, 2, 3], [2, 2], [4, 4, 4, 4], []], size=6, eot=5)


def test_training_text_itself_is_recognised() -> None:
    assert training_overlap(TRAIN, TRAIN.identity) == "it is the training text"


def test_shared_documents_are_counted_token_for_token() -> None:
    text = TokenStore.in_memory([[4, 4, 4, 4], [3, 2, 1], [2, 2], [2, 2, 2], []], size=6, eot=5)
    assert shared_documents(text, TRAIN) == 2
    assert training_overlap(text, TRAIN.identity, TRAIN) == "2 of its 5 documents are in the training text"
    assert training_overlap(text, TRAIN.identity) is None  # the training text is not available
    text = TokenStore.in_memory([[4, 4, 4, 4], [2, 2]], size=6, eot=5)
    assert training_overlap(text, TRAIN.identity, TRAIN) == "all its documents (2) are in the training text"


def test_unseen_text_has_no_overlap() -> None:
    text = TokenStore.in_memory([[1, 2, 4], [2, 3]], size=6, eot=5)
    assert training_overlap(text, TRAIN.identity, TRAIN) is None


def test_splits_of_a_known_corpus_are_recognised_by_name() -> None:
    text = replace(TokenStore.in_memory([[1]], size=6, eot=5), name="wiki22k:test")
    assert "wiki22k:train" in str(training_overlap(text, {"name": "wiki22k:train", "sha256": "x"}))
    assert training_overlap(text, {"name": "wiki22k:rest", "sha256": "x"}) is None
    assert training_overlap(text, {}) is None


def test_warning_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    warn(TRAIN, "it is the training text", "use another")
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "logpast: warning: memory is not unseen text: it is the training text; use another\n"
