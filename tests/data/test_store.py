"""The token store: equal to encoding each document whole; whole or absent on disk; checked when opened."""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, astuple
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logpast.data.prepare as preparing
from logpast.data import (
    Counts,
    Tokenizer,
    TokenStore,
    corpora,
    load_tokenizer,
    open_tokens,
    train_bpe,
)
from logpast.data.corpora import Passage, Tally, find, read
from logpast.data.prepare import prepare
from logpast.util import files
from logpast.util.errors import UserError

DATA = Path(os.environ.get("LOGPAST_DATA", "nowhere"))
real_data = pytest.mark.skipif("LOGPAST_DATA" not in os.environ, reason="LOGPAST_DATA is not set")

GPT2 = load_tokenizer("gpt2")
SNIPPETS = [" ", "  ", "\n", "\n\n\n", "\r", "\r\n", "\t", "\xa0", "\u2028", "\x1c", "\x85", "\u3000", "'s", "'t", "'"]
SNIPPETS += ["the", "Straße", "e\u0301", "\u0301", "🦊", "👩‍🚀", "日本。", "42", "=", " = ", "<|endoftext|>", "\x00"]
# Learnt from every pair of them, it has tokens that reach across any place where one might cut by mistake.
BPE = train_bpe([a + b + a + b for a, b in product(SNIPPETS, SNIPPETS)], 2000)
both = pytest.mark.parametrize("tokenizer", [GPT2, BPE], ids=["gpt2", "bpe"])

nasty = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3)), max_size=40).map("".join)


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with two small texts, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGPAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("one two\nthree")
    (tmp_path / "b.txt").write_text("four\n\n")
    return tmp_path


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- cutting


@both
@settings(deadline=None)
@given(text=nasty, blocks=st.lists(st.integers(0, 80), max_size=6), size=st.integers(1, 12))
def test_pieces_tokenise_like_the_whole(tokenizer: Tokenizer, text: str, blocks: list[int], size: int) -> None:
    marks = [0, *sorted(min(place, len(text)) for place in blocks), len(text)]
    parts = [text[a:b] for a, b in pairwise(marks) if a < b]
    passages = [Passage(None if n else "text", part) for n, part in enumerate(parts)]
    pieces = list(preparing._pieces(passages, size))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.title for piece in pieces] == (["text"] + [None] * len(pieces))[: len(pieces)]
    assert all(len(piece.text) >= size for piece in pieces[:-1])
    if text:
        ids, counts = preparing._encode(tokenizer, pieces)
        assert np.frombuffer(ids, dtype="<u2").tolist() == tokenizer.encode(text).tolist()
        assert sum(count[1] for count in counts) == len(text.split())


@both
def test_pairs_tokenise_like_the_whole(tokenizer: Tokenizer) -> None:
    """Each pair in turn, for the cases that are too rare to be drawn."""
    for a, b in product(SNIPPETS, SNIPPETS):
        ids, _ = preparing._encode(tokenizer, list(preparing._pieces([Passage("t", a + b + a + b)], 1)))
        assert np.frombuffer(ids, dtype="<u2").tolist() == tokenizer.encode(a + b + a + b).tolist(), (a, b)


def test_there_are_cuts_to_find() -> None:
    """That the property above is not met by never cutting."""
    text = "the cat's 日本。\nsat  on\n\n🦊 mats "
    pieces = [piece.text for piece in preparing._pieces([Passage("t", text)], 1)]
    assert pieces == ["the", " cat's", " 日本。", "\nsat", "  on", "\n\n🦊", " mats", " "]


@both
def test_text_without_a_place_to_cut(tokenizer: Tokenizer) -> None:
    text = "word" + " " * 5000 + "x" * 5000 + "\n" * 5000 + "end"
    passages = [Passage(None if n else "t", text[i : i + 100]) for n, i in enumerate(range(0, len(text), 100))]
    pieces = list(preparing._pieces(passages, 10))
    assert [len(piece.text) for piece in pieces] == [10_004, 5_003]
    ids, _ = preparing._encode(tokenizer, pieces)
    assert np.frombuffer(ids, dtype="<u2").tolist() == tokenizer.encode(text).tolist()


@both
def test_any_character_can_be_cut_after(tokenizer: Tokenizer) -> None:
    """Tried on each: that none which is white space to a tokenizer's pattern counts as \\S here."""
    text = "".join(f"{chr(code)} " for code in [*range(0xD800), *range(0xE000, 1 << 16), 0x1F98A])
    pieces = list(preparing._pieces([Passage("t", text)], 1))
    assert len(pieces) > 63_000
    ids, _ = preparing._encode(tokenizer, pieces)
    assert np.array_equal(np.frombuffer(ids, dtype="<u2"), tokenizer.encode(text))


