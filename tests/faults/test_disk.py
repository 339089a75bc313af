"""A disk that is full, or read-only."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from faults.commands import Command, Done, Training, assert_one_line, fill, small_disk, wait_until
from logpast.data import TokenStore
from logpast.ledger import row as ledger

FREE_SPACE = "free some space"
ELSEWHERE = "choose another place|another --run folder|elsewhere|Read-only file system"


def test_a_disk_that_becomes_full_in_training(
    training: Training, tmp_path: Path, random: Random, outcome: Callable[..., None]
) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:

        def keep_full(command: Command) -> None:
            wait_until(lambda: not (command.running and fill(disk)))  # old checkpoints are deleted

        run = disk / "run"
        assert_one_line(training.disturb(run, random, keep_full), FREE_SPACE)
        (disk / "ballast").unlink()
        training.finish(run)
        training.assert_equal(run)
    outcome("disk full: training", "equal")


def test_a_full_disk_for_a_token_store(
    home: Path, tmp_path: Path, random: Random, call: Callable[..., Done], outcome: Callable[..., None]
) -> None:
    with small_disk(tmp_path / "disk", 1024) as disk:
        fill(disk, random.randrange(16_000))
        words = ("data", "prepare", "text.txt", "--tokenizer", "store", "--out", disk / "new")
        assert_one_line(call(*words), FREE_SPACE)
        assert [path.name for path in disk.iterdir()] == ["ballast"]
        (disk / "ballast").unlink()
        assert call(*words).code == 0
        assert TokenStore.open(disk / "new").identity == TokenStore.open(home / "store").identity
    outcome("disk full: data prepare", "equal")


def test_a_full_disk_for_a_ledger(
    training: Training, tmp_path: Path, random: Random, call: Callable[..., Done], outcome: Callable[..., None]
) -> None:
    """A row is added whole or not at all, and the score is printed."""
    with small_disk(tmp_path / "disk", 256) as disk:
        words = ("eval", "--checkpoint", "undisturbed", "--data", "held-out", "--record", disk / "rows.jsonl")
        (disk / "rows.jsonl").write_text("\n" * random.randrange(3000, 4096))  # its block has little room
        fill(disk)
        done = call(*words)
        assert_one_line(done, "could not add a row")
        assert "ppl_token" in done.out
        assert ledger.read(disk / "rows.jsonl") == []
        (disk / "ballast").unlink()
        assert call(*words).code == 0
        assert len(ledger.read(disk / "rows.jsonl")) == 1
    outcome("disk full: eval --record", "equal")


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


@pytest.mark.parametrize("command", ["train", "data prepare", "eval --record", "analyze"])
def test_read_only_output(
    training: Training, interrupted: Path, tmp_path: Path, random: Random, call: Callable[..., Done],
    outcome: Callable[..., None], command: str,
) -> None:  # fmt: skip
    with small_disk(tmp_path / "disk", 4096) as disk:
        run, folder = disk / "run", disk / random.choice(["", "deeper"])
        shutil.copytree(interrupted, run)
        words: dict[str, list[object]] = {
            "train": [*training.words, "--run", run, "--resume", "auto"],
            "data prepare": ["text.txt", "--tokenizer", "store", "--out", folder / "new"],
            "eval --record": ["--checkpoint", "undisturbed", "--data", "held-out", "--record", folder / "rows.jsonl"],
            "analyze": ["undisturbed", "--data", "held-out", "--limit", "64", "--out", folder / "analysis"],
        }
        remount(disk, "ro")
        given = [*command.removesuffix(" --record").split(), *words[command]]
        assert_one_line(call(*given), ELSEWHERE)
        remount(disk, "rw")
        assert call(*given).code == 0
        if command == "train":
            training.assert_equal(run)
    outcome(f"read-only output: {command}", "equal")
