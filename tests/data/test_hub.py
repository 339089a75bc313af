"""The Hugging Face hub: without a network the error comes at once, and a slow network is given time."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logpast.data import hub
from logpast.data.corpora import find
from logpast.data.prepare import prepare
from logpast.util.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOGPAST_DATA", "HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT", *hub.OFFLINE):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    cached = hub.connection_problem
    cached.cache_clear()
    yield
    cached.cache_clear()


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed(server: str) -> str:
    """The address of a port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_without_a_network_the_error_comes_once_and_without_retries(
    closed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)  # as `datasets` does before it tries again
    monkeypatch.setenv("HF_ENDPOINT", closed)
    connect, tries = hub._connect, list[int]()
    monkeypatch.setattr(hub, "_connect", lambda host, port, seconds: tries.append(port) or connect(host, port, seconds))
    with pytest.raises(UserError, match=r"wiki\.train\.raw .*LOGPAST_DATA .*not set.*127\.0\.0\.1 cannot .* refused"):
        prepare(["wikitext103"], tmp_path / "out")
    assert len(tries) == 1  # for three splits
    with pytest.raises(UserError, match=r"pg19/test/\*\.txt .*LOGPAST_DATA .*cannot be reached"):
        find("pg19:test").probe()
    assert slept == []


@pytest.mark.parametrize("setting", hub.OFFLINE)
def test_in_offline_mode_the_network_is_not_waited_for(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting, "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # set when `datasets` is imported

    def waited_for(*server: Any) -> None:
        raise AssertionError("the connection was waited for")

    monkeypatch.setattr(hub, "connection_problem", waited_for)
    with pytest.raises(UserError, match=rf"wiki\.test\.raw .*LOGPAST_DATA .*{setting}=1"):
        find("wikitext103:test").probe()


@pytest.mark.parametrize(("reachable", "offline"), [(True, False), (False, True)])
def test_a_cached_copy_is_used_if_the_hub_cannot_be_reached(
    reachable: bool, offline: bool, server: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server if reachable else closed)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **options: datasets.config.HF_HUB_OFFLINE)
    assert hub.load("a/b", split="test", stream=False) is offline
    assert datasets.config.HF_HUB_OFFLINE is False


def test_a_network_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **options: threading.Event().wait())
    monkeypatch.setattr(hub, "SECONDS", 0.02)
    assert "did not answer within 0.02 s" in str(hub.connection_problem("https://hub.invalid", 0))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.03")
    assert "did not answer within 0.03 s" in str(hub.connection_problem("https://hub.invalid", 1))


def test_a_slow_network_is_waited_for(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = socket.getaddrinfo

    def slow(*host: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return lookup(*host, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert hub.connection_problem(server, 0) is None


def test_one_address_that_answers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, 443)) for ip in ("2001:db8::1", "192.0.2.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **options: addresses)

    def connect(address: tuple[str, int], seconds: float) -> socket.socket:
        if ":" in address[0]:
            threading.Event().wait()
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    assert hub.connection_problem("https://hub.invalid", 0) is None


def test_a_proxy_stands_in_for_the_hub(server: str, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", server)
    assert hub.connection_problem("https://hub.invalid", 0) is None
    monkeypatch.setenv("https_proxy", closed)
    assert "127.0.0.1 cannot be reached" in str(hub.connection_problem("https://hub.invalid", 1))
    monkeypatch.setenv("https_proxy", server)
    monkeypatch.setenv("no_proxy", "hub.invalid")
    assert "hub.invalid cannot be reached" in str(hub.connection_problem("https://hub.invalid", 2))
