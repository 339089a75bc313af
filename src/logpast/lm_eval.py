"""Our models and attached ones in EleutherAI's lm-evaluation-harness, each document with its whole past.

    python -m logpast.lm_eval run --model logpast --model_args checkpoint=runs/mine --tasks lambada_openai

This is the harness's own command, which knows the model `logpast` in addition. (lm-eval has no other way to find models
of other packages.) It needs the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.generation import decode, load, until_stop
from logpast.models.sampling import Sampling, generators
from logpast.models.stream import Stream
from logpast.util.environment import cpu_threads, thread_count
from logpast.util.errors import UserError
from logpast.util.progress import progress_bar
from logpast.util.validation import Share, validate_value

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    if str(error.name).split(".")[0] != "lm_eval":
        raise
    kind = SystemExit if __name__ == "__main__" else UserError
    raise kind("lm-eval is not installed; pip install 'logpast[eval]'") from None

BATCH = 16
MAX_TOKENS = 256  # to generate, if a task does not say


@register_model("logpast")
class LogPastLM(TemplateLM):
    """A run, a checkpoint, or what `logpast attach` saved.

    Args:
        checkpoint: the folder.
        batch_size: windows at a time; changes the speed and not the result.
        device: auto, cpu, cuda or mps.
        recall_limit: as in `logpast generate`.
        max_batch_size: not used; lm-eval passes it to every model.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        batch_size: int | str = BATCH,
        device: str | None = None,
        recall_limit: float | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        limit = None if recall_limit is None else validate_value("recall_limit", recall_limit, Share)
        self.model, self.own_tokenizer = load(Path(checkpoint), device or "auto", limit)
        self.ends = _ends(self.model)
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else BATCH

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Without end-of-text, which is added before every text when it is scored."""
        found: list[int] = self.own_tokenizer.encode(string).tolist()
        return found

    def nats(self, documents: Sequence[Sequence[int]]) -> list[Any]:
        """The loss of every token of each document, as `logpast eval --streams document` gives it."""
        known = [document for document in documents if len(document)]
        if not known:
            return [np.zeros(0) for _ in documents]
        store = TokenStore.in_memory(known, self.model.config.vocabulary or 0, self.own_tokenizer.eot)
        with (
            progress_bar("scoring", len(store)) as progress,
            cpu_threads(thread_count(self.model.parameter_count())),
        ):
            nats = score(
                self.model, store, self.model.window, self.model.history, self.batch_size, "document",
                self.model.table.weight.device,
                progress=progress.update, recall=self.model.config.recall_form,
            )  # fmt: skip
        return np.split(nats, np.cumsum([len(document) for document in documents])[:-1])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text. All tokens are scored, each with its whole past."""
        return [-float(nats.sum()) for nats in self.nats([self.tok_encode(request.args[0]) for request in requests])]

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context[context[:1] == [self.eot_token_id] :], target) for _, context, target in requests]
        found = self.nats([[*context, *target] for context, target in pairs])
        return [
            (-float(nats[len(context) :].sum()), self._is_greedy(context, target))
            for nats, (context, target) in zip(found, pairs, strict=True)
        ]

    def _is_greedy(self, context: Sequence[int], target: Sequence[int]) -> bool:
        """Whether each token of the target is the most likely one."""
        stream = Stream(self.model, self.eot_token_id)
        stream.push(context)
        for token in target:
            if int(stream.logits().argmax()) != token:
                return False
            stream.push([token])
        return True

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continue each text until one of the stop texts; greedily, unless the task says otherwise."""
        texts = []
        with (
            progress_bar("generating", len(requests)) as progress,
            cpu_threads(thread_count(self.model.parameter_count())),
        ):
            for number, request in enumerate(requests, 1):
                texts.append(self._continue(*request.args))
                progress.update(number)
        return texts

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        stream, stop = Stream(self.model, self.eot_token_id), settings.get("until") or []
        stream.push(self.tok_encode(context))
        allowed = torch.from_numpy(self.own_tokenizer.is_text)
        allowed[sorted(self.ends)] = True
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(temperature, settings.get("top_k"), settings.get("top_p"), allowed)
        steps = stream.sample(generators(0, 1), sampling)
        new = (row[0] for row in islice(steps, int(settings.get("max_gen_toks", MAX_TOKENS))))
        tokens = takewhile(lambda token: token not in self.ends, new)
        return "".join(until_stop(decode(tokens, self.own_tokenizer), [stop] if isinstance(stop, str) else stop))


def _ends(model: Any) -> set[int]:
    """The ids that end a generated text: a pretrained model's end-of-text. Ours have not learned where texts end."""
    if not hasattr(model, "causal_lm"):
        return set()
    ends = model.causal_lm.config.get_text_config().eos_token_id
    return {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}


def main() -> None:
    """lm-eval's command."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        raise SystemExit(f"lm_eval: {error}") from None


if __name__ == "__main__":
    main()
