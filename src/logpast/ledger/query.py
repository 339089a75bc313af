"""Rows of results, with their values by name, and a filter for them.

results/*.jsonl hold one row per scored run (`ledger.row`); results/*.json hold one table each, of a benchmark. Sweeps
and comparisons write the rows of their runs into their own folders. A value is named by its path in the row, with dots:
recipe.model.kernel, scores.documents. The prefixes recipe. and scores. may be left out, and COLUMNS gives short names
to the most useful ones.
"""

from __future__ import annotations

import glob
import json
import re
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from logpast.ledger import row as ledger
from logpast.ledger.row import RESULTS, is_run
from logpast.util import schema
from logpast.util.errors import UserError
from logpast.util.serialization import flatten

COLUMNS = {
    "run": "run", "system": "recipe.model.system", "window": "recipe.model.window", "L": "recipe.model.slots",
    "k": "recipe.model.sharpness", "corpus": "corpus", "tokens": "train_tokens", "seed": "seed",
    "ppl_token": "scores.ppl_token", "ppl_word": "scores.ppl_word", "bits_per_byte": "scores.bits_per_byte",
    "revision": "revision",
}  # fmt: skip
ORDER = ("corpus", "system", "L", "k", "seed")
DIGITS = {"ppl_token": 2, "ppl_word": 1, "bits_per_byte": 4}  # decimals of the scores
OUTPUTS = ("ledger.jsonl", "rows.jsonl")  # of a sweep and of a comparison, in its folder
LEVELS = ("", "*/", "*/*/")  # below the current folder, where OUTPUTS are looked for
NOTHING_FOUND = f"there are no rows in {RESULTS}, and no sweep or comparison below this folder"
MAX_VALUES = 6  # listed in an error message
MAX_LENGTH = 40  # characters of one of them
BENCHMARK: TypeAdapter[Any] = TypeAdapter(schema.schema({"hardware?": {"name": Any}, "rows?": [dict]}))
_ABSENT = object()  # unlike null, which a row may hold


class Entry(NamedTuple):
    """A row and the file it is from."""

    file: str
    title: str
    """of a benchmark's table; rows of a ledger have none"""
    row: dict[str, Any]
    values: dict[str, Any]
    """by short name and by dotted path"""

    def get(self, name: str, default: Any = None) -> Any:
        return next((self.values[n] for n in (name, f"recipe.{name}", f"scores.{name}") if n in self.values), default)


def find_files(folder: Path | None = None, option: str = "--folder") -> dict[Path, str]:
    """The files to read rows from, each with its name in the column `file`.

    Args:
        folder: all its .jsonl and .json files. Without it, those of results/, if there is such a folder here, and the
            rows of all sweeps and comparisons up to two levels below the current folder.
        option: names the folder in errors.
    """
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder} here; run this in the checkout, or give {option}")
        return {path: path.stem for suffix in ("jsonl", "json") for path in sorted(folder.glob(f"*.{suffix}"))}
    found = find_files(RESULTS) if RESULTS.is_dir() else {}
    outputs = sorted(Path(path) for level in LEVELS for name in OUTPUTS for path in glob.glob(level + name))
    return {path: str(path.parent) if path.parent.name else path.stem for path in outputs if _has_runs(path)} | found


def _has_runs(path: Path) -> bool:
    """Whether a file starts with the row of a run: other programs may write files of the same name."""
    with path.open("rb") as file:
        return b'"recipe"' in file.readline(1 << 16)


def read(files: dict[Path, str]) -> list[Entry]:
    """All rows of files from `find_files`, scored runs first, each file in ORDER."""
    runs, others = list[Entry](), list[Entry]()
    for file, name in files.items():
        if file.suffix == ".json":
            others += _benchmark(file)
            continue
        for number, row in ledger.read_lines(file):
            entry = _entry(name, "" if is_run(row) else file.name, row, f"{file}, line {number} is damaged")
            (runs if is_run(row) else others).append(entry)
    runs.sort(key=lambda entry: [str(entry.file), *(_sort_key(entry.get(c)) for c in ORDER)])
    return runs + others


