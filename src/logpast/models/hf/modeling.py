"""Our models, and pretrained ones with a memory, as Hugging Face models: one wrapper, and the cache of `generate`.

Position j of a text is position j of a stream (`data/batching.py`): a text starts with end-of-text, which the exported
tokenizer adds, and windows start at multiples of m. So a text of any length gets the predictions that `logpast eval`
scores. With recall, logits are the logarithms of the mixture. Tokens one by one are computed by a `Stream`, many
positions at once here.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from logpast.models.base import LanguageModel, Recurrent, State
from logpast.models.baselines.time_local import Timeline
from logpast.models.hf.attach import Attached, AttachedConfig
from logpast.models.hf.configuration import LogPastConfig
from logpast.models.registry import SYSTEMS, build
from logpast.models.stream import Stream
from logpast.recall import Recall
from logpast.recall.index import occurrences
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype

WINDOWS = 64  # computed at once when there is no gradient, which bounds the memory needed


class LogPastCache(Cache):
    """What `generate` keeps of the texts that it continues: streams, so that a new token costs one step.

    Texts of equal length are one stream. With padding there are several lengths, because the windows of each text start
    at its own first token.

    Attributes:
        streams: rows of the batch, and their texts; None before their first token.
        seen: columns of input_ids, padding included.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.streams: list[tuple[list[int], Stream | None]] = []
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none

    @property
    def batch_size(self) -> int:
        return sum(len(rows) for rows, _ in self.streams) or -1

    def reset(self) -> None:
        self.streams, self.seen = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        chosen, streams = beam_idx.tolist(), []
        for before, stream in self.streams:
            rows = [row for row, source in enumerate(chosen) if source in before]
            if rows:
                streams.append((rows, stream and stream.select([before.index(chosen[row]) for row in rows])))
        self.streams = streams

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> LogPastCache:
        """Without copying the model, which a stream refers to."""
        copy = LogPastCache()
        copy.streams, copy.seen = self.streams, self.seen
        copy.reorder_cache(torch.arange(max(0, self.batch_size)))
        return copy

    def split(self, count: list[int]) -> None:
        """Let rows that get different numbers of new tokens be different streams."""
        streams = []
        for before, stream in self.streams or [(list(range(len(count))), None)]:
            for size in sorted({count[row] for row in before}):
                rows = [row for row in before if count[row] == size]
                some = stream if rows == before else stream and stream.select([before.index(row) for row in rows])
                streams.append((rows, some))
        self.streams = streams


