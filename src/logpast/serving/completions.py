"""A request for completions: its parameters, and the steps that answer it."""

from __future__ import annotations

import codecs
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from torch import Tensor

from logpast.data import Tokenizer
from logpast.generation import UntilStop
from logpast.models import LanguageModel
from logpast.models.sampling import Sampling, generators
from logpast.models.stream import Stream
from logpast.serving.engine import OutOfTime, Refused, Steps
from logpast.util.errors import suggest

MAX_CHOICES = 16  # texts in one answer: prompts × n
MAX_STOPS = 16
READ = 1024  # tokens of a prompt that are read in one step
#: parameters of OpenAI's that we lack -> the value that changes nothing
NEUTRAL = {"best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "suffix": ""}

Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Prompts = Annotated[list[str] | list[Count] | list[list[Count]], Field(min_length=1)]
Stops = Annotated[list[Text], Field(max_length=MAX_STOPS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(BaseModel):
    """The parameters. A description says which values a parameter may have."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="a string, the name of the model")
    prompt: str | Prompts = Field(
        "", description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    max_tokens: Count = Field(16, description="a whole number, at least 0")
    temperature: float = Field(1.0, ge=0, description="a number, at least 0")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: int | None = Field(None, ge=1, description="a whole number, at least 1")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")
    stop: Text | Stops = Field([], description=f"a text, or a list of at most {MAX_STOPS} texts, none of them empty")
    seed: int = Field(
        default_factory=lambda: secrets.randbits(62), ge=0, lt=2**62, description="a whole number from 0 to 2^62 - 1"
    )
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(StreamOptions(), description='an object such as {"include_usage": true}')
    echo: bool = Field(False, description="true or false")
    logprobs: int | None = Field(None, ge=0, le=5, description="a whole number from 0 to 5")
    user: str | None = Field(None, description="a string")
    store: bool = Field(False, description="true or false")
    previous_response_id: str | None = Field(None, description="the id of a response, a string")

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]  # type: ignore[return-value, list-item]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def parse(body: bytes) -> Request:
    """A request from its JSON; Refused names the first parameter that is wrong."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused('the body must be a JSON object, such as {"prompt": "Once upon a time"}')
    given = {name: value for name, value in given.items() if value is not None}  # null stands for the default
    for name, neutral in NEUTRAL.items():
        if given.pop(name, neutral) != neutral:
            raise Refused(f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    try:
        request = Request.model_validate(given)
    except ValidationError as error:
        raise _refused(error) from None
    choices = len(request.prompts) * request.n
    if choices > MAX_CHOICES:
        raise Refused(f"{choices} texts are too many; prompts times n may be {MAX_CHOICES}", param="n")
    if request.echo and request.logprobs is not None:
        raise Refused("logprobs of the prompt are not supported; leave echo or logprobs out", param="echo")
    if request.store and choices > 1:
        raise Refused("store is for one prompt and n = 1; leave it out", param="store")
    return request


def _refused(error: ValidationError) -> Refused:
    name = str(error.errors()[0]["loc"][0])
    known = {key: each.description for key, each in Request.model_fields.items()}
    if name not in known:
        return Refused(f"unknown parameter {name[:50]!r}; {suggest(name[:50], list(known))}", param=name[:50])
    return Refused(f"{name} must be {known[name]}", param=name)


@dataclass(frozen=True)
class Piece:
    """Some text of an answer."""

    index: int
    text: str
    finish: str | None = None
    """why the text ends here: stop or length"""
    logprobs: list[TokenLogprobs] | None = None


class TokenLogprobs(NamedTuple):
    """A generated token; offset is where it starts in the text, in characters."""

    token: str
    logprob: float
    top: dict[str, float]
    offset: int


class Done(NamedTuple):
    """The end of an answer: the last pieces, and the numbers of tokens."""

    pieces: list[Piece]
    prompt_tokens: int
    completion_tokens: int


class Choice:
    """One generated text."""

    def __init__(self, index: int, stop: list[str]) -> None:
        self.index, self.text, self.ended = index, "", False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        self._until_stop, self._decoded = UntilStop(stop), 0
        self._logprobs = list[TokenLogprobs]()

    def add(self, token: bytes, logprobs: TokenLogprobs | None) -> Piece:
        """Append a token. The piece has the text that is now certain."""
        if logprobs:
            self._logprobs.append(logprobs._replace(offset=self._decoded))
        text = self._decoder.decode(token)
        self._decoded += len(text)
        return self._piece(self._until_stop.add(text))

    def end(self) -> Piece:
        """All that was held back."""
        text = self._until_stop.add(self._decoder.decode(b"", final=True))
        return self._piece(text + self._until_stop.held, "length")

    def _piece(self, text: str, finish: str | None = None) -> Piece:
        self.text += text
        if self._until_stop.stopped:
            finish = "stop"
        self.ended = finish is not None
        ready = [each for each in self._logprobs if each.offset < len(self.text)]
        del self._logprobs[: len(ready)]
        return Piece(self.index, text, finish, ready)


@dataclass
class Completions:
    """Answers requests with a model. All but `encode` runs in one thread.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        base: the state of the text that completions continue unless they continue an earlier answer.
        kept: how many states of earlier texts are kept; the least recently used is dropped first.
        prompt_tokens: the most tokens of all prompts of a request.
        tokens: the most tokens to generate.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    base: dict[str, Tensor]
    kept: int
    prompt_tokens: int
    tokens: int
    states: OrderedDict[str, dict[str, Tensor]] = field(default_factory=OrderedDict)

    def encode(self, request: Request) -> list[list[int]]:
        """The token ids of the prompts; Refused if they, or what shall be generated, are too many."""
        if request.max_tokens > self.tokens:
            raise Refused(f"max_tokens may be {self.tokens} here", param="max_tokens")
        encode = self.tokenizer.encode
        found = [encode(each).tolist() if isinstance(each, str) else each for each in request.prompts]
        total, size = sum(map(len, found)), self.tokenizer.size
        if total > self.prompt_tokens:
            raise Refused(
                f"the prompt has {total} tokens, and may have {self.prompt_tokens} here; send it in several requests, "
                "each with store and the previous_response_id of the one before",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        if not all(each < size for ids in found for each in ids):
            raise Refused(f"prompt has token ids from {size}, and the vocabulary ends before", param="prompt")
        return found

    def steps(self, response: str, request: Request, prompts: list[list[int]]) -> Steps:
        """The pieces of the answer as they come, and Done at the end. One step reads a part of a prompt, or samples one
        token of each text.
        """
        choices = [Choice(index, request.stops) for index in range(len(prompts) * request.n)]
        generated = 0
        try:
            for number, ids in enumerate(prompts):
                group = choices[number * request.n :][: request.n]
                stream = self._open(request.previous_response_id)
                for start in range(0, len(ids), READ):
                    stream.push(ids[start : start + READ])
                    yield None
                if request.store:
                    before = stream.state()
                if request.echo:
                    yield [Piece(choice.index, self._text(request.prompts[number])) for choice in group]
                for pieces in self._generate(request, stream.select([0] * request.n), group):
                    generated += len(pieces)
                    yield [piece for piece in pieces if piece.text or piece.finish or piece.logprobs] or None
        except OutOfTime:
            if not generated:
                raise
        last = [choice.end() for choice in choices if not choice.ended]
        if request.store:
            self._keep(response, before, choices[0].text)
        return Done(last, sum(map(len, prompts)), generated)

    def _generate(self, request: Request, stream: Stream, choices: list[Choice]) -> Iterator[list[Piece]]:
        """The piece of each unfinished choice, token by token."""
        randoms = generators(request.seed, len(choices))
        allowed = torch.from_numpy(self.tokenizer.is_text)
        sampling = Sampling(request.temperature, request.top_k, request.top_p, allowed)
        for _ in range(request.max_tokens):
            tokens, logits = stream.step(randoms, sampling)
            yield [
                choice.add(self.tokenizer.decode_bytes([token]), self._logprobs(token, row, request.logprobs))
                for choice, token, row in zip(choices, tokens, logits, strict=True)
                if not choice.ended
            ]
            if all(choice.ended for choice in choices):
                return

    def _logprobs(self, token: int, logits: Tensor, top: int | None) -> TokenLogprobs | None:
        if top is None:
            return None
        log_probs = logits.log_softmax(0)
        best = log_probs[: self.tokenizer.size].topk(top)  # the model's vocabulary may be larger
        names = {self._name(i): p for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)}
        return TokenLogprobs(self._name(token), float(log_probs[token]), names, 0)

    def _name(self, token: int) -> str:
        """A token's text, or as OpenAI writes bytes that are none."""
        found = self.tokenizer.decode_bytes([token])
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _open(self, previous: str | None) -> Stream:
        """The text that a completion continues."""
        if previous is None:
            return Stream.from_state(self.model, self.base)
        if previous not in self.states:
            raise Refused(
                f"no text is kept for previous_response_id {previous[:50]!r}; it was not stored, or {self.kept} others "
                "were used since: send the text again",
                status=404, param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        self.states.move_to_end(previous)
        return Stream.from_state(self.model, self.states[previous])

    def _keep(self, response: str, before: dict[str, Tensor], text: str) -> None:
        """Keep the state after a prompt and the text of its answer."""
        stream = Stream.from_state(self.model, before)
        stream.append(self.tokenizer.encode(text), own=True)
        self.states[response] = stream.state()
        while len(self.states) > self.kept:
            self.states.popitem(last=False)
