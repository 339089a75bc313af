"""The token store: a text as token ids in a memory-mapped file, with the counts that figures are divided by.

A store is a folder:

    tokens.bin       the text's ids and nothing else, little-endian uint16 (uint32 for a large vocabulary)
    documents.tsv    a line a document: start, tokens, words, lines, bytes, name
    store.json       what it is: totals, sources, tokenizer, and the SHA-256 of the two files above
    tokenizer.json   the tokenizer

Words are what `str.split` finds; lines are line ends, and one more where a document's last line has none;
bytes are those of the text as it was tokenised, in UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from logpast.data.corpora import CORPORA, Passage, Source, Tally, find, read
from logpast.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from logpast.errors import UserError
from logpast.version import __version__

TO_TRAIN = re.compile(r"bpe-(\d+)")  # a tokenizer that is yet to be trained
FORMAT, VERSION = "logpast token store", 1
PIECE = 1 << 20  # characters that a thread tokenises at a time

COLUMNS = ("start", "tokens", "words", "lines", "bytes", "name")

Int64 = npt.NDArray[np.int64]
Count = tuple[int, int, int, int]  # tokens, words, lines, bytes
Encoded = tuple[bytes, list[Count]]


@dataclass(frozen=True)
class Counts:
    """How much text: what the sums of nats are divided by."""

    tokens: int
    words: int
    lines: int
    bytes: int
    documents: int


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents in the order of the text, a column each; `start` is where a document's tokens begin."""

    start: Int64
    tokens: Int64
    words: Int64
    lines: Int64
    bytes: Int64
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def counts(self) -> Counts:
        tokens, words, lines, size = (int(column.sum()) for column in (self.tokens, self.words, self.lines, self.bytes))
        return Counts(tokens, words, lines, size, documents=len(self))


@dataclass(frozen=True)
class TokenizerInfo:
    """Which tokenizer made the tokens."""

    name: str
    size: int
    eot: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A text's tokens and counts: `TokenStore.open(folder)`.

    No end-of-text token stands between the documents; a model's stream puts its own.
    """

    path: Path
    name: str
    tokens: npt.NDArray[Any]
    documents: Documents
    tokenizer: TokenizerInfo
    sha256: str

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def counts(self) -> Counts:
        return self.documents.counts

    @property
    def identity(self) -> dict[str, Any]:
        """What a results ledger must keep to say which text a figure is about."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "tokens": len(self),
            "tokenizer": self.tokenizer.fingerprint,
        }

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Open a store after checking every byte of it."""
        folder = Path(folder)
        if not (folder / "store.json").is_file():
            raise UserError(f"{folder} is not a token store (it has no store.json): `logpast data prepare` makes one")
        try:
            about = json.loads((folder / "store.json").read_text(encoding="utf-8"))
            if (about["format"], about["version"]) != (FORMAT, VERSION):
                raise ValueError(f"store.json says {about['format']} {about['version']}, not {FORMAT} {VERSION}")
            totals = Counts(*(about[field.name] for field in fields(Counts)))
            info = TokenizerInfo(**about["tokenizer"])
            if about["dtype"] != _dtype(info.size) or not 0 <= info.eot < info.size:
                raise ValueError(f"store.json does not fit itself: {about['dtype']}, {info}")
            _check(folder / "tokens.bin", about, totals.tokens * np.dtype(about["dtype"]).itemsize)
            _check(folder / "documents.tsv", about)
            documents = _read_documents(folder / "documents.tsv")
            if documents.counts != totals:
                raise ValueError(f"documents.tsv adds up to {documents.counts}, store.json says {totals}")
            tokens = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"store.json lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{folder} is damaged: {what}; delete it and prepare it again") from error
        return cls(folder, about["name"], tokens, documents, info, about["sha256"]["tokens.bin"])

    @classmethod
    def in_memory(cls, documents: Sequence[npt.ArrayLike], size: int, eot: int, name: str = "memory") -> TokenStore:
        """A store of ids without text: each counts as a word and a byte, and a document as a line."""
        ids = [np.asarray(document, dtype=_dtype(size)) for document in documents]
        tokens = np.array([len(document) for document in ids], dtype=np.int64)
        lines, names = np.ones_like(tokens), [str(n) for n in range(len(ids))]
        table = Documents(np.cumsum(tokens) - tokens, tokens, tokens, lines, tokens, names)
        joined = np.concatenate(ids)
        sha256 = hashlib.sha256(joined.tobytes()).hexdigest()
        return cls(Path(), name, joined, table, TokenizerInfo("none", size, eot, ""), sha256)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the store, from its `tokenizer.json`."""
        tokenizer = load_tokenizer(self.path)
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise UserError(f"{self.path / 'tokenizer.json'} is not the one the store was made with: prepare it again")
        return tokenizer