class LogPastForCausalLM(PreTrainedModel, GenerationMixin):
    """A model of `logpast.models` (`core`) with the interface of transformers.

        model = LogPastForCausalLM(LogPastConfig(model=LogMemoryConfig(slots=33, vocabulary=4096)))
        model = LogPastForCausalLM.from_core(attach_memory(AutoModelForCausalLM.from_pretrained("path/to/model")))

    Texts may be longer than the window: they are cut into windows with their history, as `logpast eval` does.
    """

    config_class = LogPastConfig
    config: LogPastConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _is_stateful = True
    # the memory and the head use the embedding table itself, so a model must be on one device
    _no_split_modules = sorted(system.__name__ for system in (*SYSTEMS.values(), Attached))

    def __init__(self, config: LogPastConfig, core: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.core = _build(config) if core is None else core
        if not any(parameter.is_meta for parameter in self.parameters()):
            for parameter in self.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # by the core itself
        self.post_init()
        self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=True)  # a pretrained model's

    @classmethod
    def from_core(cls, core: LanguageModel, **ids: Any) -> LogPastForCausalLM:
        """The Hugging Face model of one of ours, or of a pretrained one with a memory. Nothing is copied.

        Args:
            core: the model.
            ids: bos_token_id, eos_token_id, pad_token_id; by default those of the pretrained model.
        """
        if not isinstance(core, Attached):
            return cls(LogPastConfig(model=core.config, **ids), core)
        if core.causal_lm is not core.model:
            raise UserError("merge the adapters first: attached.model = attached.model.merge_and_unload()")
        text = core.model.config.get_text_config()
        own: dict[str, Any] = {name: getattr(text, name, None) for name in ("eos_token_id", "pad_token_id")}
        own |= {"bos_token_id": core.config.first_token, **ids}
        model = cls(LogPastConfig(model=core.config, base=core.model.config.to_dict(), **own), core)
        model.generation_config = core.model.generation_config
        return model

    def stream(self, batch: int = 1) -> Stream:
        """A `Stream`: texts of any length, for this model to continue."""
        return self.core.stream(self.config.bos_token_id, batch)

    def get_input_embeddings(self) -> nn.Module:
        return self.core.table

    def set_input_embeddings(self, value: nn.Module) -> None:
        if isinstance(self.core, Attached):
            self.core.model.set_input_embeddings(value)
        else:
            self.core.table = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> None:
        """The head is the embedding table."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass makes a LogPastCache

    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of what a loaded checkpoint does not have."""
        super()._init_weights(module)
        if isinstance(module, Timeline):
            module.build_constants()
        elif isinstance(module, Recall):
            fresh = dict(Recall(module.weight.shape[1], module.form, pretrained=module.pretrained).named_parameters())
            for name, parameter in module.named_parameters():
                init.copy_(parameter, fresh[name].to(parameter))
        elif module is self.core:
            for parameter in module.parameters(recurse=False):  # of a memory, the scale of its slots
                init.normal_(parameter, std=0 if isinstance(module, Attached) else 0.02)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: LogPastCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) of the token after each token; with labels, also the mean loss in nats.

        Args:
            input_ids: (B, T) ids; with a cache, those that follow what it has seen. T may be larger than the window.
            attention_mask: (B, …, T), 0 for padding, which may stand before or after the tokens.
            labels: (B, T), usually the input_ids; -100, padding and the first token of a text are not scored.
            past_key_values: what a forward pass on the tokens before returned.
            use_cache: whether to return that; by default as in the config, but not in training or with labels.
            logits_to_keep: only the logits of this many last positions, or of these positions; 0: of all.
            kwargs: `num_items_in_batch` and other arguments of the loss function.
        """
        if input_ids is None:
            raise UserError("the model needs input_ids: its memory is made from ids, not from inputs_embeds")
        if past_key_values is not None and not isinstance(past_key_values, LogPastCache):
            raise UserError(f"past_key_values is a {type(past_key_values).__name__}; the model returns a LogPastCache")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        cache = past_key_values if past_key_values is not None else LogPastCache() if use_cache else None
        length = input_ids.shape[1]
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
        if not mask.any():
            raise UserError("input_ids has no tokens; start an empty text with bos_token_id")
        some = isinstance(logits_to_keep, int) and 0 < logits_to_keep < length and labels is None
        separate = labels is not None and torch.is_grad_enabled() and self.core.config.recall > 0
        (logits, *own), extra = self._predict(input_ids, mask, int(logits_to_keep) if some else length, cache, separate)
        loss = None
        if labels is not None:
            targets = labels.masked_fill(~(mask & F.pad(mask, (1, -1))), -100)
            loss, *own_loss = (
                self.loss_function(each, targets, vocab_size=each.shape[-1], **kwargs) for each in (logits, *own)
            )
            for each in own_loss:  # only its gradient: see LanguageModel.nats
                loss = loss + (each - each.detach())
            loss = loss + extra if self.training else loss
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        return CausalLMOutputWithPast(loss=loss, logits=cast(torch.FloatTensor, logits), past_key_values=cache)

    def _predict(
        self, input_ids: Tensor, mask: Tensor, keep: int, cache: LogPastCache | None, separate: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Logits of the last `keep` columns of input_ids, 0 at padding, and the extra loss of a recurrent model.

        Each row is computed without its padding, as a text that starts at its first token. With `separate`, the logits
        before recall are returned, too.
        """
        (rows, length), device = input_ids.shape, input_ids.device
        count, order = mask.sum(1), mask.logical_not().sort(dim=1, stable=True).indices  # tokens first, then padding
        position = torch.arange(length, device=device)
        ids = input_ids.gather(1, order).masked_fill(position >= count.unsqueeze(1), -1)
        skipped = mask[:, : length - keep].sum(1)  # tokens of each row whose logits are not wanted
        found, extra = list[Tensor](), torch.zeros((), device=device)
        groups: list[tuple[list[int], Stream | None]] = [(list(range(rows)), None)]
        if cache is not None:
            cache.split(count.tolist())
            groups = cache.streams
        for number, (members, stream) in enumerate(groups):
            row = torch.tensor(members, device=device)
            if not (stop := int(count[row].max())):
                continue
            first = min(int(skipped[row].min()), stop - 1)
            logits, more, stream = self._continue(stream, ids[row, :stop], stop - first, cache is not None, separate)
            groups[number] = members, stream
            extra = extra + more * len(row) / rows
            if len(groups) == 1 and mask.all():
                found = logits
                break
            column = order[row, first:stop] - (length - keep)
            real = (position[first:stop] < count[row].unsqueeze(1)) & (column >= 0)
            place = row.unsqueeze(1).expand_as(column)[real], column[real]
            found = found or [each.new_zeros(rows, keep, each.shape[2]) for each in logits]
            found = [all_.index_put(place, each[real]) for all_, each in zip(found, logits, strict=True)]
        if cache is not None:
            cache.seen += length
        return found, extra

    def _continue(
        self, stream: Stream | None, new: Tensor, keep: int, cached: bool, separate: bool
    ) -> tuple[list[Tensor], Tensor, Stream | None]:
        """As `_predict`, of the last `keep` of ids (N, T) that continue a stream; and the stream, if cached."""
        extra = torch.zeros((), device=new.device)
        if cached and keep == 1 and not torch.is_grad_enabled():
            stream = self._append(stream, new)
            return [stream.logits().unsqueeze(1)], extra, stream
        core, form = self.core, self.core.config.recall_form
        ids, start, known = self._with_past(stream, new, keep)
        followers = None
        if form and form.input:
            rows = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
            index = occurrences(known.flatten(), rows, form.orders, [form.reach], form.orders)
            followers = index.followers.view(*ids.shape, -1)
        if isinstance(core, Recurrent):
            state = core.start(len(ids)) if stream is None else stream.carried
            hidden, extra = _read_segments(core, ids, followers, start, state)
        else:
            hidden = _read_windows(core, ids, followers, start)
        if cached:
            stream = self._append(stream, new)
        hidden = hidden[:, -keep:]
        logits = core.logits(hidden)
        if not form:
            return [logits], extra, stream
        own = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
        mix = core.recall.log_probs
        if self.gradient_checkpointing and self.training:
            mix = partial(self._gradient_checkpointing_func, mix)
        found = [mix(hidden, own.detach(), known), own] if separate else [mix(hidden, own, known)]
        return found, extra, stream

    def _append(self, stream: Stream | None, new: Tensor) -> Stream:
        if stream is None:
            stream, new = Stream(self.core, new[:, 0].tolist(), len(new)), new[:, 1:]
        stream.append(new)
        return stream

    def _with_past(self, stream: Stream | None, new: Tensor, keep: int) -> tuple[Tensor, int, Tensor]:
        """Ids of the past that the last `keep` of ids (N, T) need, and these; where to read from; the same to recall.

        That is the start of a window, or where the state of a recurrent model ends. A text's first id is not recalled.
        """
        before, begin, window = (0 if stream is None else stream.length), 0, self.core.window
        start = (before + new.shape[1] - keep) // window * window
        if isinstance(self.core, Recurrent):
            start = 0 if stream is None else stream.carried_tokens
        if stream is not None:
            begin = min(before, max(0, start - stream.past))
            new = torch.cat([stream.tokens(begin, before).to(new), new], dim=1)
        known = new if begin else torch.cat([torch.full_like(new[:, :1], -1), new[:, 1:]], dim=1)
        return new, start - begin, known


