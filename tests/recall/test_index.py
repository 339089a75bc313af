import numpy as np
import pytest
import torch

from logpast.recall import index, naive


def expected(stream: list[int], orders: int, edges: list[int]) -> np.ndarray:
    """The definition: the n-grams that end at i are the (n − 1)-grams before i, followed by s_i."""
    return naive.counts(stream, orders - 1, edges)[:, 1]


@pytest.mark.parametrize("edges", [[1], [3, 10], [2, 5, 1000], [64, 309]])
@pytest.mark.parametrize("length", [1, 2, 7, 200])
def test_occurrences_are_those_of_the_definition(length: int, edges: list[int]) -> None:
    stream = np.random.default_rng(length).integers(-1, 4, length).tolist()
    found = index.occurrences(torch.tensor(stream), torch.zeros(length, dtype=torch.long), 4, edges)
    assert np.array_equal(found.numpy(), expected(stream, 4, edges))


def test_nothing_is_counted_across_streams() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 3, n).tolist() for n in (30, 1, 50)]
    streams = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    found = index.occurrences(torch.tensor([token for part in parts for token in part]), streams, 3, [4, 100])
    assert np.array_equal(found.numpy(), np.concatenate([expected(part, 3, [4, 100]) for part in parts]))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.from_numpy(np.random.default_rng(1).integers(0, 5, 500))
    whole = index.occurrences(stream, torch.zeros_like(stream), 4, [2, 9])
    monkeypatch.setattr(index, "CHUNK", 1)
    assert torch.equal(index.occurrences(stream, torch.zeros_like(stream), 4, [2, 9]), whole)


def test_one_token_a_hundred_thousand_times() -> None:
    tokens = torch.zeros(100_000, dtype=torch.long)
    found = index.occurrences(tokens, tokens, 2, [64, 10**6])
    assert found.dtype == torch.int32
    assert found[-1].tolist() == [[64, 99_999 - 64], [64, 99_998 - 64]]
