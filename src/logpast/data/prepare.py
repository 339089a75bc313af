"""`logpast data prepare`: text -> token store.

Text is tokenized piece by piece, in bounded memory and on all cores. The tokens are the same as if each document were
encoded as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from codecs import BOM_UTF8
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

from logpast.data.corpora import CORPORA, Checksum, Passage, Source, Unavailable, find, one_document, read
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
from logpast.data.text_files import describe, printable
from logpast.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from logpast.util.checksums import seal
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder
from logpast.util.progress import progress_bar
from logpast.util.threads import in_thread
from logpast.util.validation import PositiveInt, validate_arguments
from logpast.version import __version__

TO_TRAIN = re.compile(r"bpe-(\d+)")  # name of a tokenizer to be trained
PIECE = 1 << 20  # characters that a thread tokenizes at a time

Count = tuple[int, int, int, int]  # tokens, words, lines, bytes
Encoded = tuple[bytes, list[Count]]


@validate_arguments
def prepare(
    sources: list[str],
    out: Path,
    tokenizer: str = "gpt2",
    workers: PositiveInt | None = None,
    root: Path | None = None,
) -> list[TokenStore]:
    """Turn text into a token store: a folder to train on or to score.

    Examples:
        logpast data prepare mybooks/ --out data/mine --tokenizer bpe-4096
        logpast data prepare other.txt --out data/other --tokenizer data/mine
        logpast data prepare part1.txt part2.txt --out data/book
        logpast data prepare wikitext103 --out data/wikitext103
        logpast data prepare pg19:test --out data/pg19-test

    Args:
        sources: text to prepare, in UTF-8 (CR LF and CR become LF): files, folders (every *.txt below; what is left
            out is listed), globs, or splits of known corpora: wikitext103, pg19 and kjv with :train, :validation or
            :test, and wiki22k:train. 'pg19:train[:50]' is its first 50 documents, 'pg19:train[::10]' every tenth.
            Several sources become one store, in the given order. The name of a corpus alone means all splits that
            can be obtained, one store each: OUT/train, OUT/validation, …
        out: the folder to create. It must not exist, and it appears only when it is complete.
        tokenizer: gpt2; or bpe-SIZE, such as bpe-4096, to train one on this text (of a corpus, on its train split);
            or a tokenizer.json or another store, to use its tokenizer. A test text needs the tokenizer of the
            training text.
        workers: number of threads; by default one per processor core.
        root: folder with the known corpora, in place of the environment variable LOGPAST_DATA. What is not there is
            downloaded from the Hugging Face hub.

    Returns:
        The stores, one per split.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise UserError(f"{out} already exists: choose another --out, or delete it first")
    splits = _find_sources(sources, root)
    _print_left_out(source for found in splits.values() for source in found)
    try:
        with atomic_folder(out) as folder:
            chosen = _load_or_train(tokenizer, splits)
            for split, found in splits.items():
                _write_store(folder / split, found, chosen, workers)
    except FileExistsError:
        raise UserError(f"{out} was created by another process in the meantime; it was not changed") from None
    stores = [TokenStore.open(out / split) for split in splits]
    _print_counts(stores)
    return stores


def _print_left_out(sources: Iterable[Source]) -> None:
    for source in sources:
        if source.left_out:
            text = f"left out of {printable(source.name)}: {describe(source.left_out)}"
            Console(stderr=True, emoji=False).print(text, markup=False, highlight=False, soft_wrap=True)


def _print_counts(stores: list[TokenStore]) -> None:
    table = Table(Column("store", overflow="fold"), *(Column(f.name, justify="right") for f in fields(Counts)))
    for store in stores:
        table.add_row(str(store.path), *(f"{count:,}" for count in astuple(store.counts)))
    Console(emoji=False, markup=False).print(table)


