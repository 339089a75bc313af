"""Progress on standard error: a live bar or table on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import IO, Any, cast

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from logpast.util.signals import silence_closed_terminal

BAR_SECONDS = 10.0  # between two lines of one job where there is no terminal
BOARD_SECONDS = 60.0  # the same for several jobs, whose starts and ends are printed anyway

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)


@contextmanager
def hidden_progress(hidden: bool = True) -> Iterator[None]:
    """Within this context no progress is shown (`--quiet`); results, warnings and errors still are."""
    before = _hidden.set(hidden)
    try:
        yield
    finally:
        _hidden.reset(before)


class _Console(Console):
    """Prints to standard error, and nothing more once that is closed; the work continues."""

    def __init__(self, quiet: bool = False) -> None:
        # emoji=False, or ":train:" in a title becomes a picture
        super().__init__(file=cast(IO[str], _Output(sys.stderr)), quiet=quiet, emoji=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _Output:
    """A stream whose terminal may be closed: rich handles only closed pipes."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        self._do(self.stream.write, text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    @staticmethod
    def _do(act: Callable[..., Any], *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError:
            if not silence_closed_terminal():
                raise


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.printed = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def due(self, seconds: float) -> bool:
        """Whether the last line that was due is this long ago; if so, one is printed now."""
        now = time.monotonic()
        if now - self.printed < seconds:
            return False
        self.printed = now
        return True


class ProgressBar(_Lines):
    """Shows how far a job is; `update` may be called at any rate."""

    def __init__(self, title: str, total: int | None, live: Progress | None, console: Console, done: int) -> None:
        super().__init__(console)
        self.title, self.total, self.live = title, total, live
        self.started, self.start = self.printed, done
        self.task = live.add_task(title, total=total, completed=done, note="") if live else None

    def update(self, done: int, note: str = "") -> None:
        if self.live and self.task is not None:
            self.live.update(self.task, completed=done, note=note)
        elif self.due(BAR_SECONDS):
            if self.total is None:
                self.say(f"{self.title} {done:,} {note}")
                return
            left = (self.printed - self.started) / max(done - self.start, 1) * (self.total - done)
            self.say(f"{self.title} {done:,}/{self.total:,} {note} {format_seconds(left)} left")


@contextmanager
def progress_bar(title: str, total: int | None, done: int = 0, visible: bool = True) -> Iterator[ProgressBar]:
    """Progress of one job, on standard error: standard output is for results."""
    visible = visible and not _hidden.get()
    console = _Console(quiet=not visible)
    if not (visible and console.is_terminal):
        yield ProgressBar(title, total, None, console, done)
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TaskProgressColumn(),
        MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as live:
        yield ProgressBar(title, total, live, console, done)


class JobBoard(_Lines):
    """Shows how far several concurrent jobs are."""

    def __init__(self, columns: tuple[str, ...], live: Live | None, console: Console) -> None:
        super().__init__(console)
        self.columns, self.live = columns, live

    def update(self, title: str, rows: list[list[str]]) -> None:
        """One row per job: its name, how far it is, and the values of the other columns."""
        if self.live:
            table = Table(*self.columns, title=title, title_justify="left", box=None)
            for row in rows:
                table.add_row(*row)
            self.live.update(table)
        elif self.due(BOARD_SECONDS):
            self.say(f"{title}: " + ", ".join(" ".join(row[:2]) for row in rows))


@contextmanager
def job_board(*columns: str) -> Iterator[JobBoard]:
    """Progress of several jobs, on standard error."""
    console = _Console(quiet=_hidden.get())
    if _hidden.get() or not console.is_terminal:
        yield JobBoard(columns, None, console)
        return
    with Live(console=console, transient=True, refresh_per_second=2) as live:
        yield JobBoard(columns, live, console)


def format_seconds(seconds: float) -> str:
    """1:05, or 2:01:05 with hours."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
