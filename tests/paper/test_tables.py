"""`logpast paper table1`, `tableA1` and `tableA2`."""

import csv
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logpast.paper import tables
from logpast.paper.accounting import accounting
from logpast.util.errors import UserError


def test_table1_has_all_systems_on_one_basis(tmp_path: Path) -> None:
    tables.table1(tmp_path / "1.md")
    text = (tmp_path / "1.md").read_text()
    assert "| Scale-Invariant Compression Filters | 124M | 309 | 23.56 | 26.73 † |" in text
    assert "| RMT | 151M | 175 | 24.85 | 24.85 |" in text
    notes = text.split("\n\n")[2:]
    assert "inferred" in notes[1]
    assert r"\<unk>" in notes[1]


def test_file_has_all_cells_printed_and_ours(tmp_path: Path, ledger: Path) -> None:
    tables.table_a1(tmp_path / "a1.csv", ledger)
    with (tmp_path / "a1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13 * 4
    assert (rows[-1]["system"], rows[-1]["printed"]) == ("k = 200¹", "16.76/23.56")
    assert rows[-1]["printed − delta"] == f"{math.log(16.76 / 17.98):+.3f}"
    assert (rows[0]["system"], rows[0]["ours"]) == ("delta¹", "40.50 ± 0.71/81.00 ± 1.41 (2 seeds)")
    assert (rows[0]["printed"], rows[0]["printed − delta"]) == ("19.26/30.78", "")
    assert [(row["system"], row["ours"]) for row in rows[2:5]] == [("k = 150", ""), ("k = 200", ""), ("delta", "")]


def test_prints_the_table_of_the_paper_then_our_cells(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.table_a1(results=ledger)
    paper, ours = capsys.readouterr().out.split("\n\n")
    assert len(paper.splitlines()) == 2 + 13
    rows = ours.splitlines()[2:6]
    assert [line.split()[0] for line in rows] == ["5", "5", "53", "53"]
    assert "k = 150" not in ours
    assert "trained on 49.0M tokens of wiki22k:train, 124M parameters" in ours


def test_table_without_rows_of_ours_says_so(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.table_a2(tmp_path / "a2.json", ledger)
    out = capsys.readouterr().out
    assert f"no row of {ledger}" in out
    assert "ours" not in out.lower()
    assert json.loads((tmp_path / "a2.json").read_text())["rows"][43]["printed"] == "17.82/79.40"


def test_conditions_select_our_rows(ledger: Path) -> None:
    rows = tables.table_a1(results=ledger, where=["k=100"]).rows
    assert {line[2] for line in rows if "¹" in line[2]} == {"k = 100¹"}
    for table in (tables.table_a1, tables.table_a2):
        with pytest.raises(UserError, match="k=7"):
            table(results=ledger, where=["k=7"])


def test_installed_package_without_results_prints_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tables.table_a1().heads == ["L", "τ*max", "system", "printed", "printed − delta"]
    with pytest.raises(UserError, match="results"):
        tables.table_a1(where=["k=7"])
    with pytest.raises(UserError, match=r"nowhere .*--results"):
        tables.table_a1(results=Path("nowhere"))


@pytest.mark.parametrize("command", [tables.table1, accounting, tables.table_a1, tables.table_a2])
def test_tables_are_not_written_among_rows_of_a_ledger(
    command: Callable[..., Any], ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    sweep = command in (tables.table_a1, tables.table_a2)
    with pytest.raises(UserError, match=r"results/t\.json"):
        (partial(command, results=ledger) if sweep else command)(Path("results/t.json"))
    if sweep:
        with pytest.raises(UserError, match=r"ledger/t\.json"):
            command(ledger / "t.json", ledger)
    assert not list(tmp_path.rglob("t.json"))
