"""Files that are whole or not there."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from logpast.util.errors import UserError
from logpast.util.files import (
    atomic_folder,
    atomic_write,
    ensure_writable,
    exclusive_lock,
    remove_leftovers,
    temporary_path,
)


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    real, link = tmp_path / "real.md", tmp_path / "link.md"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    atomic_write(link, "new\r\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"new\r\n"
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, real]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(UserError, match="choose another place"):
        atomic_write(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    words = (
        "import pathlib; from logpast.util.files import write_whole; write_whole(pathlib.Path('/dev/stdout'), 'new')"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("new", "")


@pytest.mark.parametrize(("number", "had"), [(errno.ENOSYS, True), (errno.EAGAIN, False), (errno.EBADF, None)])
def test_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, had: bool | None) -> None:
    """Some file systems of clusters have none, and work should go on there."""

    def flock(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if had:
        with exclusive_lock(tmp_path):
            return
    with pytest.raises(UserError if had is False else OSError), exclusive_lock(tmp_path):
        pass


def test_what_a_kill_left_long_ago_is_cleared_away(tmp_path: Path) -> None:
    left = [tmp_path / f".{name}.{0:08x}.unfinished" for name in ("a[1]", "new", "other")]
    for folder in left:
        (folder / "part").mkdir(parents=True)
    for folder in (left[0], left[2]):
        os.utime(folder, (0, 0))
    with atomic_folder(tmp_path / "a[1]"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([*left[1:], tmp_path / "a[1]"])


def test_what_is_to_be_gone_on_with_is_never_cleared_away(tmp_path: Path) -> None:
    passes = temporary_path(tmp_path / "a.v2", "passes")
    passes.mkdir()
    os.utime(passes, (0, 0))
    with atomic_folder(tmp_path / "a"):
        pass
    remove_leftovers(tmp_path)
    assert passes.exists()


def test_whoever_may_read_one_file_of_a_folder_may_read_all(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as folder:
        (folder / "open").touch()
        (folder / "closed").touch(0o600)  # as safetensors leaves its files
    assert len({(tmp_path / "made" / name).stat().st_mode for name in ("open", "closed")}) == 1


def test_a_full_disk_as_safetensors_tells_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made: no room; make room"), atomic_folder(tmp_path / "made"):
        raise SafetensorError("no room")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_cannot_be_replaced_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(UserError, match="may not be written to"):
            ensure_writable(tmp_path / "f")
    finally:
        tmp_path.chmod(0o755)


def test_both_a_file_and_its_folder_must_let_themselves_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_text("")
    for closed in (tmp_path, tmp_path / "f"):
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: path != closed)
        with pytest.raises(UserError, match="may not be written to"):
            ensure_writable(tmp_path / "f")
