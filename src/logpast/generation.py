"""`logpast generate`: continue a prompt, or a text of any length, token by token."""

from __future__ import annotations

import codecs
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper, UnsupportedOperation
from itertools import chain, islice, tee
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, TextIO

import torch

from logpast.data import Tokenizer, text_files
from logpast.data.prepare import pieces_of
from logpast.models import LanguageModel
from logpast.models.sampling import Sampling, generators
from logpast.models.stream import Stream
from logpast.training.checkpoint import find_model
from logpast.util.environment import cpu_threads, pick_device, thread_count
from logpast.util.errors import UserError
from logpast.util.files import ensure_all_writable
from logpast.util.progress import progress_bar
from logpast.util.validation import LongSeed, NonNegativeFloat, PositiveInt, Share, validate_arguments

RESET = "/reset"
BLOCK = 1 << 16  # bytes read, and characters tokenized, at a time


@validate_arguments
def generate(
    checkpoint: Path,
    prompt: str = "",
    prompt_file: Path | None = None,
    tokens: PositiveInt = 200,
    temperature: NonNegativeFloat = 1.0,
    top_k: PositiveInt | None = None,
    top_p: Share | None = 0.95,
    stop: list[str] | None = None,
    samples: PositiveInt | None = None,
    seed: LongSeed = 0,
    echo: bool = True,
    interactive: bool = False,
    recall_limit: Share | None = None,
    recall_own: bool = False,
    device: str = "auto",
    follow: Path | None = None,
    load_state: Path | None = None,
    save_state: Path | None = None,
) -> str | list[str]:
    """Generate text from a prompt with a trained model. Text appears as it is generated.

    With --interactive, each line that you type, or that standard input holds, is appended to the text so far after a
    line break, and the model continues: it remembers all earlier lines and answers. An empty line continues without
    appending anything. Ctrl-C stops the current answer, /reset forgets the lines and answers so far, Ctrl-D ends.

    With --follow, the model first reads a text of any length, in little memory. It is not printed; the prompt, or the
    first line of an interactive session, comes after it.

    Examples:
        logpast generate --checkpoint runs/mine --prompt "Once upon a time"
        logpast generate --checkpoint runs/mine --prompt_file chapter.txt --tokens 500 --echo false
        logpast generate --checkpoint runs/mine --temperature 0        # always the most likely token
        logpast generate --checkpoint runs/mine --prompt "The" --samples 5 --stop . $'\\n'
        logpast generate --checkpoint runs/mine --interactive
        logpast generate --checkpoint runs/mine --follow book.txt --prompt "Chapter 2" --save_state book.state
        cat books/*.txt | logpast generate --checkpoint attached/mine --follow -

    Args:
        checkpoint: a run folder (its best checkpoint is used), one checkpoints/step-… folder, or a folder that
            `logpast attach` wrote.
        prompt: the text to continue; may be empty.
        prompt_file: read the prompt from this file ("-" is standard input), which may be as long as a book and is read
            as training text is: UTF-8, with LF as line end.
        tokens: how many tokens to generate at most; in an interactive session, per line.
        temperature: sampling temperature; 0 always takes the most likely token. Below 1 a model repeats itself more.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens whose probabilities add up to this; null: from all.
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
            by default as trained.
        recall_own: whether recall also copies what the model itself has written. It then repeats itself more than text
            does; without it, hardly, but recall does not know what the model wrote before its window.
        device: auto, cpu, cuda or mps.
        follow: read this file ("-" is standard input) before the prompt, as training text is read.
        load_state: continue after the text whose state is in this file, which --save_state wrote with the same model.
        save_state: write the state to this file, to continue from it later: after what was read (--follow and the
            prompt), before anything is generated; of an interactive session, at its end. An existing file is replaced.

    Returns:
        The prompt, unless echo is false, and the generated text; a list of such texts if samples is given. Of an
        interactive session, the text that the model remembers at its end.
    """
    stop = [_valid_utf8(text) for text in stop or []]
    if "" in stop:
        raise UserError("stop has an empty text; leave it out, or give the text to stop at")
    if interactive and samples is not None:
        raise UserError("interactive cannot be used with samples")
    _check_files(prompt, prompt_file, follow, interactive)
    ensure_all_writable({"--save_state": save_state}, prompt_file, follow)
    prompt = _valid_utf8(prompt) if prompt_file is None else "".join(_blocks(prompt_file))
    model, tokenizer = load(checkpoint, device, recall_limit, recall_own)
    count = samples or 1
    randoms = generators(seed, count)
    allowed = torch.from_numpy(tokenizer.is_text)  # no model of ours has learned when to predict end-of-text
    sampling = Sampling(temperature, top_k, top_p, allowed)

    def continue_text(stream: Stream) -> list[Iterator[str]]:
        """Continue the text so far: the pieces of each sample, without what may be a stop text."""
        steps = stream.sample(randoms, sampling)
        first = next(steps)  # a long prompt is read before anything is printed
        copies = tee(islice(chain([first], steps), tokens), count)
        by_sample = (map(itemgetter(number), copy) for number, copy in enumerate(copies))
        return [until_stop(decode(each, tokenizer), stop) for each in by_sample]

    with cpu_threads(thread_count(model.parameter_count())):
        stream = open_stream(model, tokenizer, load_state, follow)
        if interactive:
            text, stream = _converse(stream, tokenizer, prompt, lambda stream: continue_text(stream)[0])
        else:
            _read(stream, [prompt], tokenizer, "the prompt")
        if save_state is not None:
            stream.save(save_state)
        if interactive:
            return text
        texts = []
        for number, pieces in enumerate(continue_text(stream.select([0] * count)), 1):
            if count > 1:
                print(f"--- sample {number} of {count} ---")
            texts.append("".join(_printed(chain([prompt] if echo else [], pieces))))
        return texts[0] if samples is None else texts


