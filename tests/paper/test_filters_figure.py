"""The drawn filters: right numbers, real pictures, refusals."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from logpast.paper.filters_figure import NOW, draw_filters, fig1, fig_a1, remembered, signal
from logpast.util.errors import UserError


@pytest.mark.parametrize(("name", "start"), [("f.png", b"\x89PNG"), ("f.svg", b"<?xml"), ("f.pdf", b"%PDF")])
def test_pictures(tmp_path: Path, name: str, start: bytes) -> None:
    out = draw_filters(tmp_path / "new" / name, sharpness=20)
    assert out.read_bytes().startswith(start)


def test_memory_follows_a_slow_signal_and_blurs_with_small_k() -> None:
    peaks = np.geomspace(1, 30, 10)[:7]
    truth = signal(NOW - peaks)
    sharp, blurred = (np.abs(remembered(peaks, k) - truth).mean() for k in (100, 10))
    assert sharp < 0.15
    assert blurred > 1.5 * sharp


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"out": Path("f.jpeg")}, "png"),
        ({"sharpness": 0}, "sharpness"),
        ({"sharpness": []}, "sharpness"),
        ({"peaks": 1}, "peaks"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, object], name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=name):
        draw_filters(**({"out": tmp_path / "f.png"} | wrong))  # type: ignore[arg-type]


def test_figure_a1_goes_on_where_figure_1_ends(tmp_path: Path, drawn: list[Figure]) -> None:
    fig1(tmp_path / "1.png")
    fig_a1(tmp_path / "a1.png")
    assert ["".join(axis.get_title("left") for axis in figure.axes) for figure in drawn] == ["ABC", "DEFGHI"]
    sharpness = [axis.get_ylabel().partition("k = ")[2] for figure in drawn for axis in figure.axes[::3]]
    assert sharpness == ["50", "10", "100"]
