"""Our models as Hugging Face models: one wrapper for all systems, and the cache that `generate` needs.

Position j of a text is position j of a stream (`data/batching.py`): a text starts with end-of-text, which the exported
tokenizer adds, and windows start at multiples of m. So a text of any length gets the predictions that `logpast eval`
scores. With recall, logits are the logarithms of the mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from logpast.models.base import LanguageModel, Recurrent
from logpast.models.baselines.time_local import Timeline
from logpast.models.decoder import KeyValueCache
from logpast.models.hf.configuration import LogPastConfig
from logpast.models.registry import SYSTEMS, build
from logpast.recall import Recall, RecallForm
from logpast.recall.index import occurrences
from logpast.recall.matching import compare
from logpast.util.errors import UserError
from logpast.util.precision import accumulation_dtype

WINDOWS = 64  # computed at once when there is no gradient, which bounds the memory needed


@dataclass
class Texts:
    """Rows of equal length, and what is kept of them to continue."""

    rows: list[int]
    """which rows of the batch they are"""
    ids: Tensor
    """(N, T) all ids so far; -1 is padding at the end, which only texts that are not continued have"""
    followers: Tensor | None = None
    """(N, T, orders) of a model with recall at its input"""
    kept: Any = None
    """keys and values of the window that the texts end in (a KeyValueCache); of a recurrent model, its state after all
    full segments"""

    def select(self, rows: list[int], index: list[int]) -> Texts:
        """Copies of the texts with these numbers, as other rows of the batch."""
        kept: Any = None
        if isinstance(self.kept, KeyValueCache):
            kept = KeyValueCache()
            kept.layers = {layer: (key[index], value[index]) for layer, (key, value) in self.kept.layers.items()}
        elif self.kept is not None:
            kept = {name: value[index] for name, value in self.kept.items()}
        followers = None if self.followers is None else self.followers[index]
        return Texts(rows, self.ids[index], followers, kept)


class LogPastCache(Cache):
    """What `generate` keeps of the texts that it continues, so that a new token costs one step.

    Texts of equal length are computed together. With padding there are several lengths, because the windows of each
    text start at its own first token.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.texts: list[Texts] = []
        self.seen = 0  # columns of input_ids, padding included

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # none

    @property
    def batch_size(self) -> int:
        return sum(len(each.rows) for each in self.texts) or -1

    def reset(self) -> None:
        self.texts, self.seen = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        chosen, texts = beam_idx.tolist(), []
        for each in self.texts:
            index = {row: number for number, row in enumerate(each.rows)}
            rows = [row for row, before in enumerate(chosen) if before in index]
            if rows:
                texts.append(each.select(rows, [index[chosen[row]] for row in rows]))
        self.texts = texts

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> LogPastCache:
        """Without copying the model, whose modules are the keys of a `KeyValueCache`."""
        copy = LogPastCache()
        copy.texts = [each.select(each.rows, list(range(len(each.rows)))) for each in self.texts]
        copy.seen = self.seen
        return copy


