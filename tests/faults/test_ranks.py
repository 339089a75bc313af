"""A run on two devices, one of whose processes dies or hangs."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from faults.commands import STEPS, Command, Done, Training, assert_one_line, assert_runs_equal, wait_for_step

TIMEOUT = 20.0  # seconds to wait for another process
MORE = ("--devices", "2", "--timeout", TIMEOUT)


def start(training: Training, run: Path) -> list[Command]:
    """Both processes, started as Lightning starts the second one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    return [training.start(run, *MORE, LOCAL_RANK=str(rank), **shared) for rank in range(2)]


def finish(training: Training, run: Path) -> None:
    for done in [each.wait() for each in start(training, run)]:
        assert done.code == 0, done.err


@pytest.fixture(scope="session")
def undisturbed(training: Training) -> Path:
    finish(training, run := training.cwd / "on two devices")
    return run


def disturb(training: Training, run: Path, random: Random, rank: int, number: int) -> tuple[Done, Command]:
    """A signal for one process. Returns the other one, which has ended in time, and the one that got the signal."""
    commands = start(training, run)
    wait_for_step(run, commands[0], random.randrange(STEPS * 3 // 4))
    assert all(each.running for each in commands)
    os.kill(commands[rank].pid, number)
    started = time.monotonic()
    other = commands[1 - rank].wait()
    assert time.monotonic() - started < 3 * TIMEOUT
    return other, commands[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies(
    training: Training, undisturbed: Path, tmp_path: Path, random: Random, outcome: Callable[..., None], rank: int
) -> None:
    other, dead = disturb(training, run := tmp_path / "run", random, rank, signal.SIGKILL)
    assert dead.wait().code == -signal.SIGKILL
    assert_one_line(other, "another process.*resume with --resume auto")
    finish(training, run)
    assert_runs_equal(undisturbed, run)
    outcome(f"rank {rank} of 2 dies", "equal")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs(
    training: Training, undisturbed: Path, tmp_path: Path, random: Random, outcome: Callable[..., None], rank: int
) -> None:
    other, hanging = disturb(training, run := tmp_path / "run", random, rank, signal.SIGSTOP)
    assert_one_line(other, "another process.*end it if it hangs.*resume with --resume auto")
    os.kill(hanging.pid, signal.SIGKILL)
    hanging.wait()
    finish(training, run)
    assert_runs_equal(undisturbed, run)
    outcome(f"rank {rank} of 2 hangs", "equal")
