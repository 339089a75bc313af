"""A clock that jumps, in a run of its own process with libfaketime. CLOCK_MONOTONIC never jumps."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from faults.commands import STEPS, Training, wait_until
from logpast.training.checkpoint import find_checkpoint
from logpast.training.log import read_log

LIBRARIES = sorted(Path("/usr").glob("lib*/**/faketime/libfaketime.so.1"))
DAYS = 86_400


@pytest.mark.skipif(not LIBRARIES, reason="libfaketime is missing: apt-get install faketime")
@pytest.mark.parametrize("direction", ["forward", "back"])
def test_a_clock_that_jumps(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None], direction: str
) -> None:
    """By up to a year, in the middle of a run with TensorBoard's files."""
    (offset := tmp_path / "offset").write_text("+0")
    environment = os.environ | {
        "LD_PRELOAD": str(LIBRARIES[0]), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    words = [sys.executable, "-m", "logpast", "train", *training.words, "--run", run := tmp_path / "run"]
    more = ["--tensorboard", "true"]
    process = subprocess.Popen([*map(str, words), *more], cwd=training.cwd, env=environment, stderr=subprocess.PIPE)
    step, log = random.randrange(STEPS * 3 // 4), run / "log.jsonl"
    wait_until(lambda: process.poll() is not None or (log.exists() and log.read_bytes().count(b"\n") >= step))
    assert process.poll() is None
    jump = random.randrange(DAYS, 365 * DAYS) * (1 if direction == "forward" else -1)
    offset.write_text(f"{jump:+d}")
    errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors
    training.assert_equal(run)
    assert 0 < find_checkpoint(run, "latest").state["seconds"] < DAYS
    assert all(line["tokens_per_second"] > 0 for line in read_log(run) if "tokens_per_second" in line)
    outcome(f"the clock jumps {direction}", "equal")
