"""Devices, and the revision of the code."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import logpast
from logpast.util import environment
from logpast.util.environment import (
    code_sha256,
    cpu_threads,
    describe,
    memory_of,
    pick_device,
    revision,
    thread_count,
)
from logpast.util.errors import UserError


def test_auto_prefers_cuda_then_mps_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert pick_device("auto").type == expected


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "cuda"])
def test_unknown_and_missing_devices_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=name):
        pick_device(name)


def test_describe_names_the_machine_and_the_versions() -> None:
    facts = describe(torch.device("cpu"))
    assert facts["device"] == "cpu"
    assert facts["torch"] == torch.__version__
    assert facts["name"]


@pytest.mark.parametrize(
    ("parameters", "before", "threads"),
    [
        (999_999, None, 1),
        (1_000_000, None, 4),
        (10, {"device": "cpu", "threads": 3}, 3),
        (10**9, {"device": "cpu", "threads": 1}, 1),
        (10**9, {"device": "cpu", "threads": 64}, 8),
        (10, {"device": "cpu"}, 4),
        (10**9, {"device": "cuda", "threads": 1}, 4),
    ],
)
def test_threads_go_by_the_size_of_the_model_or_by_the_first_part_of_a_run(
    parameters: int, before: dict[str, Any] | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_count(parameters, before) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert thread_count(parameters, before) == 4


def test_the_number_of_threads_is_restored() -> None:
    with pytest.raises(ZeroDivisionError), cpu_threads(3):  # noqa: PT012
        assert torch.get_num_threads() == 3
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="free memory is read from Linux")
def test_memory_of_the_cpu_is_what_is_free() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total / 100 < memory_of(torch.device("cpu")) < 2 * total


def test_memory_limits_of_containers_and_their_parents_count(tmp_path: Path) -> None:
    for name, limit in {
        "a/b/memory.max": "max\n", "a/memory.max": "2000\n", "memory/c/memory.limit_in_bytes": "3000\n",
        "memory/memory.limit_in_bytes": "9000\n", "pids/a/memory.max": "1\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(limit)
    (tmp_path / "own").write_text("3:memory:/c\n2:pids:/a\n0::/a/b\n")
    assert sorted(environment._memory_limits(tmp_path, tmp_path / "own")) == [2000, 3000, 9000]
    assert environment._memory_limits(tmp_path, tmp_path / "none") == []


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in a repository of its own."""
    folder = tmp_path / "src" / "logpast"
    for name in ("util/environment.py", "models/base.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(environment, "PACKAGE", folder)
    monkeypatch.delenv("LOGPAST_REVISION", raising=False)
    return folder


def test_the_package_is_the_one_that_is_imported() -> None:
    assert environment.PACKAGE == Path(logpast.__file__).parent


def test_revision_is_the_commit_and_notes_changes_anywhere_in_the_package(package: Path) -> None:
    commit = git(package, "rev-parse", "HEAD").strip()
    assert revision() == commit
    (package / "models" / "base.py").write_text("changed")
    assert revision() == f"{commit}+changes"


def test_revision_is_the_version_inside_a_foreign_repository(package: Path) -> None:
    git(package, "rm", "--quiet", "--cached", "util/environment.py")
    assert revision() == f"version {logpast.__version__}"


def test_the_environment_variable_overrides_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGPAST_REVISION", "abc")
    assert revision() == "abc"


def test_code_sha256_depends_on_every_python_file_of_the_package(package: Path) -> None:
    before = code_sha256()
    (package / "notes.txt").write_text("no code")
    assert code_sha256() == before
    (package / "models" / "base.py").write_text("changed")
    assert code_sha256() != before
