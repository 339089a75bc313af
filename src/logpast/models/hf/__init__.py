"""Our models as Hugging Face models. Importing this package registers them with transformers' Auto classes.

This is the only package that imports transformers, which is an optional dependency.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    from logpast.util.errors import UserError

    raise UserError(f"Hugging Face models need another package ({error}); pip install 'logpast[hf]'") from error

from logpast.models.hf.configuration import LogPastConfig
from logpast.models.hf.modeling import LogPastForCausalLM

AutoConfig.register(LogPastConfig.model_type, LogPastConfig, exist_ok=True)
AutoModelForCausalLM.register(LogPastConfig, LogPastForCausalLM, exist_ok=True)

__all__ = ["LogPastConfig", "LogPastForCausalLM"]
