"""Models by name."""

from dataclasses import replace

import pytest

from logpast.models import SYSTEMS, ModelConfig, RecentConfig, build, config_from_dict, config_to_dict
from logpast.util.errors import UserError
from models.helpers import CONTROL, MEMORY


@pytest.mark.parametrize("config", [MEMORY, CONTROL], ids=["log_memory", "recent"])
def test_a_config_survives_a_round_trip(config: ModelConfig) -> None:
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_config_knows_the_name_of_its_model(name: str) -> None:
    config = SYSTEMS[name].Config()
    assert config_to_dict(config)["system"] == name
    assert config_from_dict({"system": name}) == config


def test_a_config_without_a_name_is_a_log_memory() -> None:
    assert config_to_dict(config_from_dict({"slots": 9}))["system"] == "log_memory"


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match=r"lstm.*log_memory, recent"):
        config_from_dict({"system": "lstm"})
    with pytest.raises(UserError, match=r"model\.depth .*upgrade logpast"):  # of a newer version
        config_from_dict({"system": "recent", "depth": 3})


def test_the_vocabulary_is_the_tokenizers_size_rounded_up() -> None:
    config = RecentConfig(slots=0, window=4, layers=1, heads=1, width=8)
    assert build(config, tokens=65).config.vocabulary == 128
    with pytest.raises(UserError, match=r"model\.vocabulary \(31\)"):
        build(CONTROL, tokens=32)


def test_settings_of_recall_are_stored_only_where_it_is_on() -> None:
    assert not any(name.startswith("recall") for name in config_to_dict(CONTROL))
    recalling = replace(CONTROL, recall=50, recall_orders=2)
    assert config_from_dict(config_to_dict(recalling)) == recalling
