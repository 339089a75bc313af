"""The config of our models in Hugging Face's form."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from logpast.models.base import ModelConfig
from logpast.models.hf.attach import AttachedConfig
from logpast.models.log_memory import LogMemoryConfig
from logpast.models.registry import config_from_dict, config_to_dict
from logpast.util.validation import from_saved


class LogPastConfig(PreTrainedConfig):
    """A model's settings (`model`, as in a recipe) and what transformers needs to know besides.

        LogPastConfig(model=LogMemoryConfig(slots=33, window=128, vocabulary=4096), bos_token_id=0)

    Args:
        model: a config such as `LogMemoryConfig`, or the dict of a recipe: `system`, `window`, `layers` …; by default
            the paper's model with GPT-2's vocabulary.
        base: of a pretrained model with a memory, the config of that model.
        bos_token_id: end-of-text, with which every text starts; it is no token to recall.
        eos_token_id, pad_token_id: usually the same id.
        use_cache: whether a forward pass that is no training returns what the next tokens need.
    """

    model_type = "logpast"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  as transformers declares it

    model: Any = None
    base: Any = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        given = LogMemoryConfig(vocabulary=50_304) if self.model is None else self.model
        self.model = config_to_dict(given if isinstance(given, ModelConfig) else _model_config(given))
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            kwargs.pop(name, None)  # they are in `model`
        super().__post_init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """The config of the model itself."""
        return _model_config(self.model)

    @property
    def vocab_size(self) -> int | None:
        vocabulary: int | None = self.model["vocabulary"]
        return vocabulary

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.model["vocabulary"] = size

    @property
    def hidden_size(self) -> int:
        return int(self.model["width"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.model["layers"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.model["heads"])


def _model_config(values: dict[str, Any]) -> ModelConfig:
    if values.get("system") != "attached":
        return config_from_dict(values)
    return from_saved(AttachedConfig, {name: value for name, value in values.items() if name != "system"}, "model.")
