"""Progress of several jobs: a live table on a terminal, a line now and then elsewhere."""

import io
import subprocess
import sys

import pytest

from logpast.util import progress


def test_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 30.0, 61.0, 61.0, 62.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.job_board("job", "done", "loss") as board:
        board.say("one: begins")
        for share in ("10%", "20%", "30%"):
            board.update("0 of 2", [["one", share, "3.1"], ["two", share, "3.2"]])
    assert capsys.readouterr().err.splitlines() == ["one: begins", "0 of 2: one 20%, two 20%"]


def test_work_goes_on_when_nobody_reads() -> None:
    words = """
from logpast.util.progress import board, meter
for line in range(3000):
    with meter("work", 1) as progress, board("job") as jobs:
        progress.say("x" * 99)
        jobs.say("y" * 99)
print("done")
"""
    process = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    process.stderr.readline()
    process.stderr.close()
    assert process.stdout.read() == "done\n"
    assert process.wait() == 0


def test_a_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with progress.job_board("job", "done") as board:
        board.update("1 of 2", [["two", "40%"]])
    for word in ("1 of 2", "job", "two", "40%"):
        assert word in screen.getvalue()
