"""`logpast paper`: its tables, ours beside them."""

import csv
import json
import math
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from logpast.ledger.results import results
from logpast.paper import printed
from logpast.paper import tables as paper
from logpast.paper.accounting import accounting
from logpast.paper.measured import measured
from logpast.paper.results_figure import results_figure
from logpast.util.errors import UserError


def test_of_ours_only_what_is_asked_for(
    ledger: Path, tmp_path: Path, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {one.name for one in measured(printed.sweep("A1"), ledger)}
    assert {"delta", "k = 100"} < everything
    assert [one.name for one in measured(printed.sweep("A1"), ledger, ["k=100", "seed=0"])] == ["k = 100"]
    results_figure(tmp_path / "f.png", results=ledger, where=["k=100"])
    assert [text.get_text() for text in drawn[0].axes[2].get_legend().get_texts()] == ["k = 100"]
    assert {line[2] for line in paper.table_a1(results=ledger, where=["k=100"]).rows if "¹" in line[2]} == {"k = 100¹"}
    for table in (paper.table_a1, paper.table_a2):
        with pytest.raises(UserError, match="none of the"):
            table(results=ledger, where=["k=7"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder results"):
        paper.table_a1(where=["k=7"])


def test_tables_in_three_forms(tmp_path: Path, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper.table_a1(tmp_path / "a1.csv", ledger)
    with (tmp_path / "a1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13 * 4
    assert (rows[-1]["system"], rows[-1]["printed"]) == ("k = 200¹", "16.76/23.56")
    assert rows[-1]["printed − delta"] == f"{math.log(16.76 / 17.98):+.3f}"
    assert (rows[0]["system"], rows[0]["ours"]) == ("delta¹", "40.50 ± 0.71/81.00 ± 1.41 (2 seeds)")
    assert (rows[0]["printed"], rows[0]["printed − delta"]) == ("19.26/30.78", "")
    assert [(row["system"], row["ours"]) for row in rows[2:5]] == [("k = 150", ""), ("k = 200", ""), ("delta", "")]
    below = capsys.readouterr().out.split("beside the printed:\n")[1].splitlines()
    assert [line.split("  ")[0].strip() for line in below[1:4]] == ["5", "5", "53"]
    assert "k = 150" not in "".join(below)
    paper.table_a2(tmp_path / "a2.json", ledger)
    assert json.loads((tmp_path / "a2.json").read_text())["rows"][43]["printed"] == "17.82/79.40"
    assert "ours" not in capsys.readouterr().out
    paper.table1(tmp_path / "1.md")
    assert "| Scale-Invariant Compression Filters | 124M | 309 | 23.56 | 26.73 † |" in (tmp_path / "1.md").read_text()
    notes = (tmp_path / "1.md").read_text().split("\n\n")[2:]
    assert len(notes) == 2
    assert "are like the rest" in notes[1]
    assert r"\<unk>" in notes[1]
    accounting(tmp_path / "accounting.md")
    assert "\n\n\\* outside what" in (tmp_path / "accounting.md").read_text()
    assert "trained on 49.0M tokens of wiki22k:train, 124M weights" in "".join(below)


def test_tables_are_not_written_among_rows(ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="would be read as rows"):
        paper.table_a1(ledger / "t.json", ledger)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    for make in (paper.table1, accounting, partial(paper.table_a1, results=ledger)):
        with pytest.raises(UserError, match="would be read as rows of results"):
            make(Path("results/t.json"))


def test_tables_are_not_written_over_what_a_ledger_keeps(ledger: Path) -> None:
    kept = [ledger / "README.md", ledger / "analyses" / "a" / "analysis.json", ledger / "logs" / "a.jsonl"]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("kept")
        with pytest.raises(UserError, match=f"{file.name} is among what {ledger} keeps; write to another file"):
            results(folder=ledger, csv=str(file))
    for file in kept[:2]:
        with pytest.raises(UserError, match="write to another file"):
            paper.table_a1(file, ledger)
    assert {file.read_text() for file in kept} == {"kept"}
    for _ in range(2):  # an older table is no evidence
        results(folder=ledger, csv=str(ledger / "table.csv"))


def test_tables_without_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paper.table_a1().heads == ["L", "τ*max", "system", "printed", "printed − delta"]
    with pytest.raises(UserError, match=r"no folder nowhere .*--results"):
        paper.table_a1(results=Path("nowhere"))
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    with pytest.raises(UserError, match=r"must end in \.md, \.csv, \.json"):
        paper.table1(precious)
    assert precious.read_text() == "precious"


def test_a_table_without_ours_says_so(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paper.table_a1(results=ledger)
    assert "no row of" not in capsys.readouterr().out
    paper.table_a2(results=ledger)
    assert f"no row of {ledger} belongs beside this table yet" in capsys.readouterr().out
