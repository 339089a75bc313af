"""Files and folders that are whole or not there: a kill, a full disk or Ctrl-C must never leave half of one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from logpast.util.errors import DISK_FULL, UserError

UNFINISHED = ".*.unfinished"  # what a kill may leave
LEFTOVER = "[0-9a-f]" * 8 + ".unfinished"  # how its name ends where nobody will go on with it
STALE = 7 * 86_400.0  # seconds after which nobody is at work on it any more
LOCK = "lock"  # in a folder that is worked in, and stays there


@contextmanager
def atomic_folder(place: Path) -> Iterator[Path]:
    """A folder to build in, moved to `place` when the block is done and all of it is on disk.

    Raises FileExistsError if something else has come to stand there meanwhile; it is left as it is.
    """
    folder = temporary_path(place)
    try:
        folder.mkdir(parents=True)
        for leftover in place.parent.glob(f".{escape(place.name)}.{LEFTOVER}"):
            with suppress(OSError):  # it may be moved to its place just now
                if time.time() - leftover.stat().st_mtime > STALE:
                    shutil.rmtree(leftover)
        yield folder
        mode = folder.stat().st_mode & 0o666  # some libraries write files that only their owner may read
        for path in [*folder.rglob("*"), folder]:
            if path.is_file():
                path.chmod(mode)
            fsync(path)
        os.rename(folder, place)
        fsync(place.parent)
    except (OSError, SafetensorError) as error:  # the latter of a full disk, too
        if os.path.lexists(place):
            raise FileExistsError(place) from error
        raise UserError(f"cannot write {place}: {_why(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def atomic_write(file: Path, content: str | bytes) -> None:
    """Write a file in one step, in place of any that is there, whose mode is kept; a link stays one."""
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")  # line breaks as they are; half a surrogate pair has no UTF-8
    special = file.exists() and not file.is_file()  # /dev/stdout: nothing there could be lost
    file = file if special else file.resolve()
    part = temporary_path(file)
    try:
        if special:
            file.write_bytes(content)
            return
        part.write_bytes(content)
        if file.exists():
            shutil.copymode(file, part)
        fsync(part)
        os.replace(part, file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {_why(error)}") from error
    finally:
        with suppress(OSError):  # of a read-only place, whose error has been told
            part.unlink(missing_ok=True)


def _why(error: OSError | SafetensorError) -> str:
    """With what to do about it."""
    told = isinstance(error, OSError) and error.errno is not None and error.errno not in DISK_FULL
    fix = "see who may write there, or choose another place" if told else "make room or choose another place"
    return f"{getattr(error, 'strerror', None) or error}; {fix}"


def temporary_path(place: Path, what: str = "") -> Path:
    """A name beside it that nobody else has; or always the same one, for what is to be gone on with."""
    return place.with_name(f".{place.name}.{what or secrets.token_hex(4)}.unfinished")


def try_lock(file: IO[Any] | int, wait: bool = False) -> bool:
    """Lock an open file; False if another process has it. Where a file system knows no locks, nobody is refused."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


@contextmanager
def exclusive_lock(folder: Path, option: str = "--out") -> Iterator[None]:
    """One process at a time works in a folder; the lock ends with the process, however that ends."""
    with (folder / LOCK).open("a+") as file:
        if not try_lock(file):
            file.seek(0)
            raise UserError(
                f"another command is at work in {folder} ({file.read().strip()}); wait for it, or give another {option}"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def ensure_writable(file: Path) -> None:
    """See to it that a file can be written there, before the work that it is to hold is done."""
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; choose another place") from None
    # a file is replaced by another, which is written beside it first; a device or a pipe is not
    places = [file, file.parent] if file.is_file() else [file] if file.exists() else [file.parent]
    if not all(os.access(place, os.W_OK) for place in places):
        raise UserError(f"{file} may not be written to; choose another place")


def ensure_all_writable(targets: dict[str, Path | str | None]) -> None:
    """The same for what options name, where "-" is standard output: two must not name one file."""
    places: dict[Path, str] = {}
    for option, target in targets.items():
        if target is None:
            continue
        if (other := places.setdefault(Path(target).resolve(), option)) != option:
            raise UserError(f"{other} and {option} would both be written to {target}; give each its own place")
        if str(target) != "-":
            ensure_writable(Path(target))


def remove_folder(folder: Path) -> None:
    """Take a folder away in one step."""
    away = folder.rename(temporary_path(folder))
    shutil.rmtree(away, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Clear away what killed processes left half built, or half removed, in a folder that nobody else writes to."""
    for leftover in folder.glob(f".*.{LEFTOVER}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sha256_of(file: Path) -> str:
    """Of its content, read in pieces: it may be larger than memory."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
