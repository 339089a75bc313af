"""Which tokens of a text occur in the training text."""

import pytest

from logpast.data import TokenStore, open_tokens
from logpast.evaluation import vocabulary


def test_occurrences_of_each_id() -> None:
    store = TokenStore.in_memory([[3, 1, 3], [3, 0]], size=5, eot=4)
    assert vocabulary.occurrences(store).tolist() == [1, 1, 0, 3, 0]


def test_unseen_tokens_are_counted_by_document() -> None:
    train = TokenStore.in_memory([[3, 1], [3, 0]], size=5, eot=4)
    test = TokenStore.in_memory([[2, 1, 2], [3], [4, 0]], size=5, eot=4)
    assert vocabulary.unseen(train, test).tolist() == [2, 0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("data_root")
@pytest.mark.parametrize(("text", "tokens", "others"), [("pg19:train", 45_212_690, 23), ("pg19:both", 121_153_806, 0)])
def test_in_vocabulary_books_depend_on_the_training_text(text: str, tokens: int, others: int) -> None:
    train, test = open_tokens(text), open_tokens("pg19:test")
    in_vocabulary = vocabulary.unseen(train, test) <= vocabulary.UNSEEN * test.documents.tokens
    assert (len(train), len(test.documents), (~in_vocabulary).sum()) == (tokens, 99, others)
