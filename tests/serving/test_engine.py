"""Jobs take turns in the engine's thread; they end, fail, are cancelled, and run out of time."""

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from logpast.serving.engine import Engine, Job, OutOfTime, Refused, Steps
from serving.helpers import wait_for


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(active=2, waiting=2, threads=1)
    yield made
    made.close()
    made.join(5)


class Log(list[Any]):
    """What jobs emit, with their names; `gate` holds their first steps back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = False

    def start(self, engine: Engine, name: str, count: float, seconds: float = 60) -> Job:
        job = Job(self.steps(count), lambda event: self.append((name, event)), time.monotonic() + seconds)
        engine.submit(job)
        return job

    def steps(self, count: float) -> Steps:
        number = 0
        try:
            while number < count:
                wait_for(lambda: self.gate)
                number += 1
                yield number
        except OutOfTime:
            if number < 2:
                raise
            return "late"
        return "done"


def test_active_jobs_take_turns_and_the_next_waits(engine: Engine) -> None:
    log = Log()
    for name in "abc":
        log.start(engine, name, 3)
    wait_for(lambda: engine.counts()["active"] == 2)
    assert engine.counts()["waiting"] == 1
    log.gate = True
    wait_for(lambda: engine.counts()["finished"] == 3)
    first = [(name, event) for event in (1, 2, 3, "done") for name in "ab"]
    assert [each for each in log if each[0] != "c"] == first
    assert [event for name, event in log if name == "c"] == [1, 2, 3, "done"]
    assert log.index(("c", 1)) == log.index(("a", "done")) + 2  # it takes the place of the first that ended
    assert engine.counts()["steps"] == 12


def test_what_is_more_than_may_wait_is_refused(engine: Engine) -> None:
    log = Log()
    jobs = [log.start(engine, name, math.inf) for name in "abcd"]
    with pytest.raises(Refused) as caught:
        log.start(engine, "e", 1)
    assert caught.value.status == 503
    jobs[2].cancelled = True
    log.gate = True
    wait_for(lambda: engine.counts()["cancelled"] == 1)
    log.start(engine, "f", 1)
    for job in jobs:
        job.cancelled = True
    wait_for(lambda: ("f", "done") in log)
    assert engine.counts() == {"active": 0, "waiting": 0, "steps": engine.counts()["steps"], "finished": 1, "failed": 0,
                               "cancelled": 4}  # fmt: skip
    assert {name for name, _ in log} == {"a", "b", "f"}


def test_a_job_that_is_late_ends_with_what_it_has_or_is_refused(engine: Engine) -> None:
    log = Log()
    log.gate = True
    log.start(engine, "a", math.inf, seconds=0.2)
    log.start(engine, "b", math.inf, seconds=0.3)
    log.start(engine, "c", math.inf, seconds=0)  # waits, but not for the others
    wait_for(lambda: engine.counts()["failed"] == 1)
    assert engine.counts()["active"] == 2
    wait_for(lambda: engine.counts()["finished"] == 2)
    assert {event for _, event in log if isinstance(event, str)} == {"late"}
    ((name, error),) = [each for each in log if isinstance(each[1], Exception)]
    assert (name, error.status) == ("c", 504)


def test_a_job_that_fails_does_not_end_the_others(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()

    def fail(error: Exception) -> Steps:
        yield 1
        raise error

    log.start(engine, "a", 5)
    for error in (ZeroDivisionError("bug"), Refused("user")):
        engine.submit(Job(fail(error), lambda event: log.append(("b", event)), time.monotonic() + 9))
    log.gate = True
    wait_for(lambda: ("a", "done") in log and engine.counts()["failed"] == 2)
    assert [event.status for name, event in log if isinstance(event, Refused)] == [500, 400]
    assert "bug" in caplog.text
    assert "user" not in caplog.text


def test_closing_ends_all_jobs_and_the_thread(engine: Engine) -> None:
    log = Log()
    log.gate = True
    for name in "abc":
        log.start(engine, name, math.inf)
    wait_for(lambda: ("b", 2) in log)
    engine.close()
    engine.join(10)
    assert sorted(name for name, event in log if event == "late") == ["a", "b"]
    assert engine.counts()["active"] == engine.counts()["waiting"] == 0
    with pytest.raises(Refused, match="stopping"):
        log.start(engine, "d", 1)


def test_events_for_a_closed_event_loop_are_dropped(engine: Engine) -> None:
    def closed(event: Any) -> None:
        raise RuntimeError("Event loop is closed")

    for finished in (1, 2):
        engine.submit(Job(Log().steps(0), closed, time.monotonic() + 9))
        wait_for(lambda finished=finished: engine.counts()["finished"] == finished)  # type: ignore[misc]
