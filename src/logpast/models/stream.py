"""`Stream`: texts that a model reads and continues, however long they get, with a state of constant size.

The probability of each token is the one that scoring would give it: windows start at multiples of m, and the memory in
front of a window is computed when the window starts. Keys and values are cached within a window. The state of a
recurrent model is kept from segment to segment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from logpast.models.base import LanguageModel, Recurrent
from logpast.models.decoder import KeyValueCache, Transformer
from logpast.recall import RecallForm
from logpast.recall.past import Past
from logpast.util.errors import UserError
from logpast.util.files import atomic_write
from logpast.util.progress import progress_bar

FEW = 64  # tokens; so many new ones are indexed one by one
LONG = 100  # segments; a recurrent model shows its progress on longer texts


class Stream:
    """Texts of equal length that a model continues.

        stream = Stream(model, tokenizer.eot)
        stream.push(tokenizer.encode("Once upon a time"))
        ids = stream.generate(100)[0]

    Args:
        model: any of our models.
        first: the id that every text starts with: end-of-text.
        batch: number of texts.

    Attributes:
        length: number of tokens so far, with the first one.
    """

    def __init__(self, model: LanguageModel, first: int, batch: int = 1) -> None:
        form = model.config.recall_form
        self.model, self.length = model, 1
        self._kept = model.window + max(model.history, form.reach + form.orders if form else 0)
        self._buffer = np.full((batch, 1), first, np.int32)  # ends with the last tokens, at least `_kept` of them
        self._free = 0  # columns at its end
        self._read, self._state = 0, model.start(batch) if isinstance(model, Recurrent) else {}  # tokens in the state
        self._cached, self._cache = 0, KeyValueCache()  # tokens that the cache stands for
        self._indexed, self._pasts = 0, list[Past]()  # tokens that recall has indexed
        self._followers = list[NDArray[np.int64]]()  # (B, orders) of each of the last tokens

    def push(self, ids: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer] | Tensor) -> None:
        """Append tokens: the same (T,) to all texts, or (B, T)."""
        new = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids, np.int32)
        new = np.broadcast_to(new, (self.batch, new.shape[-1]))
        total, window, before = new.shape[1], self.model.window, self.length
        piece = window if isinstance(self.model, Recurrent) else max(1, total)
        with progress_bar("reading", total, visible=piece < total > LONG * window) as progress:
            for first in range(0, total, piece):
                self._append(new[:, first : first + piece])
                while isinstance(self.model, Recurrent) and self.length - self._read > window:
                    self._read_segment(self.model)
                progress.update(self.length - before)

    def _append(self, new: NDArray[np.int32]) -> None:
        count = new.shape[1]
        if count > self._free:
            kept = self._tokens(max(0, self.length - self._kept), self.length)
            self._free = max(kept.shape[1], FEW) + count
            self._buffer = np.concatenate([kept, np.empty((self.batch, self._free), np.int32)], axis=1)
        end = self._buffer.shape[1] - self._free
        self._buffer[:, end : end + count] = new
        self._free, self.length = self._free - count, self.length + count

    @property
    def batch(self) -> int:
        return len(self._buffer)

    def _tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """(B, stop − start): the tokens at these positions; -1 before the first."""
        shift, missing = self._buffer.shape[1] - self._free - self.length, max(0, -start)
        found = self._buffer[:, shift + start + missing : shift + stop]
        return np.pad(found, ((0, 0), (missing, 0)), constant_values=-1) if missing else found

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Logits (B, V) of the next token of each text. With recall, log-probabilities of the mixture."""
        if isinstance(self.model, Recurrent):
            tokens, followers = self._inputs(self._read, self.length)
            hidden, _, _ = self.model.segment(tokens, self._state, followers)
        else:
            assert isinstance(self.model, Transformer)
            hidden = self._read_window(self.model)
        logits = self.model.logits(hidden[:, -1]).float()
        if self._pasts:
            logits = self.model.recall.mix(hidden[:, -1], logits.log_softmax(-1), self._pasts)
        return logits

    def sample(
        self,
        randoms: Sequence[torch.Generator],
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        allowed: Tensor | None = None,
    ) -> Iterator[list[int]]:
        """Endlessly sample the next token of each text and append it.

        Args:
            randoms: one per text.
            temperature, top_k, top_p: as in `logpast generate`.
            allowed: (V,) bool, the tokens that may be sampled; by default all.
        """
        while True:
            logits = self.logits().cpu()
            if logits.isnan().any():
                raise UserError("the model's predictions are NaN: its training diverged; use an earlier checkpoint")
            if allowed is not None:
                logits = logits[:, : len(allowed)].masked_fill(~allowed, -torch.inf)
            sampled = [
                _sample(row, temperature, top_k, top_p, random) for row, random in zip(logits, randoms, strict=True)
            ]
            self.push([[token] for token in sampled])
            yield sampled

    def generate(
        self,
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """Append this many sampled tokens to each text, and return them. Text i has the random numbers of seed + i."""
        randoms = [torch.Generator().manual_seed(seed + number) for number in range(self.batch)]
        steps = islice(self.sample(randoms, temperature, top_k, top_p), tokens)
        return [list(row) for row in zip(*steps, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Make text i what text rows[i] is now, for beam search."""
        chosen = np.asarray(rows)
        self._buffer, self._pasts = (
            self._buffer[chosen],
            [copy.deepcopy(self._pasts[row]) for row in rows if self._pasts],
        )
        self._followers = [each[chosen] for each in self._followers]
        index = torch.as_tensor(chosen, device=self.model.table.weight.device)
        self._state = {name: value[index] for name, value in self._state.items()}
        layers = self._cache.layers.items()
        self._cache.layers = {layer: (key[index], value[index]) for layer, (key, value) in layers}

    def state(self) -> dict[str, Tensor]:
        """All that is needed to continue the texts later, as `from_state` does."""
        ids = self._tokens(max(0, self.length - self._kept), self.length)
        lengths = torch.tensor([self.length, self._read])
        return {"ids": torch.from_numpy(ids.copy()), "lengths": lengths} | {
            f"state.{name}": value for name, value in self._state.items()
        }

    @classmethod
    def from_state(cls, model: LanguageModel, state: dict[str, Tensor]) -> Stream:
        """The stream that had this state. The model must be the same."""
        stream = cls(model, 0, len(state["ids"]))
        stream._buffer = state["ids"].numpy().copy()
        stream.length, stream._read = state["lengths"].tolist()
        stream._state = {name: state[f"state.{name}"].to(value.device) for name, value in stream._state.items()}
        return stream

    def save(self, path: Path) -> None:
        """Write the state to a file."""
        atomic_write(path, save({name: value.contiguous() for name, value in self.state().items()}))

    @classmethod
    def load(cls, model: LanguageModel, path: Path) -> Stream:
        """The stream that was saved in a file, with the same model."""
        try:
            return cls.from_state(model, load(path.read_bytes()))
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{path} is not the state of a stream of this model ({error}); save it again") from None

    def _read_window(self, model: Transformer) -> Tensor:
        """Hidden states (B, T, d) of the last tokens, of a model that takes a window and the history before it."""
        start, device = (self.length - 1) // model.window * model.window, model.table.weight.device
        cache = KeyValueCache()
        if self._cached == self.length - 1 > start:  # one token was appended within the window
            cache.layers |= self._cache.layers
            x = model.embed(*self._inputs(self._cached, self.length))
            hidden = model.hidden(x, cache, start=model.slots + self._cached - start)
        else:
            history = torch.from_numpy(self._tokens(start - model.history, start)).to(device, torch.int64)
            x = torch.cat([model.make_slots(history), model.embed(*self._inputs(start, self.length))], dim=1)
            hidden = model.hidden(x, cache)
        self._cached, self._cache = self.length, cache
        return hidden

    @torch.inference_mode()
    def _read_segment(self, model: Recurrent) -> None:
        tokens, followers = self._inputs(self._read, self._read + model.window)
        _, self._state, _ = model.segment(tokens, self._state, followers)
        self._read += model.window

    def _inputs(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """The tokens (B, T) at these positions and, for recall, their followers (B, T, orders)."""
        form, device, followers = self.model.config.recall_form, self.model.table.weight.device, None
        if form:
            self._index(form)
            if form.input:
                first = len(self._followers) - self.length
                found = np.stack(self._followers[first + start : first + stop], axis=1)
                followers = torch.from_numpy(found).to(device)
        return torch.from_numpy(self._tokens(start, stop)).to(device, torch.int64), followers

    def _index(self, form: RecallForm) -> None:
        """Index the new tokens for recall, and find the followers of those of the current window."""
        recurrent, window = isinstance(self.model, Recurrent), self.model.window
        start = self._read if recurrent else (self.length - 1) // window * window
        if start - self._indexed > FEW or not self._pasts:
            rows = self._recalled(max(0, start - form.reach - form.orders), start)
            vocabulary = self.model.table.num_embeddings
            self._pasts = [Past(row, form.orders, form.edges, vocabulary) for row in rows]
            self._indexed, self._followers = start, []
        for tokens in self._recalled(self._indexed, self.length).T:
            for past, token in zip(self._pasts, tokens.tolist(), strict=True):
                past.append(token)
            if form.input:
                self._followers.append(np.stack([past.latest() for past in self._pasts]))
        self._indexed = self.length
        del self._followers[: start - self.length]

    def _recalled(self, start: int, stop: int) -> NDArray[np.int32]:
        """The tokens at these positions; the first of a text is a missing one."""
        tokens = self._tokens(start, stop)
        return np.where(np.arange(start, stop) == 0, -1, tokens)


def _sample(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator) -> int:
    if temperature < 1e-6:  # dividing by less could overflow
        return int(logits.argmax())
    probabilities, order = (logits.double() / temperature).softmax(0).sort(descending=True, stable=True)
    if top_k is not None:
        probabilities[top_k:] = 0
    if top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities[before >= top_p] = 0  # the first always stays
    return int(order[torch.multinomial(probabilities, 1, generator=random)])