@settings(deadline=None)
@given(text=nasty.filter(bool))
def test_words_are_those_of_split(text: str) -> None:
    assert preparing._words(text) == len(text.split())


# --- preparing


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_counts_and_documents(piece: int, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "PIECE", piece)
    (store,) = prepare(["a.txt", "b.txt"], Path("out"))
    assert astuple(store.counts) == (
        len(GPT2.encode("one two\nthree")) + len(GPT2.encode("four\n\n")),
        4,
        4,
        19,
        2,
    )
    assert store.name == "a.txt + b.txt"
    assert store.documents.names == ["a.txt", "b.txt"]
    assert store.documents.words.tolist() == [3, 1]
    assert store.documents.lines.tolist() == [2, 2]
    assert store.documents.bytes.tolist() == [13, 6]
    assert store.documents.start.tolist() == [0, store.documents.tokens[0]]
    assert GPT2.decode(store.tokens) == "one two\nthreefour\n\n"  # and no end-of-text between
    assert len(store) == len(store.tokens) == store.counts.tokens
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1


def test_what_is_on_disk(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store,) = prepare(["a.txt"], Path("deep/er/out"))
    assert left_in(store.path) == ["documents.tsv", "store.json", "tokenizer.json", "tokens.bin"]
    assert left_in(store.path.parent) == ["out"]
    table = (store.path / "documents.tsv").read_text()
    assert table == f"start\ttokens\twords\tlines\tbytes\tname\n0\t{len(store)}\t3\t2\t13\ta.txt\n"
    about = json.loads((store.path / "store.json").read_text())
    assert about["sources"] == [{"name": "a.txt", "bytes": 13, "sha256": hashlib.sha256(b"one two\nthree").hexdigest()}]
    assert {name: about[name] for name in asdict(store.counts)} == asdict(store.counts)
    assert about["dtype"] == "<u2"
    sum_of_tokens = hashlib.sha256((store.path / "tokens.bin").read_bytes()).hexdigest()
    assert store.sha256 == about["sha256"]["tokens.bin"] == sum_of_tokens
    assert store.identity == {
        "name": "a.txt",
        "sha256": sum_of_tokens,
        "tokens": len(store),
        "tokenizer": GPT2.fingerprint,
    }
    assert store.load_tokenizer() is GPT2
    assert "13" in capsys.readouterr().out  # the table of counts
    assert oct(store.path.stat().st_mode) == oct(store.path.parent.stat().st_mode)  # readable as any folder


def test_document_names_keep_to_their_line(books: Path) -> None:
    (books / "odd").mkdir()
    (books / "odd" / "a\tb\nc.txt").write_text("x")
    (books / "odd" / os.fsdecode(b"\xff.txt")).write_text("y")
    (store,) = prepare(["odd"], Path("out"))
    assert store.documents.names == ["a b c.txt", "?.txt"]


@real_data
def test_wikitext_test_set(tmp_path: Path) -> None:
    (store,) = prepare(["wikitext103:test"], tmp_path / "out")
    assert store.counts == Counts(tokens=286_221, words=241_211, lines=4_358, bytes=1_290_590, documents=60)
    whole = (DATA / "wikitext103" / "wiki.test.raw").read_bytes().decode()
    assert np.array_equal(store.tokens, GPT2.encode(whole))
    assert store.documents.names[:2] == ["Robert Boulter", "Du Fu"]


