"""From text to a token store: piece by piece, in bounded memory, on all cores, and equal to encoding it whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, astuple, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from logpast.data.corpora import CORPORA, Passage, Source, Tally, find, read
from logpast.data.store import (
    COLUMNS,
    FORMAT,
    VERSION,
    Counts,
    TokenizerInfo,
    TokenStore,
    id_dtype,
    is_store,
    read_documents,
)
from logpast.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder
from logpast.util.progress import progress_bar
from logpast.util.validation import validate_arguments
from logpast.version import __version__

TO_TRAIN = re.compile(r"bpe-(\d+)")  # a tokenizer that is yet to be trained
PIECE = 1 << 20  # characters that a thread tokenises at a time

Count = tuple[int, int, int, int]  # tokens, words, lines, bytes
Encoded = tuple[bytes, list[Count]]


@validate_arguments
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
        sources: Text to prepare: files, folders (every *.txt below), globs, or parts of known corpora: wikitext103,
            pg19 and kjv, each with :train, :validation or :test, and wiki22k:train; 'pg19:train[:50]' is its first 50
            documents, 'pg19:train[::10]' the first of every ten, in the order in which they are read. Several become
            one store, in the order given. A corpus's bare name, given alone, means all its splits that can be had, each
            a store: OUT/train, OUT/validation …
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
        with atomic_folder(out) as folder:
            chosen = _choose_tokenizer(tokenizer, parts)
            for split, part in parts.items():
                _write_store(folder / split, part, chosen, workers)
    except FileExistsError:
        raise UserError(f"{out} was made by another process meanwhile and is left as it is") from None
    stores = [TokenStore.open(out / split) for split in parts]
    table = Table(Column("store", overflow="fold"), *(Column(f.name, justify="right") for f in fields(Counts)))
    for store in stores:
        table.add_row(str(store.path), *(f"{count:,}" for count in astuple(store.counts)))
    Console(emoji=False, markup=False).print(table)
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
    if is_store(spec):
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
    folder = _place(source, wanted.fingerprint if wanted else to_train, cache)
    if not folder.exists():
        try:
            with atomic_folder(folder) as unfinished:
                _write_store(unfinished, [source], wanted or _choose_tokenizer(str(to_train), {"": [source]}))
        except FileExistsError:
            pass  # another process was faster; its store is as good
    return TokenStore.open(folder)


def is_prepared(spec: str, tokenizer: str | None = None, cache: Path | None = None) -> bool:
    """Whether `open_tokens` would find the tokens and need not make them first."""
    if is_store(spec):
        return True
    to_train = tokenizer is not None and TO_TRAIN.fullmatch(tokenizer)
    try:
        source = find(spec)
        made_by = tokenizer if to_train else load_tokenizer(tokenizer or "gpt2").fingerprint
    except UserError:
        return False
    return _place(source, made_by, cache).exists()


def _place(source: Source, tokenizer: str | None, cache: Path | None) -> Path:
    """Where a source's tokens are kept, by a tokenizer's fingerprint or by the name of one trained on the source."""
    key = json.dumps([VERSION, source.name, source.stamp, tokenizer])
    label = re.sub(r"[^\w.-]+", "_", source.name).strip("_.")[-40:]
    home = cache or Path(os.environ.get("LOGPAST_CACHE") or Path.home() / ".cache" / "logpast")
    return home / "tokens" / f"{label}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


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
    for split in CORPORA[bare[0]].standard:
        try:
            source = find(f"{bare[0]}:{split}", root)
            source.probe()
            found[split] = [source]
        except UserError as error:
            missing.append(error)
    if not found:
        raise missing[0]
    for reason in missing:
        Console(stderr=True, emoji=False).print(f"left out: {reason}", style="yellow", markup=False, soft_wrap=True)
    return found


def _choose_tokenizer(spec: str, parts: dict[str, list[Source]]) -> Tokenizer:
    bpe = TO_TRAIN.fullmatch(spec)
    if not bpe:
        return load_tokenizer(spec)
    learn_from = parts.get("train") or parts.get("")
    if not learn_from:
        raise UserError(f"{spec} is trained on the train split, which is missing: give another store's tokenizer")
    console = Console(stderr=True, emoji=False)
    console.print(f"training the tokenizer {spec}; on hundreds of megabytes this takes minutes", highlight=False)
    with console.status(f"training {spec}"):
        texts = (piece.text for source in learn_from for piece in _pieces(read(source, Tally()), PIECE))
        return _interruptible(lambda: train_bpe(texts, int(bpe[1])))


def _interruptible(work: Callable[[], Tokenizer]) -> Tokenizer:
    """Do it in another thread, so that Ctrl-C is heard while a library keeps at it for minutes."""
    done: Future[Tokenizer] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result()


def _write_store(folder: Path, sources: list[Source], tokenizer: Tokenizer, workers: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    name, dtype = " + ".join(source.name for source in sources), id_dtype(tokenizer.size)
    tallies = [Tally() for _ in sources]
    batches = _batches(_pieces(chain.from_iterable(map(read, sources, tallies)), PIECE), PIECE)
    encode = partial(_encode, tokenizer)
    total, sum_of_ids, rows = 0, hashlib.sha256(), list[list[Any]]()
    sizes = [source.size for source in sources]
    megabytes = None if None in sizes else -(-sum(filter(None, sizes)) // 10**6)
    started = time.monotonic()
    with progress_bar(f"tokenising {name}, MB", megabytes) as progress, (folder / "tokens.bin").open("wb") as file:
        for batch, (ids, counts) in _in_order(encode, batches, workers or os.cpu_count() or 1):
            file.write(ids)
            sum_of_ids.update(ids)
            for passage, count in zip(batch, counts, strict=True):
                _add(rows, passage, total, count)
                total += count[0]
            speed = total / max(time.monotonic() - started, 1e-9)
            progress.update(sum(tally.size for tally in tallies) // 10**6, f"{speed:,.0f} tokens/s")
    if not total:
        raise UserError(f"{name} has no text: name a file or folder that has some")
    table = _text("".join("\t".join(map(str, row)) + "\n" for row in [COLUMNS, *rows]))
    (folder / "documents.tsv").write_bytes(table)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "dtype": dtype,
        **asdict(read_documents(folder / "documents.tsv").counts),
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
    pool = ThreadPoolExecutor(workers)
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch)))
            if len(waiting) > 2 * workers:  # enough to keep all busy, and a bound on memory
                done, tokens = waiting.popleft()
                yield done, tokens.result()
        for done, tokens in waiting:
            yield done, tokens.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C nobody wants what was still to come


def _encode(tokenizer: Tokenizer, batch: list[Passage]) -> Encoded:
    """The passages' ids, one after the other, as they stand in tokens.bin, and the counts of each."""
    ids = [tokenizer.encode(passage.text) for passage in batch]
    counts = [
        (len(own), _words(text), text.count("\n") + (not text.endswith("\n")), len(text.encode()))
        for own, (_, text) in zip(ids, batch, strict=True)
    ]
    return np.concatenate(ids).astype(id_dtype(tokenizer.size)).tobytes(), counts


SPACES = np.array([chr(code).isspace() for code in range(1 << 16)])  # there are none above


def _words(text: str) -> int:
    """len(text.split()), many times as fast."""
    units = np.frombuffer(text.encode("utf-16-le"), dtype="<u2")
    space = units == ord(" ")
    rare = np.flatnonzero((units < 32) | (units > 126))
    space[rare] = SPACES[units[rare]]
    return int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])
