"""One palette: colours that matplotlib and CSS know, and no colour literals elsewhere."""

import re
from pathlib import Path

import pytest
from matplotlib import rcParams
from matplotlib.colors import to_hex

import logpast
from logpast.reporting import palette

SOURCES = Path(logpast.__file__).parent
COLOURS = {name: value for name, value in vars(palette).items() if name.isupper() and isinstance(value, str)}


def test_memory_and_control_keep_their_colours() -> None:
    assert (palette.MEMORY, palette.CONTROL) == ("#b3282d", "#2b5c8a")


@pytest.mark.parametrize(
    "colour", [*COLOURS.values(), *palette.SERIES, *palette.LIGHT.values(), *palette.DARK.values()]
)
def test_colours_are_valid_in_plots_and_in_css(colour: str) -> None:
    assert to_hex(colour) == colour


def test_series_is_the_default_cycle_of_matplotlib() -> None:
    assert list(palette.SERIES) == [to_hex(colour) for colour in rcParams["axes.prop_cycle"].by_key()["color"]]


def test_greys_run_from_black_to_light() -> None:
    shades = [int(to_hex(grey)[1:3], 16) for grey in palette.greys(5)]
    assert shades == sorted(set(shades))
    assert (shades[0], shades[-1]) == (0, round(0.75 * 255))
    assert palette.greys(1) == ["0.0"]


@pytest.mark.parametrize(
    "package", ["analysis", "comparison", "demo", "explore", "ledger", "paper", "reporting", "sweeps"]
)
def test_no_colour_literals_outside_the_palette(package: str) -> None:
    for file in (SOURCES / package).rglob("*.*"):
        if file.suffix in (".py", ".html", ".css", ".js") and file.name != "palette.py":
            assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|tab:\w+|color=[\"']", file.read_text()), file


def test_both_themes_have_the_same_names() -> None:
    assert palette.LIGHT.keys() == palette.DARK.keys()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
@pytest.mark.parametrize("name", ["ink", "muted", "memory", "control", "recall"])
def test_text_can_be_read_on_the_page(theme: str, name: str) -> None:
    """WCAG's contrast of 4.5 to 1, on both backgrounds."""
    colours = getattr(palette, theme)
    for background in ("paper", "shade"):
        lighter, darker = sorted((luminance(colours[name]), luminance(colours[background])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, background
