"""What all plots share: the files they are written to, the styles of lines, labels."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from logpast.reporting.palette import SERIES
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable

FORMATS = (".png", ".svg", ".pdf")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)))


def check_plot_path(out: Path) -> None:
    """Check that a plot can be written there, before it is drawn."""
    if out.suffix not in FORMATS:
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise UserError(f"cannot write a plot to {str(out)!r}: its name must end in {known}")
    ensure_writable(out)


def remove_frame(*axes: Any) -> None:
    """Keep only the left and bottom sides of the frame, which carry the scales."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of a line among many: the first sixty styles are all different."""
    return {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number // len(SERIES) % len(DASHES)]}


def escape_label(name: str) -> str:
    """A user's name as a label: matplotlib would typeset $…$ as a formula and hide names that begin with _."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def render(figure: Any, file_format: str = "png") -> bytes:
    figure.savefig(content := BytesIO(), format=file_format, dpi=130)
    return content.getvalue()


def write_plot(figure: Any, out: Path) -> None:
    """Write a plot in the format of the file name, atomically: an existing file stays until the new one is complete."""
    atomic_write(out, render(figure, out.suffix[1:]))
