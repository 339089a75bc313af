"""Folders of text from other domains, for --train and --texts of pretrained_gap.py.

    python benchmarks/domain_texts.py code texts/code
    python benchmarks/domain_texts.py recent texts/recent --since 2025
    apt-get download debian-reference-de
    python benchmarks/domain_texts.py german texts/german --deb debian-reference-de_*.deb

    code      Python's standard library, of the interpreter that runs this: one document per file, without tests and
              tables of characters. Licence: PSF.
    german    the Debian reference in German: one document per chapter. Licence: GPL-2+.
    recent    text that a model which was released before --since cannot have seen: what the descriptions of the
              installed packages say below a heading with a date (changelogs) from --since on, and the docstrings of the
              installed Python files whose copyright notice begins in --since or later. Licences: the packages', listed
              in SOURCES.txt. Docstrings repeat much of older ones. Documents are short: use --streams corpus.

A document is held out, in OUT/test, if the SHA-256 of its name begins with 0, 1 or 2 in hexadecimal; the others are in
OUT/train.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import importlib.metadata
import platform
import re
import subprocess
import sysconfig
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from logpast.util.errors import UserError
from logpast.util.files import atomic_folder

Document = tuple[str, str]  # name, text
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
DATE = re.compile(r"\b(20\d\d)-\d\d-\d\d\b|\b[A-Z][a-z]{2,8} \d{1,2},? (20\d\d)\b")
HEADING = re.compile(r"[#=*(]|v?\d|version|released", re.IGNORECASE)
COPYRIGHT = re.compile(r"copyright (?:\(c\) )?(20\d\d)", re.IGNORECASE)


def code(root: Path) -> Iterator[Document]:
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if not SKIPPED.intersection(parts):
            yield ".".join(parts), file.read_text(encoding="utf-8", errors="replace")


def german(package: Path) -> Iterator[Document]:
    """The chapters of the plain text of debian-reference-de."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        (file,) = Path(folder).rglob("debian-reference.de.txt.gz")
        text = gzip.decompress(file.read_bytes()).decode("utf-8")
    _, *chapters = re.split(r"^(?=Kapitel \d+\. )", text, flags=re.MULTILINE)
    for number, chapter in enumerate(chapters, 1):
        yield f"chapter-{number:02d}", chapter


def dated_part(text: str, since: int) -> str:
    """The lines below headings with a date of that year or later, down to one with an earlier date."""
    kept, recent = list[str](), False
    for line in text.splitlines():
        if (found := DATE.search(line)) and HEADING.match(line.strip()):
            recent = int(found[1] or found[2]) >= since
        if recent:
            kept.append(line)
    return "\n".join(kept)


def docstrings(source: str, since: int) -> str:
    """All docstrings of a file whose copyright notice begins in that year or later."""
    notice = COPYRIGHT.search(source[:500])
    if not notice or int(notice[1]) < since:
        return ""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def recent(since: int) -> Iterator[Document]:
    """One document per changelog, and one per folder of Python files."""
    for package in sorted(importlib.metadata.distributions(), key=lambda each: each.name.lower()):
        yield f"{package.name}-changelog", dated_part(str(package.metadata.get_payload() or ""), since)
        parts = defaultdict[str, list[str]](list)
        for file in sorted(package.files or []):
            if file.suffix == ".py" and file.locate().is_file():
                found = docstrings(file.locate().read_text(encoding="utf-8", errors="replace"), since)
                parts[".".join(file.parent.parts)].append(found)
        for name, found_here in parts.items():
            yield name, "\n\n".join(filter(None, found_here))


def held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).hexdigest()[0] in "012"


def write(documents: Iterator[Document], out: Path, source: str) -> dict[str, int]:
    """Write the documents to OUT/train and OUT/test. Returns the characters of each."""
    sizes = {"train": 0, "test": 0}
    with atomic_folder(out) as folder:
        for split in sizes:
            (folder / split).mkdir()
        (folder / "SOURCES.txt").write_text(source + "\n", encoding="utf-8")
        for name, text in documents:
            if text.strip():
                split = "test" if held_out(name) else "train"
                (folder / split / f"{name}.txt").write_text(text.strip() + "\n", encoding="utf-8")
                sizes[split] += len(text)
    return sizes


def sources(since: int) -> str:
    """The installed packages with version and licence."""
    lines = [f"text from {since} on, of these packages:"]
    for package in sorted(importlib.metadata.distributions(), key=lambda each: each.name.lower()):
        about = package.metadata
        licence = about.get("License-Expression") or about.get("License") or "see its METADATA"
        lines.append(f"{package.name} {package.version}: {licence.splitlines()[0]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("code", "german", "recent"))
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--deb", type=Path, help="the package debian-reference-de")
    parser.add_argument("--since", type=int, default=2025, help="year; SmolLM2 was released in November 2024")
    args = parser.parse_args()
    if args.out.exists():
        raise UserError(f"{args.out} already exists; choose another folder, or delete it")
    if args.kind == "code":
        version = platform.python_version()
        sizes = write(code(Path(sysconfig.get_paths()["stdlib"])), args.out, f"Python {version}, PSF License")
    elif args.kind == "german":
        if args.deb is None or not args.deb.is_file():
            raise UserError("give --deb, the file that `apt-get download debian-reference-de` writes")
        sizes = write(german(args.deb), args.out, f"{args.deb.name}, GPL-2+")
    else:
        sizes = write(recent(args.since), args.out, sources(args.since))
    print(f"{args.out}: {sizes['train']:,} characters in train, {sizes['test']:,} in test")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"domain_texts: {error}") from None
