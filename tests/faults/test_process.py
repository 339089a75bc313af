"""A run that is killed, asked to stop, started twice or loses its folder."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from faults.commands import Command, Training, assert_one_line, wait_for_step, wait_until

SIGNALS = {"kill −9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_during_training(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None], name: str
) -> None:
    """The second one hits the resumed run."""
    run, number = tmp_path / "run", SIGNALS[name]
    for _ in range(2):
        done = training.disturb(run, random, lambda command: os.kill(command.pid, number))
        assert done.code == (-signal.SIGKILL if number == signal.SIGKILL else 130), done.err
        assert "Traceback" not in done.err
        if number != signal.SIGKILL:
            assert done.errors == ["interrupted"]
            assert "resume with --resume auto" in done.out or "step" not in done.out  # nothing to save so far
    training.finish(run)
    training.assert_equal(run)
    outcome(name, "equal")


def test_a_kill_at_the_start(training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None]) -> None:
    """Before training begins: while the run folder is made, or before that."""
    command = training.start(run := tmp_path / "run")
    time.sleep(random.uniform(0, 0.5))
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    training.finish(run)
    training.assert_equal(run)
    outcome("kill −9 before the first step", "equal")


def test_two_runs_in_one_folder(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None]
) -> None:
    """The first one is not disturbed, wherever it is when the second one starts."""
    run = tmp_path / "run"
    first = training.start(run)
    wait_for_step(run, first, random.choice([0, random.randrange(20)]))
    os.kill(first.pid, signal.SIGSTOP)  # so that both run at the same time, on a busy machine, too
    second = training.start(run).wait()
    os.kill(first.pid, signal.SIGCONT)
    assert_one_line(second, f"{run}.*wait for it, or give another --run")
    assert first.wait().code == 0
    training.assert_equal(run)
    outcome("two runs in one folder", "equal")


def test_two_runs_started_at_once(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None]
) -> None:
    run = tmp_path / "run"
    commands = [training.start(run)]
    time.sleep(random.uniform(0, 0.2))
    commands.append(training.start(run))
    done = sorted((each.wait() for each in commands), key=lambda each: each.code)
    assert done[0].code == 0, done[0].err
    if done[1].code:  # else it began after the first one had ended
        assert_one_line(done[1], f"{run}.*--run")
    training.assert_equal(run)
    outcome("two runs started at once", "equal")


def lose(run: Path, random: Random) -> None:
    """Delete the folder, or move it away and delete it then."""
    if random.random() < 0.5:
        run = run.rename(run.with_name("moved"))
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)  # the run may be writing


def test_a_folder_deleted_under_a_run(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None]
) -> None:
    run = tmp_path / "run"
    done = training.disturb(run, random, lambda command: lose(run, random))
    assert_one_line(done, f"{run}.*(start again|choose another place)")
    shutil.rmtree(run, ignore_errors=True)  # a checkpoint that was being written
    training.finish(run)
    training.assert_equal(run)
    outcome("folder deleted under a run", "line")


def test_a_folder_replaced_by_another_run(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None]
) -> None:
    """The first run must not write into the folder of the second, which has the same name."""
    run, second = tmp_path / "run", list[Command]()

    def replace(command: Command) -> None:
        os.kill(command.pid, signal.SIGSTOP)
        lose(run, random)
        second.append(training.start(run))
        wait_until(lambda: (run / "log.jsonl").exists())
        os.kill(command.pid, signal.SIGCONT)

    done = training.disturb(run, random, replace)
    assert_one_line(done, f"{run}.*(start again|choose another place)")
    assert second[0].wait().code == 0
    training.assert_equal(run)
    outcome("folder replaced under a run", "line")
