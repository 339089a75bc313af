import numpy as np
import pytest
import torch

from logpast.recall import matching, naive

EDGES = [2, 7, 40]


@pytest.mark.parametrize("length", [1, 2, 9, 80])
def test_matches_are_those_of_the_definition(length: int) -> None:
    random = np.random.default_rng(length)
    ids = random.integers(-1, 4, (2, length))
    ids += matching.OWN * (ids >= 0) * random.integers(0, 2, ids.shape)
    queries = min(5, length)
    candidates, component = matching.compare(torch.from_numpy(ids), queries, 3, EDGES)
    by_candidate = [
        matching.count(component.masked_fill((candidates != token).unsqueeze(1), 12), 3, 3) for token in range(4)
    ]
    assert torch.equal(matching.count(component, 3, 3), sum(by_candidate))
    for row, query in np.ndindex(2, queries):
        found = np.stack([counts[row, query].numpy() for counts in by_candidate], axis=-1)
        stream = ids[row, : length - queries + query + 1].tolist()
        assert np.array_equal(found, naive.distribution(stream, 3, EDGES, 4))


@pytest.mark.parametrize("length", [1, 2, 9, 80])
@pytest.mark.parametrize("at_once", [1, 300])
def test_latest_followers_are_those_of_the_definition(
    length: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "COMPARISONS", at_once)
    random = np.random.default_rng(length)
    ids = random.integers(4, size=(2, length)) + matching.OWN * random.integers(0, 2, (2, length))
    ids[:, 0] = -1  # as in a stream
    queries = min(5, length)
    found = matching.latest(torch.from_numpy(ids), queries, 3, 40)
    for row, query in np.ndindex(2, queries):
        assert found[row, query].tolist() == naive.latest(ids[row, : length - queries + query + 1].tolist(), 3, 40)
