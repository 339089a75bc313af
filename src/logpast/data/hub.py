"""Datasets of the Hugging Face hub, with the `datasets` library, which retries for half a minute without a network.

So the connection is checked first. Where the hub cannot be reached, as in its offline mode (HF_HUB_OFFLINE), only
datasets in its cache are found.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from logpast.util.threads import in_thread

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
SECONDS = 2.0  # to connect, unless HF_HUB_ETAG_TIMEOUT says otherwise
PORTS = {"http": 80, "https": 443}


class Unreachable(Exception):
    """The hub could not be reached, or did not have the dataset; says why."""


def load(*dataset: str, split: str, stream: bool) -> Any:
    """A split of a dataset. Raises ImportError without the library `datasets`, else Unreachable."""
    checking = in_thread(problem)
    import datasets  # takes a second, so the connection is checked meanwhile

    by_choice = datasets.config.HF_HUB_OFFLINE
    unreachable = None if by_choice else checking.result()
    try:
        with _offline(datasets.config, by_choice or unreachable is not None):
            return datasets.load_dataset(*dataset, split=split, streaming=stream)
    except Exception as error:  # the hub and the network may raise anything
        if by_choice:
            setting = ", ".join(f"{name}={os.environ[name]}" for name in OFFLINE if name in os.environ)
            raise Unreachable(f"its offline mode is on, {setting}, and its cache has no copy") from error
        raise Unreachable(unreachable or describe(error)) from error


def describe(error: Exception) -> str:
    """An error of the network or of a library, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def _offline(config: Any, offline: bool) -> Iterator[None]:
    """Set the offline mode of `datasets`."""
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def problem() -> str | None:
    """Why the hub cannot be reached; None if it can."""
    return connection_problem(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", int(time.monotonic() // 60))


@functools.lru_cache(maxsize=1)
def connection_problem(endpoint: str, minute: int) -> str | None:
    """Why no connection to a server, or to its proxy, can be made; None if it can. Tried once per minute."""
    server, proxies = urlsplit(endpoint), getproxies()
    if not server.hostname:
        return None  # `datasets` says what is wrong with it
    proxy = proxies.get(server.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(server.hostname):
        server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    host, port = server.hostname or "", server.port or PORTS.get(server.scheme, 1080)
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    try:
        in_thread(lambda: _connect(host, port, seconds)).result(seconds)  # looking up a name may take longer
    except (TimeoutError, futures.TimeoutError):
        return (
            f"{host} did not answer within {seconds:g} s; for a slow network, set HF_HUB_ETAG_TIMEOUT to more seconds"
        )
    except OSError as error:
        return f"{host} cannot be reached: {error.strerror}"
    return None


def _connect(host: str, port: int, seconds: float) -> None:
    """Try all addresses at once: connections by IPv6 may hang where those by IPv4 work."""
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    tries = [in_thread(partial(socket.create_connection, (address, port), seconds)) for address in addresses]
    problems = []
    for one in futures.as_completed(tries):
        if not (problem := one.exception()):
            one.result().close()
            return
        problems.append(problem)
    raise problems[0]