def open_tokens(
    spec: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    cache: Path | None = None,
    root: Path | None = None,
) -> TokenStore:
    """Open a store, or the tokens of any text, which is prepared on first use and kept in a cache.

    Args:
        spec: the folder of a store, a file, a folder, a glob, or a split of a corpus such as wikitext103:test.
        tokenizer: the tokenizer that the tokens must have, such as the model's; bpe-SIZE trains one on the text. By
            default a store's own, and gpt2 for text.
        cache: folder for prepared texts; by default $LOGPAST_CACHE, else ~/.cache/logpast.
        root: folder with the known corpora, in place of LOGPAST_DATA.
    """
    spec = str(spec)
    if is_store(spec):
        return _open_store(spec, tokenizer)
    if inner := sorted(path.parent.name for path in Path(spec).glob("*/store.json")):
        raise UserError(f"{spec} holds several stores: name one, {' or '.join(str(Path(spec, i)) for i in inner)}")
    source = find(spec, root)
    wanted = _name_to_train(tokenizer) or _as_tokenizer(tokenizer or "gpt2")
    folder, store = _find_cached(source, wanted, cache)
    if store is not None:
        return store
    _print_left_out([source])
    try:
        with atomic_folder(folder) as unfinished:
            trained = _load_or_train(wanted, {"": [source]}) if isinstance(wanted, str) else wanted
            _write_store(unfinished, [source], trained)
    except FileExistsError:
        pass  # another process has just prepared the same text
    return TokenStore.open(folder)


def _open_store(folder: str, tokenizer: str | Path | Tokenizer | None) -> TokenStore:
    """Open a store whose tokenizer must be the given one. For a BPE to be trained, only the name must agree."""
    store = TokenStore.open(folder)
    own, to_train = store.tokenizer, _name_to_train(tokenizer)
    if tokenizer is None or to_train == own.name:
        return store
    wanted = None if to_train else _as_tokenizer(tokenizer)
    if wanted is not None and wanted.fingerprint == own.fingerprint:
        return store
    need = f"{wanted.name} ({wanted.fingerprint[:8]})" if wanted else to_train
    raise UserError(
        f"{folder} was made with the tokenizer {own.name} ({own.fingerprint[:8]}), but {need} is needed: "
        "prepare the text again, with --tokenizer and a folder that has the tokenizer"
    )


def is_prepared(spec: str, tokenizer: str | None = None, cache: Path | None = None) -> bool:
    """Whether `open_tokens` would find the tokens without preparing them."""
    if is_store(spec):
        return True
    try:
        source = find(spec)
        wanted = _name_to_train(tokenizer) or load_tokenizer(tokenizer or "gpt2")
    except UserError:
        return False
    return _find_cached(source, wanted, cache)[1] is not None


def _find_cached(source: Source, tokenizer: Tokenizer | str, cache: Path | None) -> tuple[Path, TokenStore | None]:
    """The folder for the tokens of a text in the cache, and the store if it is there.

    Args:
        tokenizer: the tokenizer, or the name of one to be trained on the text.
    """
    key = [VERSION, source.name, source.stamp, tokenizer if isinstance(tokenizer, str) else tokenizer.fingerprint]
    label = re.sub(r"[^\w.-]+", "_", source.name).strip("_.")[-40:]
    home = cache or Path(os.environ.get("LOGPAST_CACHE") or Path.home() / ".cache" / "logpast")
    for rule in ([], ["LF"]):  # a store of an early version, which kept other line ends, is not used
        digest = hashlib.sha256(json.dumps(key + rule).encode()).hexdigest()
        folder = home / "tokens" / f"{label}-{digest[:16]}"
        store = TokenStore.open(folder) if folder.exists() else None
        if store is None or not _is_raw(store, store.load_tokenizer() if isinstance(tokenizer, str) else tokenizer):
            break
    return folder, store


def _is_raw(store: TokenStore, tokenizer: Tokenizer) -> bool:
    """Whether a text has a CR, or a document of it a byte-order mark, which `text_files.decode` would have removed."""
    has_cr = np.array([b"\r" in token for token in tokenizer.vocabulary])
    pieces = range(0, len(store), 1 << 24)
    starts = (store.tokens[start : start + len(BOM_UTF8)] for start in store.documents.start)
    return any(has_cr[store.tokens[first : first + pieces.step]].any() for first in pieces) or any(
        tokenizer.decode_bytes(ids).startswith(BOM_UTF8) for ids in starts
    )


def _name_to_train(tokenizer: str | Path | Tokenizer | None) -> str | None:
    """The tokenizer if it is the name of one to train, such as bpe-4096; else None."""
    return tokenizer if isinstance(tokenizer, str) and TO_TRAIN.fullmatch(tokenizer) else None


