"""Signals that ask a process to stop, and the terminal that is gone after a dropped connection."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from logpast.util.signals import SIGHUP, handle_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_handled_inside_the_block_only(number: signal.Signals) -> None:
    before, got = signal.getsignal(number), list[int]()
    with handle_signals(got.append, number):
        signal.raise_signal(number)
    assert got == [number]
    if number != SIGHUP:
        assert signal.getsignal(number) is before


def test_under_nohup_a_hangup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handle_signals(lambda number: pytest.fail("handled"), SIGHUP):
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_only_the_first_hangup_counts() -> None:
    """The system, the terminal and the shell may each send one, and the first may still be saving."""
    got = list[int]()
    with handle_signals(got.append, SIGHUP):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert got == [SIGHUP]


def test_output_to_a_closed_terminal_is_discarded_after_a_hangup() -> None:
    """Other output is not: standard output is a pipe here."""
    code = """
import signal, sys
from logpast.util.signals import SIGHUP, handle_signals
with handle_signals(print, SIGHUP):
    signal.raise_signal(SIGHUP) if sys.stdin.read() else None
    print("lost", file=sys.stderr, flush=True)
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    os.close(ours)
    assert process.communicate(b"hang up")[0].decode().split() == [str(int(signal.SIGHUP))]
    assert process.returncode == 0
