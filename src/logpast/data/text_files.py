"""Text files: which files of a folder or a glob are documents, and how their bytes become text.

One rule holds for every text: it is UTF-8; a byte-order mark at its start is not part of it; CR LF and CR become LF.
"""

from __future__ import annotations

import codecs
import errno
import glob
import io
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple, NoReturn

from logpast.util.errors import UserError

NAMED = 3  # files named for each reason to leave some out
ENCODINGS = {  # of a text that starts with another byte-order mark; the longer marks first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class TextFiles(NamedTuple):
    """The documents that were found, sorted by path: title -> path. What is left out: reason -> names."""

    files: dict[str, Path]
    left_out: dict[str, list[str]]


def files_below(folder: Path) -> TextFiles:
    """Every *.txt below a folder, except hidden ones. Links are followed, and each folder is read once."""
    files, left_out = dict[str, Path](), defaultdict[str, list[str]](list)
    seen, tops = set[str](), [folder]
    for top in tops:  # grows: linked folders come last, so that a file below `folder` keeps its own name
        for place, folders, names in os.walk(top, onerror=cannot_read):
            here, real = Path(place).relative_to(folder), os.path.realpath(place)
            if real in seen:
                left_out["linked twice"].append(f"{here}/")
                folders.clear()
                continue
            seen.add(real)
            left_out["hidden"] += [f"{here / name}/" for name in folders if name.startswith(".")]
            folders[:] = [name for name in folders if not name.startswith(".")]
            tops += [Path(place, name) for name in folders if Path(place, name).is_symlink()]
            for name in names:
                title, path = str(here / name), Path(place, name)
                if name.startswith("."):
                    left_out["hidden"].append(title)
                elif path.suffix.lower() == ".txt" or not os.path.exists(path):  # a broken link, perhaps to a folder
                    files[title] = path
                else:
                    left_out["not *.txt"].append(title)
    return _select(files, left_out)


def files_matching(pattern: str) -> TextFiles:
    """Every file that a glob matches. A folder that it matches is not read."""
    matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
    files = {str(path): path for path in matches if not path.is_dir()}
    parents = {parent for path in files.values() for parent in path.parents}
    folders = [f"{path}/" for path in matches if path.is_dir() and path not in parents]
    return _select(files, defaultdict(list, {"folder": folders}))


def _select(files: dict[str, Path], left_out: defaultdict[str, list[str]]) -> TextFiles:
    """Leave out empty files, and links to files that are there already; refuse what cannot be read."""
    selected, seen = dict[str, Path](), set[str]()
    for title in sorted(files, key=lambda title: (files[title].is_symlink(), files[title])):  # links after files
        if not file_status(files[title]).st_size:
            left_out["empty"].append(title)
        elif (real := os.path.realpath(files[title])) in seen:
            left_out["linked twice"].append(title)
        else:
            seen.add(real)
            selected[title] = files[title]
    ordered = dict(sorted(selected.items(), key=lambda item: item[1]))
    return TextFiles(ordered, {reason: sorted(names) for reason, names in left_out.items() if names})


def file_status(path: Path) -> os.stat_result:
    """The status of a regular file that can be read; a UserError for anything else."""
    try:
        status = path.stat()
    except OSError as error:
        if path.is_symlink():
            fix = "restore what it points to, or remove it"
            raise UserError(f"{printable(path)} is a broken link to {printable(os.readlink(path))}: {fix}") from None
        cannot_read(error)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{printable(path)} is not a regular file: replace it by a file with its text, or leave it out")
    if not os.access(path, os.R_OK):
        cannot_read(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)))
    return status


def cannot_read(error: OSError, path: Path | None = None) -> NoReturn:
    """A UserError for a file or folder that cannot be read."""
    fix = "`chmod -R u+rX` it, or move it elsewhere" if isinstance(error, PermissionError) else "check the path"
    raise UserError(f"cannot read {printable(path or error.filename)}: {error.strerror}; {fix}") from error


def describe(left_out: dict[str, list[str]]) -> str:
    """Why and how many files are left out, with a few names: not *.txt: 12 (a.md, b.md, c.png, …); empty: 1 (d.txt)."""
    parts = []
    for reason, names in left_out.items():
        some = [*map(printable, names[:NAMED]), *(["…"] if len(names) > NAMED else [])]
        parts.append(f"{reason}: {len(names):,} ({', '.join(some)})")
    return "; ".join(parts)


def printable(path: str | Path) -> str:
    """A path for a message of one line: escaped if it has line ends or other characters that cannot be printed."""
    return str(path) if str(path).isprintable() else ascii(str(path))


def decode(blocks: Iterable[bytes], location: str) -> Iterator[str]:
    """The text of a file that is read in blocks, by the rule above. `location` is for error messages."""
    decoder, lines = codecs.getincrementaldecoder("utf-8")(), io.IncrementalNewlineDecoder(None, translate=True)
    offset, start = 0, True
    for block in chain(blocks, [b""]):
        held = len(decoder.getstate()[0])  # bytes of a character that started in the previous block
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            byte = offset - held + error.start
            encoding = next((name for mark, name in ENCODINGS.items() if block.startswith(mark)), "latin1")
            fix = f"convert it, for example with `iconv -f {encoding} -t utf-8`"
            raise UserError(f"{location} is not UTF-8 at byte {byte}: {fix}") from None
        offset += len(block)
        if start and text:
            text, start = text.removeprefix("\ufeff"), False
        if text := lines.decode(text, final=not block):
            yield text
