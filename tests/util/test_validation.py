"""Settings from a notebook are held to their types as those of the command line are."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logpast
from logpast import DataConfig, LogMemoryConfig, OptimizerConfig, TokenStore, TrainConfig, UserError, evaluate, train
from logpast.cli import VERBS
from logpast.models import CompressiveConfig
from logpast.util.validation import validate_value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig("x", streams="documents"), r"data\.streams cannot be 'documents'; did you mean document\?"),
        (lambda: DataConfig("x", validation_tokens="9"), r"validation_tokens cannot be '9'; it is no text, but int"),
        (lambda: OptimizerConfig(learning_rate="1e-3"), r"optimizer\.learning_rate cannot be '1e-3'"),
        (lambda: TrainConfig(Path("x"), DataConfig("x"), steps=1, precision="bf16"), r"cannot be 'bf16'; known: 32"),
        (lambda: TrainConfig(Path("x"), DataConfig("x"), steps="5"), r"steps cannot be '5'; it is no text, but int"),
        (lambda: TrainConfig(Path("x"), DataConfig("x"), model="recent", steps=1), r"no text, but ModelConfig"),
        (lambda: TrainConfig(Path("x"), DataConfig("x"), steps=1.5), r"steps cannot be 1\.5; .* whole number"),
        (lambda: LogMemoryConfig(window=float("inf")), r"model\.window cannot be inf; it must be a whole number"),
        (lambda: logpast.generate("x", tokens=2.5), r"tokens cannot be 2\.5; it must be a whole number"),
        (lambda: LogMemoryConfig(window="16"), r"model\.window cannot be '16'"),
        (lambda: LogMemoryConfig(kernel="isit"), r"model\.kernel cannot be 'isit'; did you mean isith\?"),
        (lambda: CompressiveConfig(compression="median"), r"model\.compression cannot be 'median'"),
        (lambda: evaluate("x", "y", accounting="All"), r"accounting cannot be 'All'; did you mean all\?"),
        (lambda: evaluate("x", "y", streams="documents"), r"streams cannot be 'documents'"),
        (lambda: evaluate("x", "y", precision="float16"), r"precision cannot be 'float16'; did you mean bfloat16\?"),
        (lambda: evaluate("x", "y", streams=2), r"streams cannot be 2; known: corpus, document"),
        (lambda: evaluate("x", "y", batch_size="4"), r"batch_size cannot be '4'; it is no text, but int"),
        (lambda: logpast.analyze("x", "y", precision="half"), r"precision cannot be 'half'; known: float32"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_told(make: Any, message: str) -> None:
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
        (3, Path, 3),
        (3.0, int | None, 3),
        (np.int64(3), int, 3),
        (3.5, int | float, 3.5),
        (True, bool, True),
        (True, int, True),
        (np.float64(0.5), float, 0.5),
        ((Path("a"),), list[str], ["a"]),
        (Path("a"), str | Path, Path("a")),
        (Path("a"), str, "a"),
        (Path("a"), list[str], ["a"]),
        ([Path("a"), "b"], list[str], ["a", "b"]),
    ],
)
def test_values_as_their_types_have_them(value: Any, kind: Any, expected: Any) -> None:
    found = validate_value("name", value, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("name", [name for name in VERBS if name != "train"])
def test_every_verb_settles_its_arguments(name: str) -> None:
    """And of `train` the config does."""
    assert hasattr(getattr(import_module(VERBS[name].module), VERBS[name].function), "__wrapped__")


def test_paths_may_be_texts(tmp_path: Path, store: TokenStore, train_config: TrainConfig) -> None:
    config = replace(train_config, run=str(tmp_path / "run"), steps=2)
    assert config.run == tmp_path / "run"
    train(config)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("And")
    assert logpast.generate(str(tmp_path / "run"), prompt_file=str(prompt), tokens=2).startswith("And")
    assert logpast.draw_filters(str(tmp_path / "f.png"), 10.0) == tmp_path / "f.png"
    assert evaluate(str(tmp_path / "run"), str(store.path), save_nats=str(tmp_path / "n.npy"))["tokens"] == len(store)
    with pytest.raises(UserError, match=r"n\.txt is no name for saved nats: give --save_nats one that ends in \.npy"):
        evaluate(tmp_path / "run", str(store.path), save_nats=tmp_path / "n.txt")


def test_names_are_listed_before_they_are_loaded() -> None:
    assert {"FilterBank", "LogMemory", "evaluate", "sweep", "compare"} <= set(dir(logpast))


def test_nothing_is_a_value_only_where_it_says_something() -> None:
    assert validate_value("steps", None, int | None) is None
    assert validate_value("anything", None, Any) is None
    with pytest.raises(UserError, match="batch_size is empty; give it a value, or leave it out"):
        validate_value("batch_size", None, int)
