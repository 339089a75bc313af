"""Signals that ask a process to stop: Ctrl-C, SIGTERM, and SIGHUP, which follows a dropped connection."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none


@contextmanager
def handle_signals(act: Callable[[int], None], *numbers: int | None) -> Iterator[None]:
    """Call `act` with the number of each of these signals that arrives; does nothing outside the main thread.

    A signal that is ignored stays ignored, as SIGHUP under `nohup`. SIGINT does not: shells ignore it in background
    jobs, which `kill -INT` still has to stop.
    """

    def caught(number: int, frame: FrameType | None) -> None:
        if number == SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # the system, the terminal and the shell may each send one
            silence_closed_terminal()
        act(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number is not None and (number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN):
                before[number] = signal.signal(number, caught)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is caught:
                signal.signal(number, handler)


def silence_closed_terminal() -> bool:
    """Discard all further output to a terminal that is gone, which would raise. True if there was any such output."""
    found = False
    for stream in (1, 2):  # standard output and error
        try:
            os.write(stream, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream)
                os.close(null)
                found = True
    return found
