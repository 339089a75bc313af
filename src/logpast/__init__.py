"""logpast: log-compressed memory for transformers.

    from logpast import FilterBank, LogMemory, Recall, RecallForm         # the memories alone, for your own model
    from logpast import TrainConfig, prepare, train, evaluate, generate   # the commands as functions

Names are imported on first use, so that `import logpast` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from logpast.util.errors import UserError
from logpast.version import __version__

if TYPE_CHECKING:
    from logpast.analysis.analyze import analyze
    from logpast.comparison.compare import compare
    from logpast.data.prepare import open_tokens, prepare
    from logpast.data.store import TokenStore
    from logpast.evaluation.evaluate import evaluate
    from logpast.evaluation.scoring import score
    from logpast.filters import FilterBank
    from logpast.generation import generate
    from logpast.memory import LogMemory
    from logpast.memory.sketch import Sketch
    from logpast.models import LogMemoryConfig, RecentConfig, Stream, build
    from logpast.models.hf import LogPastConfig, LogPastForCausalLM
    from logpast.models.hf.attach import Attached, attach_memory, detach_memory, load_attached
    from logpast.models.hf.export import export
    from logpast.paper.filters_figure import draw_filters
    from logpast.recall import Recall, RecallForm
    from logpast.sweeps.sweep import sweep
    from logpast.training.attach import attach
    from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
    from logpast.training.loop import train

_MODULES = {
    "logpast.data.prepare": ("open_tokens", "prepare"),
    "logpast.data.store": ("TokenStore",),
    "logpast.analysis.analyze": ("analyze",),
    "logpast.comparison.compare": ("compare",),
    "logpast.evaluation.evaluate": ("evaluate",),
    "logpast.paper.filters_figure": ("draw_filters",),
    "logpast.sweeps.sweep": ("sweep",),
    "logpast.filters": ("FilterBank",),
    "logpast.generation": ("generate",),
    "logpast.memory": ("LogMemory",),
    "logpast.memory.sketch": ("Sketch",),
    "logpast.models": ("LogMemoryConfig", "RecentConfig", "Stream", "build"),
    "logpast.models.hf.attach": ("Attached", "attach_memory", "detach_memory", "load_attached"),
    "logpast.models.hf": ("LogPastConfig", "LogPastForCausalLM"),
    "logpast.models.hf.export": ("export",),
    "logpast.recall": ("Recall", "RecallForm"),
    "logpast.evaluation.scoring": ("score",),
    "logpast.training.attach": ("attach",),
    "logpast.training.config": ("DataConfig", "OptimizerConfig", "TrainConfig"),
    "logpast.training.loop": ("train",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Attached",
    "DataConfig",
    "FilterBank",
    "LogMemory",
    "LogMemoryConfig",
    "LogPastConfig",
    "LogPastForCausalLM",
    "OptimizerConfig",
    "Recall",
    "RecallForm",
    "RecentConfig",
    "Sketch",
    "Stream",
    "TokenStore",
    "TrainConfig",
    "UserError",
    "__version__",
    "analyze",
    "attach",
    "attach_memory",
    "build",
    "compare",
    "detach_memory",
    "draw_filters",
    "evaluate",
    "export",
    "generate",
    "load_attached",
    "open_tokens",
    "prepare",
    "score",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'logpast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
