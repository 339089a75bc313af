import numpy as np
import pytest
import torch

from logpast.recall import index, naive


def expected(stream: list[int], orders: int, edges: list[int]) -> np.ndarray:
    """The definition: the n-grams that end at i are the (n − 1)-grams before i, followed by s_i."""
    return naive.counts(stream, orders - 1, edges)[:, 1]


@pytest.mark.parametrize("edges", [[1], [3, 10], [2, 5, 1000], [64, 309]])
@pytest.mark.parametrize("length", [1, 2, 7, 200])
def test_counts_and_followers_are_those_of_the_definition(length: int, edges: list[int]) -> None:
    stream = np.random.default_rng(length).integers(-1, 4, length).tolist()
    found = index.occurrences(torch.tensor(stream), torch.zeros(length, dtype=torch.long), 4, edges, followers=3)
    assert np.array_equal(found.counts.numpy(), expected(stream, 4, edges))
    latest = [naive.latest(stream[: end + 1], 3, edges[-1]) for end in range(length)]
    assert found.followers.tolist() == latest


def test_nothing_is_counted_across_streams() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 3, n).tolist() for n in (30, 1, 50)]
    streams = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    found = index.occurrences(
        torch.tensor([token for part in parts for token in part]), streams, 3, [4, 100], followers=3
    )
    assert np.array_equal(found.counts.numpy(), np.concatenate([expected(part, 3, [4, 100]) for part in parts]))
    latest = [naive.latest(part[: end + 1], 3, 100) for part in parts for end in range(len(part))]
    assert found.followers.tolist() == latest


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.from_numpy(np.random.default_rng(1).integers(0, 5, 500))
    whole = index.occurrences(stream, torch.zeros_like(stream), 4, [2, 9], followers=4)
    monkeypatch.setattr(index, "CHUNK", 1)
    for table, expected in zip(
        index.occurrences(stream, torch.zeros_like(stream), 4, [2, 9], followers=4), whole, strict=True
    ):
        assert torch.equal(table, expected)


def test_one_token_a_million_times() -> None:
    tokens = torch.zeros(10**6, dtype=torch.long)
    found = index.occurrences(tokens, tokens, 2, [64, 10**6], followers=1)
    assert found.counts.dtype == torch.int32
    assert found.counts[-1].tolist() == [[64, 10**6 - 1 - 64], [64, 10**6 - 2 - 64]]
    assert not found.followers[-1].any()
