"""Files of measurements: ledger rows, finished analyses."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from fuzz.harness import Target
from fuzz.mutations import IN_JSON, as_json, damaged, damages, edited, edits
from ledger_rows import scored_row
from logpast.analysis.saved import read_analysis
from logpast.comparison.table import show
from logpast.ledger import row as ledger
from logpast.ledger.results import results
from logpast.util.errors import UserError

RESULTS = Path(__file__).parents[2] / "results"
FILES = ("sweep-small", "rivals-toy", "rivals-pg19", "recall-loss", "demo-topics")  # of all ages


def ledger_rows(home: Path) -> Target:
    """`results`, the reading of a sweep's rows, and the table of a comparison; a row is added."""
    known, file = [full_row(), *map(_oldest, FILES)], home / "rows.jsonl"
    line = st.tuples(st.sampled_from(range(len(known))), edits(IN_JSON))
    inputs = st.tuples(st.lists(line, min_size=1, max_size=3), damages())

    def place(value: Any) -> Callable[[], object]:
        lines, damage = value
        rows = [as_json(edited(known[number], changes)) for number, changes in lines]
        content = damaged(b"".join(row + b"\n" for row in rows), damage)
        file.write_bytes(content)
        return lambda: use_rows(file)

    return Target(inputs, place, home, "rows.jsonl")


def use_rows(file: Path) -> None:
    rows = ledger.read(file)
    with suppress(UserError):
        ledger.read(file, "sweep", "seconds")
    with suppress(UserError):  # an empty file has no rows
        results(folder=file.parent)
    drawn = crc32(file.read_bytes()) % 20 == 0  # which takes long
    if drawn and any("comparison" in row for row in rows):
        with suppress(UserError):  # rows of several comparisons
            show(file, plot=file.with_name("plot.png"))
        file.with_name("plot.png").unlink(missing_ok=True)
    before = file.read_bytes()
    ledger.append(file, {"seed": 1})
    if not file.read_bytes().startswith(before):
        raise AssertionError("rows were lost")
    file.write_bytes(before)


def analyses(home: Path) -> Target:
    """The analysis that `analyze` draws again, or compares with."""
    kept = sorted((RESULTS / "analyses").glob("*/analysis.json"), key=lambda path: path.stat().st_size)[:3]
    known, file = [json.loads(path.read_text()) for path in kept], home / "analysis.json"
    inputs = st.tuples(st.sampled_from(range(len(known))), edits(IN_JSON), damages())

    def place(value: Any) -> Callable[[], object]:
        number, changes, damage = value
        file.write_bytes(damaged(as_json(edited(known[number], changes)), damage))
        return lambda: read_analysis(home)

    return Target(inputs, place, home, "analysis.json")


def _oldest(name: str) -> dict[str, Any]:
    """A published row, with few documents."""
    row: dict[str, Any] = json.loads((RESULTS / f"{name}.jsonl").read_text().partition("\n")[0])
    if documents := row["scores"].get("by_document"):
        row["scores"]["by_document"] = {column: values[:3] for column, values in documents.items()}
        nats, tokens = (sum(row["scores"]["by_document"][column]) for column in ("nats", "tokens"))
        row["scores"]["ppl_token"] = 2.718281828459045 ** (nats / tokens)
    return row


def full_row() -> dict[str, Any]:
    """A row with optional fields, too."""
    row = scored_row()
    documents = {"nats": [3.0, 4.0], "tokens": [2, 3], "unseen": [0, 1]}
    scores = row["scores"] | {"ppl_token": 2.718281828459045 ** (7 / 5), "by_document": documents, "interval": None}
    sweep = {"cell": "a", "key": "b", "choices": {"seed": 0}, "test": "c"}
    return row | {"schema": 1, "scores": scores, "sweep": sweep, "seconds": 3.0, "hardware": {"device": "cpu"}}
