"""`logpast serve`: answer requests for completions over HTTP."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from logpast.generation import ensure_readable, load, open_stream
from logpast.models.sampling import generators
from logpast.util.environment import cpu_threads, thread_count
from logpast.util.errors import UserError
from logpast.util.signals import SIGHUP, handle_signals
from logpast.util.validation import Count, PositiveFloat, PositiveInt, Share, validate_arguments

if TYPE_CHECKING:
    import uvicorn

    from logpast.serving.app import Api
    from logpast.serving.engine import Engine

KEY = "LOGPAST_API_KEY"
CONNECTIONS = 512  # at a time
STOPPING_SECONDS = 5

Port = Annotated[int, Ge(0), Le(65535)]


@validate_arguments
def serve(
    checkpoint: Path,
    host: str = "127.0.0.1",
    port: Port = 8000,
    api_key: str | None = None,
    follow: Path | None = None,
    load_state: Path | None = None,
    recall_limit: Share | None = None,
    recall_own: bool = False,
    device: str = "auto",
    max_active: PositiveInt = 8,
    max_waiting: Count = 64,
    max_bytes: PositiveInt = 4_000_000,
    max_prompt_tokens: PositiveInt = 500_000,
    max_tokens: PositiveInt = 4096,
    max_seconds: PositiveFloat = 300,
    max_stored: Count = 64,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface for completions. Ctrl-C stops it.

    With --follow or --load_state, every completion continues that text. A request may also continue an earlier one:
    only the new text is sent. Needs the extra serve: pip install 'logpast[serve]'.

    Examples:
        logpast serve runs/mine
        logpast serve attached/mine --port 8080 --follow book.txt
        logpast serve runs/mine --host 0.0.0.0 --api_key secret

    Args:
        checkpoint: a run folder (its best checkpoint is used), one checkpoints/step-… folder, or a folder that
            `logpast attach` wrote.
        host: the address to listen on; by default only programs on this machine can connect.
        port: the port to listen on; 0 takes a free one.
        api_key: clients must send this key; by default the environment variable LOGPAST_API_KEY, else none is needed.
        follow: read this file before the first request; every completion continues it.
        load_state: every completion continues the text whose state is in this file, which `logpast generate
            --save_state` wrote with the same model.
        recall_limit: of a model with recall, how much of each prediction may come from copies, above 0 and at most 1;
            by default as trained.
        recall_own: whether recall also copies what the model itself has written, in this answer and in the answers that
            a request continues (previous_response_id).
        device: auto, cpu, cuda or mps.
        max_active: requests that are computed at a time; they take turns, one token each.
        max_waiting: further requests that may wait; more are refused with status 503.
        max_bytes: the largest request.
        max_prompt_tokens: the most tokens in a request's prompts.
        max_tokens: the most tokens that a request may generate in each text.
        max_seconds: the time for one request. When it is over, the answer ends with what there is.
        max_stored: states of texts that are kept for requests that continue them; the one that was not used for the
            longest time is dropped first.
    """
    _require_packages()
    from logpast.serving.app import Api
    from logpast.serving.completions import Completions
    from logpast.serving.engine import Engine

    key = os.environ.get(KEY) if api_key is None else api_key
    if key == "":  # as a variable that is not set gives
        raise UserError(f"--api_key and {KEY} must not be empty; give a key, or leave them out")
    listening = _listen(host, port)
    with listening:
        if follow is not None:
            ensure_readable(follow)
        model, tokenizer = load(checkpoint, device, recall_limit, recall_own)
        threads = thread_count(model.parameter_count())
        with cpu_threads(threads):
            stream = open_stream(model, tokenizer, load_state, follow)
            stream.select([0]).step(generators(0, 1))  # takes seconds once, and fails if the model diverged
        completions = Completions(model, tokenizer, stream.state(), max_stored, max_prompt_tokens, max_tokens)
        engine = Engine(max_active, max_waiting, threads)
        api = Api(completions, engine, checkpoint.resolve().name, max_bytes, max_seconds, key)
        server = make_server(api, engine)
        _print_address(listening, api.name, key)
        with handle_signals(lambda number: signal.raise_signal(signal.SIGTERM), SIGHUP):  # uvicorn handles that one
            server.run(sockets=[listening])


def make_server(api: Api, engine: Engine) -> uvicorn.Server:
    """An HTTP server that, when it stops, ends what the engine does."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.close()
            await super().shutdown(sockets)
            engine.join(STOPPING_SECONDS)

    config = uvicorn.Config(
        api.app(), http="h11", ws="none", loop="asyncio", lifespan="off", log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=STOPPING_SECONDS,
    )  # fmt: skip
    return Server(config)


def _require_packages() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"{error.name} is not installed; pip install 'logpast[serve]'") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (")[0]
        raise UserError(
            f"cannot listen on {host}, port {port}: {reason}; give another --host or --port (0: any free one)"
        ) from None


def _print_address(listening: socket.socket, name: str, key: str | None) -> None:
    address, port = listening.getsockname()[:2]
    local = ipaddress.ip_address(address).is_loopback
    if not (local or key):
        print(f"logpast: warning: whoever reaches {address} can use the model; give an --api_key", file=sys.stderr)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    header = " -H 'Authorization: Bearer KEY'" if key else ""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 50})
    print(f"serving {name} on {url}/v1; try: curl {url}/v1/completions{header} -d '{body}'", flush=True)
