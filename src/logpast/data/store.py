"""The token store: a text as token ids in a memory-mapped file, with the counts that metrics are divided by.

A store is a folder:

    tokens.bin       the token ids, little-endian uint16 (uint32 for a vocabulary above 65,536)
    documents.tsv    one line per document: start, tokens, words, lines, bytes, name
    store.json       format, totals, sources, tokenizer, and the SHA-256 of the two files above
    tokenizer.json   the tokenizer

Words are counted with `str.split`. A document has one line per line end, and one more if its last line has no line
end. Bytes are the UTF-8 bytes of the text as tokenized: without byte-order mark, with LF as line end. Stores of early
versions, which kept other line ends, still open.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter

from logpast.data.tokenizers import Tokenizer, load_tokenizer
from logpast.util.checksums import unseal
from logpast.util.errors import UserError
from logpast.util.files import sha256_of
from logpast.util.schema import parse_json, reading, schema, validate

FORMAT, VERSION = "logpast token store", 1
COLUMNS = ("start", "tokens", "words", "lines", "bytes", "name")
STORE: TypeAdapter[dict[str, Any]] = TypeAdapter(
    schema({
        "format": Literal[FORMAT], "version": Literal[VERSION], "name": str, "dtype": Literal["<u2", "<u4"],
        **dict.fromkeys(("tokens", "words", "lines", "bytes", "documents"), NonNegativeInt),
        "tokenizer": {"name": str, "size": PositiveInt, "eot": NonNegativeInt, "fingerprint": str},
        "sha256": {"tokens.bin": str, "documents.tsv": str},
    })
)  # fmt: skip

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """The size of a text. Metrics divide its loss by these."""

    tokens: int
    words: int
    lines: int
    bytes: int
    documents: int


@dataclass(frozen=True, eq=False)
class Documents:
    """One column per attribute, documents in text order. `start` is the position of a document's first token."""

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
    """The tokenizer of a store."""

    name: str
    size: int
    eot: int
    fingerprint: str


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens and counts of a text. Open one with `TokenStore.open(folder)`.

    There is no end-of-text token between documents; `logpast.data.batching` adds one before each stream.
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
        """What a ledger row records about a text."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "tokens": len(self),
            "tokenizer": self.tokenizer.fingerprint,
        }

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Open a store and verify its checksums."""
        folder = Path(folder)
        if not (folder / "store.json").is_file():
            raise UserError(f"{folder} is not a token store (no store.json): make one with `logpast data prepare`")
        fix = "delete it and prepare it again"
        with reading(f"{folder} is damaged: store.json", fix):
            about = unseal(validate(STORE, parse_json((folder / "store.json").read_text(encoding="utf-8"))))
        with reading(f"{folder} is damaged", fix):
            totals = Counts(*(about[field.name] for field in fields(Counts)))
            info = TokenizerInfo(**about["tokenizer"])
            if about["dtype"] != id_dtype(info.size) or not 0 <= info.eot < info.size:
                raise ValueError(f"store.json contradicts itself: dtype {about['dtype']}, {info}")
            _check(folder / "tokens.bin", about, totals.tokens * np.dtype(about["dtype"]).itemsize)
            _check(folder / "documents.tsv", about)
            documents = read_documents(folder / "documents.tsv")
            if documents.counts != totals:
                raise ValueError(f"documents.tsv adds up to {documents.counts}, store.json says {totals}")
            tokens = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r")
            if (largest := int(tokens.max())) >= info.size:
                raise ValueError(f"tokens.bin has the id {largest}, beyond the vocabulary of {info.size}")
        return cls(folder, about["name"], tokens, documents, info, about["sha256"]["tokens.bin"])

    @classmethod
    def in_memory(cls, documents: Sequence[npt.ArrayLike], size: int, eot: int) -> TokenStore:
        """A store of ids without text. Each id counts as one word and one byte, each document as one line."""
        arrays = [np.asarray(document) for document in documents]
        if not arrays or not all(_are_ids(array, size) for array in arrays):
            raise UserError(f"documents must be a list of lists of ids, whole numbers from 0 to {size - 1}")
        if not 0 <= eot < size:
            raise UserError(f"eot (end-of-text) must be an id from 0 to {size - 1}, got {eot}")
        ids = [array.astype(id_dtype(size)) for array in arrays]
        tokens = np.array([len(document) for document in ids], dtype=np.int64)
        lines, names = np.ones_like(tokens), [str(n) for n in range(len(ids))]
        table = Documents(np.cumsum(tokens) - tokens, tokens, tokens, lines, tokens, names)
        joined = np.concatenate(ids)
        sha256 = hashlib.sha256(joined.tobytes()).hexdigest()
        return cls(Path(), "memory", joined, table, TokenizerInfo("none", size, eot, ""), sha256)

    def load_tokenizer(self) -> Tokenizer:
        """The store's tokenizer, from its `tokenizer.json`."""
        tokenizer = load_tokenizer(self.path)
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise UserError(f"{self.path / 'tokenizer.json'} is not the store's tokenizer: prepare the text again")
        return tokenizer


def _are_ids(values: npt.NDArray[Any], size: int) -> bool:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iuf"):
        return False
    return bool(((values % 1 == 0) & (values >= 0) & (values < size)).all())


def is_store(spec: str | Path) -> bool:
    """Whether a path is the folder of a token store, complete or damaged."""
    return any((Path(spec) / file).exists() for file in ("store.json", "tokens.bin"))


def read_documents(path: Path) -> Documents:
    """Read a `documents.tsv`. Raises ValueError if it is damaged."""
    head, *rows = (line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[:-1])
    if tuple(head) != COLUMNS:
        raise ValueError(f"{path.name} has the columns {', '.join(head)}, not {', '.join(COLUMNS)}")
    *numbers, names = zip(*rows, strict=True)
    start, tokens, words, lines, size = (np.array(column, dtype=np.int64) for column in numbers)
    if any((column < 0).any() for column in (tokens, words, lines, size)):
        raise ValueError(f"{path.name} has a document with negative counts")
    if not np.array_equal(start, np.cumsum(tokens) - tokens):
        raise ValueError(f"{path.name} has a document that does not start where the previous one ends")
    return Documents(start, tokens, words, lines, size, list(names))


def _check(path: Path, about: dict[str, Any], size: int | None = None) -> None:
    """Raise ValueError if the file has changed since the store was written."""
    if not path.is_file():
        raise ValueError(f"{path.name} is missing")
    if size is not None and path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, not {size:,}")
    if sha256_of(path) != about["sha256"][path.name]:
        raise ValueError(f"{path.name} has changed since it was written (its SHA-256 differs)")


def id_dtype(size: int) -> str:
    """The NumPy dtype of ids in a vocabulary of this size."""
    return "<u2" if size <= 1 << 16 else "<u4"
