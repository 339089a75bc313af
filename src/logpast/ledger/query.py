"""The rows of results/, read: each value by its name, and those rows that are asked for.

results/*.jsonl hold a row per scored run (`ledger.row`), results/*.json one table each, of a benchmark. A row's values
go by their place in it, with dots (recipe.model.kernel, scores.documents; recipe. and scores. may be left out), and
those that a reader wants first have short names: COLUMNS.
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from logpast.ledger import row as ledger
from logpast.util.errors import UserError
from logpast.util.serialization import flatten

COLUMNS = {
    "run": "run", "system": "recipe.model.system", "window": "recipe.model.window", "L": "recipe.model.slots",
    "k": "recipe.model.sharpness", "corpus": "corpus", "tokens": "train_tokens", "seed": "seed",
    "ppl_token": "scores.ppl_token", "ppl_word": "scores.ppl_word", "bits_per_byte": "scores.bits_per_byte",
    "revision": "revision",
}  # fmt: skip
ORDER = ("corpus", "system", "L", "k", "seed")
DIGITS = {"ppl_token": 2, "ppl_word": 1, "bits_per_byte": 4}  # of the figures, which are numbers
SOME = 6  # values that an error names
LONGEST = 40  # signs of one of them
_ABSENT = object()  # not null, which a row may hold


class Entry(NamedTuple):
    """A row, and where it stands."""

    file: str
    title: str
    """of a benchmark's table; rows of a ledger have none"""
    row: dict[str, Any]
    values: dict[str, Any]
    """by name: short ones, and places with dots"""

    def get(self, name: str, default: Any = None) -> Any:
        return next((self.values[n] for n in (name, f"recipe.{name}", f"scores.{name}") if n in self.values), default)


def read(folder: Path, option: str = "--folder") -> list[Entry]:
    """All rows of a results folder, which the option names: ledgers first, each in ORDER."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} here; run this where the checkout is, or give {option}")
    runs, measured = list[Entry](), list[Entry]()
    for file in sorted(folder.glob("*.jsonl")):
        for number, row in ledger.read_lines(file):
            with ledger.reading(f"{file}, line {number} is not a row of a scored run"):
                (runs if is_run(row) else measured).append(_entry(file.stem, "" if is_run(row) else file.name, row))
    for file in sorted(folder.glob("*.json")):
        measured += _benchmark(file)
    runs.sort(key=lambda entry: [str(entry.file), *(_sortable(entry.get(c)) for c in ORDER)])
    return runs + measured


def is_run(row: dict[str, Any]) -> bool:
    return "recipe" in row and "scores" in row


def _benchmark(file: Path) -> list[Entry]:
    """A table's rows; of one without rows, its facts as a single one."""
    with ledger.reading(f"{file} is not a table of results"):
        table = ledger.parse_json(file.read_text(encoding="utf-8"))
        facts = {name: value for name, value in table.items() if name != "rows"}
        told = [str(facts["what"])] if "what" in facts else []
        told += [str(facts["hardware"]["name"])] if "hardware" in facts else []
        told += [f"revision {str(facts['revision'])[:7]}"] if "revision" in facts else []
        title = f"{file.name}: {', '.join(told)}"
        return [_entry(file.stem, title, row) for row in table.get("rows", [facts])]


def _entry(file: str, title: str, row: dict[str, Any]) -> Entry:
    values = {"file": file} | flatten(row)
    if is_run(row):
        for part in ("recipe", "scores"):
            if not isinstance(row[part], dict):
                raise TypeError(f"its {part} is {row[part]!r}")
        revision = str(row["trained_at_revision"])
        values |= {"corpus": corpus(row), "revision": revision[:7] + ("+changes" if "+" in revision else "")}
        values |= {name: values[place] for name, place in COLUMNS.items() if place in values}
        values |= {name: row["scores"][name] for name in DIGITS if name in row["scores"]}  # {} has no place in values
    for name, value in values.items():
        if is_number(value):
            float(value)  # an error for an integer too large for anything that we do with it
        elif name in DIGITS and value is not None:
            raise TypeError(f"its {name} is {value!r}, not a number")
    return Entry(file, title, row, values)


def corpus(row: dict[str, Any]) -> str:
    """What a run was trained and scored on: one name where its own train and test splits were used, else both."""
    train = row["train_data"]["name"].removesuffix(":train")
    test = row["test_data"]["name"].removesuffix(":test")
    return test if train == test else f"{train}→{test}"


def parse_condition(word: str) -> tuple[str, str]:
    """NAME=VALUE, in two."""
    name, given, wanted = word.partition("=")
    if not given:
        raise UserError(f"{word!r} is no condition; write NAME=VALUE, such as seed=0")
    return name, wanted


def select(entries: list[Entry], conditions: list[tuple[str, str]]) -> list[Entry]:
    """The entries of which every condition, a name and the value wanted, holds."""
    fitting = entries
    for name, wanted in conditions:
        check_name(entries, name)
        before, fitting = fitting, [entry for entry in fitting if _holds(entry.get(name, _ABSENT), wanted)]
        if not fitting:
            asked = " ".join(map("=".join, conditions))
            raise UserError(f"none of the {len(entries)} rows fits {asked}; {_values(before, name)}")
    return fitting


def _values(entries: list[Entry], name: str) -> str:
    """What a name may be asked for, in a few words."""
    found = {as_asked(value) for entry in entries if (value := entry.get(name, _ABSENT)) is not _ABSENT}
    if not found:
        return f"those that fit the rest have no {name}"
    some = sorted(found, key=lambda text: (len(text), text))[:SOME]  # short ones first: numbers are in order then
    some = [text if len(text) <= LONGEST else text[:LONGEST] + "…" for text in some]
    return f"its {name} may be {', '.join(some)}{' and others' if len(found) > SOME else ''}"


def check_name(entries: list[Entry], name: str) -> None:
    """A name that no row knows is a mistake."""
    known = {*COLUMNS, *(n for entry in entries for n in entry.values)}
    if name not in known and f"recipe.{name}" not in known and f"scores.{name}" not in known:
        near = get_close_matches(name, known, n=1)
        told = f"did you mean {near[0]}?" if near else f"known: file, {', '.join(COLUMNS)} and any place in a row"
        raise UserError(f"no row has a {name!r}; {told}")


def _holds(value: Any, wanted: str) -> bool:
    """Numbers are compared as such unless a * stands in what is wanted; null is itself alone, not anything."""
    if value is _ABSENT or value is None:
        return value is None and wanted == "null"
    if is_number(value) and "*" not in wanted:
        try:
            return float(wanted.replace(",", "")) == value
        except ValueError:
            return False
    return fnmatchcase(as_asked(value), re.sub(r"[][?]", r"[\g<0>]", wanted))  # of its signs we have * alone


def as_asked(value: Any) -> str:
    """As JSON writes it, texts without their quotes, 100.0 as 100."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).removesuffix(".0")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sortable(value: Any) -> tuple[int, Any]:
    """What is missing, then numbers, then the rest."""
    return (0, 0) if value is None else (1, value) if is_number(value) else (2, str(value))
