"""Atomic writes, locks and checks: a kill, a full disk or Ctrl-C never leaves a file or folder half written."""

from __future__ import annotations

import errno
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

from filelock import lock_descriptor
from safetensors import SafetensorError

from logpast.util.errors import DISK_FULL, UserError

UNFINISHED = ".*.unfinished"  # temporary files and folders, which a kill may leave
LEFTOVER = "[0-9a-f]" * 8 + ".unfinished"  # the end of the name of one that will not be resumed
JUST_MADE = 1.0  # seconds in which a process has locked its folder
STALE = 7 * 86_400.0  # seconds after which a leftover is no longer in use, where there are no locks
LOCK = "lock"  # the lock file in a folder; it is not removed


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that is synced to disk and renamed to `target` when the block ends.

    Raises FileExistsError, and leaves `target` as it is, if it has been created meanwhile.
    """
    folder, handle = temporary_path(target), None
    try:
        folder.mkdir(parents=True)
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            lock_descriptor(handle, blocking=False)
        for leftover in target.parent.glob(f".{escape(target.name)}.{LEFTOVER}"):
            if leftover != folder:
                _remove_abandoned(leftover)
        yield folder
        mode = folder.stat().st_mode & 0o666  # some libraries write files that only their owner may read
        for path in [*folder.rglob("*"), folder]:
            if path.is_file():
                path.chmod(mode)
            fsync(path)
        os.rename(folder, target)
        fsync(target.parent)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        if os.path.lexists(target):
            raise FileExistsError(target) from error
        raise UserError(f"cannot write {target}: {_reason_and_fix(error)}") from error
    finally:
        if handle is not None:
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(leftover: Path) -> None:
    """Delete the folder of a killed process. One that is in use is locked, or changes from time to time."""
    with suppress(OSError):  # another process may be renaming it
        handle, age = os.open(leftover, os.O_RDONLY), time.time() - leftover.stat().st_mtime
        try:
            free = age > JUST_MADE and lock_descriptor(handle, blocking=False)
        except OSError:  # a file system without locks
            free = age > STALE
        finally:
            os.close(handle)
        if free:
            shutil.rmtree(leftover)


def atomic_write(file: Path, content: str | bytes) -> None:
    """Write a file in one step. An existing file is replaced and keeps its mode; a symbolic link is followed."""
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")  # keeps line breaks; a lone surrogate has no UTF-8
    special = file.exists() and not file.is_file()  # such as /dev/stdout, which has no content to lose
    file = file if special else file.resolve()
    temporary = temporary_path(file)
    try:
        if special:
            file.write_bytes(content)
            return
        temporary.write_bytes(content)
        if file.exists():
            shutil.copymode(file, temporary)
        fsync(temporary)
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {_reason_and_fix(error)}") from error
    finally:
        with suppress(OSError):  # in a read-only folder, whose error was raised above
            temporary.unlink(missing_ok=True)


def _reason_and_fix(error: OSError | SafetensorError) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    may_be_full = getattr(error, "errno", None) in (None, *DISK_FULL)
    fix = "free some space or choose another place" if may_be_full else "check its permissions or choose another place"
    return f"{reason}; {fix}"


def temporary_path(target: Path, purpose: str = "") -> Path:
    """An unused hidden name next to `target`; with a purpose, always the same name, for work that can be resumed."""
    return target.with_name(f".{target.name}.{purpose or secrets.token_hex(4)}.unfinished")


def try_lock(file: IO[Any] | int, wait: bool = False) -> bool:
    """Lock an open file; False if another process holds it. On a file system without locks it always succeeds."""
    try:
        return lock_descriptor(file if isinstance(file, int) else file.fileno(), blocking=wait)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


@contextmanager
def exclusive_lock(folder: Path, option: str = "--out") -> Iterator[None]:
    """Let one process at a time work in a folder; the lock ends with the process, however that ends."""
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
    """Check that a file can be written, before the work whose result it will hold."""
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; choose another place") from None
    # a file is replaced by a new one in its folder; a device or a pipe is written to
    needed = [file, file.parent] if file.is_file() else [file] if file.exists() else [file.parent]
    if not all(os.access(path, os.W_OK) for path in needed):
        raise UserError(f"{file} may not be written to; choose another place")


def ensure_all_writable(targets: dict[str, Path | str | None], *read: Path | str | None) -> None:
    """`ensure_writable` for the files that options name ("-" is standard output).

    No two may name the same file, and none a file that the command reads.
    """
    options: dict[Path, str] = {}
    for option, target in targets.items():
        if target is None:
            continue
        if (other := options.setdefault(Path(target).resolve(), option)) != option:
            raise UserError(f"{other} and {option} would both be written to {target}; give each its own place")
        if str(target) != "-":
            if any(Path(target).resolve() == Path(file).resolve() for file in read if file is not None):
                raise UserError(f"{option} would replace {target}, which is read; give another name")
            ensure_writable(Path(target))


def remove_folder(folder: Path) -> None:
    """Remove a folder in one step, if it exists: rename it, then delete it."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder.rename(temporary_path(folder)), ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left half written or half removed in a folder that no other process writes to."""
    for leftover in folder.glob(f".*.{LEFTOVER}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sha256_of(file: Path) -> str:
    """Hash of the content, read in blocks: the file may be larger than memory."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
