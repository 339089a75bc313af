"""A flipped bit and a truncation in each kind of file: it is noticed, or it does no harm."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from faults.commands import DAMAGES, STEPS, Done, Training, assert_one_line, run
from logpast.models.stream import Stream
from logpast.training.checkpoint import find_checkpoint, sorted_checkpoints
from logpast.util.errors import UserError
from models.hf.tiny import save_tiny

pytestmark = pytest.mark.parametrize("damage", DAMAGES)
Call = Callable[..., Done]
Outcome = Callable[..., None]

CHECKPOINT = ["model.safetensors", "optimizer.safetensors", "carried.safetensors", "state.json", "config.yaml",
              "tokenizer.json", "SHA256SUMS"]  # fmt: skip
STORE = ["tokens.bin", "documents.tsv", "store.json", "tokenizer.json"]
ATTACHED = ["logpast.json", "logpast.safetensors", "adapter_model.safetensors", "adapter_config.json", "training.json",
            "tokenizer.json", "SHA256SUMS"]  # fmt: skip
FREE = ("--steps", STEPS, "--log_every", 1, "--validate_every", 20, "--checkpoint_every", 3)  # may change
ANALYSIS = ["analysis.json", "nats.safetensors", "SHA256SUMS"]


def resume(call: Call, training: Training, run: Path, *more: object) -> Done:
    return call("train", *training.words, *more, "--run", run, "--resume", "auto")


@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_damaged_checkpoint(
    training: Training, interrupted: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, name: str,
    damage: str,
) -> None:  # fmt: skip
    """The one before it is used."""
    shutil.copytree(interrupted, run := tmp_path / "run")
    last = sorted_checkpoints(run)[-1]
    DAMAGES[damage](last / name, random)
    done = resume(call, training, run)
    assert done.code == 0, done.err
    assert f"warning: {last}" in done.err
    training.assert_equal(run)
    outcome(f"{damage}: checkpoint, {name}", "equal")


@pytest.mark.parametrize("name", ["config.yaml", "lock"])
def test_a_damaged_file_of_the_run_folder(
    training: Training, interrupted: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, name: str,
    damage: str,
) -> None:  # fmt: skip
    """They are written anew."""
    shutil.copytree(interrupted, run := tmp_path / "run")
    DAMAGES[damage](run / name, random)
    done = resume(call, training, run)
    assert done.code == 0, done.err
    training.assert_equal(run)
    outcome(f"{damage}: run, {name}", "equal")


def test_a_damaged_log(
    training: Training, interrupted: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, damage: str
) -> None:
    shutil.copytree(interrupted, run := tmp_path / "run")
    DAMAGES[damage](log := run / "log.jsonl", random)
    done = resume(call, training, run)
    if done.code:
        assert_one_line(done, f"{log}.*restore it, or move it away")
        shutil.copy(interrupted / log.name, log)
        assert resume(call, training, run).code == 0
    training.assert_equal(run)
    outcome(f"{damage}: run, log.jsonl", "line" if done.code else "equal")


@pytest.mark.parametrize("name", STORE)
def test_a_damaged_token_store(
    training: Training, interrupted: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, name: str,
    damage: str,
) -> None:  # fmt: skip
    shutil.copytree(interrupted, run := tmp_path / "run")
    content = (file := training.cwd / "store" / name).read_bytes()
    DAMAGES[damage](file, random)
    try:
        done = resume(call, training, run)
    finally:
        file.write_bytes(content)
    if done.code:
        assert_one_line(done, "store.*(prepare|restore it)")
        done = resume(call, training, run)
        assert done.code == 0, done.err
        outcome(f"{damage}: token store, {name}", "line")
    else:
        outcome(f"{damage}: token store, {name}", "equal")
    training.assert_equal(run)


@pytest.fixture(scope="session")
def ledger(training: Training) -> Path:
    """Two rows."""
    (training.cwd / "rows").mkdir()
    file = training.cwd / "rows" / "ledger.jsonl"
    for precision in ("float32", "float64"):
        words = ["--checkpoint", "undisturbed", "--data", "held-out", "--precision", precision, "--record", file]
        assert run("eval", *words, cwd=training.cwd).code == 0
    return file


def test_a_damaged_ledger(
    ledger: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, damage: str
) -> None:
    whole = call("results", "--folder", ledger.parent).out
    DAMAGES[damage](file := Path(shutil.copy(ledger, tmp_path)), random)
    done = call("results", "--folder", tmp_path)
    if done.code:
        assert_one_line(done, f"{file}.*(fix or remove it|give a file)")
    else:
        assert done.out == whole
    outcome(f"{damage}: ledger", "line" if done.code else "equal")


def test_a_damaged_state_of_a_stream(
    training: Training, tmp_path: Path, random: Random, outcome: Outcome, damage: str
) -> None:
    model = find_checkpoint(training.undisturbed).load_model()
    stream = Stream(model, 0)
    stream.push([5, 6, 7] * 9)
    stream.save(file := tmp_path / "state.safetensors")
    whole = stream.state()
    DAMAGES[damage](file, random)
    try:
        found = Stream.load(model, file).state()
    except UserError as error:
        problem = str(error)
    else:
        assert all(torch.equal(value, found[name]) for name, value in whole.items())
        problem = ""
    assert not problem or (str(file) in problem and "; " in problem and "\n" not in problem)
    outcome(f"{damage}: state of a stream", "line" if problem else "equal")


@pytest.fixture(scope="session")
def attached(home: Path) -> Path:
    """A tiny Llama with a memory and LoRA's adapters."""
    (home / "llama").mkdir()
    model = save_tiny(home / "llama", [(home / "text.txt").read_text()])
    words = ["--window", "16", "--recall", "64", "--slots", "5", "--train", "lora", "--steps", "2", "--device", "cpu"]
    done = run("attach", "--model", model, "--data", "held-out.txt", "--out", "attached", *words, cwd=home)
    assert done.code == 0, done.err
    return home / "attached"


