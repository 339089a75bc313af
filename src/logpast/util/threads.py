"""Work in a thread that can be abandoned: unlike those of an executor, it does not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start the work in a thread. Waiting for its result can be interrupted with Ctrl-C, and given a time limit."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done
