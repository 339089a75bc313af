"""The command: it says where it listens, serves until a signal comes, and reports mistakes in one line."""

import http.client
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logpast.cli import main
from logpast.generation import generate
from logpast.serving.serve import serve
from logpast.util.errors import UserError
from serving.helpers import answers, while_serving

pytest.importorskip("uvicorn")


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_line_at_the_start_has_a_command_to_try(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def try_it(port: int) -> str:
        (line,) = capsys.readouterr().out.splitlines()
        assert f"http://127.0.0.1:{port}/v1" in line
        return subprocess.check_output(shlex.split(line.partition("try: ")[2]), text=True)

    assert json.loads(while_serving(try_it, run))["usage"]["completion_tokens"] == 50
    assert capsys.readouterr().err == "logpast: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_completions_continue_the_text_of_a_file_or_a_state(
    number: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signals stop the server while it answers."""
    openai = pytest.importorskip("openai")
    (tmp_path / "book.txt").write_text("And God said, Let there be light. " * 9)
    expected = generate(
        run, prompt=" And", follow=tmp_path / "book.txt", save_state=tmp_path / "book.state", tokens=20, seed=5,
        top_p=0.9, echo=False, device="cpu",
    )  # fmt: skip

    def ask(port: int) -> str:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key", max_retries=0)
        settings = {"model": run.name, "prompt": "", "max_tokens": 20, "seed": 5, "top_p": 0.9}
        endless = client.completions.create(**settings | {"max_tokens": 4000, "stream": True})
        next(iter(endless))
        if number == signal.SIGHUP:
            settings["prompt"] = " And"
        return str(client.completions.create(**settings).choices[0].text)

    by_file = (
        ("--load_state", tmp_path / "book.state") if number == signal.SIGTERM else ("--follow", tmp_path / "book.txt")
    )
    assert while_serving(ask, run, *by_file, "--api_key", "key", number=number) == expected
    assert "-H 'Authorization: Bearer KEY'" in capsys.readouterr().out


def test_a_port_in_use_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(SystemExit) as stopped:
            main(["serve", str(run), "--port", str(port)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(port) in line
    for host in ("no.such.host", "no..host"):
        with pytest.raises(UserError, match=re.escape(host)):
            serve(run, host=host)


def test_other_machines_are_let_in_with_a_warning_or_a_key(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    while_serving(answers, run, "--host", "0.0.0.0")
    assert "warning" in capsys.readouterr().err
    while_serving(answers, run, "--host", "0.0.0.0", "--api_key", "key")
    assert "warning" not in capsys.readouterr().err


def test_the_key_may_be_in_the_environment(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGPAST_API_KEY", "key")

    def ask(port: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v1/models")
        return connection.getresponse().status

    assert while_serving(ask, run) == 401


def test_an_empty_key_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="api_key"):
        serve(run, host="no..host", api_key="")  # a server that started anyway would not end
    monkeypatch.setenv("LOGPAST_API_KEY", "")
    with pytest.raises(UserError, match="LOGPAST_API_KEY"):
        serve(run, host="no..host")


def test_missing_packages_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"uvicorn .*logpast\[serve\]"):
        serve(run)


@pytest.mark.parametrize(
    "wrong",
    [{"port": 65536}, {"max_active": 0}, {"max_waiting": -1}, {"max_seconds": 0.0}, {"recall_limit": 2.0},
     {"follow": Path("nowhere")}, {"load_state": Path("nowhere")}],
)  # fmt: skip
def test_wrong_options_are_named(wrong: dict[str, Any], run: Path) -> None:
    key, value = next(iter(wrong.items()))
    with pytest.raises(UserError, match="nowhere" if value == Path("nowhere") else key):
        serve(run, **{"port": 0} | wrong)
