"""The thread that computes: every request is a generator, and the active ones take turns, one step each."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from logpast.util.environment import cpu_threads
from logpast.util.errors import UserError

LOG = logging.getLogger("uvicorn.error")


Steps = Generator[Any, None, Any]


class Refused(UserError):
    """A request that is not answered: an HTTP status, the parameter that is wrong, OpenAI's code of the error."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class OutOfTime(Exception):
    """Raised in a request's generator when its time is over. It may catch it and return what it has."""


class Job:
    """A request.

    Attributes:
        steps: does a little work with every `next`.
        emit: called in the engine's thread with what the steps yield, unless it is None; last with what they return, or
            with a UserError.
        ends: when its time is over, on the monotonic clock.
        cancelled: nobody waits for it any more.
    """

    def __init__(self, steps: Steps, emit: Callable[[Any], object], ends: float) -> None:
        self.steps, self.emit, self.ends, self.cancelled = steps, emit, ends, False


class Engine:
    """Runs jobs in a thread of its own.

    Args:
        active: how many jobs take turns.
        waiting: how many more may wait; further ones are refused.
        threads: CPU threads that PyTorch computes with.
    """

    def __init__(self, active: int, waiting: int, threads: int) -> None:
        self._limit, self._room, self._threads = active, waiting, threads
        self._active, self._waiting = deque[Job](), deque[Job]()
        self._changed, self._closed = threading.Condition(), False
        self._counts = {"steps": 0, "finished": 0, "failed": 0, "cancelled": 0}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Start a job, or let it wait for its turn."""
        with self._changed:
            if self._closed:
                raise Refused("the server is stopping", status=503, code="stopping")
            if len(self._active) + len(self._waiting) >= self._limit + self._room:
                raise Refused("too many requests are waiting; try again later", status=503, code="overloaded")
            self._waiting.append(job)
            self._changed.notify()

    def counts(self) -> dict[str, int]:
        """How many jobs are active and waiting, and how many steps and ended jobs there were."""
        with self._changed:
            return {"active": len(self._active), "waiting": len(self._waiting), **self._counts}

    def close(self) -> None:
        """Take no more jobs. The time of all others is over."""
        with self._changed:
            self._closed = True
            for job in (*self._active, *self._waiting):
                job.ends = min(job.ends, 0)
            self._changed.notify()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        with cpu_threads(self._threads):
            while job := self._next():
                ended, event = _advance(job)
                with self._changed:
                    self._counts["steps"] += 1
                    if ended:
                        self._active.popleft()
                        self._counts[ended] += 1
                    else:
                        self._active.rotate(-1)
                if event is not None:
                    with suppress(RuntimeError):  # the event loop is closed: nobody waits
                        job.emit(event)

    def _next(self) -> Job | None:
        """The job whose turn it is; None when the engine is closed and has none left."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._active or self._waiting)
            now = time.monotonic()
            over = [job for job in self._waiting if job.cancelled or job.ends < now]
            for job in over:  # ends at its first turn, which it need not wait for
                self._waiting.remove(job)
            self._active.extendleft(over)
            while self._waiting and len(self._active) < self._limit:
                self._active.append(self._waiting.popleft())
            return self._active[0] if self._active else None


def _advance(job: Job) -> tuple[str | None, Any]:
    """One step of a job: how it ended, or None, and its event."""
    try:
        if job.cancelled:
            job.steps.close()
            return "cancelled", None
        if job.ends < time.monotonic():
            return None, job.steps.throw(OutOfTime)
        return None, next(job.steps)
    except StopIteration as end:
        return "finished", end.value
    except OutOfTime:
        return "failed", Refused("there was no time for the first token", status=504, code="timeout")
    except UserError as error:
        return "failed", error
    except Exception:
        LOG.exception("a completion failed")
        return "failed", Refused("internal error; the server's log has more", status=500, code="internal")
