"""Runners: processes on this machine, and Ray clusters."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logpast.sweeps import runners
from logpast.sweeps.runners import Cluster, Processes
from logpast.util.errors import UserError

CHILD = """
import os, signal, sys, time
job = sys.stdin.readline()
print("a word", file=sys.stderr)
if "row" in job: print('{"scores": 1}')
if "bad" in job: sys.exit("logpast: a bad setting; fix it")
if "hog" in job: os.kill(os.getpid(), signal.SIGKILL)
if "long" in job: time.sleep(60)
if "orphan" in job: sys.exit(f"read {len(sys.stdin.read())}")
"""


def test_a_process_that_exits_before_reading_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "COMMAND", [sys.executable, "-c", "import sys; sys.exit('logpast: too soon')"])
    start = subprocess.Popen

    def ended(*given: Any, **words: Any) -> subprocess.Popen[bytes]:
        (process := start(*given, **words)).wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", ended)
    with pytest.raises(RuntimeError, match=r"^too soon$"):
        Processes(1).start({"log": str(tmp_path / "log")}).result(20)


def test_each_cell_has_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "COMMAND", [sys.executable, "-c", CHILD])
    runner = Processes(5)
    names = ("row", "bad", "hog", "long", "orphan")
    cases = {name: runner.start({"name": name, "log": str(tmp_path / f"{name}.log")}) for name in names}
    assert cases["row"].result(20) == {"scores": 1}
    assert (tmp_path / "row.log").read_text() == "a word\n"
    for name, problem in (("bad", "^a bad setting; fix it$"), ("hog", r"killed by SIGKILL \(out of memory\?\)")):
        with pytest.raises(RuntimeError, match=problem):
            cases[name].result(20)
    assert len(runner.free) == 3
    assert not cases["orphan"].done()  # its standard input is still open
    runner.stop()
    for name in ("long", "orphan"):
        with pytest.raises(RuntimeError, match="killed by SIGTERM"):
            cases[name].result(20)
    assert sorted(map(id, runner.free)) == sorted({id(environment) for environment in runner.free})
    runner.close()


def test_gpus_and_cores_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(runners.torch.cuda, "device_count", lambda: 2)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in Processes(None).free] == ["4", "6"]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in Processes(3).free] == ["4", "6", "4"]
    monkeypatch.setattr(runners.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(runners.os, "cpu_count", lambda: 8)
    assert Processes(None).free == [{}]
    assert Processes(3).free == [{"OMP_NUM_THREADS": "2"}] * 3


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"logpast\[ray\]"):
        Cluster("local", 1, None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "auto", "", "nowhere"])
def test_a_cluster_that_does_not_answer_is_reported_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("it would try for minutes"))
    if address == "auto":
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=f"'{address}' .*--address local"):
        Cluster(address, 1, None)


def test_cells_too_large_for_every_machine_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    fake = SimpleNamespace(
        init=lambda *_, **__: None, cluster_resources=lambda: {"CPU": 8.0}, nodes=lambda: nodes,
        shutdown=lambda: closed.append(True), remote=lambda _: SimpleNamespace(options=lambda **_: None),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(runners, "_check_reachable", lambda _: None)
    for cpus, gpus in ((6, None), (1, 1)):
        with pytest.raises(UserError, match=f"cpus: {cpus} and gpus: {gpus or 0}"):
            Cluster("local", cpus, gpus)
    assert closed == [True, True]
    assert Cluster("there:1", 6, None).max_started == 2  # it may grow
    assert "no machine of the cluster is large enough for a cell with cpus: 6" in capsys.readouterr().err
    Cluster("local", 4, None)
    assert capsys.readouterr().err == ""
