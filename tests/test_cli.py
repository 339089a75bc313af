"""The command line: help, one-line errors with exit code 2, and all steps from a text to generated text."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from logpast import cli, generation
from logpast.cli import COMMANDS, SECTIONS, main
from logpast.data import TokenStore
from logpast.models import RecentConfig
from logpast.training import loop, memory_check
from logpast.training.checkpoint import find_checkpoint, open_checkpoint, sorted_checkpoints
from logpast.training.config import TrainConfig
from logpast.training.recipes import shipped_recipes
from logpast.util import files


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(stop.value.code or 0)


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The error message of a command that fails, which must be one line."""
    capsys.readouterr()
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("logpast: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def parsed(monkeypatch: pytest.MonkeyPatch, *words: object) -> TrainConfig:
    """The config that `logpast train` would run."""
    seen: list[TrainConfig] = []
    monkeypatch.setattr(loop, "train", seen.append)
    assert run("train", *words) == 0
    return seen[0]


def test_help_does_not_import_torch() -> None:
    code = "import sys; from logpast.cli import run; run(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_help_of_every_command_imports_no_torch_and_is_fast() -> None:
    code = (
        "import sys, contextlib; from logpast.cli import COMMANDS, run\n"
        "for name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit): run([*name.split(), '--help'])\n"
        "with contextlib.suppress(SystemExit): run('train --config transformer-xl-base --help'.split())\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & sys.modules.keys()"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (time.monotonic() - start) / len(COMMANDS) < 0.5  # seconds per command
    assert "--model.memory_when_scoring" in done.stdout


def test_a_recipe_may_be_given_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"steps: {number}\n")
    words = [word for number in (1, 2, 1) for word in ("--config", tmp_path / f"{number}.yaml")]
    assert parsed(monkeypatch, "--config", "small-cpu", *words).steps == 1


def test_options_replace_what_a_recipe_may_not_hold_for_a_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["--config", "small-cpu", "--model", "time_local"]
    assert parsed(monkeypatch, *train, "--model.sharpness", "4").model.sharpness == 4
    assert "small-cpu: model.sharpness must be at most 16" in error_of(capsys, "train", *train)


def test_options_refuse_what_their_type_does_not_allow(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--config", "small-cpu"]
    assert "--steps must be at least 1" in error_of(capsys, *train, "--steps", "0")
    assert "--data.jitter cannot be 'maybe'" in error_of(capsys, *train, "--data.jitter=maybe")
    assert "--data.streams cannot be 'documents'; did you mean document?" in error_of(
        capsys, *train, "--data.streams", "documents"
    )


def test_null_overrides_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, "--config", "paper-pg19").data.validation is not None
    assert parsed(monkeypatch, "--config", "paper-pg19", "--data.validation", "null").data.validation is None


def test_overview_lists_all_commands_in_sections_with_the_demo_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"{title}:" in lines for title in SECTIONS)
    listed = [name for line in lines for name in COMMANDS if line.startswith(f"  {name}  ")]
    assert listed == list(COMMANDS)
    assert listed[0] == "demo"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_in_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"\n    logpast {command} " in text or f"\n    logpast {command}\n" in text


def test_help_of_train_lists_its_shipped_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    names = [name for name in shipped_recipes() if not name.startswith(("rivals-", "sweep-"))]
    assert f"the name of a shipped recipe: {', '.join(names)};" in text


@pytest.mark.parametrize("words", [["paper"], ["paper", "--help"]])
def test_the_first_word_alone_lists_its_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        command.split() for command in COMMANDS if command.startswith("paper ")
    ]


