"""`Stream`: texts that a model reads and continues, however long they get, with a state of constant size.

The probability of each token is the one that scoring would give it: windows start at multiples of m, and the memory in
front of a window is computed when the window starts. Keys and values are cached within a window. The state of a
recurrent model is kept from segment to segment. Only with `model.recall.copy_own` off do probabilities depend on who
wrote a token.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from logpast.models.base import LanguageModel, Recurrent
from logpast.models.decoder import KeyValueCache, Transformer
from logpast.models.sampling import Sampling, generators
from logpast.recall import OWN, RecallForm, matching
from logpast.recall.past import Past
from logpast.util.errors import UserError
from logpast.util.files import atomic_write
from logpast.util.precision import accumulation_dtype

INDEXED_ON = "cpu"  # recall has an index there; a GPU compares with the whole past in less time
ONE_BY_ONE = 1 / 32  # up to this part of the indexed tokens, new ones are added singly, which takes less time
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN's takes tens of
# milliseconds to plan each new length, and a text that grows has a new length with every token
HASH = "sha256"  # of all tensors in a file
SAMPLE = 4096  # numbers of the embedding table by which a state recognises its model

Ids = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer] | Tensor


class Stream:
    """Texts of equal length that a model continues.

        stream = Stream(model, tokenizer.eot)
        stream.push(tokenizer.encode("Once upon a time"))
        ids = stream.generate(100)[0]

    Args:
        model: any of our models, or a pretrained one with a memory attached.
        first: the id that every text starts with: end-of-text. Or one per text.
        batch: number of texts; by default one for each id in `first`.

    Attributes:
        length: number of tokens so far, with the first one.
    """

    def __init__(self, model: LanguageModel, first: int | Sequence[int], batch: int = 1) -> None:
        form = model.config.recall_form
        self.model, self.length = model, 1
        self.past = max(model.history, form.reach + form.orders if form else 0)  # tokens needed before a window
        self._kept = model.window + self.past
        start = torch.as_tensor(first, dtype=torch.int32).reshape(-1, 1)
        start = start.expand(max(batch, len(start)), 1)
        self._buffer = start.to(self._device, copy=True)  # ends with the last tokens, ≥ `_kept`, marked
        self._free = 0  # columns at its end
        self.carried = model.start(self.batch) if isinstance(model, Recurrent) else {}
        self.carried_tokens = 0  # that the state has read
        self._cached, self._cache = 0, KeyValueCache()  # tokens that the cache stands for
        self._indexed, self._pasts = 0, list[Past]()  # tokens that recall has indexed
        self._followers = list[NDArray[np.int64]]()  # (B, orders) of each of the last tokens

    def push(self, ids: Ids) -> None:
        """Append tokens: the same (T,) to all texts, or (B, T).

        The id that texts start with may come first, as Hugging Face's tokenizers put it; it is there already.
        """
        new = self._rows(ids)
        if self.length == 1 and new.size and (new[:, 0] == self._buffer[:, 0].cpu().numpy()).all():
            new = new[:, 1:]
        self.append(new)

    def append(self, ids: Ids, own: bool = False) -> None:
        """`push` without a look at the first id. `own` says that the model has written them, as `step` does."""
        new = self._rows(ids) + OWN * own
        piece = self.model.window if isinstance(self.model, Recurrent) else max(1, new.shape[1])
        for first in range(0, new.shape[1], piece):
            self._append(new[:, first : first + piece])
            while isinstance(self.model, Recurrent) and self.length - self.carried_tokens > self.model.window:
                self._read_segment(self.model)

    def _rows(self, ids: Ids) -> NDArray[np.int32]:
        """Ids as an array (B, T)."""
        new = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
        if new.size and new.dtype.kind not in "iu":
            raise UserError(
                f"ids must be whole numbers, got {new.dtype}; encode a text with the model's tokenizer first"
            )
        if new.ndim not in (1, 2) or (new.ndim == 2 and len(new) not in (1, self.batch)):
            raise UserError(f"ids must be (T,) or ({self.batch}, T), got {new.shape}")
        vocabulary = self.model.table.num_embeddings
        if new.size and not 0 <= new.min() <= new.max() < vocabulary:
            raise UserError(f"ids must be from 0 to {vocabulary - 1}, got {new.min()} to {new.max()}; is it another "
                            "model's tokenizer?")  # fmt: skip
        return np.broadcast_to(new.astype(np.int32), (self.batch, new.shape[-1]))

    def _append(self, new: NDArray[np.int32]) -> None:
        count = new.shape[1]
        if count > self._free:
            kept = self._marked(max(0, self.length - self._kept), self.length)
            self._free = max(kept.shape[1], 64) + count
            self._buffer = torch.cat([kept, kept.new_empty(self.batch, self._free)], dim=1)
        end = self._buffer.shape[1] - self._free
        self._buffer[:, end : end + count] = torch.tensor(new)
        self._free, self.length = self._free - count, self.length + count

    @property
    def batch(self) -> int:
        return len(self._buffer)

    @property
    def _form(self) -> RecallForm:
        form = self.model.config.recall_form
        assert form is not None
        return form

    @property
    def _device(self) -> torch.device:
        return self.model.table.weight.device

    def tokens(self, start: int, stop: int) -> Tensor:
        """(B, stop − start), int32: the tokens at these positions; -1 before the first."""
        missing = max(0, -start)
        return F.pad(self._marked(start + missing, stop) & ~OWN, (missing, 0), value=-1)

    def _marked(self, start: int, stop: int) -> Tensor:
        """`tokens`, with `OWN` added to those that the model has written; start is not negative."""
        shift = self._buffer.shape[1] - self._free - self.length
        return self._buffer[:, shift + start : shift + stop]

    def logits(self) -> Tensor:
        """Logits (B, V) of the next token of each text. With recall, log-probabilities of the mixture."""
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            found = self._logits()
        return found.clone()  # one that may be changed

    def _logits(self) -> Tensor:
        if isinstance(self.model, Recurrent):
            tokens, followers = self._inputs(self.carried_tokens, self.length)
            hidden, _, _ = self.model.segment(tokens, self.carried, followers)
        else:
            assert isinstance(self.model, Transformer)
            hidden = self._read_window(self.model)
        logits = self.model.logits(hidden[:, -1])
        logits = logits.to(accumulation_dtype(logits.dtype))
        return self.mix(hidden[:, -1], logits.log_softmax(-1)) if self.model.config.recall else logits

    def mix(self, hidden: Tensor, log_probs: Tensor) -> Tensor:
        """(B, V): recall mixed into the model's log_probs (B, V) of the next tokens; hidden is (B, d)."""
        if self._device.type == INDEXED_ON:
            self._index()
            return self.model.recall.mix(hidden, log_probs, self._pasts)
        known = self._recalled(self.length - 1, self.length)
        return self.model.recall.log_probs(hidden.unsqueeze(1), log_probs.unsqueeze(1), known).squeeze(1)

    def step(
        self, randoms: Sequence[np.random.Generator], sampling: Sampling | None = None
    ) -> tuple[list[int], Tensor]:
        """Sample the next token of each text and append it.

        Args:
            randoms: one per text, as `generators` makes them.
            sampling: how; by default with all probabilities as they are.

        Returns:
            The tokens, and the logits (B, V) that they were sampled from.
        """
        logits = self.logits()
        logits = logits if logits.is_cuda else logits.cpu()  # sampling takes float64, which MPS does not have
        if logits.isnan().any():
            raise UserError("the model's predictions are NaN: its training diverged; use an earlier checkpoint")
        sampled = (sampling or Sampling()).draw(logits, randoms)
        self.append([[token] for token in sampled], own=True)
        return sampled, logits

    def sample(self, randoms: Sequence[np.random.Generator], sampling: Sampling | None = None) -> Iterator[list[int]]:
        """The tokens of one `step` after the other, without an end."""
        while True:
            yield self.step(randoms, sampling)[0]

    def generate(
        self,
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        allowed: Tensor | NDArray[np.bool_] | None = None,
    ) -> list[list[int]]:
        """Append this many sampled tokens to each text, and return them. Text i has the random numbers of seed + i.

        `allowed` is (V,) bool, the ids that may be sampled: `tokenizer.is_text`. The others are as in `Sampling`.
        """
        sampling = Sampling(temperature, top_k, top_p, None if allowed is None else torch.as_tensor(allowed))
        steps = islice(self.sample(generators(seed, self.batch), sampling), tokens)
        return [list(row) for row in zip(*steps, strict=True)]

    def select(self, rows: Sequence[int]) -> Stream:
        """A stream whose text i is what text rows[i] is now: for beams, or for several continuations of one text."""
        index, new = torch.as_tensor(rows, device=self._device), copy.copy(self)
        new._buffer, new._pasts = self._buffer[index], []  # an index is cheaper to make again than to copy
        new.carried = {name: value[index] for name, value in self.carried.items()}
        new._cache = KeyValueCache()
        layers = self._cache.layers.items()
        new._cache.layers = {layer: (key[index], value[index]) for layer, (key, value) in layers}
        return new

    def state(self) -> dict[str, Tensor]:
        """All that is needed to continue the texts later, as `from_state` does."""
        ids = self._marked(max(0, self.length - self._kept), self.length)
        lengths = torch.tensor([self.length, self.carried_tokens])
        return {"model": self._model_hash(), "ids": ids.cpu().clone(), "lengths": lengths} | {
            f"state.{name}": value for name, value in self.carried.items()
        }

    @classmethod
    def from_state(cls, model: LanguageModel, state: dict[str, Tensor]) -> Stream:
        """The stream that had this state. The model must be the same."""
        ids, lengths = state["ids"], state["lengths"]
        if (ids.dtype, ids.ndim, lengths.dtype, lengths.shape) != (torch.int32, 2, torch.int64, (2,)) or not len(ids):
            raise UserError("its ids or lengths have another type or shape; give a file that save wrote")
        stream = cls(model, 0, len(ids))
        if state["model"].dtype != torch.uint8 or not torch.equal(state["model"], stream._model_hash()):
            raise UserError("the state is that of another model; give the model that it was saved with")
        stream.length, stream.carried_tokens = lengths.tolist()
        unread = range(1, model.window + 1) if isinstance(model, Recurrent) else [stream.length]
        if (
            stream.carried_tokens < 0
            or not 1 <= stream.length < 2**62
            or stream.length - stream.carried_tokens not in unread
        ):
            raise UserError(f"its lengths {lengths.tolist()} are impossible; give a file that save wrote")
        if ids.shape[1] != min(stream.length, stream._kept):
            raise UserError(f"it has {ids.shape[1]} ids of {stream.length}; give a file that save wrote")
        vocabulary = model.table.num_embeddings
        if wrong := ids[(ids < 0) | (ids & ~OWN >= vocabulary)].tolist()[:1]:
            raise UserError(
                f"its ids have {wrong[0]}, beyond the vocabulary of {vocabulary}; give a file that save wrote"
            )
        stream._buffer = ids.to(stream._device, copy=True)
        for name, value in stream.carried.items():
            if (found := state[f"state.{name}"]).shape != value.shape:
                raise UserError(f"state.{name} has the shape {tuple(found.shape)}, not {tuple(value.shape)}")
            if found.dtype != value.dtype and not (found.is_floating_point() and value.is_floating_point()):
                raise UserError(f"state.{name} has the type {found.dtype}, not {value.dtype}")
            stream.carried[name] = found.to(value)  # also from another precision
            if not stream.carried[name].isfinite().all():
                raise UserError(f"state.{name} has NaN or infinite values; give a file that save wrote")
        return stream

    def _model_hash(self) -> Tensor:
        """Of what the state depends on, and of a sample of the weights in any precision."""
        table = self.model.table.weight.detach().flatten()
        some = table[:: -(-len(table) // SAMPLE)].to(torch.bfloat16).float().cpu().numpy().tobytes()
        sizes = f"{type(self.model).__name__} {self._kept} {self.model.window} {len(table)}".encode()
        return torch.frombuffer(bytearray(hashlib.sha256(sizes + some).digest()), dtype=torch.uint8)

    def save(self, path: str | Path) -> None:
        """Write the state to a file."""
        state = {name: value.contiguous() for name, value in self.state().items()}
        atomic_write(Path(path), save(state | {HASH: _hash(state)}))

    @classmethod
    def load(cls, model: LanguageModel, path: str | Path) -> Stream:
        """The stream that was saved in a file, with the same model."""
        try:
            state = load(Path(path).read_bytes())
            saved = state.pop(HASH, None)  # early versions had none
            if saved is not None and not torch.equal(saved, _hash(state)):
                raise UserError("it has changed since it was saved; restore it, or read the text again")
            return cls.from_state(model, state)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{path} is not the state of a stream ({error}); give a file that save wrote") from None

    def _read_window(self, model: Transformer) -> Tensor:
        """Hidden states (B, T, d) of the last tokens, of a model that takes a window and the history before it."""
        start, cache = (self.length - 1) // model.window * model.window, KeyValueCache()
        if self._cached == self.length - 1 > start:  # one token was appended within the window
            cache.layers |= self._cache.layers
            x = model.embed(*self._inputs(self._cached, self.length))
            hidden = model.hidden(x, cache, start=model.slots + self._cached - start)
        else:
            history = self.tokens(start - model.history, start)
            x = torch.cat([model.make_slots(history.long()), model.embed(*self._inputs(start, self.length))], dim=1)
            hidden = model.hidden(x, cache)
        self._cached, self._cache = self.length, cache
        return hidden

    @torch.no_grad()
    def _read_segment(self, model: Recurrent) -> None:
        tokens, followers = self._inputs(self.carried_tokens, self.carried_tokens + model.window)
        _, self.carried, _ = model.segment(tokens, self.carried, followers)
        self.carried_tokens += model.window

    def _inputs(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """The tokens (B, T) at these positions and, for recall, their followers (B, T, orders)."""
        form, tokens = self.model.config.recall_form, self.tokens(start, stop).long()
        if not (form and form.input):
            return tokens, None
        if self._device.type != INDEXED_ON:
            return tokens, matching.latest(self._recalled(start, stop), stop - start, form.orders, form.reach)
        self._index()
        first = len(self._followers) - self.length
        return tokens, torch.from_numpy(np.stack(self._followers[first + start : first + stop], axis=1))

    def _index(self) -> None:
        """Index the new tokens for recall, and find the followers of those of the current window."""
        form, recurrent, window = self._form, isinstance(self.model, Recurrent), self.model.window
        start = self.carried_tokens if recurrent else (self.length - 1) // window * window
        first = max(0, start - form.reach - form.orders)
        if start - self._indexed > ONE_BY_ONE * (start - first) or not self._pasts:
            rows = self._recalled(start, start).numpy()
            vocabulary = self.model.table.num_embeddings
            self._pasts = [Past(row, form.orders, form.edges, vocabulary, form.input) for row in rows]
            self._indexed, self._followers = start, []
        new = self._known(self._indexed, self.length)
        for position, tokens in enumerate(new.T.tolist(), self._indexed):
            for past, token in zip(self._pasts, tokens, strict=True):
                past.append(token)
            if form.input and position >= start:
                self._followers.append(np.stack([past.latest() for past in self._pasts]))
        self._indexed = self.length
        del self._followers[: start - self.length]

    def _recalled(self, start: int, stop: int) -> Tensor:
        """What recall needs for these positions: their tokens and those before them."""
        return self._known(max(0, start - self._form.reach - self._form.orders), stop)

    def _known(self, start: int, stop: int) -> Tensor:
        """`tokens` for recall, to which the first of a text is missing."""
        tokens = self.tokens(start, stop) if self.model.recall.copy_own else self._marked(start, stop)
        return tokens if start else tokens.masked_fill(torch.arange(stop, device=tokens.device) == 0, -1)


def _hash(state: dict[str, Tensor]) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(save(state)).digest()), dtype=torch.uint8)