def prepare(
    sources: list[str],
    out: Path,
    tokenizer: str = "gpt2",
    workers: int | None = None,
    root: Path | None = None,
) -> list[TokenStore]:
    """Turn text into a token store: a folder to train on and to score.

    Examples:
        logpast data prepare notes/ --out data/notes --tokenizer bpe-4096
        logpast data prepare part1.txt part2.txt --out data/book
        logpast data prepare wikitext103 --out data/wikitext103
        logpast data prepare pg19:test --out data/pg19-test

    Args:
        sources: Text to prepare: files, folders (every *.txt below), globs, or parts of known corpora, which
            are wikitext103:train, wikitext103:validation, wikitext103:test, pg19:train, pg19:validation,
            pg19:test and wiki22k:train. Several become one store, in the order given. A corpus's bare name,
            given alone, means all its splits that can be had, each a store: OUT/train, OUT/validation …
        out: The folder to make. It must not exist yet, and it appears only when it is complete.
        tokenizer: gpt2; or bpe-SIZE, such as bpe-4096, to train one on this very text (of several splits, on
            train alone); or the path of a tokenizer.json or of another store, to use its tokenizer. A test
            text needs the tokenizer of the training text.
        workers: Threads that tokenise side by side. The default is one for each processor core.
        root: Folder with the known corpora, in place of the environment variable LOGPAST_DATA. What is not
            there is fetched from the Hugging Face hub.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers must be 1 or more, got {workers}")
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise UserError(f"{out} exists already and is left as it is: choose another --out, or delete it first")
    parts = _resolve(sources, root)
    try:
        with _whole_or_absent(out) as folder:
            chosen = _choose_tokenizer(tokenizer, parts)
            for split, part in parts.items():
                _write_store(folder / split, part, chosen, workers)
    except FileExistsError:
        raise UserError(f"{out} was made by another process meanwhile and is left as it is") from None
    stores = [TokenStore.open(out / split) for split in parts]
    table = Table(Column("store", overflow="fold"), *(Column(f.name, justify="right") for f in fields(Counts)))
    for store in stores:
        table.add_row(str(store.path), *(f"{count:,}" for count in astuple(store.counts)))
    Console().print(table)
    return stores


def open_tokens(
    spec: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    cache: Path | None = None,
    root: Path | None = None,
) -> TokenStore:
    """The tokens of a store, or of any one SOURCE, which is prepared first, once, into the cache.

    Args:
        spec: A store's folder, a file, a folder, a glob or a corpus's split such as wikitext103:test.
        tokenizer: The tokenizer that the tokens must be of, such as the model's; bpe-SIZE trains one on a text. The
            default is a store's own, and gpt2 for text.
        cache: Folder to keep prepared sources in. The default is $LOGPAST_CACHE, else ~/.cache/logpast.
        root: Folder with the known corpora, in place of LOGPAST_DATA.
    """
    spec = str(spec)
    to_train = tokenizer if isinstance(tokenizer, str) and TO_TRAIN.fullmatch(tokenizer) else None
    if any((Path(spec) / file).exists() for file in ("store.json", "tokens.bin")):
        store = TokenStore.open(spec)
        made = store.tokenizer
        if tokenizer is None or to_train == made.name:
            return store
        wanted = None if to_train else _loaded(tokenizer)
        if wanted is None or made.fingerprint != wanted.fingerprint:
            need = f"{wanted.name} ({wanted.fingerprint[:8]})" if wanted else to_train
            raise UserError(
                f"{spec} was made with the tokenizer {made.name} ({made.fingerprint[:8]}), but {need} is needed: "
                "prepare the text again with --tokenizer and the folder that has it"
            )
        return store
    if inner := sorted(path.parent.name for path in Path(spec).glob("*/store.json")):
        raise UserError(f"{spec} holds several stores: name one, {' or '.join(str(Path(spec, i)) for i in inner)}")
    source = find(spec, root)
    wanted = None if to_train else _loaded(tokenizer or "gpt2")
    key = json.dumps([VERSION, source.name, source.stamp, wanted.fingerprint if wanted else to_train])
    label = re.sub(r"[^\w.-]+", "_", source.name).strip("_.")[-40:]
    home = cache or Path(os.environ.get("LOGPAST_CACHE") or Path.home() / ".cache" / "logpast")
    folder = home / "tokens" / f"{label}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.exists():
        try:
            with _whole_or_absent(folder) as unfinished:
                _write_store(unfinished, [source], wanted or _choose_tokenizer(str(to_train), {"": [source]}))
        except FileExistsError:
            pass  # another process was faster; its store is as good
    return TokenStore.open(folder)


def _loaded(tokenizer: str | Path | Tokenizer) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)


def _resolve(specs: list[str], root: Path | None) -> dict[str, list[Source]]:
    """The sources of each store to write, by the store's place below OUT."""
    if not specs:
        raise UserError("no text was named: give a file, a folder or a corpus, for example wikitext103:test")
    bare = [spec for spec in specs if spec in CORPORA]
    if not bare:
        return {"": [find(spec, root) for spec in specs]}
    if len(specs) > 1:
        raise UserError(f"{bare[0]} means all its splits and must stand alone: write {bare[0]}:train, say, to join it")
    found, missing = {}, []
    for split in CORPORA[bare[0]].splits:
        try:
            source = find(f"{bare[0]}:{split}", root)
            source.probe()
            found[split] = [source]
        except UserError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    for reason in missing:
        Console(stderr=True).print(f"left out: {reason}", style="yellow", markup=False, soft_wrap=True)
    return found