def _as_tokenizer(tokenizer: str | Path | Tokenizer) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)


def _find_sources(specs: list[str], root: Path | None) -> dict[str, list[Source]]:
    """The sources of each store to write, by its folder below OUT."""
    if not specs:
        raise UserError("no text given: name a file, a folder or a split of a corpus, for example wikitext103:test")
    whole = [spec for spec in specs if spec in CORPORA]
    if not whole:
        return {"": [find(spec, root) for spec in specs]}
    if len(specs) > 1:
        raise UserError(f"{whole[0]} means all its splits and must be the only source: or write {whole[0]}:train")
    found, missing = {}, dict[str, Unavailable]()
    for split in CORPORA[whole[0]].standard:
        spec = f"{whole[0]}:{split}"
        try:
            source = find(spec, root)
            source.probe()
            found[split] = [source]
        except Unavailable as error:
            missing[spec] = error
    if missing:
        first, *others = missing
        if not found:
            raise missing[first]
        text = f"skipped: {missing[first]}" + "".join(f"; the same for {spec}" for spec in others)
        Console(stderr=True, emoji=False).print(text, style="yellow", markup=False, soft_wrap=True)
    return found


def _load_or_train(spec: str, splits: dict[str, list[Source]]) -> Tokenizer:
    bpe = TO_TRAIN.fullmatch(spec)
    if not bpe:
        return load_tokenizer(spec)
    sources = splits.get("train") or splits.get("")
    if not sources:
        raise UserError(f"{spec} is trained on the train split, which is missing: give another store's tokenizer")
    console = Console(stderr=True, emoji=False)
    console.print(f"training the tokenizer {spec}; hundreds of megabytes take minutes", highlight=False)
    with console.status(f"training {spec}"):
        texts = (piece.text for source in sources for piece in _pieces(read(source, Checksum()), PIECE))
        return in_thread(lambda: train_bpe(texts, int(bpe[1]))).result()  # or Ctrl-C would not work for minutes


def _write_store(folder: Path, sources: list[Source], tokenizer: Tokenizer, workers: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    name = " + ".join(source.name for source in sources)
    checksums = [Checksum() for _ in sources]
    rows, tokens_sha256 = _write_tokens(folder / "tokens.bin", name, sources, checksums, tokenizer, workers)
    table = _to_bytes("".join("\t".join(map(str, row)) + "\n" for row in [COLUMNS, *rows]))
    (folder / "documents.tsv").write_bytes(table)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "dtype": id_dtype(tokenizer.size),
        **asdict(read_documents(folder / "documents.tsv").counts),
        "sources": [
            {"name": source.name, "bytes": checksum.size, "sha256": checksum.hash.hexdigest()}
            for source, checksum in zip(sources, checksums, strict=True)
        ],
        "tokenizer": {f.name: getattr(tokenizer, f.name) for f in fields(TokenizerInfo)},
        "sha256": {
            "tokens.bin": tokens_sha256,
            "documents.tsv": hashlib.sha256(table).hexdigest(),
        },
        "logpast": __version__,
    }
    (folder / "store.json").write_bytes(_to_bytes(json.dumps(seal(about), indent=2, ensure_ascii=False) + "\n"))


