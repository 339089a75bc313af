"""What is read from the source equals what Python itself says of the imported functions and classes."""

import inspect
from dataclasses import MISSING, fields
from importlib import import_module

import pytest

from logpast.cli import COMMANDS
from logpast.models import SYSTEMS
from logpast.training.config import TrainConfig
from logpast.util.source import class_fields, function_parameters, system_configs


@pytest.mark.parametrize("name", COMMANDS)
def test_parameters_of_commands(name: str) -> None:
    module, function = COMMANDS[name][:2]
    description, found = function_parameters(module, function)
    real = getattr(import_module(module), function)
    assert description.splitlines()[0] == real.__doc__.splitlines()[0]
    parameters = inspect.signature(real).parameters
    assert list(found) == list(parameters)
    for each in parameters.values():
        assert (found[each.name].default is None) == (each.default is each.empty)
        assert found[each.name].help or name == "train"


@pytest.mark.parametrize("system", SYSTEMS)
def test_fields_of_the_configs_of_systems(system: str) -> None:
    found = class_fields(*system_configs()[system])
    real = fields(SYSTEMS[system].Config)
    assert list(found) == [each.name for each in real]
    assert all(each.help for each in found.values())


def test_fields_with_their_types_defaults_and_help() -> None:
    found = class_fields("logpast.training.config", "TrainConfig")
    real = {each.name: each for each in fields(TrainConfig)}
    assert list(found) == list(real)
    assert [name for name, each in found.items() if each.default is None] == [
        name for name, each in real.items() if each.default is MISSING and each.default_factory is MISSING
    ]
    assert found["steps"].kind == "int | None"
    assert found["log_every"] == ("int", "10", "steps between lines of the log")
    streams = class_fields("logpast.training.config", "DataConfig")["streams"]
    assert streams.kind == "Literal['corpus', 'document']"
