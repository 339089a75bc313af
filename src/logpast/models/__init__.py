"""Language models with one interface (`base`), built from a config by `registry.build`."""

from logpast.models.base import LanguageModel, ModelConfig, Recurrent, RecurrentConfig, State
from logpast.models.baselines.compressive import CompressiveConfig, CompressiveTransformer
from logpast.models.baselines.recurrent_memory import (
    RecurrentMemoryConfig,
    RecurrentMemoryTransformer,
    TransformerXLRecurrentMemory,
    TransformerXLRecurrentMemoryConfig,
)
from logpast.models.baselines.time_local import TimeLocalConfig, TimeLocalTransformer
from logpast.models.baselines.transformer_xl import TransformerXL, TransformerXLConfig
from logpast.models.decoder import Transformer, TransformerConfig
from logpast.models.log_memory import LogMemoryConfig, LogMemoryTransformer
from logpast.models.recent import RecentConfig, RecentTransformer
from logpast.models.registry import SYSTEMS, build, config_from_dict, config_to_dict, known_system, system_of
from logpast.models.stream import Stream

__all__ = [
    "SYSTEMS",
    "CompressiveConfig",
    "CompressiveTransformer",
    "LanguageModel",
    "LogMemoryConfig",
    "LogMemoryTransformer",
    "ModelConfig",
    "RecentConfig",
    "RecentTransformer",
    "Recurrent",
    "RecurrentConfig",
    "RecurrentMemoryConfig",
    "RecurrentMemoryTransformer",
    "State",
    "Stream",
    "TimeLocalConfig",
    "TimeLocalTransformer",
    "Transformer",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLRecurrentMemory",
    "TransformerXLRecurrentMemoryConfig",
    "build",
    "config_from_dict",
    "config_to_dict",
    "known_system",
    "system_of",
]
