"""tools/pictures.py: what the pictures of docs/how-it-works.md show."""

from pathlib import Path

import pytest
from tools import pictures

from logpast.filters import FilterBank


def test_spans_grow_with_the_lag_and_reach_the_horizon() -> None:
    spans = pictures.spans(FilterBank(slots=53, sharpness=200))
    assert spans[-1][1] == 8192
    widths = [far / near for near, far in spans[30:-1]]  # the same on a logarithmic axis
    assert widths == pytest.approx([widths[0]] * len(widths), rel=0.02)


def test_matches_are_what_followed_the_same_words() -> None:
    assert pictures.matches(list("abcxbcybc")) == [(3, 2, "y"), (6, 2, "x")]
    text = pictures.words()
    for lag, length, word in pictures.matches(text):
        assert text[-lag - length : -lag] == text[-length:]
        assert text[-lag] == word


def test_pictures_are_written(tmp_path: Path) -> None:
    assert all(path.stat().st_size > 10_000 for path in pictures.draw(tmp_path))
