"""Tokens are drawn from the right distribution."""

import numpy as np
import torch

from logpast.models.sampling import Sampling


def test_tokens_are_drawn_as_the_settings_say() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    randoms = [torch.Generator().manual_seed(seed) for seed in range(2000)]

    def sampled(**how: float) -> list[int]:
        return Sampling(**how).draw(logits.expand(2000, 4), randoms)  # type: ignore[arg-type]

    assert set(sampled(temperature=0)) == {0}
    assert set(sampled(top_k=2)) == {0, 1}
    assert set(sampled(top_p=0.01)) == {0}
    assert set(sampled(top_p=0.7)) == {0, 1}  # the first has only 0.64
    assert set(sampled(top_k=3, top_p=0.7)) == {0, 1}
    assert set(sampled(top_k=9)) == set(sampled(top_p=1)) == {0, 1, 2, 3}
    shares = np.bincount(sampled(), minlength=4) / 2000
    np.testing.assert_allclose(shares, logits.softmax(0), atol=0.04)
    cold = np.bincount(sampled(temperature=0.5), minlength=4) / 2000
    np.testing.assert_allclose(cold, (2 * logits).softmax(0), atol=0.04)


def test_a_text_is_sampled_alike_alone_and_beside_others() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    for how in ((1.0, None, None), (0.7, 20, None), (1.0, None, 0.9), (1.0, 20, 0.9)):
        sampling, randoms = Sampling(*how), [torch.Generator() for _ in range(5)]
        together = sampling.draw(logits, [random.manual_seed(seed) for seed, random in enumerate(randoms)])
        alone = [sampling.draw(row[None], [random.manual_seed(seed)])
                 for seed, (row, random) in enumerate(zip(logits, randoms, strict=True))]  # fmt: skip
        assert together == [token for row in alone for token in row]
