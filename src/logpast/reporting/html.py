"""What our pages share: one HTML file, its pictures inside, that can be sent to anyone."""

from __future__ import annotations

import base64
import html
from typing import Any

from logpast.reporting.plots import render

COLOURS = {"memory": "#b3282d", "control": "#2b5c8a"}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .3rem .9rem; text-align: right }
th { border-bottom: 2px solid #222 } td:first-child, th:first-child { text-align: left }
tr + tr td { border-top: 1px solid #ddd } img { max-width: 100% }
pre { background: #f5f3ee; padding: 1rem; white-space: pre-wrap } .note { color: #666; font-size: .9em }
"""


def html_page(title: str, body: str) -> str:
    """A whole page."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def html_image(figure: Any, what: str) -> str:
    """A matplotlib figure as an image that is part of the page."""
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{base64.b64encode(render(figure)).decode()}">'


def html_table(head: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML; whoever fills them escapes what is foreign."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head), *("".join(f"<td>{c}</td>" for c in row) for row in rows)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
