"""`logpast filters`, `logpast paper fig1` and `figA1`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from logpast.paper.filters_figure import NOW, draw_filters, fig1, fig_a1, memory_of_signal, signal
from logpast.util.errors import UserError


@pytest.mark.parametrize(("name", "start"), [("f.png", b"\x89PNG"), ("f.svg", b"<?xml"), ("f.pdf", b"%PDF")])
def test_file_format_follows_the_suffix(tmp_path: Path, name: str, start: bytes) -> None:
    out = draw_filters(tmp_path / "new" / name, sharpness=20)
    assert out.read_bytes().startswith(start)


def test_memory_follows_the_signal_and_small_k_blurs_it() -> None:
    peaks = np.geomspace(1, 30, 10)[:7]
    sharp, blurred = (np.abs(memory_of_signal(peaks, k) - signal(NOW - peaks)).mean() for k in (100, 10))
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
def test_bad_options_are_refused(wrong: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=name):
        draw_filters(**{"out": tmp_path / "f.png"} | wrong)


def test_figures_have_the_letters_and_sharpness_of_the_paper(tmp_path: Path, drawn: list[Figure]) -> None:
    fig1(tmp_path / "1.png")
    fig_a1(tmp_path / "a1.png")
    assert ["".join(axis.get_title("left") for axis in figure.axes) for figure in drawn] == ["ABC", "DEFGHI"]
    sharpness = [axis.get_ylabel().partition("k = ")[2] for figure in drawn for axis in figure.axes[::3]]
    assert sharpness == ["50", "10", "100"]


def test_one_row_of_panels_per_sharpness(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_filters(tmp_path / "f.png", sharpness=[25, 200], peaks=4)
    assert [len(axis.lines) for axis in drawn[0].axes] == [4, 4, 2] * 2
    assert [axis.get_ylabel().partition("k = ")[2] for axis in drawn[0].axes[::3]] == ["25", "200"]
