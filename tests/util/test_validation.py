"""Settings from Python code have their types checked, as options on the command line do."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logpast
from logpast import DataConfig, LogMemoryConfig, OptimizerConfig, TokenStore, TrainConfig, UserError, evaluate, train
from logpast.cli import COMMANDS
from logpast.models import CompressiveConfig
from logpast.util.validation import NonNegativeFloat, PositiveInt, validate_value

CONFIG = (Path("x"), DataConfig("x"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig("x", streams="documents"), r"data\.streams .*'documents'.* document\?"),
        (lambda: DataConfig("x", validation_tokens="9"), r"data\.validation_tokens .*'9'.* int"),
        (lambda: OptimizerConfig(learning_rate="1e-3"), r"optimizer\.learning_rate .*'1e-3'.* float"),
        (lambda: TrainConfig(*CONFIG, steps=1, precision="bf16"), r"precision .*'bf16'.* 32"),
        (lambda: TrainConfig(*CONFIG, steps="5"), r"steps .*'5'.* int"),
        (lambda: TrainConfig(*CONFIG, model="recent", steps=1), r"model .*'recent'.* ModelConfig"),
        (lambda: TrainConfig(*CONFIG, steps=1.5), r"steps .*1\.5.* whole number"),
        (lambda: LogMemoryConfig(window=float("inf")), r"model\.window .*inf.* whole number"),
        (lambda: LogMemoryConfig(window="16"), r"model\.window .*'16'"),
        (lambda: LogMemoryConfig(kernel="isit"), r"model\.kernel .*'isit'.* isith\?"),
        (lambda: CompressiveConfig(compression="median"), r"model\.compression .*'median'"),
        (lambda: logpast.generate("x", tokens=2.5), r"tokens .*2\.5.* whole number"),
        (lambda: evaluate("x", "y", accounting="All"), r"accounting .*'All'.* all\?"),
        (lambda: evaluate("x", "y", streams="documents"), r"streams .*'documents'"),
        (lambda: evaluate("x", "y", precision="float16"), r"precision .*'float16'.* bfloat16\?"),
        (lambda: evaluate("x", "y", streams=2), r"streams .*2.* corpus, document"),
        (lambda: evaluate("x", "y", batch_size="4"), r"batch_size .*'4'.* int"),
        (lambda: logpast.analyze("x", "y", precision="half"), r"precision .*'half'.* float32"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("a/b", Path, Path("a/b")),
        ("a/b", Path | None, Path("a/b")),
        ("a/b", str | Path, "a/b"),
        (None, Path | None, None),
        ("a", list[str] | None, ["a"]),
        (["a"], list[str], ["a"]),
        ("a", Any, "a"),
        (3.0, int | None, 3),
        (np.int64(3), int, 3),
        (3.5, int | float, 3.5),
        (True, bool, True),
        (np.float64(0.5), float, 0.5),
        ((Path("a"),), list[str], ["a"]),
        (Path("a"), str, "a"),
        (Path("a"), list[str], ["a"]),
        ([Path("a"), "b"], list[str], ["a", "b"]),
    ],
)
def test_values_are_converted_to_their_types(value: Any, kind: Any, expected: Any) -> None:
    found = validate_value("name", value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_every_command_validates_its_arguments(name: str) -> None:
    """The argument of `train` is a config, which validates itself."""
    assert hasattr(getattr(import_module(COMMANDS[name].module), COMMANDS[name].function), "__wrapped__")


def test_paths_may_be_strings(tmp_path: Path, store: TokenStore, train_config: TrainConfig) -> None:
    config = replace(train_config, run=str(tmp_path / "run"), steps=2)
    assert config.run == tmp_path / "run"
    train(config)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("And")
    assert logpast.generate(str(tmp_path / "run"), prompt_file=str(prompt), tokens=2).startswith("And")
    assert logpast.draw_filters(str(tmp_path / "f.png"), 10.0) == tmp_path / "f.png"
    assert evaluate(str(tmp_path / "run"), str(store.path), save_nats=str(tmp_path / "n.npy"))["tokens"] == len(store)
    with pytest.raises(UserError, match=r"--save_nats.*n\.txt"):
        evaluate(tmp_path / "run", str(store.path), save_nats=tmp_path / "n.txt")


@pytest.mark.parametrize(
    ("value", "kind"), [(3, Path), (True, int), (True, float | None), ("1", bool), ([1], list[str])]
)
def test_values_of_another_type_are_refused(value: Any, kind: Any) -> None:
    with pytest.raises(UserError, match="name cannot be"):
        validate_value("name", value, kind)


def test_text_may_be_a_number_but_true_is_none() -> None:
    """Options are text, and so is 6e-4 in YAML."""
    assert validate_value("rate", "6e-4", NonNegativeFloat, text=True) == 6e-4
    assert validate_value("steps", "5", PositiveInt | None, text=True) == 5
    for value, message in ((True, "cannot be True"), ("0", "at least 1, got '0'"), ("x", "int")):
        with pytest.raises(UserError, match=f"steps.*{message}"):
            validate_value("steps", value, PositiveInt, text=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_limits_exclude_infinity_and_nan(value: float) -> None:
    with pytest.raises(UserError, match=r"rate .*got"):
        validate_value("rate", value, NonNegativeFloat)


def test_none_is_allowed_only_where_its_type_says_so() -> None:
    assert validate_value("steps", None, int | None) is None
    assert validate_value("anything", None, Any) is None
    with pytest.raises(UserError, match="batch_size is empty"):
        validate_value("batch_size", None, int)