def _choose_tokenizer(spec: str, parts: dict[str, list[Source]]) -> Tokenizer:
    bpe = TO_TRAIN.fullmatch(spec)
    if not bpe:
        return load_tokenizer(spec)
    learn_from = parts.get("train") or parts.get("")
    if not learn_from:
        raise UserError(f"{spec} is trained on the train split, which is missing: give another store's tokenizer")
    with Console(stderr=True).status(f"training {spec}"):
        texts = (piece.text for source in learn_from for piece in _pieces(read(source, Tally()), PIECE))
        return train_bpe(texts, int(bpe[1]))


@contextmanager
def _whole_or_absent(out: Path) -> Iterator[Path]:
    """A folder to build in, moved to `out` when it is done: whatever happens, `out` is whole or absent."""
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.unfinished")
    try:
        folder.mkdir(parents=True)
        yield folder
        for path in [*folder.rglob("*"), folder]:
            _sync(path)
        os.rename(folder, out)
        _sync(out.parent)
    except OSError as error:
        if os.path.lexists(out):
            raise FileExistsError(out) from error
        raise UserError(f"cannot write {out}: {error.strerror}; make room or choose another place") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_store(folder: Path, sources: list[Source], tokenizer: Tokenizer, workers: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    name, dtype = " + ".join(source.name for source in sources), _dtype(tokenizer.size)
    tallies = [Tally() for _ in sources]
    batches = _batches(_pieces(chain.from_iterable(map(read, sources, tallies)), PIECE), PIECE)
    encode = partial(_encode, tokenizer)
    total, sum_of_ids, rows = 0, hashlib.sha256(), list[list[Any]]()
    with _progress(name, sources) as show, (folder / "tokens.bin").open("wb") as file:
        for batch, (ids, counts) in _in_order(encode, batches, workers or os.cpu_count() or 1):
            file.write(ids)
            sum_of_ids.update(ids)
            for passage, count in zip(batch, counts, strict=True):
                _add(rows, passage, total, count)
                total += count[0]
            show(sum(tally.size for tally in tallies), total)
    if not total:
        raise UserError(f"{name} has no text: name a file or folder that has some")
    table = _text("".join("\t".join(map(str, row)) + "\n" for row in [COLUMNS, *rows]))
    (folder / "documents.tsv").write_bytes(table)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "dtype": dtype,
        **asdict(_read_documents(folder / "documents.tsv").counts),
        "sources": [
            {"name": source.name, "bytes": tally.size, "sha256": tally.hash.hexdigest()}
            for source, tally in zip(sources, tallies, strict=True)
        ],
        "tokenizer": {f.name: getattr(tokenizer, f.name) for f in fields(TokenizerInfo)},
        "sha256": {
            "tokens.bin": sum_of_ids.hexdigest(),
            "documents.tsv": hashlib.sha256(table).hexdigest(),
        },
        "logpast": __version__,
    }
    (folder / "store.json").write_bytes(_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n"))


def _text(text: str) -> bytes:
    return text.encode(errors="replace")  # the name of a file need not be valid Unicode


def _add(rows: list[list[Any]], passage: Passage, start: int, count: Count) -> None:
    """Count a passage to its document."""
    if passage.title is not None:
        rows.append([start, 0, 0, 0, 0, " ".join(passage.title.split())])
    else:  # the passage before it ended within a line, and both have counted that
        rows[-1][COLUMNS.index("lines")] -= 1
    for column, n in enumerate(count, start=1):
        rows[-1][column] += n


def _read_documents(path: Path) -> Documents:
    head, *rows = (line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1])
    if tuple(head) != COLUMNS:
        raise ValueError(f"{path.name} has the columns {', '.join(head)}, not {', '.join(COLUMNS)}")
    *numbers, names = zip(*rows, strict=True)
    start, tokens, words, lines, size = (np.array(column, dtype=np.int64) for column in numbers)
    if not np.array_equal(start, np.cumsum(tokens) - tokens):
        raise ValueError(f"{path.name} has documents that do not begin where the one before ends")
    return Documents(start, tokens, words, lines, size, list(names))