@real_data
@both
def test_parallel_is_serial_is_whole(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.save(tmp_path)
    monkeypatch.setattr(preparing, "PIECE", 5000)
    monkeypatch.setattr(corpora, "BLOCK", 7001)
    stores = [
        prepare(["wikitext103:validation"], tmp_path / str(workers), str(tmp_path / "tokenizer.json"), workers)[0]
        for workers in (1, 3)
    ]
    text = (DATA / "wikitext103" / "wiki.valid.raw").read_bytes().decode()
    for store in stores:
        assert np.array_equal(store.tokens, tokenizer.encode(text))
        assert astuple(store.counts)[1:] == (213_886, 3_760, 1_146_846, 60)
        starts = np.cumsum([0] + [len(tokenizer.encode(text)) for text in _articles("wikitext103:validation")])
        assert store.documents.start.tolist() == starts[:-1].tolist()
    assert stores[0].identity == stores[1].identity


def _articles(spec: str) -> list[str]:
    texts: list[str] = []
    for title, text in read(find(spec), Tally()):
        if title is not None:
            texts.append("")
        texts[-1] += text
    return texts


@real_data
def test_books_have_unix_line_ends(tmp_path: Path) -> None:
    (store,) = prepare(["pg19:validation"], tmp_path / "out")
    assert (store.counts.documents, store.counts.words) == (49, 2_963_926)
    first = DATA / "pg19" / "validation" / f"{store.documents.names[0]}.txt"
    text = first.read_bytes().decode().replace("\r\n", "\n")
    assert np.array_equal(store.tokens[: store.documents.tokens[0]], GPT2.encode(text))
    assert (store.documents.bytes[0], store.documents.lines[0]) == (
        len(text.encode()),
        len(text.splitlines()),
    )


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as LOGPAST_DATA, with PG-19's train and test, and nothing else to be had."""
    for split, text in {"train": "a rose is a rose\r\n" * 30, "test": "is it not a rose?\r\n"}.items():
        (tmp_path / "root" / "pg19" / split).mkdir(parents=True)
        (tmp_path / "root" / "pg19" / split / "1.txt").write_bytes(text.encode())
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path / "root"


def test_a_bare_name_means_all_its_splits(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = prepare(["pg19"], tmp_path / "out", "bpe-270", root=corpus)
    assert [(store.path.name, store.name) for store in stores] == [
        ("train", "pg19:train"),
        ("test", "pg19:test"),
    ]
    assert "left out: pg19:validation is not here" in capsys.readouterr().err
    trained = train_bpe(["a rose is a rose\n" * 30], 270).fingerprint  # on train alone
    assert {store.tokenizer.fingerprint for store in stores} == {trained}
    assert stores[1].load_tokenizer().decode(stores[1].tokens) == "is it not a rose?\n"


def test_what_a_bare_name_cannot_do(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="pg19 means all its splits and must stand alone: write pg19:train"):
        prepare(["pg19", "pg19:test"], out, root=corpus)
    with pytest.raises(UserError, match="wikitext103:train is not here"):
        prepare(["wikitext103"], out, root=corpus)
    (corpus / "pg19" / "train" / "1.txt").unlink()
    with pytest.raises(UserError, match="bpe-300 is trained on the train split, which is missing"):
        prepare(["pg19"], out, "bpe-300", root=corpus)
    assert left_in(tmp_path) == ["root"]


def test_another_store_lends_its_tokenizer(books: Path) -> None:
    (train,) = prepare(["a.txt"], Path("train"), "bpe-260")
    (test,) = prepare(["b.txt"], Path("test"), "train")
    assert test.tokenizer == train.tokenizer
    assert test.load_tokenizer().decode(test.tokens) == "four\n\n"


class Wide(Tokenizer):
    """Letters are ids, from 128,000 on: too many for 16 bits."""

    def __init__(self) -> None:
        super().__init__("wide", [chr(n % 128).encode() for n in range(128_128)], 0)

    def encode(self, text: str) -> Any:
        return np.array([128_000 + ord(letter) for letter in text], dtype=np.uint32)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_a_large_vocabulary(books: Path) -> None:
    store = open_tokens("a.txt", Wide())
    assert store.tokens.dtype == np.dtype("<u4")
    assert Wide().decode(store.tokens) == "one two\nthree"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sources": []}, "no text was named"),
        ({"sources": ["gone.txt"]}, "no file, folder or corpus 'gone.txt'"),
        ({"sources": ["a.txt", "empty.txt"]}, "empty.txt is empty"),
        ({"sources": ["latin.txt"]}, "latin.txt is not UTF-8 at byte 3"),
        ({"sources": ["latin.txt"], "tokenizer": "bpe-300"}, "latin.txt is not UTF-8 at byte 3"),
        ({"out": Path("a.txt")}, "a.txt exists already and is left as it is"),
        ({"out": Path("folder")}, "folder exists already"),
        ({"out": Path("a.txt/out")}, "cannot write .*a.txt/out: Not a directory"),
        ({"tokenizer": "gpt5"}, "no tokenizer 'gpt5'"),
        ({"tokenizer": "bpe-99"}, "a BPE of 99 tokens is too small"),
        ({"workers": 0}, "workers must be 1 or more"),
    ],
)
def test_what_cannot_be_prepared(change: dict[str, Any], what: str, books: Path) -> None:
    (books / "empty.txt").touch()
    (books / "latin.txt").write_bytes(b"caf\xe9")
    (books / "folder").mkdir()
    before = left_in(books)
    with pytest.raises(UserError, match=what) as error:
        prepare(**{"sources": ["a.txt"], "out": Path("out"), **change})
    assert "\n" not in str(error.value)
    assert left_in(books) == before
    assert (books / "a.txt").read_text() == "one two\nthree"


