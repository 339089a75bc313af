"""Atomic writes, locks and checks of files."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from logpast.util.errors import UserError
from logpast.util.files import (
    atomic_folder,
    atomic_write,
    ensure_all_writable,
    ensure_writable,
    exclusive_lock,
    remove_folder,
    remove_leftovers,
    sha256_of,
    temporary_path,
)


def test_atomic_write_follows_links_and_keeps_the_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real.md", tmp_path / "link.md"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    atomic_write(link, "new\r\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"new\r\n"
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, real]


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        atomic_write(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_device_is_written_to(tmp_path: Path) -> None:
    code = "import pathlib, logpast.util.files as files; files.atomic_write(pathlib.Path('/dev/stdout'), 'new')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("new", "")


def test_a_lock_is_refused_while_another_process_holds_it(tmp_path: Path) -> None:
    with (
        exclusive_lock(tmp_path),
        pytest.raises(UserError, match=rf"{tmp_path} \(process {os.getpid()} on .*--run"),
        exclusive_lock(tmp_path, "--run"),
    ):
        pass
    with exclusive_lock(tmp_path):
        pass


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSYS, None), (errno.EAGAIN, UserError), (errno.EBADF, OSError)])
def test_locks_on_file_systems_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception] | None
) -> None:
    """Some file systems of clusters have no locks; work continues there without them."""

    def flock(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if error is None:
        with exclusive_lock(tmp_path):
            return
    with pytest.raises(error), exclusive_lock(tmp_path):
        pass


def test_atomic_folder_removes_old_leftovers_of_its_own(tmp_path: Path) -> None:
    left = [tmp_path / f".{name}.{0:08x}.unfinished" for name in ("a[1]", "new", "other")]
    for folder in left:
        (folder / "part").mkdir(parents=True)
    for folder in (left[0], left[2]):
        os.utime(folder, (0, 0))
    with atomic_folder(tmp_path / "a[1]"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([*left[1:], tmp_path / "a[1]"])


def test_atomic_folder_removes_what_a_killed_process_left_but_nothing_in_use(tmp_path: Path) -> None:
    left, used = (tmp_path / f".new.{number:08x}.unfinished" for number in (0, 1))
    for folder in (left, used):
        folder.mkdir()
        os.utime(folder, (time.time() - 10,) * 2)
    handle = os.open(used, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with atomic_folder(tmp_path / "new"):
        pass
    os.close(handle)
    assert sorted(tmp_path.iterdir()) == [used, tmp_path / "new"]


def test_a_folder_that_is_written_is_locked(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "new") as first:
        os.utime(first, (0, 0))
        with atomic_folder(tmp_path / "new"):
            assert first.exists()
        (tmp_path / "new").rmdir()


def test_work_that_can_be_resumed_is_no_leftover(tmp_path: Path) -> None:
    passes = temporary_path(tmp_path / "a.v2", "passes")
    passes.mkdir()
    os.utime(passes, (0, 0))
    with atomic_folder(tmp_path / "a"):
        pass
    remove_leftovers(tmp_path)
    assert passes.exists()


def test_remove_leftovers_deletes_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / ".file.01234567.unfinished").touch()
    (tmp_path / ".folder.01234567.unfinished" / "part").mkdir(parents=True)
    (tmp_path / "kept").touch()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]


def test_atomic_folder_leaves_a_folder_that_appeared_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "made"):
        (tmp_path / "made" / "theirs").mkdir(parents=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]


def test_all_files_of_an_atomic_folder_have_the_same_mode(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as folder:
        (folder / "open").touch()
        (folder / "closed").touch(0o600)  # as safetensors leaves its files
    assert len({(tmp_path / "made" / name).stat().st_mode for name in ("open", "closed")}) == 1


def test_a_full_disk_reported_by_safetensors_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made: no space; free some space"), atomic_folder(tmp_path / "made"):
        raise SafetensorError("no space")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_in_a_read_only_folder_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(UserError, match=str(tmp_path / "f")):
            ensure_writable(tmp_path / "f")
    finally:
        tmp_path.chmod(0o755)


def test_a_file_and_its_folder_must_both_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("")
    for closed in (tmp_path, tmp_path / "f"):
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: path != closed)
        with pytest.raises(UserError, match=str(tmp_path / "f")):
            ensure_writable(tmp_path / "f")


def test_a_folder_and_a_path_below_a_file_are_not_writable(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    for wrong in (tmp_path, tmp_path / "f" / "below"):
        with pytest.raises(UserError, match=str(wrong)):
            ensure_writable(wrong)


def test_two_options_must_not_name_the_same_file(tmp_path: Path) -> None:
    ensure_all_writable({"--json": "-", "--out": None, "--csv": tmp_path / "new" / "a.csv"})
    assert (tmp_path / "new").is_dir()
    with pytest.raises(UserError, match=r"--json and --csv"):
        ensure_all_writable({"--json": tmp_path / "a", "--csv": tmp_path / "b" / ".." / "a"})


def test_remove_folder_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for _ in range(2):  # another process may have done it
        remove_folder(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_sha256_of_a_file_longer_than_a_block(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(content)
    assert sha256_of(tmp_path / "f") == hashlib.sha256(content).hexdigest()
