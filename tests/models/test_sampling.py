"""Tokens are drawn from the right distribution."""

from typing import Any

import numpy as np
import pytest
import torch

from logpast.models.sampling import Sampling, generators
from logpast.util.errors import UserError


def test_tokens_are_drawn_as_the_settings_say() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    randoms = generators(0, 2000)

    def sampled(**how: float) -> list[int]:
        return Sampling(**how).draw(logits.expand(2000, 4), randoms)  # type: ignore[arg-type]

    assert set(sampled(temperature=0)) == {0}
    assert set(sampled(top_k=2)) == {0, 1}
    assert set(sampled(top_p=0.01)) == {0}
    assert set(sampled(top_p=0.7)) == {0, 1}  # the first has only 0.64
    assert set(sampled(top_k=3, top_p=0.7)) == {0, 1}
    assert set(sampled(top_k=9)) == set(sampled(top_p=1)) == {0, 1, 2, 3}
    assert len(set(Sampling(top_k=2).draw(torch.ones(2000, 4), randoms))) == 2  # also of equally likely ones
    shares = np.bincount(sampled(), minlength=4) / 2000
    np.testing.assert_allclose(shares, logits.softmax(0), atol=0.04)
    cold = np.bincount(sampled(temperature=0.5), minlength=4) / 2000
    np.testing.assert_allclose(cold, (2 * logits).softmax(0), atol=0.04)


def test_a_text_is_sampled_alike_alone_and_beside_others() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    for how in ((1.0, None, None), (0.7, 20, None), (1.0, None, 0.9), (1.0, 20, 0.9)):
        sampling = Sampling(*how)
        together = sampling.draw(logits, generators(0, 5))
        alone = [sampling.draw(row[None], generators(seed, 1)) for seed, row in enumerate(logits)]
        assert together == [token for row in alone for token in row]


def test_seeds_of_any_size_differ() -> None:
    logits = torch.zeros(1, 10**6)
    drawn = [Sampling().draw(logits, generators(seed, 1))[0] for seed in (0, 2**32, 2**62)]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 2.0},
              {"allowed": torch.zeros(5, dtype=torch.bool)}, {"allowed": torch.ones(5)}], ids=str,
)  # fmt: skip
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=min(wrong)):
        Sampling(**wrong)