def _write_tokens(
    path: Path,
    name: str,
    sources: list[Source],
    checksums: list[Checksum],
    tokenizer: Tokenizer,
    workers: int | None,
) -> tuple[list[list[Any]], str]:
    """Write the ids of all sources. Returns the rows of documents.tsv and the SHA-256 of the ids."""
    passages = chain.from_iterable(map(read, sources, checksums))
    batches = _batches(_pieces(passages, _piece_size(tokenizer, PIECE)), PIECE)
    encode = partial(_encode, tokenizer)
    total, sha256, rows = 0, hashlib.sha256(), list[list[Any]]()
    sizes = [source.size for source in sources]
    megabytes = None if None in sizes else -(-sum(filter(None, sizes)) // 10**6)
    started = time.monotonic()
    with progress_bar(f"tokenizing {name}, MB", megabytes) as progress, path.open("wb") as file:
        for batch, (ids, counts) in _in_parallel(encode, batches, workers or os.cpu_count() or 1):
            file.write(ids)
            sha256.update(ids)
            for passage, count in zip(batch, counts, strict=True):
                _add(rows, passage, total, count)
                total += count[0]
            speed = total / max(time.monotonic() - started, 1e-9)
            progress.update(sum(checksum.size for checksum in checksums) // 10**6, f"{speed:,.0f} tokens/s")
    return rows, sha256.hexdigest()


def _to_bytes(text: str) -> bytes:
    return text.encode(errors="replace")  # a file name need not be valid Unicode


def _add(rows: list[list[Any]], passage: Passage, start: int, count: Count) -> None:
    """Add the counts of a passage to the row of its document."""
    if passage.title is not None:
        rows.append([start, 0, 0, 0, 0, " ".join(passage.title.split())])
    else:  # the previous passage ended within a line, which both have counted
        rows[-1][COLUMNS.index("lines")] -= 1
    for column, n in enumerate(count, start=1):
        rows[-1][column] += n


# GPT-2's pattern always splits between a character that is not white space and a space or newline after it: no match
# contains both, and no match that ends with the first looks ahead.
CUT = re.compile(r"\S(?=[ \n])")


def pieces_of(blocks: Iterable[str], tokenizer: Tokenizer, size: int) -> Iterator[str]:
    """A text that is read in blocks, in pieces of about `size` characters that have the tokens of the whole text.

    One piece, if the tokenizer encodes texts as a whole only.
    """
    return (piece.text for piece in _pieces(one_document(blocks, ""), _piece_size(tokenizer, size)))


def _piece_size(tokenizer: Tokenizer, size: int) -> int:
    return size if tokenizer.encodes_pieces else sys.maxsize


def _pieces(passages: Iterable[Passage], size: int) -> Iterator[Passage]:
    """The same documents in pieces of at least `size` characters that can be tokenized separately.

    A piece grows until there is a place to cut, for example through a megabyte of white space.
    """
    title, text = None, ""
    for passage in passages:
        if passage.title is not None:
            if text:
                yield Passage(title, text)
            title, text = passage.title, ""
        start, search_from = 0, max(len(text), size) - 1
        text += passage.text
        while cut := CUT.search(text, search_from):
            yield Passage(title, text[start : cut.end()])
            title, start, search_from = None, cut.end(), cut.end() + size - 1
        text = text[start:]
    if text:
        yield Passage(title, text)


def _batches(pieces: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    """Pieces in groups of at least `size` characters, so that short documents do not mean many small tasks."""
    batch, length = list[Passage](), 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece.text)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _in_parallel(
    encode: Callable[[list[Passage]], Encoded], batches: Iterable[list[Passage]], workers: int
) -> Iterator[tuple[list[Passage], Encoded]]:
    """Each batch with its tokens, in order. Threads are enough: both tokenizers release Python's lock."""
    waiting: deque[tuple[list[Passage], Future[Encoded]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch)))
            if len(waiting) > 2 * workers:  # enough to keep all threads busy, and a bound on memory
                done, tokens = waiting.popleft()
                yield done, tokens.result()
        for done, tokens in waiting:
            yield done, tokens.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C


def _encode(tokenizer: Tokenizer, batch: list[Passage]) -> Encoded:
    """The ids of all passages, as bytes of tokens.bin, and the counts of each passage."""
    ids = [tokenizer.encode(passage.text) for passage in batch]
    counts = [
        (len(own), _count_words(text), text.count("\n") + (not text.endswith("\n")), len(text.encode()))
        for own, (_, text) in zip(ids, batch, strict=True)
    ]
    return np.concatenate(ids).astype(id_dtype(tokenizer.size)).tobytes(), counts


IS_SPACE = np.array([chr(code).isspace() for code in range(1 << 16)])  # no white space above


def _count_words(text: str) -> int:
    """len(text.split()), several times as fast."""
    units = np.frombuffer(text.encode("utf-16-le"), dtype="<u2")
    space = units == ord(" ")
    rare = np.flatnonzero((units < 32) | (units > 126))
    space[rare] = IS_SPACE[units[rare]]
    return int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])