def test_ctrl_c_and_a_full_disk_leave_nothing(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparing, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(["a.txt"], Path("out"))
    monkeypatch.undo()
    monkeypatch.chdir(books)
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(UserError, match=r"cannot write .*out: No space left on device"):
        prepare(["a.txt"], Path("out"))
    assert left_in(books) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle(end: signal.Signals, tmp_path: Path) -> None:
    with (tmp_path / "big.txt").open("w") as file:
        for n in range(60):
            file.write(f"{n} the quick brown fox — " * 40_000)
    code = "from logpast import prepare; prepare(['big.txt'], 'out', workers=1)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not any(file.stat().st_size for file in tmp_path.glob(".out.*.unfinished/tokens.bin")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(end)
    assert process.wait(30) != 0
    assert not (tmp_path / "out").exists()
    if end == signal.SIGINT:
        assert left_in(tmp_path) == ["big.txt"]
    (tmp_path / "small.txt").write_text("a b")
    assert len(prepare([str(tmp_path / "small.txt")], tmp_path / "out")[0]) == 2


def test_a_store_that_appears_meanwhile_is_left(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = files.fsync

    def meanwhile(path: Path) -> None:
        (books / "out").mkdir(exist_ok=True)
        (books / "out" / "precious").touch()
        sync(path)

    monkeypatch.setattr(files, "sync", meanwhile)
    with pytest.raises(UserError, match="was made by another process meanwhile"):
        prepare(["a.txt"], Path("out"))
    assert left_in(books) == ["a.txt", "b.txt", "out"]
    assert left_in(books / "out") == ["precious"]


# --- opening


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def edit_about(**changes: Any) -> Callable[[Path], None]:
    return edit("store.json", lambda content: json.dumps({**json.loads(content), **changes}).encode())


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (edit("tokens.bin", lambda content: content[:-2]), r"tokens.bin has 6 bytes, not 8"),
    "odd": (edit("tokens.bin", lambda content: content[:-1]), r"tokens.bin has 7 bytes, not 8"),
    "one bit": (edit("tokens.bin", flip), "tokens.bin is not as it was written"),
    "no tokens": (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin"),
    "no documents": (lambda folder: (folder / "documents.tsv").unlink(), "documents.tsv"),
    "a name": (
        edit("documents.tsv", lambda content: content.replace(b"a.txt", b"b.txt")),
        "documents.tsv is not as",
    ),
    "half a json": (edit("store.json", lambda content: content[:50]), "is damaged"),
    "another json": (edit("store.json", lambda content: b"[1]"), "is damaged"),
    "foreign": (edit_about(format="mine"), "says mine 1, not logpast token store 1"),
    "newer": (edit_about(version=2), "logpast token store 2, not logpast token store 1"),
    "words": (edit_about(words=99), r"documents.tsv adds up to .*words=3.*words=99"),
    "tokens": (edit_about(tokens=5), r"tokens.bin has 8 bytes, not 10"),
    "dtype": (edit_about(dtype="<f4"), "does not fit itself"),
    "tokenizer": (edit_about(tokenizer={"name": "gpt2"}), "is damaged"),
    "no sums": (edit_about(sha256={}), "store.json lacks 'tokens.bin'"),
}


@pytest.mark.parametrize(("damage", "what"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found(damage: Callable[[Path], None], what: str, books: Path) -> None:
    (store,) = prepare(["a.txt"], Path("out"))
    assert len(store) == 4
    damage(store.path)
    with pytest.raises(UserError, match=what) as error:
        TokenStore.open("out")
    assert re.search(r"^out is damaged: .*; delete it and prepare it again$", str(error.value))


def test_a_table_that_does_not_follow_on(books: Path) -> None:
    (store,) = prepare(["a.txt", "b.txt"], Path("out"))
    table = (store.path / "documents.tsv").read_bytes().replace(b"\n4\t", b"\n3\t")
    (store.path / "documents.tsv").write_bytes(table)
    sums = {"tokens.bin": store.sha256, "documents.tsv": hashlib.sha256(table).hexdigest()}
    edit_about(sha256=sums)(store.path)
    with pytest.raises(UserError, match="do not begin where the one before ends"):
        TokenStore.open("out")


def test_no_store_at_all(books: Path) -> None:
    with pytest.raises(UserError, match=r"no store\.json.*`logpast data prepare` makes one"):
        TokenStore.open(books)


def test_another_tokenizer_slipped_in(books: Path) -> None:
    (store,) = prepare(["a.txt"], Path("out"))
    BPE.save(store.path)
    with pytest.raises(UserError, match="not the one the store was made with"):
        TokenStore.open("out").load_tokenizer()


@pytest.mark.parametrize("documents", [[], [[5]], [[-1]], [[1.5]], [[1], [65541]], [[[1]]]])
def test_in_memory_takes_ids_alone(documents: list[Any]) -> None:
    with pytest.raises(UserError, match="whole numbers from 0 to 4"):
        TokenStore.in_memory(documents, size=5, eot=0)


def test_in_memory() -> None:
    store = TokenStore.in_memory([[1, 2, 3], [4]], size=5, eot=0)
    assert store.tokens.tolist() == [1, 2, 3, 4]
    assert store.documents.start.tolist() == [0, 3]
    assert store.counts == Counts(tokens=4, words=4, lines=2, bytes=4, documents=2)
    assert (store.tokenizer.size, store.tokenizer.eot, len(store)) == (5, 0, 4)


# --- opening any text


def test_open_tokens_opens_a_store_of_the_same_tokenizer_only(books: Path) -> None:
    prepare(["a.txt"], Path("out"))
    assert open_tokens("out", "gpt2").counts == open_tokens(Path("a.txt"), "gpt2").counts
    with pytest.raises(UserError, match=rf"gpt2 \({GPT2.fingerprint[:8]}\), but {BPE.name} \({BPE.fingerprint[:8]}\)"):
        open_tokens("out", BPE)
    (books / "out" / "store.json").unlink()
    with pytest.raises(UserError, match="not a token store"):
        open_tokens("out", "gpt2")


def test_open_tokens_of_a_folder_of_stores(corpus: Path, tmp_path: Path) -> None:
    prepare(["pg19"], tmp_path / "out", root=corpus)
    with pytest.raises(UserError, match=r"holds several stores: name one, .*out/test or .*out/train"):
        open_tokens(tmp_path / "out", "gpt2")
    with pytest.raises(UserError, match="write pg19:train"):
        open_tokens("pg19", "gpt2", root=corpus)
    assert open_tokens("pg19:test", "gpt2", tmp_path / "cache", corpus).name == "pg19:test"


def test_open_tokens_prepares_once(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_tokens("a.txt", "gpt2")
    assert first.path.is_relative_to(books / "cache")
    made = list[str]()
    write = preparing._write_store
    monkeypatch.setattr(preparing, "_write_store", lambda *args: made.append("store") or write(*args))
    assert open_tokens("a.txt", GPT2).path == first.path
    assert made == []
    assert open_tokens("a.txt", BPE).path != first.path
    (books / "a.txt").write_text("other words")
    assert GPT2.decode(open_tokens("a.txt", "gpt2").tokens) == "other words"
    assert open_tokens("b.txt", "gpt2", cache=books / "elsewhere").path.is_relative_to(books / "elsewhere")
    assert made == ["store"] * 3


def test_open_tokens_by_two_at_once(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, both_have_written = preparing._write_store, threading.Barrier(2)

    def write_and_wait(*args: Any) -> None:
        write(*args)
        both_have_written.wait(10)

    monkeypatch.setattr(preparing, "_write_store", write_and_wait)
    stores: list[TokenStore] = []
    threads = [threading.Thread(target=lambda: stores.append(open_tokens("a.txt", "gpt2"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].path == stores[1].path
    assert stores[0].identity == stores[1].identity
    assert left_in(books / "cache" / "tokens") == [stores[0].path.name]


def test_a_store_is_named_in_a_line(books: Path) -> None:
    store = open_tokens(books, "gpt2")
    shown = repr(store)
    assert shown.startswith(f"<TokenStore {store.name}: {len(store):,} tokens (gpt2) in ")
    assert "\n" not in shown
    assert "array" not in shown


def test_an_end_of_text_is_in_the_vocabulary() -> None:
    for eot in (10, -1):
        with pytest.raises(UserError, match=f"eot, the end of a text, must be an id from 0 to 9, got {eot}"):
            TokenStore.in_memory([[1, 2]], size=10, eot=eot)


def test_a_store_is_shown_by_its_whole_name(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(["a.txt"], Path("v[/old]"))
    assert "v[/old]" in "".join(capsys.readouterr().out.split())
