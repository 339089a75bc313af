"""Starts, waits for and stops what the tests of servers share."""

import http.client
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logpast.cli import main

Serving = Callable[..., Any]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def while_serving(act: Callable[[int], Any], *words: str | Path, number: int = signal.SIGINT) -> Any:
    """Run the command, do something while it serves, and stop it with a signal. Returns what `act` returns."""
    port, found = free_port(), list[Any]()

    def client() -> None:
        try:
            wait_for(lambda: answers(port), seconds=60)
            found.append(act(port))
        except BaseException as error:
            found.append(error)
        finally:
            signal.raise_signal(number)

    thread = threading.Thread(target=client, daemon=True)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *map(str, words), "--port", str(port), "--device", "cpu"])
    thread.join()
    assert stopped.value.code == 130
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
