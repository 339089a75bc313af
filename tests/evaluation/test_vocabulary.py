"""Which tokens of a text occur in the training text."""

from logpast.data import TokenStore
from logpast.evaluation import vocabulary


def test_occurrences_of_each_id() -> None:
    store = TokenStore.in_memory([[3, 1, 3], [3, 0]], size=5, eot=4)
    assert vocabulary.occurrences(store).tolist() == [1, 1, 0, 3, 0]


def test_unseen_tokens_are_counted_by_document() -> None:
    train = TokenStore.in_memory([[3, 1], [3, 0]], size=5, eot=4)
    test = TokenStore.in_memory([[2, 1, 2], [3], [4, 0]], size=5, eot=4)
    assert vocabulary.unseen(train, test).tolist() == [2, 0, 1]
