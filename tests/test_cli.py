"""The command line: help that teaches, one-line errors with exit code 2, and the whole way from text to text."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from logpast import cli
from logpast.cli import VERBS, main
from logpast.data import TokenStore
from logpast.training import loop
from logpast.training.checkpoint import find_checkpoint, open_checkpoint, sorted_checkpoints
from logpast.training.config import TrainConfig
from logpast.training.recipes import SHIPPED
from logpast.util import files

RECIPES = SHIPPED


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(stop.value.code or 0)


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a mistake is told in."""
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
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_by_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*verb.split(), "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"\n    logpast {verb} " in text or f"\n    logpast {verb}\n" in text


@pytest.mark.parametrize("words", [["paper"], ["paper", "--help"]])
def test_a_word_alone_lists_its_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        verb.split() for verb in VERBS if verb.startswith("paper ")
    ]


def test_unknown_words_get_the_nearest_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean train" in error_of(capsys, "trian")
    assert "unknown verb 'paper tabel1'; did you mean table1?" in error_of(capsys, "paper", "tabel1")
    assert "unknown verb 'paper TABELA1'; did you mean tableA1?" in error_of(capsys, "paper", "TABELA1")
    assert "unknown verb 'paper nope'; known: fig1, figA1, " in error_of(capsys, "paper", "nope")
    assert "unknown verb 'resluts'; did you mean results" in error_of(capsys, "resluts", "pages")
    assert "did you mean --checkpoint" in error_of(capsys, "eval", "--chekpoint", "x", "--data", "y")
    assert "did you mean --model.slots" in error_of(capsys, "train", "--model.slotss", 3)
    assert "did you mean recent" in error_of(capsys, "train", "--model", "recnt")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: r\nmodel:\n  slotz: 5\ndata: {train: x}\nsteps: 1\n")
    assert "recipe.yaml: unknown key 'model.slotz'; did you mean model.slots?" in error_of(
        capsys, "train", "--config", recipe
    )
    assert "wikitext103" in error_of(capsys, "data", "prepare", "wikitext13:test", "--out", tmp_path / "o")


