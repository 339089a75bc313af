"""Pages: one self-contained HTML file each, rendered from a Jinja2 template in `templates/`."""

from __future__ import annotations

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from logpast.reporting import palette
from logpast.reporting.plots import render


def render_page(template: str, **values: Any) -> str:
    """A whole page. Every value is escaped by the template."""
    environment = Environment(
        loader=PackageLoader("logpast.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = format_number
    return environment.get_template(template).render(palette=palette, **values)


def format_number(value: float | None, spec: str) -> str:
    """A number as text, by a format specification such as ",.3f"; a dash for None."""
    return "–" if value is None else f"{value:{spec}}"


def data_uri(figure: Any) -> str:
    """A matplotlib figure as a PNG that is part of the page: the `src` of an image."""
    return f"data:image/png;base64,{base64.b64encode(render(figure)).decode()}"
