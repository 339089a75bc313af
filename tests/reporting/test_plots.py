"""Files, line styles and labels of plots."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from logpast.reporting import plots
from logpast.util.errors import UserError


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_format_is_the_one_of_the_file_name(name: str, magic: bytes, tmp_path: Path) -> None:
    plots.check_plot_path(tmp_path / name)
    figure = Figure(figsize=(1, 1))
    plots.write_plot(figure, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.PNG"])
def test_unknown_format_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{name}.*\.png, \.svg or \.pdf"):
        plots.check_plot_path(tmp_path / name)


def test_first_sixty_line_styles_differ() -> None:
    assert len({str(plots.line_style(number)) for number in range(60)}) == 60


def test_label_with_dollars_and_a_leading_underscore_is_shown_as_it_is() -> None:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([0, 1], label=plots.escape_label("_a$x_1$"))
    (text,) = axis.legend().get_texts()
    assert text.get_text() == r" _a\$x_1\$"


def test_only_the_sides_with_scales_are_left_of_the_frame() -> None:
    axis = Figure().subplots()
    plots.remove_frame(axis)
    assert [side for side, spine in axis.spines.items() if spine.get_visible()] == ["left", "bottom"]
