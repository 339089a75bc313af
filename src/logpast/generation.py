"""`logpast generate`: continue a prompt, token by token.

The probability of each token is the one that scoring would give it: windows start at multiples of m, and the memory in
front of a window is computed when the window starts. Keys and values are cached within a window.
"""

from __future__ import annotations

import codecs
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from logpast.data import Tokenizer
from logpast.models import LanguageModel, Recurrent, Transformer
from logpast.models.decoder import KeyValueCache
from logpast.training.checkpoint import find_checkpoint
from logpast.util.environment import cpu_threads, pick_device, thread_count
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments


@validate_arguments
def generate(
    checkpoint: Path,
    prompt: str = "",
    prompt_file: Path | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "auto",
) -> str:
    """Generate text from a prompt with a trained model. Text appears as it is generated.

    Examples:
        logpast generate --checkpoint runs/mine --prompt "Once upon a time"
        logpast generate --checkpoint runs/mine --prompt_file chapter.txt --tokens 500 --top_p 0.95
        logpast generate --checkpoint runs/mine --temperature 0        # always the most likely token

    Args:
        checkpoint: a run folder (its best checkpoint is used) or one checkpoints/step-… folder.
        prompt: the text to continue; may be empty.
        prompt_file: read the prompt from this file ("-" is standard input); it may be as long as a book.
        tokens: how many tokens to generate.
        temperature: sampling temperature; 0 always takes the most likely token.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens whose probabilities add up to this.
        seed: the same seed gives the same text on the same machine.
        device: auto, cpu, cuda or mps.

    Returns:
        The prompt and the generated text.
    """
    _check_options(tokens, temperature, top_k, top_p, seed)
    if prompt_file is not None:
        if prompt:
            raise UserError("give prompt or prompt_file, not both")
        prompt = _read_prompt(prompt_file)
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # arguments may be invalid UTF-8
    found = find_checkpoint(checkpoint)
    tokenizer = found.load_tokenizer()
    model = found.load_model().to(pick_device(device)).eval()
    ids = [int(i) for i in tokenizer.encode(prompt)]
    allowed = torch.ones(tokenizer.size, dtype=torch.bool)
    allowed[tokenizer.eot] = False  # it only occurs at the start of a text, so no model has learned when to predict it
    stream = continuations(model, [tokenizer.eot, *ids], allowed, temperature, top_k, top_p, seed)
    with cpu_threads(thread_count(model.parameter_count())):
        return _print_text(prompt, islice(stream, tokens), tokenizer)


def _print_text(prompt: str, tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    """Print the prompt and each token as it comes: all that `generate` prints. Returns the text."""
    chunks = (tokenizer.decode_bytes([token]) for token in tokens)
    text = ""
    for piece in chain([prompt], codecs.iterdecode(chunks, "utf-8", "replace")):  # a character may span several tokens
        text += piece
        print(piece, end="", flush=True)
    print()
    return text


def continuations(
    model: LanguageModel,
    stream: list[int],
    allowed: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Endlessly sample the next token of a stream and append it. A stream starts with end-of-text.

    Args:
        allowed: (V,) bool, the tokens that may be sampled.
    """
    random = torch.Generator().manual_seed(seed)
    for logits in next_logits(model, stream):
        if logits.isnan().any():
            raise UserError("the model's predictions are NaN: its training diverged; use an earlier checkpoint")
        logits = logits[: len(allowed)].masked_fill(~allowed, -torch.inf)
        token = _sample(logits, temperature, top_k, top_p, random)
        yield token
        stream.append(token)


@torch.inference_mode()
def next_logits(model: LanguageModel, stream: list[int]) -> Iterator[Tensor]:
    """Logits (V,) of the next token, on the CPU. The caller appends a token to the stream before each further one."""
    hidden = _recurrent_hidden(model, stream) if isinstance(model, Recurrent) else _windowed_hidden(model, stream)
    for last in hidden:
        yield model.logits(last).float().cpu()


def _windowed_hidden(model: LanguageModel, stream: list[int]) -> Iterator[Tensor]:
    """The hidden state of the last token, for a model that takes a window and the history before it."""
    assert isinstance(model, Transformer)
    device = model.table.weight.device
    table, window, history = model.table, model.window, model.history
    cache, cached_start = KeyValueCache(), -1
    while True:
        start = (len(stream) - 1) // window * window
        if start != cached_start:
            cache, cached_start = KeyValueCache(), start
            past = stream[max(0, start - history) : start]
            past = [-1] * (history - len(past)) + past
            slots = model.make_slots(torch.tensor([past], dtype=torch.int64, device=device))
            inputs = torch.cat([slots, table(torch.tensor([stream[start:]], device=device))], dim=1)
            hidden = model.hidden(inputs, cache)
        else:
            inputs = table(torch.tensor([stream[-1:]], device=device))
            hidden = model.hidden(inputs, cache, start=model.slots + len(stream) - 1 - start)
        yield hidden[0, -1]


def _recurrent_hidden(model: Recurrent, stream: list[int]) -> Iterator[Tensor]:
    """The hidden state of the last token. The current segment is recomputed for each token, from its initial state."""
    device, window = model.table.weight.device, model.window
    state, start = model.start(1), 0
    while True:
        while len(stream) - start > window:
            segment = torch.tensor([stream[start : start + window]], device=device)
            _, state, _ = model.segment(segment, state)
            start += window
        hidden, _, _ = model.segment(torch.tensor([stream[start:]], device=device), state)
        yield hidden[0, -1]


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


def _check_options(tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int) -> None:
    if tokens < 1:
        raise UserError(f"tokens must be at least 1, got {tokens}")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed must be from 0 to 2^63 − 1, got {seed}")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be a number of 0 or above, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {top_p}")


def _read_prompt(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt from {file}: {error}") from None