def _build(config: LogPastConfig) -> LanguageModel:
    sizes = config.model_config
    if not isinstance(sizes, AttachedConfig):
        return build(sizes)
    base = AutoConfig.for_model(**config.base)
    return Attached(AutoModelForCausalLM.from_config(base, dtype=torch.get_default_dtype()), sizes)


def _read_segments(
    core: Recurrent, ids: Tensor, followers: Tensor | None, start: int, state: State
) -> tuple[Tensor, Tensor]:
    """Hidden states (N, T − start, d) of ids (N, T) of a recurrent model, and its extra loss per training step.

    In training, gradients flow across `segments` segments, as in `logpast train`.
    """
    parts, extra = list[Tensor](), torch.zeros(len(ids), device=ids.device)
    for first in range(start, ids.shape[1], core.window):
        part = slice(first, first + core.window)
        hidden, state, more = core.segment(ids[:, part], state, *([] if followers is None else [followers[:, part]]))
        parts.append(hidden)
        extra = extra + more
        if len(parts) % core.config.segments == 0:
            state = {name: value.detach() for name, value in state.items()}
    return torch.cat(parts, dim=1), extra.mean() * core.config.segments / len(parts)


def _read_windows(core: Any, ids: Tensor, followers: Tensor | None, start: int) -> Tensor:
    """Hidden states (N, T − start, d) of ids (N, T) of a model that takes a window and the history before it."""
    length, size = ids.shape[1], core.window * max(1, WINDOWS // len(ids))
    size = length if torch.is_grad_enabled() else size
    stops = [min(first + size, length) for first in range(start, length, size)]
    return torch.cat([_hidden_of_windows(core, ids, followers, *ends) for ends in pairwise([start, *stops])], dim=1)


def _hidden_of_windows(core: Any, ids: Tensor, followers: Tensor | None, start: int, stop: int) -> Tensor:
    """Hidden states (N, stop − start, d); `start` is the start of a window."""
    rows, window, history = len(ids), min(core.window, stop - start), core.history
    number = -(-(stop - start) // window)
    padding = number * window - (stop - start)
    ids = F.pad(ids[:, max(0, start - history) : stop], (max(0, history - start), padding), value=-1)
    pasts = [ids[:, i * window : i * window + history] for i in range(number)]
    slots = core.make_slots(torch.stack(pasts, dim=1).flatten(0, 1))
    if followers is not None:
        followers = F.pad(followers[:, start:stop], (0, 0, 0, padding), value=-1).reshape(rows * number, window, -1)
    tokens = core.embed(ids[:, history:].reshape(rows * number, window), followers)
    hidden = core.hidden(torch.cat([slots, tokens], dim=1), skip=core.slots)
    return hidden.reshape(rows, number * window, -1)[:, : stop - start]
