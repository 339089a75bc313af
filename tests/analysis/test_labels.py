"""Numbers as they are shown: differences from the control, bins."""

import pytest

from logpast.analysis.labels import difference, span, spans


def test_difference_from_the_control_has_the_opposite_sign_of_the_stored_gain() -> None:
    gain = {"nats": [0.5, -0.25, None, 0.0], "interval": [[0.25, 0.75], None, None, [-0.5, 0.0]]}
    found = difference(gain)
    assert found == {"nats": [-0.5, 0.25, None, 0.0], "interval": [[-0.75, -0.25], None, None, [0.0, 0.5]]}
    assert f"{found['nats'][3]:+.4f}" == "+0.0000"


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
