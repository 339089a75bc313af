"""Rendering pages from templates."""

import base64

import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure

from logpast.reporting import palette
from logpast.reporting.html import data_uri, format_number, render_page


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (1234567, ",", "1,234,567"),
        (0.12345, ".1%", "12.3%"),
        (0.5, "+.4f", "+0.5000"),
        (None, ".4f", "–"),
        (0, ",", "0"),
    ],
)
def test_numbers_are_formatted_and_none_is_a_dash(value: float | None, spec: str, text: str) -> None:
    assert format_number(value, spec) == text


def test_figure_is_embedded_as_png() -> None:
    kind, content = data_uri(Figure(figsize=(1, 1))).split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content).startswith(b"\x89PNG")


def test_missing_value_is_an_error_not_a_gap() -> None:
    with pytest.raises(UndefinedError, match="text"):
        render_page("demo.html", seed=0)


def test_page_is_a_complete_html_document_in_utf8() -> None:
    page = render_page("demo.html", seed=0, text=None, topics=None, plots={}, exp=None)
    assert page.startswith("<!doctype html>\n")
    assert page.endswith("</html>\n")
    assert '<meta charset="utf-8">' in page
    assert "#b3282d" in page  # colours come from the palette


def test_page_has_both_themes_and_loads_nothing() -> None:
    page = render_page("demo.html", seed=0, text=None, topics=None, plots={}, exp=None)
    for colours in (palette.LIGHT, palette.DARK):
        assert "".join(f"--{name}: {colour}; " for name, colour in colours.items()) in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
