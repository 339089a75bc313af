"""The config in Hugging Face's form: what it holds, and that it is saved and loaded."""

import importlib
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from logpast.models import LogMemoryConfig, RecentConfig, TransformerXLConfig
from logpast.models.hf import LogPastConfig
from logpast.util.errors import UserError


@pytest.mark.parametrize("model", [LogMemoryConfig(slots=9, vocabulary=70, recall=5), TransformerXLConfig(memory=3)])
def test_config_is_the_same_after_saving_and_loading(model: LogMemoryConfig, tmp_path: Path) -> None:
    LogPastConfig(model=model, bos_token_id=0).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LogPastConfig)
    assert loaded.model_config == model
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, None)


def test_sizes_have_the_names_of_transformers() -> None:
    config = LogPastConfig(model={"system": "recent", "layers": 3, "heads": 2, "width": 8, "vocabulary": 64})
    assert config.model_config == RecentConfig(layers=3, heads=2, width=8, vocabulary=64)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        64,
        8,
        3,
        2,
    )
    config.vocab_size = 65
    assert config.model_config.vocabulary == 65


def test_misspelt_system_is_named() -> None:
    with pytest.raises(UserError, match="log_memry"):
        LogPastConfig(model={"system": "log_memry"})


def test_missing_extra_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("logpast.models.hf")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"pip install 'logpast\[hf\]'"):
        importlib.import_module("logpast.models.hf.export")