def _check(path: Path, about: dict[str, Any], size: int | None = None) -> None:
    """Raise ValueError unless the file is what it was when the store was written."""
    if size is not None and path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, not {size:,}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != about["sha256"][path.name]:
        raise ValueError(f"{path.name} is not as it was written (its SHA-256 differs)")


def _dtype(size: int) -> str:
    return "<u2" if size <= 1 << 16 else "<u4"


@contextmanager
def _progress(name: str, sources: list[Source]) -> Iterator[Callable[[int, int], None]]:
    """A bar of the bytes read, with the speed in tokens; call it with how many of each there are so far."""
    sizes = [source.size for source in sources]
    size = None if None in sizes else sum(filter(None, sizes))
    label, speed = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[speed]}")
    columns = label, BarColumn(), DownloadColumn(), speed, TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=size, speed="")

        def show(read: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 1.0
            bar.update(task, completed=read, speed=f"{tokens / elapsed:,.0f} tokens/s")

        yield show


# GPT-2's pattern always cuts between a character that is no white space and a space or line end after it: no
# match has one after the other, and none that ends on the first looks ahead.
CUT = re.compile(r"\S(?=[ \n])")


def _pieces(passages: Iterable[Passage], size: int) -> Iterator[Passage]:
    """The same documents in pieces of `size` characters or a little more, which can be tokenised one by one.

    Where there is no place to cut, as in a megabyte of white space, a piece grows until there is one.
    """
    title, text = None, ""
    for passage in passages:
        if passage.title is not None:
            if text:
                yield Passage(title, text)
            title, text = passage.title, ""
        start, look = 0, max(len(text), size) - 1
        text += passage.text
        while cut := CUT.search(text, look):
            yield Passage(title, text[start : cut.end()])
            title, start, look = None, cut.end(), cut.end() + size - 1
        text = text[start:]
    if text:
        yield Passage(title, text)


def _batches(pieces: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    """Pieces put together, so that threads get equal shares of work, however short the documents."""
    batch, length = list[Passage](), 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece.text)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _in_order(
    encode: Callable[[list[Passage]], Encoded], batches: Iterable[list[Passage]], workers: int
) -> Iterator[tuple[list[Passage], Encoded]]:
    """Each batch with its tokens, in order. Threads do, for both tokenizers let go of Python's lock."""
    waiting: deque[tuple[list[Passage], Future[Encoded]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch)))
            if len(waiting) > 2 * workers:  # enough to keep all busy, and a bound on memory
                done, tokens = waiting.popleft()
                yield done, tokens.result()
        for done, tokens in waiting:
            yield done, tokens.result()


def _encode(tokenizer: Tokenizer, batch: list[Passage]) -> Encoded:
    """The passages' ids, one after the other, as they stand in tokens.bin, and the counts of each."""
    ids = [tokenizer.encode(passage.text) for passage in batch]
    counts = [
        (len(own), _words(text), text.count("\n") + (not text.endswith("\n")), len(text.encode()))
        for own, (_, text) in zip(ids, batch, strict=True)
    ]
    return np.concatenate(ids).astype(_dtype(tokenizer.size)).tobytes(), counts


SPACES = np.array([chr(code).isspace() for code in range(1 << 16)])  # there are none above


def _words(text: str) -> int:
    """len(text.split()), many times as fast."""
    units = np.frombuffer(text.encode("utf-16-le"), dtype="<u2")
    space = units == ord(" ")
    rare = np.flatnonzero((units < 32) | (units > 126))
    space[rare] = SPACES[units[rare]]
    return int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])
