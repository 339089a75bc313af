"""What the tokens of a text show.

Text is shown as it is, except what cannot be seen or would change other text: control characters, and those that
reorder what is around them, become visible signs. A token may be a part of a character. The character is then shown at
the last of its tokens; the others show nothing.
"""

from __future__ import annotations

import codecs
import unicodedata
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from logpast.data import Tokenizer
from logpast.data.store import Int64

REORDERING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class Pieces(NamedTuple):
    """The distinct tokens of a page: as they stand in the text, and as candidates.

    Attributes:
        place: (N,) the piece at each place of the text.
        ids: the token id of each piece.
        text: what is shown in the text.
        label: what is shown where the token stands alone, by piece; only where it differs.
    """

    place: Int64
    ids: list[int]
    text: list[str]
    label: dict[int, str]

    def of_tokens(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """A piece for each of these ids, all of which must be known."""
        first = dict[int, int]()
        for piece, token in enumerate(self.ids):
            first.setdefault(token, piece)
        known = np.zeros(max(self.ids) + 1, np.int64)
        known[list(first)] = list(first.values())
        return known[tokens]


def make_pieces(tokens: NDArray[Any], starts: Int64, tokenizer: Tokenizer, others: NDArray[np.int64]) -> Pieces:
    """The pieces of a text whose documents begin at `starts`, and of candidates, `others`."""
    number: dict[tuple[int, str], int] = {}
    place = [
        number.setdefault((token, text), len(number))
        for token, text in zip(tokens.tolist(), texts_of(tokens, starts, tokenizer), strict=True)
    ]
    seen = {token for token, _ in number}
    for token in np.unique(others).tolist():
        if token not in seen:
            number.setdefault((token, alone(token, tokenizer)), len(number))
    ids, text = [token for token, _ in number], [text for _, text in number]
    labels = {piece: alone(token, tokenizer) for piece, token in enumerate(ids)}
    return Pieces(np.array(place), ids, text, {piece: name for piece, name in labels.items() if name != text[piece]})


def texts_of(tokens: NDArray[Any], starts: Int64, tokenizer: Tokenizer) -> list[str]:
    """What each token of a text shows: its characters that are complete with it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begins, texts, pending = set(starts.tolist()), list[str](), False
    whole: dict[int, str | None] = {}
    for position, token in enumerate(tokens.tolist()):
        if position in begins:
            decoder.reset()
            pending = False
        if token not in whole:
            whole[token] = _decoded(tokenizer.decode_bytes([token]))
        text = whole[token]
        if pending or text is None:
            text = visible(decoder.decode(tokenizer.decode_bytes([token])))
            pending = decoder.getstate()[0] != b""
        texts.append(text)
    return texts


def alone(token: int, tokenizer: Tokenizer) -> str:
    """A token by itself: bytes that are no character as \\xf0."""
    return visible(tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace"))


def _decoded(content: bytes) -> str | None:
    try:
        return visible(content.decode("utf-8"))
    except UnicodeDecodeError:
        return None


def visible(text: str) -> str:
    """The text, with signs for characters that cannot be seen or that reorder others; not for line break and tab."""
    return text if text.isprintable() else "".join(map(_sign, text))


def _sign(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    if character in REORDERING or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return f"‹{code:04X}›"
    return character
