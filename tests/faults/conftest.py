"""A tiny recurrent model, trained by the command; the report of all faults, as `results/faults.json`."""

import json
import os
import signal
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from faults.commands import STEPS, TIMES, Done, Training, run, wait_for_step
from logpast.cli import main
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError

WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "home", "and"]
RECIPE = {
    "data": {"train": "store", "validation": "held-out", "validation_tokens": 100},
    "model": {"system": "transformer_xl", "window": 8, "layers": 1, "heads": 2, "width": 16, "memory": 8},
    "optimizer": {"learning_rate": 3e-3, "final_learning_rate": 3e-4, "warmup_steps": 5},
    "steps": STEPS,
    "batch_size": 4,
    "validate_every": 20,
    "checkpoint_every": 3,
    "log_every": 1,
    "accelerator": "cpu",
    "tensorboard": False,
}
REPORT = "LOGPAST_FAULTS"  # environment variable: the file for the report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each fault is caused several times, at other moments."""
    if "random" in metafunc.fixturenames:
        metafunc.parametrize("random", range(TIMES), indirect=True)


@pytest.fixture
def random(request: pytest.FixtureRequest) -> Random:
    """Moments and places, which depend only on the test."""
    return Random(request.node.nodeid)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record for the report which fault it was and what came of it: `equal`, or `line`."""

    def record(fault: str, result: str) -> None:
        assert result in ("equal", "line")
        record_property("fault", fault)
        record_property("outcome", result)

    return record


def write_text(file: Path, lines: int, seed: int) -> Path:
    random = Random(seed)
    file.write_text("".join(" ".join(random.choices(WORDS, k=9)) + "\n" for _ in range(lines)))
    return file


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of all commands, with texts, token stores and a recipe."""
    folder = tmp_path_factory.mktemp("home")
    write_text(folder / "text.txt", 400, seed=0)
    write_text(folder / "held-out.txt", 60, seed=1)
    for words in (["text.txt", "--out", "store", "--tokenizer", "bpe-300"],
                  ["held-out.txt", "--out", "held-out", "--tokenizer", "store"]):  # fmt: skip
        assert run("data", "prepare", *words, cwd=folder).code == 0
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture(scope="session")
def training(home: Path) -> Training:
    """The training that is disturbed, with a run that was not."""
    made = Training(["--config", "recipe.yaml"], home, home / "undisturbed")
    made.finish(made.undisturbed)
    return made


@pytest.fixture(scope="session")
def interrupted(training: Training) -> Path:
    """A run that was killed after its middle; to be copied."""
    run = training.cwd / "interrupted"
    command = training.start(run)
    wait_for_step(run, command, 2 * STEPS // 3)
    assert command.running
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    return run


@pytest.fixture
def call(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process, which is faster, in the working folder."""
    monkeypatch.chdir(home)

    def run_here(*words: object) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        return Done(int(end.value.code or 0), *capfd.readouterr())

    return run_here


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the report: fault -> how often it was injected, what came of it, and how long one took."""
    file = os.environ.get(REPORT)
    if not file:
        return
    found = defaultdict[str, list[tuple[str, float]]](list)
    for report in terminalreporter.stats.get("passed", []):
        properties = dict(report.user_properties)
        if "fault" in properties:
            found[properties["fault"]].append((properties["outcome"], report.duration))
    skipped = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])}
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if failed or skipped:
        terminalreporter.write_line(f"{file} is not written: {[*failed, *skipped]}")
        return
    faults = {
        fault: {
            "injected": len(each),
            "equal": sum(outcome == "equal" for outcome, _ in each),
            "line": sum(outcome == "line" for outcome, _ in each),
            "seconds": round(statistics.median(seconds for _, seconds in each), 1),
        }
        for fault, each in sorted(found.items())
    }
    if not faults:
        raise UserError(f"{file} is not written: no fault was caused")
    about = {"revision": revision(), "hardware": describe(pick_device("cpu")), "recipe": RECIPE, "faults": faults}
    Path(file).write_text(json.dumps(about, indent=2) + "\n")
