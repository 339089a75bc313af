"""Progress for whoever is watching: a live bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 10.0  # between two lines where there is no terminal


class Meter:
    """Says how far a job is; `update` may be called as often as one likes."""

    def __init__(self, title: str, total: int | None, live: Progress | None, console: Console, done: int) -> None:
        self.title, self.total, self.live, self.console = title, total, live, console
        self.started = self.spoke = time.monotonic()
        self.start = done
        self.task = live.add_task(title, total=total, completed=done, note="") if live else None

    def update(self, done: int, note: str = "") -> None:
        if self.live and self.task is not None:
            self.live.update(self.task, completed=done, note=note)
            return
        now = time.monotonic()
        if now - self.spoke >= QUIET_SECONDS:
            self.spoke = now
            if self.total is None:
                self.say(f"{self.title} {done:,} {note}")
                return
            left = (now - self.started) / max(done - self.start, 1) * (self.total - done)
            self.say(f"{self.title} {done:,}/{self.total:,} {note} {_clock(left)} left")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def meter(title: str, total: int | None, done: int = 0, visible: bool = True) -> Iterator[Meter]:
    """Progress of one job, on standard error, so that standard output stays clean for results."""
    console = Console(file=sys.stderr, quiet=not visible, emoji=False)  # wikitext103:train: is no train
    if not (visible and console.is_terminal):
        yield Meter(title, total, None, console, done)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TaskProgressColumn(),
        MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as live:
        yield Meter(title, total, live, console, done)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
