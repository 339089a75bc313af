"""HTTP: OpenAI's requests, answers and errors."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from logpast.serving.completions import Completions, Done, Piece, Request, TokenLogprobs, parse
from logpast.serving.engine import Engine, Job, Refused, Steps
from logpast.util.errors import UserError

T = TypeVar("T")
Events = AsyncGenerator[list[Piece] | Done, None]

DRAINED = 8  # times the limit: so much of a body that is too large is read, for its sender to see the answer
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not hold back what is streamed
CLOSE = {"connection": "close"}  # the rest of the body was not read
HEADERS = {401: {"www-authenticate": "Bearer"}, 408: CLOSE, 413: CLOSE, 503: {"retry-after": "1"}}
ERROR_TYPES = {401: "authentication_error", 403: "permission_error"}


class Api:
    """The endpoints.

    Args:
        completions: the model.
        engine: where it computes.
        name: of the model, for clients.
        max_bytes: the largest body of a request.
        seconds: the time for a request, from its first byte to the last of the answer.
        api_key: what clients must send, if given.
    """

    def __init__(
        self, completions: Completions, engine: Engine, name: str, max_bytes: int, seconds: float, api_key: str | None
    ) -> None:
        self.completions, self.engine, self.name = completions, engine, name
        self.max_bytes, self.seconds, self.api_key = max_bytes, seconds, api_key
        self.started = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{name}", self.model),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]
        errors = (UserError, HTTPException, ClientDisconnect, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _failed))

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "model": self.name, **self.engine.counts()})

    async def models(self, request: HttpRequest) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def model(self, request: HttpRequest) -> Response:
        self._authorize(request)
        self._check_name(request.path_params["name"])
        return JSONResponse(self._about())

    async def complete(self, request: HttpRequest) -> Response:
        self._authorize(request)
        ends = time.monotonic() + self.seconds
        asked = parse(await self._body(request))
        self._check_name(asked.model)
        prompts = await run_in_threadpool(self.completions.encode, asked)
        answer = f"cmpl-{secrets.token_hex(12)}"
        about = {"id": answer, "object": "text_completion", "created": int(time.time()), "model": self.name}
        events = self._events(self.completions.steps(answer, asked, prompts), ends)
        if not asked.stream:
            return await _while_connected(request, _collect(events, asked, about))
        # an error before the first event has a status of its own
        first = await _while_connected(request, anext(events))
        if isinstance(first, Response):
            return first
        chunks = _chunks(first, events, asked, about)
        return StreamingResponse(chunks, media_type="text/event-stream", headers=STREAM_HEADERS)

    def _authorize(self, request: HttpRequest) -> None:
        """Refuse clients without the key, and web pages: they could use a server on their reader's machine."""
        if "origin" in request.headers:
            raise Refused("requests from web pages are refused", status=403, code="origin")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key is not None and not secrets.compare_digest(given.encode("latin-1"), self.api_key.encode()):
            raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model {name[:100]!r} here, only {self.name!r}"
            raise Refused(message, status=404, param="model", code="model_not_found")

    def _about(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "logpast"}

    async def _body(self, request: HttpRequest) -> bytes:
        size, body = 0, bytearray()
        try:
            with anyio.fail_after(self.seconds):
                async for block in request.stream():
                    size += len(block)
                    body += block[: max(0, self.max_bytes + 1 - len(body))]
                    if size > DRAINED * self.max_bytes:
                        break
        except TimeoutError:
            raise Refused("the body took too long to arrive", status=408, code="timeout") from None
        if size > self.max_bytes:
            raise Refused(f"the body is too large; it may have {self.max_bytes:,} bytes here", 413, code="too_large")
        return bytes(body)

    async def _events(self, steps: Steps, ends: float) -> Events:
        """The events of a job, which is cancelled when they are wanted no more."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        job = Job(steps, lambda event: loop.call_soon_threadsafe(queue.put_nowait, event), ends)
        self.engine.submit(job)
        try:
            while not isinstance(event := await queue.get(), Done):
                if isinstance(event, Exception):
                    raise event
                yield event
            yield event
        finally:
            job.cancelled = True


async def _while_connected(request: HttpRequest, work: Awaitable[T]) -> T | Response:
    """The result of the work, which is cancelled when the client leaves; then an answer that nobody reads."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        leaving.cancel()


async def _collect(events: Events, asked: Request, about: dict[str, Any]) -> Response:
    """The whole answer."""
    pieces = list[Piece]()
    async with aclosing(events):
        async for event in events:
            pieces += event.pieces if isinstance(event, Done) else event
    by_choice = dict[int, Piece]()
    for each in pieces:
        first = by_choice.get(each.index, Piece(each.index, ""))
        together = [*(first.logprobs or []), *(each.logprobs or [])]
        by_choice[each.index] = Piece(each.index, first.text + each.text, each.finish, together)
    choices = [_choice(by_choice[index], asked) for index in sorted(by_choice)]
    return JSONResponse({**about, "choices": choices, "usage": _usage(event)})


async def _chunks(
    first: list[Piece] | Done, events: Events, asked: Request, about: dict[str, Any]
) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    usage = {"usage": None} if asked.stream_options.include_usage else {}
    event = first
    async with aclosing(events):
        try:
            while True:
                for piece in event.pieces if isinstance(event, Done) else event:
                    yield _server_sent({**about, "choices": [_choice(piece, asked)], **usage})
                if isinstance(event, Done):
                    break
                event = await anext(events)
        except Exception as error:  # the status is already sent
            yield _server_sent(_error(error)[1])
            return
    if usage:
        yield _server_sent({**about, "choices": [], "usage": _usage(event)})
    yield "data: [DONE]\n\n"


def _server_sent(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _choice(piece: Piece, asked: Request) -> dict[str, Any]:
    logprobs = None if asked.logprobs is None else _logprobs(piece.logprobs or [])
    return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}


def _logprobs(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "tokens": [each.token for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [each.top for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def _usage(done: Any) -> dict[str, int]:
    prompt, completion = done.prompt_tokens, done.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def _failed(request: HttpRequest, error: Exception) -> Response:
    status, content = _error(error)
    return JSONResponse(content, status, HEADERS.get(status) or getattr(error, "headers", None))


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an error, and OpenAI's description."""
    status, message, param, code = 500, "internal error", None, None
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, UserError):
        status, message = getattr(error, "status", 400), str(error)
        param, code = getattr(error, "param", None), getattr(error, "code", None)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
