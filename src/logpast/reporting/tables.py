"""Tables as text for a terminal, Markdown, CSV or JSON, and where they may be written."""

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

SUFFIXES = (".md", ".csv", ".json")
LEDGER_SUFFIXES = (".json", ".jsonl", ".md", ".safetensors")  # files of a ledger's folder that no table may replace
NOTE_WIDTH = 118  # characters per line of a note in a terminal


class Table(NamedTuple):
    """A formatted table: numbers are already text. Notes are one line each; as_text wraps them."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()


def as_text(table: Table) -> str:
    """Aligned columns: numbers to the right, words to the left."""
    columns = list(zip(table.heads, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    align = [">" if all(map(_starts_like_number, column[1:])) else "<" for column in columns]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, align, widths, strict=True)).rstrip()
        for line in (table.heads, *table.rows)
    ]
    notes = [fill(note, NOTE_WIDTH, subsequent_indent="  ") for note in table.notes]
    return "\n".join([*([table.title] if table.title else []), *lines, *notes])


def as_markdown(table: Table) -> str:
    """A Markdown table, without title and notes."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (table.heads, *table.rows)]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], "|---" * len(table.heads) + "|", *lines[1:]])


def as_markdown_page(table: Table) -> str:
    """A Markdown table with title and notes."""
    notes = [re.sub(r"[<*]", r"\\\g<0>", note) for note in table.notes]  # neither HTML tags nor list items
    return "\n\n".join([f"**{table.title}**", as_markdown(table), *notes]) + "\n"


def as_csv(table: Table) -> str:
    """CSV, without title and notes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.heads, *table.rows])
    return text.getvalue()


def as_json(table: Table) -> str:
    """One object per row, keyed by column; with title and notes."""
    rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    return json.dumps(table._asdict() | {"rows": rows}, indent=2, ensure_ascii=False) + "\n"


def check_table_path(out: Path | None, *ledgers: Path) -> None:
    """Refuse a path that no table can be written to, before the table is computed."""
    if out is None:
        return
    for ledger in ledgers:
        protect_ledger(ledger, out)
    if out.suffix not in SUFFIXES:
        raise UserError(f"cannot write a table to {str(out)!r}: its name must end in {', '.join(SUFFIXES)}")
    ensure_writable(out)


def protect_ledger(ledger: Path, out: Path) -> None:
    """Refuse to write over the files of a ledger's folder, or to where a file would be read as rows of the ledger."""
    path, folder = out.resolve(), ledger.resolve()
    rows = {file.resolve() for file in folder.glob("*.json*")}
    if path in rows or (path.parent == folder and path.suffix in (".json", ".jsonl")):
        raise UserError(f"{out} would be read as rows of {ledger}; write it to another folder")
    if path.is_relative_to(folder) and path.suffix in LEDGER_SUFFIXES and path.exists():
        raise UserError(f"{out} is a file of the ledger {ledger}; write to another file")


def write(table: Table, out: Path) -> None:
    """Write a table in the format of the file's suffix. An existing file is replaced."""
    formats = {".json": as_json, ".csv": as_csv, ".md": as_markdown_page}
    atomic_write(out, formats[out.suffix](table))
    print(f"wrote {out}")


def print_and_write(table: Table, out: Path | None) -> Table:
    """Print a table, and write it to a file if one is given."""
    print(as_text(table))
    if out is not None:
        write(table, out)
    return table


def _starts_like_number(cell: str) -> bool:
    return not cell or cell.lstrip("+-−")[:1].isdigit()
