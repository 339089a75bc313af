"""`logpast paper accounting`: the cells that do not fit, and a table that was copied wrongly."""

import copy

import pytest

from logpast.paper import printed
from logpast.paper.accounting import accounting
from logpast.util.errors import UserError


def test_accounting_marks_the_cells_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    table = accounting()
    marked = {
        (line[0], int(line[1]), head)
        for line in table.rows
        for head, cell in zip(table.heads, line, strict=True)
        if "*" in cell
    }
    controls = {(name, slots, "delta") for name in ("A1", "A2") for slots in (5, 9, 13, 17)}
    assert marked == controls | {("A1", 9, "k = 150"), ("A2", 21, "k = 100"), ("A2", 41, "k = 200")}
    best = table.rows[12]
    assert best[:4] == ["A1", "53", "15,885 (5.55%)", "1.1207"]
    assert best[-1] == "23.56 → 28.36 (k = 200)"
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[-8:])) <= 118
    text = " ".join(" ".join(lines).split())
    assert "23.56 would read 28.36 on 241,211 words, and 26.73 on 245,569" in text
    assert "inference" in text


def test_accounting_fails_where_a_row_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = copy.deepcopy(printed.page())
    wrong["tableA2"]["rows"][3][150][1] = 89.60  # 98.60 is printed
    monkeypatch.setattr(printed, "page", lambda: wrong)
    with pytest.raises(UserError, match="Table A2, L = 17"):
        accounting()