@pytest.mark.parametrize(
    ("words", "wrong", "suggested"),
    [
        ("trian", "'trian'", "did you mean train?"),
        ("paper tabel1", "'paper tabel1'", "did you mean table1?"),
        ("paper TABELA1", "'paper TABELA1'", "did you mean tableA1?"),
        ("paper nope", "'paper nope'", "known: fig1, figA1, "),
        ("resluts pages", "'resluts'", "did you mean results"),
        ("eval --chekpoint x --data y", "--chekpoint", "did you mean --checkpoint?"),
        ("train --model.slotss 3", "--model.slotss", "did you mean --model.slots?"),
        ("train --model recnt", "'recnt'", "did you mean recent?"),
        ("train --config smal-cpu", "smal-cpu", "did you mean small-cpu?"),
        ("compare rivals-toi", "rivals-toi", "did you mean rivals-toy?"),
        ("sweep sweep-smal", "sweep-smal", "did you mean sweep-small?"),
        ("data prepare wikitext13:test --out o", "wikitext13", "wikitext103"),
    ],
)
def test_unknown_names_get_the_nearest_one(
    words: str,
    wrong: str,
    suggested: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of(capsys, *words.split())
    assert wrong in error
    assert suggested in error


def test_unknown_keys_of_a_recipe_get_the_nearest_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: r\nmodel:\n  slotz: 5\ndata: {train: x}\nsteps: 1\n")
    error = error_of(capsys, "train", "--config", recipe)
    assert "recipe.yaml" in error
    assert "'model.slotz'; did you mean model.slots?" in error


def test_wrong_and_missing_values_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch_size" in error_of(capsys, "eval", "--checkpoint", "x", "--data", "y", "--batch_size", "many")
    assert "slots" in error_of(capsys, "train", "--run", "r", "--data.train", "x", "--model.slots", -3)
    assert "data" in error_of(capsys, "eval", "--checkpoint", "x")
    assert "run" in error_of(capsys, "train", "--data.train", "x")


def test_options_override_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parsed(monkeypatch, "--config", "paper-wikitext103")
    cell = parsed(monkeypatch, "--config", "paper-wikitext103", "--model.slots", 5, "--model.sharpness", 150)
    assert cell == replace(recipe, model=replace(recipe.model, slots=5, sharpness=150))  # type: ignore[call-arg]


def test_later_recipes_override_earlier_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: 7\nmodel: {slots: 9}\n")
    small = parsed(monkeypatch, "--config", "small-cpu")
    mine = parsed(monkeypatch, "--config", "small-cpu", "--config", tmp_path / "mine.yaml")
    assert mine == replace(small, steps=7, model=replace(small.model, slots=9))  # type: ignore[call-arg]


def test_steps_replace_the_epochs_of_a_recipe_and_the_reverse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parsed(monkeypatch, "--config", "small-cpu", "--epochs", 3)
    assert (config.steps, config.epochs) == (None, 3)
    (tmp_path / "mine.yaml").write_text("steps: 7\n")
    config = parsed(monkeypatch, "--config", "paper-pg19", "--config", tmp_path / "mine.yaml")
    assert (config.steps, config.epochs) == (7, None)
    error = error_of(capsys, "train", "--config", "small-cpu", "--epochs", 3, "--steps=5")
    assert "steps and epochs are both given (5 and 3)" in error


@pytest.mark.parametrize("words", ["--freeze blocks.* !blocks.1 --seed=1", "--freeze '[blocks.*, \"!blocks.1\"]'"])
def test_a_list_may_be_given_as_several_words(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(monkeypatch, "--config", "small-cpu", *shlex.split(words)).freeze == ["blocks.*", "!blocks.1"]


def test_init_from_supplies_the_settings_if_there_is_no_recipe(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = find_checkpoint(tiny_run).config
    words = ["--init_from", tiny_run, "--run", tmp_path / "new", "--data.train", "new.txt"]
    config = parsed(monkeypatch, *words, "--epochs=2", "--model", "recent")
    assert config.model == RecentConfig(
        slots=5, window=8, layers=1, heads=1, width=8, vocabulary=before.model.vocabulary
    )
    assert config.data.tokenizer == str(find_checkpoint(tiny_run).path)
    assert (config.run, config.epochs, config.steps, config.batch_size) == (tmp_path / "new", 2, None, 4)
    assert parsed(monkeypatch, *words, "--config", "small-cpu").model.layers == 4
    assert "run" in error_of(capsys, "train", "--init_from", tiny_run)


def test_model_selects_another_system_than_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parsed(monkeypatch, "--config", "paper-pg19")
    control = parsed(monkeypatch, "--config", "paper-pg19", "--model", "recent", "--model.slots", 41)
    assert isinstance(control.model, RecentConfig)
    assert control.model.slots == 41
    assert control.optimizer == recipe.optimizer


def test_dashes_are_underscores_and_the_last_option_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--batch-size", 5, "--seed=3", "--resume", "auto", "--batch_size", 6]
    config = parsed(monkeypatch, "--config", "small-cpu", *words)
    assert (config.batch_size, config.seed, config.resume) == (6, 3, "auto")
    assert parsed(monkeypatch, "--config", "small-cpu").resume is False


@pytest.mark.parametrize(
    ("words", "jitter"),
    [("--data.jitter", True), ("--data.jitter --seed=3", True), ("--data.jitter false", False), ("", False)],
)
def test_a_true_false_option_without_value_is_true(words: str, jitter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed(monkeypatch, "--config", "small-cpu", *words.split())
    assert config.data.jitter is jitter


def test_prepare_train_eval_generate(books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model.layers", 1, "--model.heads", 2, "--model.width", 16, "--model.window", 8, "--model.slots", 9]
    assert run("data", "prepare", books, "--out", tmp_path / "store", "--tokenizer", "bpe-300") == 0
    quick = ["--steps", 5, "--batch_size", 4, "--accelerator", "cpu", "--data.train", tmp_path / "store"]
    assert run("train", "--run", tmp_path / "run", *quick, *sizes) == 0
    capsys.readouterr()
    assert run("eval", "--checkpoint", tmp_path / "run", "--data", books / "0.txt", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["unscored"] == 0
    assert run("generate", "--checkpoint", tmp_path / "run", "--prompt", "And", "--tokens", 9) == 0
    assert capsys.readouterr().out.startswith("And")
    assert run("filters", "--out", tmp_path / "filters.svg", "--sharpness", "[20, 50]") == 0
    assert str(tmp_path / "run") in error_of(capsys, "train", "--run", tmp_path / "run", *quick, *sizes)


def test_train_on_text_without_preparing_it(books: Path, tmp_path: Path) -> None:
    """The second run finds the tokens in the cache."""
    words = ["--data.train", books, "--data.validation", books / "0.txt", "--data.tokenizer", "bpe-300", "--steps", 2]
    words += ["--batch_size", 4, "--accelerator", "cpu", "--model.layers", 1, "--model.heads", 1, "--model.width", 8]
    words += ["--model.window", 8, "--model.slots", 5]
    for name in ("first", "second"):
        assert run("train", "--run", tmp_path / name, *words) == 0
    models = [(next((tmp_path / name).rglob("model.safetensors"))).read_bytes() for name in ("first", "second")]
    assert models[0] == models[1]


def test_version_and_python_m(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.count(".") == 2
    done = subprocess.run([sys.executable, "-m", "logpast", "--version"], capture_output=True, text=True)
    assert done.returncode == 0


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "run"
    assert run("train", "--run", folder, "--data.train", store.path, *TINY) == 0
    return folder


TINY = ["--steps=1", "--batch_size=4", "--accelerator=cpu", "--tensorboard=false"]
TINY += ["--model.layers=1", "--model.heads=1", "--model.width=8", "--model.window=8", "--model.slots=5"]

BAD_TRAINING = {
    "run is a file": ["--run", "FILE"],
    "run below a file": ["--run", "FILE/x"],
    "small vocabulary": ["--model.vocabulary", "100"],
    "negative vocabulary": ["--model.vocabulary", "-5"],
    "negative rate": ["--optimizer.learning_rate", "-1"],
    "large beta": ["--optimizer.beta1", "2"],
    "no validation tokens": ["--data.validation_tokens", "0"],
    "too sharp": ["--model.sharpness", "1e308"],
    "heads": ["--model.heads", "3"],
    "no text": ["--data.train", "nowhere.txt"],
    "steps and epochs": ["--epochs", "2"],
    "accelerator": ["--accelerator", "abacus"],
    "text too short": ["--model.window", "100000"],
    "empty system": ["--model", ""],
    "no system": ["--model.system"],
    "empty text": ["--data.train", ""],
    "nothing to start from": ["--init_from", "runs/nowhere/else"],
    "nothing to resume": ["--resume", "best"],
    "nothing to freeze": ["--freeze", "nothing"],
}


@pytest.mark.parametrize("words", BAD_TRAINING.values(), ids=BAD_TRAINING.keys())
def test_wrong_options_of_train_are_one_line_errors(
    words: list[str], store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").write_text("precious")
    words = [word.replace("FILE", str(tmp_path / "FILE")) for word in words]
    error_of(capsys, "train", "--run", tmp_path / "run", "--data.train", store.path, *TINY, *words)
    assert (tmp_path / "FILE").read_text() == "precious"
    assert not (tmp_path / "run").exists()


BAD_EVALUATION = {
    "json is a folder": ["--json", "FOLDER"],
    "record below a file": ["--record", "FILE/x"],
    "record no ledger": ["--record", "FILE"],
    "empty name": ["--data", ""],
    "other nats": ["--against", "FILE"],
    "device": ["--device", "cpu:x"],
    "no such device": ["--device", "tpu"],
    "batch": ["--batch_size", "0"],
    "accounting": ["--accounting", "creative"],
    "not UTF-8": ["--data", "BINARY"],
    "empty": ["--data", "EMPTY"],
}


@pytest.mark.parametrize("words", BAD_EVALUATION.values(), ids=BAD_EVALUATION.keys())
def test_wrong_options_of_eval_are_one_line_errors(
    words: list[str], tiny_run: Path, books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"FILE": b"precious", "BINARY": b"abc \xff\xfe def", "EMPTY": b""}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "FOLDER").mkdir()
    for name in ("FILE", "BINARY", "EMPTY", "FOLDER"):
        words = [word.replace(name, str(tmp_path / name)) for word in words]
    error = error_of(capsys, "eval", "--checkpoint", tiny_run, "--data", books, *words)
    assert (tmp_path / "FILE").read_bytes() == b"precious"
    if "BINARY" in words[-1]:
        assert "byte 4" in error


@pytest.mark.parametrize(
    "content",
    [
        "model: log_memory",
        "model: [1]",
        "model: {system: [a]}",
        "model: {system: 3}",
        "data: my.txt",
        "optimizer: [1]",
        "optimizer:\ndata:",
        "a: [1,",
        "steps: 1\nsteps: 2\n",
    ],
)
def test_malformed_recipes_are_one_line_errors(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    error = error_of(capsys, "train", "--config", tmp_path / "recipe.yaml", "--run", tmp_path / "run")
    assert ("data.train" if content.endswith("data:") else "recipe.yaml") in error


def test_sections_are_not_options(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--data.train" in error_of(capsys, "train", "--run", "r", "--data", books)
    assert "--optimizer.learning_rate" in error_of(capsys, "train", "--run", "r", "--optimizer=3")
    run("train", "--help")
    text = capsys.readouterr().out
    assert "settings of data: what to train on:" in text
    assert "--data CONFIG" not in text


def test_an_empty_section_of_a_recipe_is_ignored(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("optimizer:\n")
    words = ["--config", tmp_path / "recipe.yaml", "--run", tmp_path / "run", "--data.train", store.path]
    assert run("train", *words, *TINY, "--accelerator", "cpu") == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--prompt=-- he said"],
        ["--prompt=\udcff"],
        ["--prompt==x"],
        ["--prompt", "-- he said"],
        ["--prompt", "--A well-known"],
        ["--temperature", "1e-310"],
    ],
)
def test_unusual_prompts_are_accepted(words: list[str], tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--checkpoint", tiny_run, *words, "--tokens", 2, "--device", "cpu") == 0
    if words[-1].startswith("--A"):
        assert capsys.readouterr().out.startswith(words[-1])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seed", 10**23], "seed"),
        (["--prompt", "-hello"], "write --prompt=-hello"),
        (["--prompt", "--hello"], "write --prompt=--hello"),
        (["--prompt", "--seed=3"], "--prompt: expected one argument"),
        (["--temperature", -1], "temperature"),
        (["--stop", "--x"], "write --stop=--x"),
        (["--stop"], "--stop"),
        (["--stop", ""], "stop"),
        (["--samples", 0], "samples"),
    ],
)
def test_wrong_options_of_generate_are_one_line_errors(
    words: list[object], named: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in error_of(capsys, "generate", "--checkpoint", tiny_run, *words)


def test_stop_texts_are_taken_as_they_are(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(generation, "until_stop", lambda pieces, stop: seen.append(stop) or pieces)
    words = ["--stop", "User:", "[x]", "null", "\n", "--stop=--x", "--tokens", 2]
    assert run("generate", "--checkpoint", tiny_run, *words) == 0
    assert seen == [["User:", "[x]", "null", "\n", "--x"]]


def test_brackets_are_suggested_for_lists_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'write "[25,200]"' in error_of(capsys, "filters", "--sharpness", "25,200")
    assert "[" not in error_of(capsys, "filters", "--sharpness", "abc")
    assert 'write "[memory]"' in error_of(capsys, "compare", "rivals-toy", "--systems", "memory")


def test_full_disk_while_saving(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run stops with one line. Earlier checkpoints are complete, and it resumes once there is room."""
    words = [
        "--run",
        tmp_path / "run",
        "--data.train",
        store.path,
        *TINY,
        "--steps=4",
        "--checkpoint_every=1",
        "--keep=9",
    ]
    fsync, calls = files.fsync, []

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) > 12:  # while a later checkpoint is written
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(path)

    monkeypatch.setattr(files, "fsync", full)
    assert run("train", *words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"logpast: cannot write {tmp_path / 'run'}")
    saved = sorted_checkpoints(tmp_path / "run")
    assert saved
    assert all(open_checkpoint(folder) for folder in saved)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    monkeypatch.setattr(files, "fsync", fsync)
    assert run("train", *words, "--resume", "auto") == 0
    assert find_checkpoint(tmp_path / "run", "latest").step == 4


def test_ctrl_c_within_a_destructor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", cli._deliver_again)
    Interrupted()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)
    assert time.monotonic() < begun + 30


@pytest.mark.parametrize("begun", [None, ".", "log.jsonl"], ids=["imports", "set-up", "training"])
def test_ctrl_c_leaves_no_traceback(begun: str | None, store: TokenStore, tmp_path: Path) -> None:
    words = ["--run", tmp_path / "run", "--data.train", store.path, *TINY, "--steps=100000000", "--log_every=1"]
    command = [sys.executable, "-m", "logpast", "train", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1)
    while begun and not (tmp_path / "run" / begun).exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (130, -signal.SIGINT)  # during imports the signal itself may end it
    if sorted_checkpoints(tmp_path / "run"):
        assert find_checkpoint(tmp_path / "run", "latest").step > 0


@pytest.mark.parametrize(
    ("words", "option", "right"),
    [
        ("eval --checkpoint x --data y --precision f", "--precision", "float32, float64"),
        ("compare rivals-toy --seeds 3", "--seeds", '"[3]"'),
    ],
)
def test_errors_say_which_values_are_allowed(
    words: str, option: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, *words.split())
    assert option in error
    assert right in error


def test_an_ascii_terminal_gets_all_it_can_print() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "logpast", "paper", "tableA1"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "8,192" in done.stdout


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_one_line_error(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(words: list[str]) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cli, "run", full)
    with pytest.raises(SystemExit, match="2"):
        main(["results"])
    error = capsys.readouterr().err
    assert error.startswith(f"logpast: the disk: {os.strerror(number)};")
    assert error.count("\n") == 1


def test_an_error_of_a_file_is_one_line_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "a\nb\x1b[2J").mkdir()
    monkeypatch.setattr(cli, "run", lambda words: folder.read_bytes())
    with pytest.raises(SystemExit, match="2"):
        main(["results"])
    error = capsys.readouterr().err
    assert error == f"logpast: {tmp_path}/a\\nb\\x1b[2J: {os.strerror(errno.EISDIR)}\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_out_of_memory_is_a_one_line_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocate(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "run", allocate)
    assert "batch_size" in error_of(capsys, "train")
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")
    assert "--resume auto" in error_of(capsys, "train")
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train"])


def test_batches_and_models_that_cannot_fit_are_refused_at_once(
    store: TokenStore,
    tmp_path: Path,
    tiny_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, setting in (
        (["--batch_size=100000000"], "micro_batch_size"),
        (["--batch_size=10000000000", "--micro_batch_size=2"], "batch_size (10,000,000,000)"),
        (["--model.width=4000000"], "model.width"),
        (["--model.width=4000000000"], "model.width"),
        (["--model.layers=1000000000000"], "model.layers"),
    ):
        error = error_of(capsys, "train", "--run", tmp_path / "run", "--data.train", store.path, *TINY, *words)
        assert setting in error
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory_check, "memory_of", lambda device: 50_000)
    (tmp_path / "unseen.txt").write_text("other words " * 500)
    for command in (["eval", "--checkpoint", tiny_run], ["analyze", tiny_run, "--out", tmp_path / "analysis"]):
        error = error_of(capsys, *command, "--data", tmp_path / "unseen.txt", "--batch_size=1000")
        assert "batch_size (1,000)" in error


@pytest.mark.parametrize(
    "words", ["eval --data {text} --checkpoint", "analyze --data {text} --limit 9 --out {out}", "generate --checkpoint"]
)
def test_small_models_use_one_thread(
    words: str, tiny_run: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[int]()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    assert run(*words.format(text=books / "0.txt", out=tmp_path / "out").split(), tiny_run) == 0
    assert (set(used[::2]), set(used[1::2])) == ({1}, {3})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_every_command_like_ctrl_c(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that sweeps, comparisons, analyses and the demo stop what they have started, and save."""
    monkeypatch.setattr(cli, "run", lambda words: signal.raise_signal(number))
    assert run("sweep") == 130
    assert capsys.readouterr().err == "logpast: interrupted\n"


def test_print_config_shows_options_without_value_as_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of an option whose default is null."""
    assert run("train", "--config", "small-cpu", "--print_config", "--compile", "--data.jitter") == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert (settings["compile"], settings["data"]["jitter"]) == (True, True)
