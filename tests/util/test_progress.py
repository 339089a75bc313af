"""Progress: a live bar or table on a terminal, an occasional line elsewhere."""

import io
import os
import pty
import subprocess
import sys

import pytest

from logpast.util import progress


def set_clock(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    clock = iter(times)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_a_bar_prints_a_line_with_the_time_left_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_clock(monkeypatch, 0.0, 9.0, 11.0, 20.0)
    with progress.progress_bar("work", 100, done=10) as bar:
        for done in (15, 21, 30):
            bar.update(done, "loss 3")
    assert capsys.readouterr().err.splitlines() == ["work 21/100 loss 3 1:19 left"]


def test_a_bar_without_a_total_prints_the_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_clock(monkeypatch, 0.0, 11.0)
    with progress.progress_bar("work", None) as bar:
        bar.update(2100, "tokens")
    assert capsys.readouterr().err.splitlines() == ["work 2,100 tokens"]


def test_hidden_progress_prints_nothing_in_its_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "BAR_SECONDS", -1.0)
    monkeypatch.setattr(progress, "BOARD_SECONDS", -1.0)

    def work() -> str:
        with progress.progress_bar("work", 100) as bar:
            bar.update(50)
            bar.say("a line")
        with progress.job_board("cell", "trained") as board:
            board.update("jobs", [["a", "50 %"]])
        return capsys.readouterr().err

    with progress.hidden_progress():
        assert work() == ""
    with progress.hidden_progress(False):
        assert work().count("\n") == 3
    screen = use_terminal(monkeypatch)
    with progress.hidden_progress():
        work()
    assert screen.getvalue() == ""


def test_an_invisible_bar_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_clock(monkeypatch, 0.0, 11.0)
    with progress.progress_bar("work", 100, visible=False) as bar:
        bar.update(50)
        bar.say("a line")
    assert capsys.readouterr().err == ""


def test_a_job_board_prints_a_line_every_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_clock(monkeypatch, 0.0, 30.0, 61.0, 62.0)
    with progress.job_board("job", "done", "loss") as board:
        board.say("one: starts")
        for share in ("10%", "20%", "30%"):
            board.update("0 of 2", [["one", share, "3.1"], ["two", share, "3.2"]])
    assert capsys.readouterr().err.splitlines() == ["one: starts", "0 of 2: one 20%, two 20%"]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_work_continues_when_standard_error_is_closed(terminal: bool) -> None:
    code = """
import sys
from logpast.util.progress import job_board, progress_bar
sys.stdin.read()
for line in range(3):
    with progress_bar("work", 1) as bar, job_board("job") as jobs:
        bar.say("x" * 99)
        jobs.say("y" * 99)
print("done")
"""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    os.close(ours)
    assert process.communicate("go")[0] == "done\n"
    assert process.returncode == 0


def test_a_live_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with progress.progress_bar("wikitext103:train:", 100) as bar:
        bar.update(40, "loss 3")
    for text in ("wikitext103:train:", "40/100", "loss 3"):
        assert text in terminal.getvalue()


def test_a_live_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with progress.job_board("job", "done") as board:
        board.update("1 of 2", [["two", "40%"]])
    for text in ("1 of 2", "job", "two", "40%"):
        assert text in terminal.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(5.9, "0:05"), (65, "1:05"), (7265, "2:01:05")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert progress.format_seconds(seconds) == text
