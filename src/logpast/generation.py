"""Text out, token by token.

The text so far is a stream like any other: windows start at multiples of m, and the slots before the window are
made when it opens. So the probability of each token is the one that scoring would give it. Within a window, keys
and values are cached; when it is full, the next one opens with the memory of all that came before.
"""

from __future__ import annotations

import codecs
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from logpast.models import LanguageModel, Recurrent, Transformer
from logpast.models.decoder import KeyValueCache
from logpast.training.checkpoint import find_checkpoint
from logpast.util.environment import pick_device
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
    """Write on from a prompt with a trained model; text appears as it is made.

    Examples:
        logpast generate --checkpoint runs/demo --prompt "In the beginning"
        logpast generate --checkpoint runs/demo --prompt_file chapter.txt --tokens 500 --top_p 0.95
        logpast generate --checkpoint runs/demo --temperature 0        # always the likeliest token

    Args:
        checkpoint: a run folder (its best checkpoint is taken) or one checkpoints/step-… folder.
        prompt: text to go on from; may be empty.
        prompt_file: read the prompt from this file ("-" is standard input); it may be as long as a book.
        tokens: how many tokens to write.
        temperature: below 1 is more careful, above 1 bolder; 0 takes the likeliest token every time.
        top_k: choose among the k likeliest tokens only.
        top_p: choose among the likeliest tokens that together have this probability.
        seed: the same seed gives the same text on the same machine.
        device: auto, cpu, cuda or mps.

    Returns:
        The prompt and what was written.
    """
    _check(tokens, temperature, top_k, top_p, seed)
    if prompt_file is not None:
        if prompt:
            raise UserError("give prompt or prompt_file, not both")
        prompt = _read(prompt_file)
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are no UTF-8
    found = find_checkpoint(checkpoint)
    tokenizer = found.load_tokenizer()
    model = found.load_model().to(pick_device(device)).eval()
    text = prompt
    print(prompt, end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may span several tokens
    ids = [int(i) for i in tokenizer.encode(prompt)]
    allowed = torch.ones(tokenizer.size, dtype=torch.bool)
    allowed[tokenizer.eot] = False  # no text has it inside, so no model has learned when to say it
    stream = continuations(model, [tokenizer.eot, *ids], allowed, temperature, top_k, top_p, seed)
    for number, token in enumerate(stream, start=1):
        piece = decoder.decode(tokenizer.decode_bytes([token]), final=number == tokens)
        text += piece
        print(piece, end="", flush=True)
        if number == tokens:
            break
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
    """Endlessly the next token of a stream, which begins with end-of-text and grows by what is drawn."""
    random = torch.Generator().manual_seed(seed)
    for logits in next_logits(model, stream):
        if logits.isnan().any():
            raise UserError("the model gives no numbers: its training diverged; take an earlier checkpoint")
        logits = logits[: len(allowed)].masked_fill(~allowed, -torch.inf)
        token = _draw(logits, temperature, top_k, top_p, random)
        yield token
        stream.append(token)


@torch.inference_mode()
def next_logits(model: LanguageModel, stream: list[int]) -> Iterator[Tensor]:
    """Logits (V,) of the token after the stream, on the CPU; the caller appends a token before asking for more."""
    hidden = _read_on(model, stream) if isinstance(model, Recurrent) else _look_back(model, stream)
    for last in hidden:
        yield model.logits(last).float().cpu()


def _look_back(model: LanguageModel, stream: list[int]) -> Iterator[Tensor]:
    assert isinstance(model, Transformer)
    device = model.table.weight.device
    table, window, history = model.table, model.window, model.history
    cache, opened = KeyValueCache(), -1
    while True:
        start = (len(stream) - 1) // window * window
        if start != opened:
            cache, opened = KeyValueCache(), start
            past = stream[max(0, start - history) : start]
            past = [-1] * (history - len(past)) + past
            slots = model.front(torch.tensor([past], dtype=torch.int64, device=device))
            seen = torch.cat([slots, table(torch.tensor([stream[start:]], device=device))], dim=1)
            hidden = model.hidden(seen, cache)
        else:
            seen = table(torch.tensor([stream[-1:]], device=device))
            hidden = model.hidden(seen, cache, start=model.slots + len(stream) - 1 - start)
        yield hidden[0, -1]


def _read_on(model: Recurrent, stream: list[int]) -> Iterator[Tensor]:
    """A segment that grows is read anew with each token, from the state that it began with."""
    device, window = model.table.weight.device, model.window
    state, start = model.start(1), 0
    while True:
        while len(stream) - start > window:
            segment = torch.tensor([stream[start : start + window]], device=device)
            _, state, _ = model.segment(segment, state)
            start += window
        hidden, _, _ = model.segment(torch.tensor([stream[start:]], device=device), state)
        yield hidden[0, -1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator) -> int:
    if temperature < 1e-6:  # also where dividing by it would overflow
        return int(logits.argmax())
    probabilities, order = (logits.double() / temperature).softmax(0).sort(descending=True, stable=True)
    if top_k is not None:
        probabilities[top_k:] = 0
    if top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities[before >= top_p] = 0  # the first one stays, whatever its probability
    return int(order[torch.multinomial(probabilities, 1, generator=random)])


def _check(tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int) -> None:
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


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt from {file}: {error}") from None
