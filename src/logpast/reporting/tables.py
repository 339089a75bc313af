"""A table once, in whatever form it is wanted: aligned for a terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable

FORMS = (".md", ".csv", ".json")
KEPT = (".json", ".jsonl", ".md", ".safetensors")  # what measurements, and what is said of them, are kept in
NOTE_WIDTH = 118  # characters of a line, in a terminal


class Table(NamedTuple):
    """Cells are texts, as they are to be read."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    """each whole, in one line: who shows them breaks them"""


def as_text(table: Table) -> str:
    """Columns under each other: numbers end together, words begin together."""
    columns = list(zip(table.heads, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    to_the_right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    forms = [f"{'>' if right else '<'}{width}" for width, right in zip(widths, to_the_right, strict=True)]
    lines = [
        "  ".join(f"{cell:{form}}" for cell, form in zip(line, forms, strict=True))
        for line in (table.heads, *table.rows)
    ]
    notes = [fill(note, NOTE_WIDTH, subsequent_indent="  ") for note in table.notes]
    return "\n".join([*([table.title] if table.title else []), *(line.rstrip() for line in lines), *notes])


def as_markdown(table: Table) -> str:
    """The table alone; its title and notes are prose, for the page around it."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (table.heads, *table.rows)]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], "|---" * len(table.heads) + "|", *lines[1:]])


def as_markdown_page(table: Table) -> str:
    """Markdown with title and notes."""
    notes = [re.sub(r"[<*]", r"\\\g<0>", note) for note in table.notes]  # neither tags nor lists
    return "\n\n".join([f"**{table.title}**", as_markdown(table), *notes]) + "\n"


def as_csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.heads, *table.rows])
    return text.getvalue()


def check_table_path(out: Path | None, *ledgers: Path) -> None:
    """See to it that tables can be written there, before they are made, and not among the rows of a ledger's folder."""
    if out is None:
        return
    for ledger in ledgers:
        protect_ledger(ledger, out)
    if out.suffix not in FORMS:
        raise UserError(f"cannot write a table to {str(out)!r}: its name must end in {', '.join(FORMS)}")
    ensure_writable(out)


def protect_ledger(ledger: Path, out: Path) -> None:
    """Nothing is written over what a ledger's folder keeps, nor where it would be read as rows of it."""
    place, folder = out.resolve(), ledger.resolve()
    rows = {file.resolve() for file in folder.glob("*.json*")}
    if place in rows or (place.parent == folder and place.suffix in (".json", ".jsonl")):
        raise UserError(f"{out} would be read as rows of {ledger}; write it to another folder")
    if place.is_relative_to(folder) and place.suffix in KEPT and place.exists():
        raise UserError(f"{out} is among what {ledger} keeps; write to another file")


def write(table: Table, out: Path) -> None:
    """In the form that the file's name ends in; an existing file is replaced."""
    if out.suffix == ".json":
        named = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
        text = json.dumps(table._asdict() | {"rows": named}, indent=2, ensure_ascii=False) + "\n"
    elif out.suffix == ".csv":
        text = as_csv(table)
    else:
        text = as_markdown_page(table)
    atomic_write(out, text)
    print(f"wrote {out}")


def _is_number(cell: str) -> bool:
    return not cell or cell.lstrip("+-−")[:1].isdigit()


def print_and_write(table: Table, out: Path | None) -> Table:
    """Print it, and write it to a file if one is named."""
    print(as_text(table))
    if out is not None:
        write(table, out)
    return table
