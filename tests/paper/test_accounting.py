"""`logpast paper accounting`."""

import copy

import pytest

from logpast.paper import printed
from logpast.paper.accounting import accounting, accounting_table
from logpast.util.errors import UserError


def test_cells_that_do_not_fit_have_an_asterisk() -> None:
    table = accounting_table()
    marked = {
        (line[0], int(line[1]), head)
        for line in table.rows
        for head, cell in zip(table.heads, line, strict=True)
        if "*" in cell
    }
    controls = {(name, slots, "delta") for name in ("A1", "A2") for slots in (5, 9, 13, 17)}
    assert marked == controls | {("A1", 9, "k = 150"), ("A2", 21, "k = 100"), ("A2", 41, "k = 200")}


def test_row_of_the_best_cell() -> None:
    table = accounting_table()
    best = dict(zip(table.heads, table.rows[12], strict=True))
    assert (best["table"], best["L"], best["left out"], best["formula"]) == ("A1", "53", "15,885 (5.55%)", "1.1207")
    assert best["best k: word → all"] == "23.56 → 28.36 (k = 200)"


def test_notes_fit_a_terminal_and_say_that_it_is_an_inference(capsys: pytest.CaptureFixture[str]) -> None:
    accounting()
    notes = capsys.readouterr().out.splitlines()[-9:]
    assert max(map(len, notes)) <= 118
    text = " ".join(" ".join(notes).split())
    assert "23.56 would read 28.36 on 241,211 words, and 26.73 on 245,569" in text
    assert "inference" in text


def test_row_that_differs_from_the_formula_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = copy.deepcopy(printed.load())
    wrong["tableA2"]["rows"][3][150][1] = 89.60  # the paper has 98.60
    monkeypatch.setattr(printed, "load", lambda: wrong)
    with pytest.raises(UserError, match="Table A2, L = 17"):
        accounting()
