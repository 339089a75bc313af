"""`logpast generate`: continue a prompt, token by token.

The probability of each token is the one that scoring would give it: windows start at multiples of m, and the memory in
front of a window is computed when the window starts. Keys and values are cached within a window. The state of a
recurrent model is kept from segment to segment.
"""

from __future__ import annotations

import codecs
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, tee
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from logpast.data import Tokenizer, text_files
from logpast.models import LanguageModel, Recurrent, Transformer
from logpast.models.base import State, check_limit
from logpast.models.decoder import KeyValueCache
from logpast.recall import RecallForm
from logpast.recall.index import occurrences
from logpast.recall.matching import latest
from logpast.training.checkpoint import find_checkpoint
from logpast.util.environment import cpu_threads, pick_device, thread_count
from logpast.util.errors import UserError
from logpast.util.progress import progress_bar
from logpast.util.validation import validate_arguments

LONG_PROMPT = 100  # segments; a recurrent model shows its progress on longer prompts
RESET = "/reset"


@validate_arguments
def generate(
    checkpoint: Path,
    prompt: str = "",
    prompt_file: Path | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: list[str] | None = None,
    samples: int | None = None,
    seed: int = 0,
    echo: bool = True,
    interactive: bool = False,
    recall_limit: float | None = None,
    device: str = "auto",
) -> str | list[str]:
    """Generate text from a prompt with a trained model. Text appears as it is generated.

    With --interactive, each line that you type, or that standard input holds, is appended to the text so far after a
    line break, and the model continues: it remembers all earlier lines and answers. An empty line continues without
    appending anything. Ctrl-C stops the current answer, /reset forgets the text so far, Ctrl-D ends.

    Examples:
        logpast generate --checkpoint runs/mine --prompt "Once upon a time"
        logpast generate --checkpoint runs/mine --prompt_file chapter.txt --tokens 500 --top_p 0.95 --echo false
        logpast generate --checkpoint runs/mine --temperature 0        # always the most likely token
        logpast generate --checkpoint runs/mine --prompt "The" --samples 5 --stop . $'\\n'
        logpast generate --checkpoint runs/mine --interactive

    Args:
        checkpoint: a run folder (its best checkpoint is used) or one checkpoints/step-… folder.
        prompt: the text to continue; may be empty.
        prompt_file: read the prompt from this file ("-" is standard input), which may be as long as a book and is read
            as training text is: UTF-8, with LF as line end.
        tokens: how many tokens to generate at most; in an interactive session, per line.
        temperature: sampling temperature; 0 always takes the most likely token.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens whose probabilities add up to this.
        stop: end when one of these texts has been generated. It is not printed. The shell writes a line break as
            $'\\n'.
        samples: generate this many texts from the prompt, in one batch. The first is what one sample with this seed
            would be, the second what one with seed + 1 would be, and so on, up to rounding.
        seed: the same seed gives the same text on the same machine.
        echo: print the prompt before the generated text; --echo false leaves it out. An interactive session never
            repeats your lines.
        interactive: read lines from the terminal or standard input and continue after each; see above. A prompt is the
            first line.
        recall_limit: of a model with recall, how much of each prediction may come from copies, above 0 and at most 1;
            by default as trained. Less avoids verbatim repetition.
        device: auto, cpu, cuda or mps.

    Returns:
        The prompt, unless echo is false, and the generated text; a list of such texts if samples is given. Of an
        interactive session, the text that the model remembers at its end.
    """
    stop = [_valid_utf8(text) for text in stop or []]
    _check_options(tokens, temperature, top_k, top_p, stop, samples, seed)
    if recall_limit is not None:
        check_limit("recall_limit", recall_limit)
    if interactive and (samples is not None or str(prompt_file) == "-"):
        raise UserError(f"interactive cannot be used with {'samples' if samples is not None else 'prompt_file -'}")
    if prompt_file is not None:
        if prompt:
            raise UserError("give prompt or prompt_file, not both")
        prompt = _read_prompt(prompt_file)
    prompt = _valid_utf8(prompt)
    found = find_checkpoint(checkpoint)
    tokenizer = found.load_tokenizer()
    model = found.load_model().to(pick_device(device)).eval()
    if recall_limit is not None:
        if not model.config.recall:
            raise UserError(f"recall_limit is for models with recall, and {checkpoint} has none; leave it out")
        model.recall.limit = recall_limit
    count = samples or 1
    reader = Reader(model, [[tokenizer.eot] for _ in range(count)])
    randoms = [torch.Generator().manual_seed(seed + number) for number in range(count)]
    allowed = torch.ones(tokenizer.size, dtype=torch.bool)
    allowed[tokenizer.eot] = False  # it only occurs at the start of a text, so no model has learned when to predict it

    def continue_text(text: str) -> list[Iterator[str]]:
        """Append to the text so far, and continue it: the pieces of each sample, without what may be a stop text."""
        reader.extend([int(i) for i in tokenizer.encode(text)])
        steps = continuations(reader, allowed, randoms, temperature, top_k, top_p)
        first = next(steps)  # a long prompt is read before anything is printed
        copies = tee(islice(chain([first], steps), tokens), count)
        by_sample = (map(itemgetter(number), copy) for number, copy in enumerate(copies))
        return [until_stop(decode(each, tokenizer), stop) for each in by_sample]

    with cpu_threads(thread_count(model.parameter_count())):
        if interactive:
            return _converse(reader, tokenizer, prompt, lambda text: continue_text(text)[0])
        texts = []
        for number, pieces in enumerate(continue_text(prompt), 1):
            if count > 1:
                print(f"--- sample {number} of {count} ---")
            texts.append("".join(_printed(chain([prompt] if echo else [], pieces))))
        return texts[0] if samples is None else texts


