"""Progress for whoever is watching: a live bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

QUIET_SECONDS = 10.0  # between two lines where there is no terminal
QUIET_MINUTE = 60.0  # the same for many jobs, whose beginnings and ends are told anyway


class _Console(Console):
    """Falls silent when whoever read it is gone: the work goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressBar:
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
            self.say(f"{self.title} {done:,}/{self.total:,} {note} {format_seconds(left)} left")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(title: str, total: int | None, done: int = 0, visible: bool = True) -> Iterator[ProgressBar]:
    """Progress of one job, on standard error, so that standard output stays clean for results."""
    console = _Console(file=sys.stderr, quiet=not visible, emoji=False)  # wikitext103:train: is no train
    if not (visible and console.is_terminal):
        yield ProgressBar(title, total, None, console, done)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TaskProgressColumn(),
        MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as live:
        yield ProgressBar(title, total, live, console, done)


class JobBoard:
    """Says how far several jobs are that run at the same time."""

    def __init__(self, columns: tuple[str, ...], live: Live | None, console: Console) -> None:
        self.columns, self.live, self.console = columns, live, console
        self.spoke = time.monotonic()

    def update(self, title: str, rows: list[list[str]]) -> None:
        """A row is of one job: its name, how far it is, and whatever else the columns say."""
        if self.live:
            table = Table(*self.columns, title=title, title_justify="left", box=None)
            for row in rows:
                table.add_row(*row)
            self.live.update(table)
        elif time.monotonic() - self.spoke >= QUIET_MINUTE:
            self.spoke = time.monotonic()
            self.say(f"{title}: " + ", ".join(" ".join(row[:2]) for row in rows))

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def job_board(*columns: str) -> Iterator[JobBoard]:
    """Progress of several jobs: a live table on a terminal, else a line now and then; on standard error."""
    console = _Console(file=sys.stderr, emoji=False)
    if not console.is_terminal:
        yield JobBoard(columns, None, console)
        return
    with Live(console=console, transient=True, refresh_per_second=2) as live:
        yield JobBoard(columns, live, console)


def format_seconds(seconds: float) -> str:
    """1:05, or 2:01:05 with hours."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