def _benchmark(file: Path) -> list[Entry]:
    """The rows of a benchmark's table; its other values as a single row if it has no rows."""
    problem = f"{file} is not a table of results"
    with schema.reading(problem):
        table = schema.parse_json(file.read_text(encoding="utf-8"))
        schema.validate(BENCHMARK, table)
    about = {name: value for name, value in table.items() if name != "rows"}
    parts = [str(about["what"])] if "what" in about else []
    parts += [str(about["hardware"]["name"])] if "hardware" in about else []
    parts += [f"revision {str(about['revision'])[:7]}"] if "revision" in about else []
    title = f"{file.name}: {', '.join(parts)}"
    return [_entry(file.stem, title, row, problem) for row in table.get("rows", [about])]


def _entry(file: str, title: str, row: dict[str, Any], problem: str) -> Entry:
    with schema.reading(problem):  # flatten refuses a value that is given both as a.b and as a: {b}
        values = {"file": file} | flatten(row)
    if is_run(row):
        revision = str(row["trained_at_revision"])
        values |= {"corpus": corpus(row), "revision": revision[:7] + ("+changes" if "+" in revision else "")}
        values |= {name: values[path] for name, path in COLUMNS.items() if path in values}
    return Entry(file, title, row, values)


def corpus(row: dict[str, Any]) -> str:
    """What a run was trained and scored on: one name for the splits of one corpus, else both."""
    train = row["train_data"]["name"].removesuffix(":train")
    test = row["test_data"]["name"].removesuffix(":test")
    return test if train == test else f"{train}→{test}"


def parse_condition(word: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, given, wanted = word.partition("=")
    if not given:
        raise UserError(f"{word!r} is not a condition; write NAME=VALUE, for example seed=0")
    return name, wanted


def select(entries: list[Entry], conditions: list[tuple[str, str]]) -> list[Entry]:
    """The entries that meet all conditions, each a name and a value."""
    matching = entries
    for name, wanted in conditions:
        check_name(entries, name)
        before, matching = matching, [entry for entry in matching if _matches(entry.get(name, _ABSENT), wanted)]
        if not matching:
            given = " ".join(map("=".join, conditions))
            raise UserError(f"none of the {len(entries)} rows matches {given}; {_known_values(before, name)}")
    return matching


def _known_values(entries: list[Entry], name: str) -> str:
    """Some values that rows have under a name, for an error message."""
    found = {as_condition_value(value) for entry in entries if (value := entry.get(name, _ABSENT)) is not _ABSENT}
    if not found:
        return f"rows that match the other conditions have no {name}"
    some = sorted(found, key=lambda text: (len(text), text))[:MAX_VALUES]  # by length, which orders numbers
    some = [text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…" for text in some]
    return f"known values of {name}: {', '.join(some)}{', …' if len(found) > MAX_VALUES else ''}"


def check_name(entries: list[Entry], name: str) -> None:
    """A UserError if no row has a value of this name."""
    known = {*COLUMNS, *(n for entry in entries for n in entry.values)}
    if name not in known and f"recipe.{name}" not in known and f"scores.{name}" not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: file, {', '.join(COLUMNS)} and any path in a row"
        raise UserError(f"no row has a {name!r}; {hint}")


def _matches(value: Any, wanted: str) -> bool:
    """Numbers are compared as numbers unless the value has a *; only null matches null."""
    if value is _ABSENT or value is None:
        return value is None and wanted == "null"
    if is_number(value) and "*" not in wanted:
        try:
            return float(wanted.replace(",", "")) == value
        except ValueError:
            return False
    return fnmatchcase(as_condition_value(value), re.sub(r"[][?]", r"[\g<0>]", wanted))  # only * is a wildcard


def as_condition_value(value: Any) -> str:
    """A value as it is written in a condition: JSON, but text without quotes, and 100.0 as 100."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).removesuffix(".0")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sort_key(value: Any) -> tuple[int, Any]:
    """Missing values first, then numbers, then the rest."""
    return (0, 0) if value is None else (1, value) if is_number(value) else (2, str(value))
