"""Checksums by which we notice that a disk, a copy or an editor has changed a file.

- A folder has SHA256SUMS, in the format of `sha256sum`.
- A JSON object, such as a row of a ledger, has its `crc32` as last field.

Files without them, as early versions wrote them, are read unverified.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from logpast.util.errors import UserError
from logpast.util.files import sha256_of
from logpast.util.schema import reading

SUMS = "SHA256SUMS"
CRC = "crc32"
LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
VERIFIED = (".json", ".safetensors", ".yaml")  # other files in a folder need not be listed


def sums_text(sums: dict[str, str]) -> str:
    """The content of SHA256SUMS, from name -> SHA-256."""
    return "".join(f"{value}  {name}\n" for name, value in sums.items())


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of all files in a folder."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    (folder / SUMS).write_text(sums_text({file.name: sha256_of(file) for file in files}), encoding="utf-8")


def read_sums(file: Path, fix: str) -> dict[str, str]:
    """Name -> SHA-256. A UserError, with what to do, if a file of ours is not listed."""
    with reading(f"{file} cannot be used", fix):
        lines = [LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    if not all(lines):
        raise UserError(f"{file} is damaged: it is not in the format of sha256sum; {fix}")
    sums = {line[2]: line[1] for line in lines if line}
    for other in sorted(file.parent.iterdir()):
        if other.suffix in VERIFIED and other.name not in sums:
            raise UserError(f"{file} is damaged: it does not list {other.name}; {fix}")
    return sums


def verify(file: Path, sha256: str | None, fix: str, size: int | None = None) -> None:
    """A UserError if a file is missing, or has another SHA-256 or size than when it was saved."""
    try:
        changed = size not in (None, file.stat().st_size) or (sha256 is not None and sha256 != sha256_of(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {fix}") from None
    if changed:
        sums = file.with_name(SUMS)
        allow = f"delete {sums}" if sums.exists() else f"remove sizes and sums from {file.with_name('state.json')}"
        raise UserError(
            f"{file} has changed since it was saved; restore it, or {fix}, or {allow} if the change was on purpose"
        )


def verify_folder(folder: Path, fix: str) -> None:
    """Verify the files of a folder that has SHA256SUMS."""
    if (folder / SUMS).exists():
        for name, sha256 in read_sums(folder / SUMS, fix).items():
            if (folder / name).exists():
                verify(folder / name, sha256, fix)


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """The object with its checksum; `values` must be JSON."""
    return values | {CRC: _crc32(values)}


def unseal(values: dict[str, Any]) -> dict[str, Any]:
    """The object without its checksum; a ValueError if it has another one."""
    rest = {name: value for name, value in values.items() if name != CRC}
    if values.get(CRC, found := _crc32(rest)) != found:
        raise ValueError(f"it has changed since it was written: its {CRC} is another (delete {CRC} if on purpose)")
    return rest


def _crc32(values: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"
