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
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logpast.data.tokenizers import Tokenizer, load_tokenizer
from logpast.util.errors import UserError
from logpast.util.files import sha256_of

FORMAT, VERSION = "logpast token store", 1
COLUMNS = ("start", "tokens", "words", "lines", "bytes", "name")

Int64 = npt.NDArray[np.int64]


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

    def __repr__(self) -> str:
        size = f"{len(self):,} tokens ({self.tokenizer.name}) in {len(self.documents):,} documents"
        return f"<{type(self).__name__} {self.name}: {size}, {self.path}>"

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
            if about["dtype"] != id_dtype(info.size) or not 0 <= info.eot < info.size:
                raise ValueError(f"store.json does not fit itself: {about['dtype']}, {info}")
            _check(folder / "tokens.bin", about, totals.tokens * np.dtype(about["dtype"]).itemsize)
            _check(folder / "documents.tsv", about)
            documents = read_documents(folder / "documents.tsv")
            if documents.counts != totals:
                raise ValueError(f"documents.tsv adds up to {documents.counts}, store.json says {totals}")
            tokens = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"store.json lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{folder} is damaged: {what}; delete it and prepare it again") from error
        return cls(folder, about["name"], tokens, documents, info, about["sha256"]["tokens.bin"])

    @classmethod
    def in_memory(cls, documents: Sequence[npt.ArrayLike], size: int, eot: int) -> TokenStore:
        """A store of ids without text: each counts as a word and a byte, and a document as a line."""
        given = [np.asarray(document) for document in documents]
        if not given or not all(_are_ids(document, size) for document in given):
            raise UserError(f"a store wants documents of ids, whole numbers from 0 to {size - 1}")
        if not 0 <= eot < size:
            raise UserError(f"eot, the end of a text, must be an id from 0 to {size - 1}, got {eot}")
        ids = [document.astype(id_dtype(size)) for document in given]
        tokens = np.array([len(document) for document in ids], dtype=np.int64)
        lines, names = np.ones_like(tokens), [str(n) for n in range(len(ids))]
        table = Documents(np.cumsum(tokens) - tokens, tokens, tokens, lines, tokens, names)
        joined = np.concatenate(ids)
        sha256 = hashlib.sha256(joined.tobytes()).hexdigest()
        return cls(Path(), "memory", joined, table, TokenizerInfo("none", size, eot, ""), sha256)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the store, from its `tokenizer.json`."""
        tokenizer = load_tokenizer(self.path)
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise UserError(f"{self.path / 'tokenizer.json'} is not the one the store was made with: prepare it again")
        return tokenizer


def _are_ids(values: npt.NDArray[Any], size: int) -> bool:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iuf"):
        return False
    return bool(((values % 1 == 0) & (values >= 0) & (values < size)).all())


def is_store(spec: str | Path) -> bool:
    """Whether a SOURCE is a token store's folder, be it whole or damaged."""
    return any((Path(spec) / file).exists() for file in ("store.json", "tokens.bin"))


def read_documents(path: Path) -> Documents:
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
    if sha256_of(path) != about["sha256"][path.name]:
        raise ValueError(f"{path.name} is not as it was written (its SHA-256 differs)")


def id_dtype(size: int) -> str:
    return "<u2" if size <= 1 << 16 else "<u4"
