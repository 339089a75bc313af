"""Pictures: where they may be written, and what all of them share."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable

FORMS = (".png", ".svg", ".pdf")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)))


def check_plot_path(out: Path) -> None:
    """See to it that a picture can be written there, before it is drawn."""
    if out.suffix not in FORMS:
        raise UserError(f"cannot draw to {str(out)!r}: its name must end in {', '.join(FORMS[:-1])} or {FORMS[-1]}")
    ensure_writable(out)


def remove_frame(*axes: Any) -> None:
    """Leave two sides of the frame, those with the scales."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of a line among many: no two of the first sixty are alike."""
    return {"color": f"C{number % 10}", "linestyle": DASHES[number // 10 % len(DASHES)]}


def escape_label(name: str) -> str:
    """A name that is not ours as a label: its dollars are no formula, and an underscore does not hide it."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def render(figure: Any, form: str = "png") -> bytes:
    figure.savefig(content := BytesIO(), format=form, dpi=130)
    return content.getvalue()


def write_plot(figure: Any, out: Path) -> None:
    """In the form that its name says, and in one step: what was there stays until all of it is."""
    atomic_write(out, render(figure, out.suffix[1:]))
