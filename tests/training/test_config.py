"""The settings of a run: what is refused, and what a resumed run must share."""

import json
from dataclasses import replace

import pytest

from logpast.training.config import (
    FREE_TO_CHANGE,
    OPTIONAL,
    DataConfig,
    OptimizerConfig,
    TrainConfig,
    recorded_settings,
    training_settings,
)
from logpast.util.errors import UserError


def test_config_survives_json(train_config: TrainConfig) -> None:
    assert TrainConfig.from_dict(json.loads(json.dumps(train_config.to_dict()))) == train_config


def test_settings_of_a_newer_version_are_named(train_config: TrainConfig) -> None:
    for section in ("data", "optimizer"):
        values = train_config.to_dict()
        values[section]["new"] = 1
        with pytest.raises(UserError, match=rf"{section}\.new .*upgrade logpast"):
            TrainConfig.from_dict(values)
    with pytest.raises(UserError, match=r"new .*upgrade logpast"):
        TrainConfig.from_dict(train_config.to_dict() | {"new": 1})


def test_total_steps_from_epochs(train_config: TrainConfig) -> None:
    assert replace(train_config, steps=None, epochs=2.5).total_steps(160) == 25
    with pytest.raises(UserError, match=r"epochs=0.01"):
        replace(train_config, steps=None, epochs=0.01).total_steps(160)


@pytest.mark.parametrize("wrong", [{"epochs": 1.0}, {"steps": None}, {"steps": 0}])
def test_either_steps_or_epochs(train_config: TrainConfig, wrong: dict[str, float | None]) -> None:
    with pytest.raises(UserError, match="steps"):
        replace(train_config, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_epochs_must_be_positive_and_finite(train_config: TrainConfig, epochs: float) -> None:
    with pytest.raises(UserError, match="epochs"):
        replace(train_config, steps=None, epochs=epochs)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"clip": -1.0},
        {"weight_decay": -0.1},
        {"warmup_steps": -5},
        {"beta1": 2.0},
        {"beta2": 1.0},
    ],
)
def test_wrong_optimizer_settings_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"optimizer.{next(iter(wrong))}"):
        OptimizerConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"devices": 3}, {"micro_batch_size": 0}, {"seed": -1}, {"keep": 0}]
)
def test_wrong_settings_are_refused_by_name(train_config: TrainConfig, wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        replace(train_config, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["train", "validation", "tokenizer"])
def test_empty_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"data.{name}"):
        DataConfig(**({"train": "a.txt"} | {name: ""}))  # type: ignore[arg-type]


def test_training_settings_leave_out_what_may_change(train_config: TrainConfig) -> None:
    settings = training_settings(replace(train_config, init_from="runs/a", freeze=["table"]))
    assert settings.keys() | FREE_TO_CHANGE == train_config.to_dict().keys()
    assert not settings.keys() & FREE_TO_CHANGE
    assert training_settings(train_config).keys() == settings.keys() - OPTIONAL  # as in recipes of earlier versions
    assert {"seed", "steps", "batch_size", "precision", "model", "data", "optimizer"} <= settings.keys()


def test_recorded_settings_include_validate_every_only_with_validation_text(train_config: TrainConfig) -> None:
    without = replace(train_config, data=replace(train_config.data, validation=None))
    assert recorded_settings(train_config)["validate_every"] == 10
    assert recorded_settings(without) == training_settings(without)
