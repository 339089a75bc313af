"""Devices, and the revision of the code."""

import subprocess
from pathlib import Path

import pytest
import torch

import logpast
from logpast.util import environment
from logpast.util.environment import code_sha256, describe, pick_device, revision
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