def _printed(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces, each printed as it comes, and a line break at their end."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            yield piece
    finally:
        print(flush=True)


def _converse(reader: Reader, tokenizer: Tokenizer, prompt: str, continue_text: Callable[[str], Iterator[str]]) -> str:
    """An interactive session. Returns the text at its end."""
    (stream,) = reader.streams
    line = prompt or _read_line()
    while line is not None:
        if line == RESET:
            reader.cut(1)
        elif re.fullmatch(r"/\w+", line):
            print(f"unknown command {line}; {RESET} forgets the text so far, Ctrl-D ends", file=sys.stderr)
        else:
            shown, kept = "\n" + line if line and len(stream) > 1 else line, len(stream)
            with suppress(KeyboardInterrupt):
                for piece in _printed(continue_text(shown)):
                    shown += piece
            _set_text(reader, tokenizer, kept, shown)
        line = _read_line()
    return tokenizer.decode(stream[1:])


def _set_text(reader: Reader, tokenizer: Tokenizer, kept: int, text: str) -> None:
    """Make `text` all that follows the first `kept` tokens: what was not printed is not remembered."""
    (stream,) = reader.streams
    length = len(stream)
    while not text.startswith(tokenizer.decode(stream[kept:length])):
        length -= 1
    reader.cut(length)
    reader.extend([int(i) for i in tokenizer.encode(text.removeprefix(tokenizer.decode(stream[kept:])))])


def decode(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens as they come. A character may span several tokens."""
    return codecs.iterdecode((tokenizer.decode_bytes([token]) for token in tokens), "utf-8", "replace")


def until_stop(pieces: Iterable[str], stop: list[str]) -> Iterator[str]:
    """The text up to the first of the stop texts, however the pieces split it. What may be the beginning of one is held
    back until it is known.
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [(at + len(text), at) for text in stop if (at := held.find(text)) >= 0]
        if found:
            yield held[: min(found)[1]]  # the first to be complete
            return
        safe = next(at for at in range(len(held) + 1) if any(text.startswith(held[at:]) for text in ["", *stop]))
        yield held[:safe]
        held = held[safe:]
    yield held


class Reader:
    """Reads token streams of equal length and predicts the next token of each. What it has read is not read again.

    Attributes:
        streams: (N, T) ids; each stream starts with end-of-text. They may be appended to, but only cut by `cut`.
    """

    def __init__(self, model: LanguageModel, streams: list[list[int]]) -> None:
        self.model, self.streams = model, streams
        self.read: tuple[int, Any] = 0, None  # how many tokens, and what is kept of them; one value, if interrupted
        self.recalled: tuple[Tensor, Tensor] | None = None  # for recall: ids (N, T) and their followers (N, T, orders)

    def extend(self, tokens: list[int]) -> None:
        """Append the same tokens to all streams."""
        for stream in self.streams:
            stream += tokens

    def cut(self, length: int) -> None:
        """Keep the first tokens of each stream only."""
        for stream in self.streams:
            del stream[length:]
        if self.read[0] >= length:
            self.read = 0, None
        if self.recalled:
            self.recalled = self.recalled[0][:, :length], self.recalled[1][:, :length]

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Logits (N, V) of the next token of each stream, on the CPU."""
        if form := self.model.config.recall_form:
            self.recalled = self._append(form)
        if isinstance(self.model, Recurrent):
            hidden = self._read_segments(self.model, *self.read)
        else:
            assert isinstance(self.model, Transformer)
            hidden = self._read_window(self.model, *self.read)
        logits = self.model.logits(hidden).float()
        if self.recalled:  # the logarithm of the mixture takes the logits' place
            own = logits.log_softmax(-1).unsqueeze(1)
            logits = self.model.recall.log_probs(hidden.unsqueeze(1), own, self.recalled[0]).squeeze(1)
        return logits.cpu()

    def _append(self, form: RecallForm) -> tuple[Tensor, Tensor]:
        """The ids of the streams and their followers. End-of-text at the start is a missing token."""
        device, rows = self.model.table.weight.device, len(self.streams)
        ids, followers = self.recalled or (torch.full((rows, 1), -1), torch.full((rows, 1, form.orders), -1))
        known = ids.shape[1]
        new = torch.tensor([stream[known:] for stream in self.streams], dtype=torch.int64, device=device)
        ids, followers = torch.cat([ids.to(device), new], dim=1), followers.to(device)
        if new.shape[1] == 1:
            found = latest(ids, form.orders, form.reach).unsqueeze(1)
        else:
            stream = torch.arange(rows, device=device).repeat_interleave(ids.shape[1])
            found = occurrences(ids.flatten(), stream, form.orders, [form.reach]).followers
            found = found.view(rows, -1, form.orders)[:, known:]
        return ids, torch.cat([followers, found], dim=1)

    def _inputs(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """The ids (N, T) at positions start … stop − 1, and their followers for recall."""
        form, device = self.model.config.recall_form, self.model.table.weight.device
        followers = self.recalled[1][:, start:stop] if self.recalled and form and form.input else None
        return torch.tensor([stream[start:stop] for stream in self.streams], device=device), followers

    def _read_window(self, model: Transformer, read: int, before: KeyValueCache | None) -> Tensor:
        """Hidden states (N, d) of the last tokens, of a model that takes a window and the history before it.

        `before` caches the window that the first `read` tokens end in. It can be used if one token of it was appended.
        """
        device, length = model.table.weight.device, len(self.streams[0])
        window, history = model.window, model.history
        start, cache = (length - 1) // window * window, KeyValueCache()
        if before is not None and read == length - 1 and read > start:
            cache.layers |= before.layers
            hidden = model.hidden(model.embed(*self._inputs(read, length)), cache, start=model.slots + read - start)
        else:
            past = [stream[max(0, start - history) : start] for stream in self.streams]
            past = [[-1] * (history - len(some)) + some for some in past]
            slots = model.make_slots(torch.tensor(past, dtype=torch.int64, device=device))
            hidden = model.hidden(torch.cat([slots, model.embed(*self._inputs(start, length))], dim=1), cache)
        self.read = length, cache
        return hidden[:, -1]

    def _read_segments(self, model: Recurrent, read: int, state: State | None) -> Tensor:
        """Hidden states (N, d) of the last tokens, of a model that carries a state from segment to segment.

        `state` is the state after the first `read` tokens, a whole number of segments. The rest is recomputed.
        """
        window, length = model.window, len(self.streams[0])
        state = state or model.start(len(self.streams))
        with progress_bar("reading the prompt", length, read, visible=length - read > LONG_PROMPT * window) as progress:
            while length - read > window:
                tokens, followers = self._inputs(read, read + window)
                _, state, _ = model.segment(tokens, state, followers)
                read += window
                progress.update(read)
        tokens, followers = self._inputs(read, length)
        hidden, _, _ = model.segment(tokens, state, followers)
        self.read = read, state
        return hidden[:, -1]


def continuations(
    reader: Reader,
    allowed: Tensor,
    randoms: list[torch.Generator],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[list[int]]:
    """Endlessly sample the next token of each stream and append it.

    Args:
        reader: the streams.
        allowed: (V,) bool, the tokens that may be sampled.
        randoms: one per stream.
    """
    while True:
        logits = reader.logits()
        if logits.isnan().any():
            raise UserError("the model's predictions are NaN: its training diverged; use an earlier checkpoint")
        logits = logits[:, : len(allowed)].masked_fill(~allowed, -torch.inf)
        sampled = [_sample(row, temperature, top_k, top_p, random) for row, random in zip(logits, randoms, strict=True)]
        for stream, token in zip(reader.streams, sampled, strict=True):
            stream.append(token)
        yield sampled


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


def _check_options(
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: list[str],
    samples: int | None,
    seed: int,
) -> None:
    for name, value in (("tokens", tokens), ("top_k", top_k), ("samples", samples)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed must be from 0 to 2^63 − 1, got {seed}")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be a number of 0 or above, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {top_p}")
    if "" in stop:
        raise UserError("stop has an empty text; leave it out, or give the text to stop at")


def _read_prompt(file: Path) -> str:
    """The prompt in a file, or in standard input for "-", read as any text is."""
    name = "standard input" if str(file) == "-" else str(file)
    try:
        content = _standard_input().buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the prompt from {name}: {error}") from None
    return "".join(text_files.decode([content], name))


def _read_line() -> str | None:
    """A line of an interactive session; None at the end of the input."""
    terminal = _standard_input().isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  arrow keys edit the line
    try:
        return _valid_utf8(input("> " if terminal and sys.stdout.isatty() else ""), "strict")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt from standard input: {error}") from None
    except EOFError:
        if terminal:
            print()
        return None
    except KeyboardInterrupt:
        if not terminal:
            raise
        print("\nCtrl-D ends", file=sys.stderr)
        return _read_line()


def _standard_input() -> TextIO:
    if sys.stdin is None:
        raise UserError("standard input is closed; give a prompt instead")
    return sys.stdin


def _valid_utf8(text: str, errors: str = "replace") -> str:
    """Text without the surrogates that stand for bytes which are not valid in the user's encoding."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", errors)