def test_bad_recipes_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "nowhere.yaml" in error_of(capsys, "train", "--config", tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,")
    assert "is not YAML" in error_of(capsys, "train", "--config", tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_text("steps: 1\nmodel: {slots: 5}\nsteps: 2\n")
    assert "'steps' is given twice" in error_of(capsys, "train", "--config", tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_text("{[steps]: 1}")
    assert "is not YAML" in error_of(capsys, "train", "--config", tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "not a recipe" in error_of(capsys, "train", "--config", tmp_path / "list.yaml")


def test_bad_values_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch_size" in error_of(capsys, "eval", "--checkpoint", "x", "--data", "y", "--batch_size", "many")
    assert "slots" in error_of(capsys, "train", "--run", "r", "--data.train", "x", "--model.slots", -3)
    assert "data" in error_of(capsys, "eval", "--checkpoint", "x")
    assert "run" in error_of(capsys, "train", "--data.train", "x")


OTHERS = ("rivals-", "sweep-")  # for compare and sweep
TO_TRAIN = [path for path in sorted(RECIPES.glob("*.yaml")) if not path.name.startswith(OTHERS)]


@pytest.mark.parametrize("recipe", TO_TRAIN, ids=lambda path: path.stem)
def test_recipes_are_whole(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed(monkeypatch, "--config", recipe)
    assert (config.steps is None) != (config.epochs is None)


@pytest.mark.parametrize("corpus", ["wikitext103", "pg19"])
def test_paper_recipes_are_the_papers(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES / f"paper-{corpus}.yaml"
    config = parsed(monkeypatch, "--config", recipe)
    words = ["--config", recipe, "--model.slots", 5, "--model.sharpness", 150]
    assert parsed(monkeypatch, *words).model == replace(config.model, slots=5, sharpness=150)  # type: ignore[call-arg]
    for slots in range(5, 54, 4):
        for k in (100, 150, 200):
            model = replace(config.model, slots=slots, sharpness=k)  # type: ignore[call-arg]
            assert model.bank.horizon == 2 ** ((slots - 1) // 4)  # type: ignore[attr-defined]
    assert config.epochs == {"wikitext103": 90, "pg19": 4}[corpus]
    assert config.batch_size * config.model.window == 16_384
    model, optimizer = config.model, config.optimizer
    assert (model.layers, model.heads, model.width, model.window, model.slots) == (12, 12, 768, 256, 53)
    assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup_steps) == (
        6e-4,
        6e-5,
        700,
    )
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (0.9, 0.95, 0.1, 1.0)
    control = parsed(monkeypatch, "--config", recipe, "--model", "recent", "--model.slots", 41)
    assert type(control.model).__name__ == "RecentConfig"
    assert control.model.slots == 41
    assert control.optimizer == optimizer


def test_dashes_and_later_words_win(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES / "small-cpu.yaml"
    config = parsed(
        monkeypatch, "--config", recipe, "--batch-size", 5, "--seed=3", "--resume", "auto", "--batch_size", 6
    )
    assert (config.batch_size, config.seed, config.resume) == (6, 3, "auto")
    assert parsed(monkeypatch, "--config", recipe).resume is False


@pytest.mark.parametrize(
    ("words", "jitter"),
    [("--data.jitter", True), ("--data.jitter --seed=3", True), ("--data.jitter false", False), ("", False)],
)
def test_a_bool_alone_is_true(words: str, jitter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed(monkeypatch, "--config", RECIPES / "small-cpu.yaml", *words.split())
    assert config.data.jitter is jitter


def test_from_text_to_text(books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five verbs in a row, as a person would type them."""
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
    assert "exists already" in error_of(capsys, "train", "--run", tmp_path / "run", *quick, *sizes)


def test_train_straight_from_text(books: Path, tmp_path: Path) -> None:
    """No preparation: text in, a BPE of its own, a model out; a second run finds the tokens in the cache."""
    words = ["--data.train", books, "--data.validation", books / "0.txt", "--data.tokenizer", "bpe-300", "--steps", 2]
    words += ["--batch_size", 4, "--accelerator", "cpu", "--model.layers", 1, "--model.heads", 1, "--model.width", 8]
    words += ["--model.window", 8, "--model.slots", 5]
    for name in ("first", "second"):
        assert run("train", "--run", tmp_path / name, *words) == 0
    models = [(next((tmp_path / name).rglob("model.safetensors"))).read_bytes() for name in ("first", "second")]
    assert models[0] == models[1]


def test_version_and_module(capsys: pytest.CaptureFixture[str]) -> None:
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
}


@pytest.mark.parametrize("words", BAD_TRAINING.values(), ids=BAD_TRAINING.keys())
def test_bad_training_is_told_in_a_line(
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
def test_bad_evaluation_is_told_in_a_line(
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


@pytest.mark.parametrize("content", ["model: log_memory", "model: [1]", "model: {system: [a]}", "model: {system: 3}",
                                     "data: my.txt", "optimizer: [1]", "optimizer:\ndata:"])  # fmt: skip
def test_bad_recipes_are_told_in_a_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    told = error_of(capsys, "train", "--config", tmp_path / "recipe.yaml", "--run", tmp_path / "run")
    assert ("data.train" if content.endswith("data:") else "recipe.yaml") in told


def test_sections_are_no_options(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "write --data.train TEXT" in error_of(capsys, "train", "--run", "r", "--data", books)
    assert "write --optimizer.learning_rate" in error_of(capsys, "train", "--run", "r", "--optimizer=3")
    run("train", "--help")
    told = capsys.readouterr().out
    assert "settings of data: what to train on:" in told
    assert "--data CONFIG" not in told


def test_an_empty_section_is_as_good_as_none(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("optimizer:\n")
    words = ["--config", tmp_path / "recipe.yaml", "--run", tmp_path / "run", "--data.train", store.path]
    assert run("train", *words, *TINY, "--accelerator", "cpu") == 0


def test_odd_prompts_are_taken(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prompt in ("-- he said", "\udcff", "=x"):
        assert run("generate", "--checkpoint", tiny_run, f"--prompt={prompt}", "--tokens", 2, "--device", "cpu") == 0
    assert run("generate", "--checkpoint", tiny_run, "--prompt", "-- he said", "--tokens", 2, "--device", "cpu") == 0
    capsys.readouterr()
    assert (
        run("generate", "--checkpoint", tiny_run, "--prompt", "--A well-known", "--tokens", 1, "--device", "cpu") == 0
    )
    assert capsys.readouterr().out.startswith("--A well-known")
    assert run("generate", "--checkpoint", tiny_run, "--temperature", "1e-310", "--tokens", 2, "--device", "cpu") == 0
    error_of(capsys, "generate", "--checkpoint", tiny_run, "--seed", 10**23)
    for prompt in ("-hello", "--hello"):
        told = error_of(capsys, "generate", "--checkpoint", tiny_run, "--prompt", prompt)
        assert f"--prompt is given without a value; write --prompt={prompt} if that is meant" in told
    told = error_of(capsys, "generate", "--checkpoint", tiny_run, "--prompt", "--seed=3")
    assert "--prompt: expected one argument" in told
    assert run("train", "--config", RECIPES / "small-cpu.yaml", "--print_config", "--steps=5") == 0
    assert "must be a number of 0 or above" in error_of(capsys, "generate", "--checkpoint", ".", "--temperature", -1)


def test_brackets_are_suggested_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'write "[25,200]"' in error_of(capsys, "filters", "--sharpness", "25,200")
    assert "[" not in error_of(capsys, "filters", "--sharpness", "abc")
    assert 'write "[memory]"' in error_of(capsys, "compare", RECIPES / "rivals-toy.yaml", "--systems", "memory")


def test_full_disk_while_saving(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run stops with a line; what was saved before is whole, and it goes on from there once there is room."""
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
    sync, calls = files.fsync, []

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    monkeypatch.setattr(files, "sync", full)
    assert run("train", *words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("logpast: cannot write")
    saved = sorted_checkpoints(tmp_path / "run")
    assert saved
    assert all(open_checkpoint(folder) for folder in saved)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    monkeypatch.setattr(files, "sync", sync)
    assert run("train", *words, "--resume", "auto") == 0
    assert find_checkpoint(tmp_path / "run", "latest").step == 4


@pytest.mark.parametrize("wait", [3.0, 6.0, 9.0])
def test_ctrl_c_leaves_no_traceback(wait: float, store: TokenStore, tmp_path: Path) -> None:
    """While it imports, while it sets up, while it trains."""
    words = ["--run", tmp_path / "run", "--data.train", store.path, *TINY, "--steps=100000000"]
    command = [sys.executable, "-m", "logpast", "train", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (130, -signal.SIGINT)  # while a library is loading, the signal itself may end it
    if sorted_checkpoints(tmp_path / "run"):
        assert find_checkpoint(tmp_path / "run", "latest").step > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("eval --checkpoint x --data y --precision f", "--precision cannot be 'f'; it may be 'float32', 'float64'"),
        ("compare rivals-toy --seeds 3", "--seeds cannot be '3'; write \"[3]\""),
    ],
)
def test_a_wrong_value_is_told_with_a_right_one(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert told in capsys.readouterr().err


def test_a_terminal_without_greek_has_the_rest() -> None:
    surroundings = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "logpast", "paper", "tableA1"]
    done = subprocess.run(words, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "8,192" in done.stdout


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_is_full_is_told_in_a_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(words: list[str]) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cli, "run", full)
    with pytest.raises(SystemExit, match="2"):
        main(["results"])
    assert capsys.readouterr().err == f"logpast: the disk: {os.strerror(number)}; make room, or write elsewhere\n"


def test_yes_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a choice that is by default left to us."""
    assert run("train", "--config", RECIPES / "small-cpu.yaml", "--print_config", "--compile", "--data.jitter") == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert (settings["compile"], settings["data"]["jitter"]) == (True, True)