def scores(done: Done) -> dict[str, Any]:
    found = json.loads(done.out)
    return {name: value for name, value in found.items() if name not in ("checkpoint", "seconds")}


@pytest.fixture(scope="session")
def scores_of_attached(attached: Path, home: Path) -> dict[str, Any]:
    return scores(run("eval", "--checkpoint", attached, "--data", "held-out.txt", "--json", "-", cwd=home))


@pytest.mark.parametrize("name", ATTACHED)
def test_a_damaged_attached_model(
    attached: Path, scores_of_attached: dict[str, Any], tmp_path: Path, call: Call, random: Random, outcome: Outcome,
    name: str, damage: str,
) -> None:  # fmt: skip
    shutil.copytree(attached, folder := tmp_path / "attached")
    DAMAGES[damage](folder / name, random)
    done = call("eval", "--checkpoint", folder, "--data", "held-out.txt", "--json", "-")
    if done.code:
        assert_one_line(done, f"{folder}.*attach the memory again")
    else:
        assert scores(done) == scores_of_attached
    outcome(f"{damage}: attached model, {name}", "line" if done.code else "equal")


@pytest.fixture(scope="session")
def analysis(training: Training) -> Path:
    words = ["undisturbed", "--data", "held-out", "--limit", "64", "--out", "analysis"]
    done = run("analyze", *words, cwd=training.cwd)
    assert done.code == 0, done.err
    return training.cwd / "analysis"


@pytest.mark.parametrize("name", ANALYSIS)
def test_a_damaged_analysis(
    analysis: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, name: str, damage: str
) -> None:
    """Its page is drawn again."""
    shutil.copytree(analysis, folder := tmp_path / "analysis")
    (folder / "report.html").unlink()
    DAMAGES[damage](folder / name, random)
    done = call("analyze", folder)
    if done.code:
        assert_one_line(done, f"{folder}.*analyze the model again")
    else:
        assert (folder / "report.html").read_bytes() == (analysis / "report.html").read_bytes()
    outcome(f"{damage}: analysis, {name}", "line" if done.code else "equal")


def test_a_damaged_recipe(
    training: Training, interrupted: Path, tmp_path: Path, call: Call, random: Random, outcome: Outcome, damage: str
) -> None:
    """It is no recipe, or one with other settings than the run, or what differs has no effect."""
    shutil.copytree(interrupted, run := tmp_path / "run")
    DAMAGES[damage](recipe := Path(shutil.copy(training.cwd / "recipe.yaml", tmp_path)), random)
    done = call("train", "--config", recipe, "--run", run, "--resume", "auto", *FREE)
    if done.code:
        assert_one_line(done, f"; |did you mean|{recipe} is not")
        assert resume(call, training, run).code == 0
    training.assert_equal(run)
    outcome(f"{damage}: recipe", "line" if done.code else "equal")
