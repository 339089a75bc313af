"""Tables as text, Markdown, CSV and JSON, and where they may be written."""

import csv
import io
import json
from pathlib import Path

import pytest

from logpast.reporting.tables import (
    NOTE_WIDTH,
    Table,
    as_csv,
    as_markdown,
    as_markdown_page,
    as_text,
    check_table_path,
    print_and_write,
    protect_ledger,
)
from logpast.util.errors import UserError

TABLE = Table(
    ["name", "value"], [["a|b", "+1.5 ± 0.1"], ["long name", "−12.25"], ["c, d", ""]], "Title", ["* note <x>"]
)


def test_text_aligns_numbers_right_and_words_left() -> None:
    assert as_text(TABLE).splitlines() == [
        "Title",
        "name            value",
        "a|b        +1.5 ± 0.1",
        "long name      −12.25",
        "c, d",
        "* note <x>",
    ]


def test_text_wraps_notes() -> None:
    lines = as_text(TABLE._replace(title="", notes=["word " * 50])).splitlines()[4:]
    assert len(lines) == 3
    assert max(map(len, lines)) <= NOTE_WIDTH
    assert all(line.startswith("  ") for line in lines[1:])


def test_markdown_escapes_bars_in_cells() -> None:
    assert as_markdown(TABLE).splitlines()[:3] == ["| name | value |", "|---|---|", r"| a\|b | +1.5 ± 0.1 |"]


def test_markdown_page_escapes_tags_and_stars_in_notes() -> None:
    title, table, note = as_markdown_page(TABLE).rstrip().split("\n\n")
    assert (title, note) == ("**Title**", r"\* note \<x>")
    assert table == as_markdown(TABLE)


def test_csv_can_be_read_again() -> None:
    assert list(csv.reader(io.StringIO(as_csv(TABLE)))) == [TABLE.heads, *TABLE.rows]


def test_written_file_has_the_format_of_its_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("md", "csv", "json"):
        assert print_and_write(TABLE, tmp_path / f"t.{suffix}") is TABLE
    assert capsys.readouterr().out.count(as_text(TABLE)) == 3
    assert (tmp_path / "t.md").read_text() == as_markdown_page(TABLE)
    assert (tmp_path / "t.csv").read_text() == as_csv(TABLE)
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["rows"][1] == {"name": "long name", "value": "−12.25"}
    assert (content["title"], content["notes"]) == ("Title", ["* note <x>"])


def test_path_with_another_suffix_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "precious.txt").write_text("precious")
    with pytest.raises(UserError, match=r"precious\.txt"):
        check_table_path(file)
    assert file.read_text() == "precious"
    check_table_path(tmp_path / "t.md")
    check_table_path(None)


def test_path_that_would_be_read_as_rows_is_refused(tmp_path: Path) -> None:
    (ledger := tmp_path / "ledger").mkdir()
    for name in ("new.json", "new.jsonl"):
        with pytest.raises(UserError, match=name):
            protect_ledger(ledger, ledger / name)
    (ledger / "rows.jsonl").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "link.json").symlink_to(ledger / "other.json")
    for name in ("elsewhere.json", "link.json"):
        with pytest.raises(UserError, match=name):
            protect_ledger(ledger, tmp_path / name)


def test_files_of_a_ledger_are_not_replaced(tmp_path: Path) -> None:
    for name in ("README.md", "analyses/a/analysis.json", "analyses/a/nats.safetensors", "logs/a.jsonl"):
        protect_ledger(tmp_path, tmp_path / name)  # nothing there yet
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text("kept")
        with pytest.raises(UserError, match=file.name):
            check_table_path(file, tmp_path)
        assert file.read_text() == "kept"
    (table := tmp_path / "table.csv").write_text("an earlier table")
    check_table_path(table, tmp_path)  # tables may be replaced
