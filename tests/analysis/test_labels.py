"""Numbers as text: differences with intervals, bins."""

import pytest

from logpast.analysis.labels import signed, span, spans


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (0.25, [-0.5, 1.0], "+0.2500 [-0.5000, +1.0000]"),
        (-0.25, None, "-0.2500"),
        (None, None, "–"),
    ],
)
def test_difference_with_its_interval(value: float | None, interval: list[float] | None, text: str) -> None:
    assert signed(value, interval) == text


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (3, 3, "3"),
        (64, 127, "64–127"),
        (1024, 9999, "1,024–9,999"),
        (10_000, 999_499, "10k–999k"),
        (999_500, 1_048_575, "1M–1.05M"),
    ],
)
def test_bin_in_short_form(first: int, last: int, text: str) -> None:
    assert span(first, last) == text


def test_bins_of_a_part() -> None:
    assert spans({"from": [0, 2], "to": [1, 5]}) == [(0, 1), (2, 5)]
