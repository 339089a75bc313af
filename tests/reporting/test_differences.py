"""Differences between losses as text: one sign, one wording."""

import pytest

from logpast.reporting.differences import in_words, signed, too_few


@pytest.mark.parametrize(
    ("nats", "text"),
    [
        (-0.0118, "lower by 0.0118 nats/token (1.2 %)"),
        (0.0119, "higher by 0.0119 nats/token (1.2 %)"),
        (-0.5, "lower by 0.5000 nats/token (39.3 %)"),
        (0.5, "higher by 0.5000 nats/token (64.9 %)"),
        (1e4, "higher by 10000.0000 nats/token (inf %)"),
    ],
)
def test_difference_in_words_with_the_percentage_of_perplexity(nats: float, text: str) -> None:
    assert in_words(nats) == text


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((-0.0313, -0.0203), "0.0203 to 0.0313 lower"),
        ((0.0203, 0.0313), "0.0203 to 0.0313 higher"),
        ((-0.0148, 0.0103), "0.0148 lower to 0.0103 higher"),
    ],
)
def test_interval_in_words(interval: tuple[float, float], text: str) -> None:
    assert in_words(-0.0256, interval) == f"lower by 0.0256 nats/token (2.5 %), 95 % interval: {text}"


def test_number_of_decimals() -> None:
    assert in_words(-0.0586, (-0.07, -0.05), digits=3) == (
        "lower by 0.059 nats/token (5.7 %), 95 % interval: 0.050 to 0.070 lower"
    )


def test_missing_interval_is_explained() -> None:
    assert too_few(3).startswith("too few documents (3)")


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (0.25, [-0.5, 1.0], "+0.2500 [-0.5000, +1.0000]"),
        (-0.25, None, "-0.2500"),
        (None, None, "–"),
    ],
)
def test_signed_difference_with_its_interval(value: float | None, interval: list[float] | None, text: str) -> None:
    assert signed(value, interval) == text
