"""What tokens show: whole characters, visible signs, and each token as itself among candidates."""

import numpy as np
import pytest

from logpast.data import Tokenizer, TokenStore, load_tokenizer
from logpast.explore.pieces import alone, make_pieces, texts_of, visible


@pytest.fixture
def tokenizer(store: TokenStore) -> Tokenizer:
    return load_tokenizer(store.path)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return tokenizer.encode(text).astype(np.int64)


def test_texts_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = 'In the <b> beginning "\U0001f600" \u732b \u05e9\u05dc\u05d5\u05dd & \u00e9\n\tend'
    tokens = encode(tokenizer, text)
    texts = texts_of(tokens, np.zeros(1, np.int64), tokenizer)
    assert "".join(texts) == text
    assert len(texts) == len(tokens)


def test_character_of_several_tokens_is_shown_at_the_last_of_them(tokenizer: Tokenizer) -> None:
    tokens = encode(tokenizer, "\U0001f600")
    assert len(tokens) == 4
    assert texts_of(tokens, np.zeros(1, np.int64), tokenizer) == ["", "", "", "\U0001f600"]
    assert [alone(int(token), tokenizer) for token in tokens] == ["\\xf0", "\\x9f", "\\x98", "\\x80"]


def test_character_does_not_continue_in_the_next_document(tokenizer: Tokenizer) -> None:
    tokens = np.concatenate([encode(tokenizer, "\U0001f600")[:2], encode(tokenizer, "and")])
    assert "".join(texts_of(tokens, np.array([0, 2]), tokenizer)) == "and"
    assert "".join(texts_of(tokens, np.array([0]), tokenizer)) == "\ufffdand"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("line\n\tend", "line\n\tend"),
        ("\x00\x1b[31m\r", "\u2400\u241b[31m\u240d"),
        ("\x7f\x85", "‹007F›‹0085›"),
        ("\u202eabc\u2066\u200f", "‹202E›abc‹2066›‹200F›"),
        ("\u2028", "‹2028›"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680"),
        ("\u0645\u0631", "\u0645\u0631"),
    ],
)
def test_only_what_hides_or_reorders_text_is_a_sign(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_pieces_name_every_place_and_candidate_by_its_token(tokenizer: Tokenizer) -> None:
    tokens = encode(tokenizer, "the the \U0001f600 the")
    others = np.array([*encode(tokenizer, "God"), tokens[0], tokenizer.eot])
    pieces = make_pieces(tokens, np.zeros(1, np.int64), tokenizer, others)
    assert [pieces.ids[piece] for piece in pieces.place] == tokens.tolist()
    assert [pieces.ids[piece] for piece in pieces.of_tokens(others)] == others.tolist()
    assert len(set(zip(pieces.ids, pieces.text, strict=True))) == len(pieces.ids)
    assert pieces.text[pieces.of_tokens(others)[-1]] == "<|endoftext|>"
    parts = [piece for piece in pieces.place if pieces.text[piece] == ""]
    assert [pieces.label[piece] for piece in parts] == ["\\xf0", "\\x9f", "\\x98"]