def load(
    checkpoint: Path, device: str, recall_limit: float | None, recall_own: bool = True
) -> tuple[LanguageModel, Tokenizer]:
    """A model to generate with, on its device, and its tokenizer."""
    found = find_model(checkpoint)
    tokenizer = found.load_tokenizer()
    model = found.load_model().to(pick_device(device)).eval()
    if recall_limit is not None:
        if not model.config.recall:
            raise UserError(f"recall_limit is for models with recall, and {checkpoint} has none; leave it out")
        model.recall.limit = recall_limit
    if model.config.recall:
        model.recall.copy_own = recall_own
    return model, tokenizer


def open_stream(model: LanguageModel, tokenizer: Tokenizer, load_state: Path | None, follow: Path | None) -> Stream:
    """The stream of a text: a new one, or one whose state was saved, and then the text of a file."""
    stream = model.stream(tokenizer.eot) if load_state is None else Stream.load(model, load_state)
    if stream.batch > 1:
        raise UserError(f"{load_state} is the state of {stream.batch} texts; save that of one: stream.select([0])")
    if follow is not None:
        size = follow.stat().st_size // 1000 if follow.is_file() else None
        _read(stream, _blocks(follow), tokenizer, _name(follow), size)
    return stream


def _read(stream: Stream, blocks: Iterable[str], tokenizer: Tokenizer, name: str, kilobytes: int | None = None) -> None:
    """Append a text to a stream, piece by piece. The tokens are those of the whole text."""
    done, before, started = 0, stream.length, time.monotonic()
    with progress_bar(f"reading {name}, kB", kilobytes) as progress:
        for piece in pieces_of(blocks, tokenizer, BLOCK):
            stream.push(tokenizer.encode(piece))
            done += len(piece.encode())
            speed = (stream.length - before) / max(time.monotonic() - started, 1e-9)
            progress.update(done // 1000, f"{speed:,.0f} tokens/s")


def _printed(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces, each printed as it comes, and a line break at their end."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            yield piece
    finally:
        print(flush=True)


def _converse(
    stream: Stream, tokenizer: Tokenizer, prompt: str, continue_text: Callable[[Stream], Iterator[str]]
) -> tuple[str, Stream]:
    """An interactive session. Returns its text, and the stream at its end."""
    started = stream.length > 1
    text, beginning = "", stream.state()
    if isinstance(sys.stdin, TextIOWrapper):
        with suppress(UnsupportedOperation):  # it has been read from
            sys.stdin.reconfigure(errors="surrogateescape")  # so that a line that is not UTF-8 can be left out
    line = prompt or _read_line()
    while line is not None:
        before = stream.state()
        if line == RESET:
            text, stream = "", Stream.from_state(stream.model, beginning)
        elif re.fullmatch(r"/\w+", line):
            print(f"unknown command {line}; {RESET} forgets the text so far, Ctrl-D ends", file=sys.stderr)
        else:
            shown, answer = "\n" + line if line and (text or started) else line, ""
            read = tokenizer.encode(shown)
            with suppress(KeyboardInterrupt):
                stream.push(read)
                for piece in _printed(continue_text(stream)):
                    answer += piece
            text, stream = text + shown + answer, Stream.from_state(stream.model, before)
            stream.push(read)
            stream.append(tokenizer.encode(answer), own=True)  # what was not printed is not remembered
        line = _read_line()
    return text, stream


def decode(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of tokens as they come. A character may span several tokens."""
    return codecs.iterdecode((tokenizer.decode_bytes([token]) for token in tokens), "utf-8", "replace")


def until_stop(pieces: Iterable[str], stop: list[str]) -> Iterator[str]:
    """The text up to the first of the stop texts, however the pieces split it."""
    text = UntilStop(stop)
    for piece in pieces:
        yield text.add(piece)
        if text.stopped:
            return
    yield text.held


class UntilStop:
    """A text that comes in pieces and ends before the first of the stop texts.

    Attributes:
        held: the end of the text that may be the beginning of a stop text; it is held back until that is known.
        stopped: whether there was a stop text.
    """

    def __init__(self, stop: list[str]) -> None:
        self.stop, self.held, self.stopped = stop, "", False

    def add(self, piece: str) -> str:
        """Append a piece. Returns what is now known to be part of the text."""
        text = self.held + piece
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:
            self.held, self.stopped = "", True
            return text[: min(found)[1]]  # the first to be complete
        safe = next(at for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in ["", *self.stop]))
        self.held = text[safe:]
        return text[:safe]


def _check_files(prompt: str, prompt_file: Path | None, follow: Path | None, interactive: bool) -> None:
    """What is read can be read, before the model is loaded."""
    piped = [f"{name} -" for name, file in (("prompt_file", prompt_file), ("follow", follow)) if str(file) == "-"]
    if interactive and piped:
        raise UserError(f"interactive cannot be used with {piped[0]}: both read standard input")
    if len(piped) > 1:
        raise UserError("prompt_file and follow cannot both read standard input; give one of them as a file")
    if prompt and prompt_file is not None:
        raise UserError("give prompt or prompt_file, not both")
    if follow is not None:
        ensure_readable(follow)


def ensure_readable(file: Path) -> None:
    """Raise UserError if a text cannot be opened."""
    with _open(file):
        pass


def _blocks(file: Path) -> Iterator[str]:
    """The text of a file, or of standard input for "-", read block by block as any text is."""
    with _open(file) as opened:
        empty = True
        for text in text_files.decode(iter(lambda: opened.read(BLOCK), b""), _name(file)):
            empty = False
            yield text
        if empty:
            raise UserError(f"{_name(file)} is empty; give a text, or leave it out")


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    try:
        if str(file) == "-":
            yield _standard_input().buffer
        else:
            with file.open("rb") as opened:
                yield opened
    except OSError as error:
        raise UserError(f"cannot read {_name(file)}: {error.strerror or error}; check the path") from None


def _name(file: Path) -> str:
    return "standard input" if str(file) == "-" else text_files.printable(file)


def _read_line() -> str | None:
    """A line of an interactive session; None at the end of the input."""
    terminal = _standard_input().isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  arrow keys edit the line
    try:
        return _valid_utf8(input("> " if terminal and sys.stdout.isatty() else ""), "strict")
    except UnicodeError:
        print("a line is left out, because it is not UTF-8; give it again", file=sys.stderr)
        return _read_line()
    except OSError as error:
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