class LogPastForCausalLM(PreTrainedModel, GenerationMixin):
    """A model of `logpast.models` (`core`) with the interface of transformers.

        model = LogPastForCausalLM(LogPastConfig(model=LogMemoryConfig(slots=33, vocabulary=4096)))

    Texts may be longer than the window: they are cut into windows with their history, as `logpast eval` does.
    """

    config_class = LogPastConfig
    config: LogPastConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _is_stateful = True
    # the memory and the head use the embedding table itself, so a model must be on one device
    _no_split_modules = sorted(system.__name__ for system in SYSTEMS.values())

    def __init__(self, config: LogPastConfig) -> None:
        super().__init__(config)
        self.core: LanguageModel = build(config.model_config)
        if not any(parameter.is_meta for parameter in self.parameters()):
            for parameter in self.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # by the core itself
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.core.table

    def set_input_embeddings(self, value: nn.Module) -> None:
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
            fresh = dict(Recall(module.weight.shape[1], module.form).named_parameters())
            for name, parameter in module.named_parameters():
                init.copy_(parameter, fresh[name].to(parameter))
        elif module is self.core:
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, std=0.02)

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
        groups = _groups(ids, count.tolist(), cache)
        for texts, stop in groups:
            row = torch.tensor(texts.rows, device=device)
            first = min(int(skipped[row].min()), stop - 1)
            logits, more = self._extend(texts, ids[row, :stop], stop - first, cache is not None, separate)
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

    def _extend(
        self, texts: Texts, new: Tensor, keep: int, cached: bool, separate: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Append ids (N, T) to texts. Returns what `_predict` does, of the last `keep` positions."""
        core, before, form = self.core, texts.ids.shape[1], self.core.config.recall_form
        texts.ids = torch.cat([texts.ids, new], dim=1)
        known = texts.ids  # to recall
        if self.config.bos_token_id is not None:
            start = texts.ids[:, :1]
            known = torch.cat([start.masked_fill(start == self.config.bos_token_id, -1), texts.ids[:, 1:]], dim=1)
        if form and form.input:
            found = _followers(known, before, form)
            texts.followers = found if texts.followers is None else torch.cat([texts.followers, found], dim=1)
        if isinstance(core, Recurrent):
            hidden, extra = self._read_segments(core, texts, before, keep)
        else:
            hidden, extra = _read_windows(core, texts, before, keep, cached), torch.zeros((), device=new.device)
        logits = core.logits(hidden)
        if not form:
            return [logits], extra
        own = logits.to(accumulation_dtype(logits.dtype)).log_softmax(-1)
        mix = core.recall.log_probs
        if self.gradient_checkpointing and self.training:
            mix = partial(self._gradient_checkpointing_func, mix)
        return ([mix(hidden, own.detach(), known), own] if separate else [mix(hidden, own, known)]), extra

    def _read_segments(self, core: Recurrent, texts: Texts, before: int, keep: int) -> tuple[Tensor, Tensor]:
        """Hidden states (N, keep, d) of the last positions of a recurrent model, and its extra loss per training step.

        In training, gradients flow across `segments` segments, as in `logpast train`.
        """
        length, read, parts = texts.ids.shape[1], before // core.window * core.window, []
        state = core.start(len(texts.ids)) if texts.kept is None else texts.kept
        extra, number = torch.zeros(len(texts.ids), device=texts.ids.device), 0
        while read < length:
            part = slice(read, read + core.window)
            followers = () if texts.followers is None else (texts.followers[:, part],)
            hidden, after, more = core.segment(texts.ids[:, part], state, *followers)
            read, number, extra = read + hidden.shape[1], number + 1, extra + more
            if read > length - keep:
                parts.append(hidden)
            if hidden.shape[1] == core.window:
                state = after
                if number % core.config.segments == 0:
                    state = {name: value.detach() for name, value in state.items()}
        texts.kept = state
        return torch.cat(parts, dim=1)[:, -keep:], extra.mean() * core.config.segments / number


def _read_windows(core: Any, texts: Texts, before: int, keep: int, cached: bool) -> Tensor:
    """Hidden states (N, keep, d) of the last positions, of a model that takes a window and the history before it."""
    length, window = texts.ids.shape[1], core.window
    if cached and before == length - 1 and before % window and texts.kept is not None:
        followers = None if texts.followers is None else texts.followers[:, before:]
        return core.hidden(core.embed(texts.ids[:, before:], followers), texts.kept, start=core.slots + before % window)
    first = (length - keep) // window * window
    last = (length - 1) // window * window if cached else length  # the window that is cached is computed on its own
    parts, size = [], window * (length if torch.is_grad_enabled() else max(1, WINDOWS // len(texts.ids)))
    for start in range(first, last, size):
        parts.append(_hidden_of_windows(core, texts, start, min(start + size, last)))
    if cached:
        texts.kept = KeyValueCache()
        parts.append(_hidden_of_windows(core, texts, last, length, texts.kept))
    return torch.cat(parts, dim=1)[:, -keep:]


def _hidden_of_windows(core: Any, texts: Texts, start: int, stop: int, cache: KeyValueCache | None = None) -> Tensor:
    """Hidden states (N, stop − start, d); `start` is the start of a window."""
    rows, window, history = len(texts.ids), min(core.window, stop - start), core.history
    number = -(-(stop - start) // window)
    padding = number * window - (stop - start)
    ids = F.pad(texts.ids[:, max(0, start - history) : stop], (max(0, history - start), padding), value=-1)
    pasts = [ids[:, i * window : i * window + history] for i in range(number)]
    slots = core.make_slots(torch.stack(pasts, dim=1).flatten(0, 1))
    followers = None
    if texts.followers is not None:
        followers = F.pad(texts.followers[:, start:stop], (0, 0, 0, padding), value=-1).reshape(
            rows * number, window, -1
        )
    tokens = core.embed(ids[:, history:].reshape(rows * number, window), followers)
    hidden = core.hidden(torch.cat([slots, tokens], dim=1), cache, skip=core.slots)
    return hidden.reshape(rows, number * window, -1)[:, : stop - start]


def _groups(ids: Tensor, count: list[int], cache: LogPastCache | None) -> list[tuple[Texts, int]]:
    """The texts to append ids (B, T) to, `count` in each row, and how many: with a cache, texts of equal length."""
    texts = Texts(list(range(len(ids))), ids[:, :0])
    if cache is None:
        return [(texts, max(1, *count))]
    groups = []
    for each in cache.texts or [texts]:
        for size in sorted({count[row] for row in each.rows}):
            index = [number for number, row in enumerate(each.rows) if count[row] == size]
            some = each if len(index) == len(each.rows) else each.select([each.rows[number] for number in index], index)
            groups.append((some, size))
    cache.texts = [some for some, _ in groups]
    return [(some, size) for some, size in groups if size]


def _followers(ids: Tensor, known: int, form: RecallForm) -> Tensor:
    """(N, T − known, orders): what followed the latest matches of the ids (N, T) after the first `known`."""
    rows, length = ids.shape
    if known == length - 1:
        candidates, matched = compare(ids, 1, form.orders, [form.reach])  # with one lag bin, components are lengths
        order = torch.arange(1, form.orders + 1, device=ids.device).unsqueeze(1)
        place = torch.arange(candidates.shape[1], device=ids.device)
        last = torch.where((order <= matched) & (matched <= form.orders), place, -1).amax(-1)  # (N, orders)
        return torch.where(last >= 0, candidates.gather(1, last.clamp(min=0)), -1).unsqueeze(1)
    stream = torch.arange(rows, device=ids.device).repeat_interleave(length)
    found = occurrences(ids.flatten(), stream, form.orders, [form.reach]).followers
    return found.view(rows, length, form.orders)[:, known:]
