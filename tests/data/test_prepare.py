"""Preparing text: the tokens equal those of each document encoded whole; a failure leaves nothing behind."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, astuple
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logpast.data.prepare as preparing
from logpast.data import Counts, Tokenizer, TokenStore, corpora, load_tokenizer, open_tokens, train_bpe
from logpast.data.corpora import Checksum, Passage, find, read
from logpast.data.prepare import is_prepared, prepare
from logpast.util import files
from logpast.util.errors import UserError

GPT2 = load_tokenizer("gpt2")
SNIPPETS = [" ", "  ", "\n", "\n\n\n", "\r", "\r\n", "\t", "\xa0", "\u2028", "\x1c", "\x85", "\u3000", "'s", "'t", "'"]
SNIPPETS += ["the", "Straße", "e\u0301", "\u0301", "🦊", "👩‍🚀", "日本。", "42", "=", " = ", "<|endoftext|>", "\x00"]
# Trained on every pair, it has tokens that span any place where text could be cut by mistake.
BPE = train_bpe([a + b + a + b for a, b in product(SNIPPETS, SNIPPETS)], 2000)
both = pytest.mark.parametrize("tokenizer", [GPT2, BPE], ids=["gpt2", "bpe"])

difficult = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3)), max_size=40).map("".join)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- cutting text into pieces


@both
@settings(deadline=None)
@given(text=difficult, cuts=st.lists(st.integers(0, 80), max_size=6), size=st.integers(1, 12))
def test_pieces_give_the_tokens_of_the_whole_text(tokenizer: Tokenizer, text: str, cuts: list[int], size: int) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds) if a < b]
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
def test_pieces_give_the_same_tokens_for_every_pair_of_snippets(tokenizer: Tokenizer) -> None:
    """Cases too rare for random texts."""
    for a, b in product(SNIPPETS, SNIPPETS):
        ids, _ = preparing._encode(tokenizer, list(preparing._pieces([Passage("t", a + b + a + b)], 1)))
        assert np.frombuffer(ids, dtype="<u2").tolist() == tokenizer.encode(a + b + a + b).tolist(), (a, b)


def test_text_is_cut_before_spaces_and_newlines() -> None:
    """The tests above would also pass if text were never cut."""
    text = "the cat's 日本。\nsat  on\n\n🦊 mats "
    pieces = [piece.text for piece in preparing._pieces([Passage("t", text)], 1)]
    assert pieces == ["the", " cat's", " 日本。", "\nsat", "  on", "\n\n🦊", " mats", " "]


@both
def test_a_piece_grows_until_there_is_a_place_to_cut(tokenizer: Tokenizer) -> None:
    text = "word" + " " * 5000 + "x" * 5000 + "\n" * 5000 + "end"
    passages = [Passage(None if n else "t", text[i : i + 100]) for n, i in enumerate(range(0, len(text), 100))]
    pieces = list(preparing._pieces(passages, 10))
    assert [len(piece.text) for piece in pieces] == [10_004, 5_003]
    ids, _ = preparing._encode(tokenizer, pieces)
    assert np.frombuffer(ids, dtype="<u2").tolist() == tokenizer.encode(text).tolist()


@both
def test_text_can_be_cut_after_any_character(tokenizer: Tokenizer) -> None:
    """For every character: none that the tokenizer's pattern treats as white space may count as \\S here."""
    text = "".join(f"{chr(code)} " for code in [*range(0xD800), *range(0xE000, 1 << 16), 0x1F98A])
    pieces = list(preparing._pieces([Passage("t", text)], 1))
    assert len(pieces) > 63_000
    ids, _ = preparing._encode(tokenizer, pieces)
    assert np.array_equal(np.frombuffer(ids, dtype="<u2"), tokenizer.encode(text))


@settings(deadline=None)
@given(text=difficult.filter(bool))
def test_words_are_counted_as_by_split(text: str) -> None:
    assert preparing._count_words(text) == len(text.split())


# --- the store that is written


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_counts_of_documents(piece: int, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "PIECE", piece)
    (store,) = prepare(["a.txt", "b.txt"], Path("out"))
    tokens = len(GPT2.encode("one two\nthree")) + len(GPT2.encode("four\n\n"))
    assert store.counts == Counts(tokens, words=4, lines=4, bytes=19, documents=2)
    assert store.name == "a.txt + b.txt"
    assert store.documents.names == ["a.txt", "b.txt"]
    assert store.documents.words.tolist() == [3, 1]
    assert store.documents.lines.tolist() == [2, 2]
    assert store.documents.bytes.tolist() == [13, 6]
    assert store.documents.start.tolist() == [0, store.documents.tokens[0]]
    assert GPT2.decode(store.tokens) == "one two\nthreefour\n\n"  # no end-of-text in between
    assert len(store) == len(store.tokens) == store.counts.tokens
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1


def test_files_of_a_store(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store,) = prepare(["a.txt"], Path("deep/er/out"))
    assert names_in(store.path) == ["documents.tsv", "store.json", "tokenizer.json", "tokens.bin"]
    assert names_in(store.path.parent) == ["out"]
    table = (store.path / "documents.tsv").read_text()
    assert table == f"start\ttokens\twords\tlines\tbytes\tname\n0\t{len(store)}\t3\t2\t13\ta.txt\n"
    about = json.loads((store.path / "store.json").read_text())
    assert about["sources"] == [{"name": "a.txt", "bytes": 13, "sha256": hashlib.sha256(b"one two\nthree").hexdigest()}]
    assert {name: about[name] for name in asdict(store.counts)} == asdict(store.counts)
    assert about["dtype"] == "<u2"
    tokens_sha256 = hashlib.sha256((store.path / "tokens.bin").read_bytes()).hexdigest()
    assert store.sha256 == about["sha256"]["tokens.bin"] == tokens_sha256
    assert store.identity == {
        "name": "a.txt",
        "sha256": tokens_sha256,
        "tokens": len(store),
        "tokenizer": GPT2.fingerprint,
    }
    assert store.load_tokenizer() is GPT2
    assert "13" in capsys.readouterr().out  # the table of counts
    assert oct(store.path.stat().st_mode) == oct(store.path.parent.stat().st_mode)  # readable like any folder


def test_document_names_are_one_line_of_valid_unicode(texts: Path) -> None:
    (texts / "odd").mkdir()
    (texts / "odd" / "a\tb\nc.txt").write_text("x")
    (texts / "odd" / os.fsdecode(b"\xff.txt")).write_text("y")
    (store,) = prepare(["odd"], Path("out"))
    assert store.documents.names == ["a b c.txt", "?.txt"]


def test_the_printed_table_shows_brackets_in_a_folder_name(
    texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    prepare(["a.txt"], Path("v[/old]"))
    assert "v[/old]" in capsys.readouterr().out


def test_wikitext_test_set(data_root: Path, tmp_path: Path) -> None:
    (store,) = prepare(["wikitext103:test"], tmp_path / "out")
    assert store.counts == Counts(tokens=286_221, words=241_211, lines=4_358, bytes=1_290_590, documents=60)
    whole = (data_root / "wikitext103" / "wiki.test.raw").read_bytes().decode()
    assert np.array_equal(store.tokens, GPT2.encode(whole))
    assert store.documents.names[:2] == ["Robert Boulter", "Du Fu"]


@both
def test_tokens_do_not_depend_on_the_number_of_workers(
    tokenizer: Tokenizer, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save(tmp_path)
    monkeypatch.setattr(preparing, "PIECE", 5000)
    monkeypatch.setattr(corpora, "BLOCK", 7001)
    stores = [
        prepare(["wikitext103:validation"], tmp_path / str(workers), str(tmp_path / "tokenizer.json"), workers)[0]
        for workers in (1, 3)
    ]
    text = (data_root / "wikitext103" / "wiki.valid.raw").read_bytes().decode()
    articles: list[str] = []
    for title, part in read(find("wikitext103:validation"), Checksum()):
        if title is not None:
            articles.append("")
        articles[-1] += part
    starts = np.cumsum([0] + [len(tokenizer.encode(article)) for article in articles])[:-1]
    for store in stores:
        assert np.array_equal(store.tokens, tokenizer.encode(text))
        assert astuple(store.counts)[1:] == (213_886, 3_760, 1_146_846, 60)
        assert store.documents.start.tolist() == starts.tolist()
    assert stores[0].identity == stores[1].identity


def test_pg19_has_unix_line_ends(data_root: Path, tmp_path: Path) -> None:
    (store,) = prepare(["pg19:validation"], tmp_path / "out")
    assert (store.counts.documents, store.counts.words) == (49, 2_963_926)
    first = data_root / "pg19" / "validation" / f"{store.documents.names[0]}.txt"
    text = first.read_bytes().decode().replace("\r\n", "\n")
    assert np.array_equal(store.tokens[: store.documents.tokens[0]], GPT2.encode(text))
    assert (store.documents.bytes[0], store.documents.lines[0]) == (len(text.encode()), len(text.splitlines()))


def test_prepare_and_open_tokens_say_what_they_leave_out(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` and `eval` open their texts with `open_tokens`."""
    (texts / "books" / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/c.txt", "cover [b].png", ".hidden.txt"):
        (texts / "books" / name).write_text("text")
    (texts / "books" / "d.txt").symlink_to(texts / "b.txt")
    (texts / "books" / "empty.txt").touch()
    (store,) = prepare(["books", "a.txt"], Path("out"))
    assert store.documents.names == ["a.txt", "d.txt", "deep/c.txt", "a.txt"]
    listed = "left out of books: hidden: 1 (.hidden.txt); not *.txt: 1 (cover [b].png); empty: 1 (empty.txt)\n"
    assert capsys.readouterr().err == listed
    assert len(open_tokens("books").documents) == 3
    assert capsys.readouterr().err == listed
    open_tokens("books")  # from the cache
    assert capsys.readouterr().err == ""
    (texts / "books" / "gone.txt").symlink_to("nowhere")
    for spec in ("books", "books/gone.txt", "books/*.txt"):
        with pytest.raises(UserError, match=r"books/gone\.txt is a broken link to nowhere"):
            prepare([spec], Path("other"))
        with pytest.raises(UserError, match=r"books/gone\.txt is a broken link to nowhere"):
            open_tokens(spec)
    assert not Path("other").exists()


# --- splits and tokenizers


def test_the_name_of_a_corpus_means_all_its_splits(
    corpora_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = prepare(["pg19"], tmp_path / "out", "bpe-270", root=corpora_folder)
    assert [(store.path.name, store.name) for store in stores] == [("train", "pg19:train"), ("test", "pg19:test")]
    assert "skipped: pg19:validation" in capsys.readouterr().err
    trained = train_bpe(["a rose is a rose\n" * 30], 270).fingerprint  # on the train split only
    assert {store.tokenizer.fingerprint for store in stores} == {trained}
    assert stores[1].load_tokenizer().decode(stores[1].tokens) == "is it not a rose?\n"


def test_errors_of_a_whole_corpus(corpora_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="pg19 means all its splits"):
        prepare(["pg19", "pg19:test"], out, root=corpora_folder)
    with pytest.raises(UserError, match="wikitext103:train"):
        prepare(["wikitext103"], out, root=corpora_folder)
    (corpora_folder / "pg19" / "train" / "1.txt").rename(corpora_folder / "1.txt")
    with pytest.raises(UserError, match="bpe-300 is trained on the train split"):
        prepare(["pg19"], out, "bpe-300", root=corpora_folder)
    (corpora_folder / "pg19" / "train" / "1.txt").symlink_to("gone.txt")  # not skipped: it cannot be read
    with pytest.raises(UserError, match=r"train/1\.txt is a broken link"):
        prepare(["pg19"], out, root=corpora_folder)
    assert names_in(tmp_path) == ["root"]


def test_the_tokenizer_of_another_store(texts: Path) -> None:
    (train,) = prepare(["a.txt"], Path("train"), "bpe-260")
    (test,) = prepare(["b.txt"], Path("test"), "train")
    assert test.tokenizer == train.tokenizer
    assert test.load_tokenizer().decode(test.tokens) == "four\n\n"


class LargeVocabulary(Tokenizer):
    """Characters become ids from 128,000 on, which need 32 bits."""

    def __init__(self) -> None:
        super().__init__("large", [chr(n % 128).encode() for n in range(128_128)], 0)

    def encode(self, text: str) -> Any:
        return np.array([128_000 + ord(letter) for letter in text], dtype=np.uint32)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_a_large_vocabulary_needs_32_bits(texts: Path) -> None:
    store = open_tokens("a.txt", LargeVocabulary())
    assert store.tokens.dtype == np.dtype("<u4")
    assert LargeVocabulary().decode(store.tokens) == "one two\nthree"


# --- failures


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"sources": []}, "no text given"),
        ({"sources": ["gone.txt"]}, "gone.txt"),
        ({"sources": ["a.txt", "empty.txt"]}, "empty.txt is empty"),
        ({"sources": ["latin.txt"]}, "latin.txt is not UTF-8 at byte 3"),
        ({"sources": ["latin.txt"], "tokenizer": "bpe-300"}, "latin.txt is not UTF-8 at byte 3"),
        ({"out": Path("a.txt")}, "a.txt already exists"),
        ({"out": Path("folder")}, "folder already exists"),
        ({"out": Path("a.txt/out")}, "a.txt/out: Not a directory"),
        ({"tokenizer": "gpt5"}, "gpt5"),
        ({"tokenizer": "bpe-99"}, "99 tokens is too small"),
        ({"workers": 0}, "workers"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(change: dict[str, Any], names: str, texts: Path) -> None:
    (texts / "empty.txt").touch()
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (texts / "folder").mkdir()
    before = names_in(texts)
    with pytest.raises(UserError, match=names) as error:
        prepare(**{"sources": ["a.txt"], "out": Path("out"), **change})
    assert "\n" not in str(error.value)
    assert names_in(texts) == before
    assert (texts / "a.txt").read_text() == "one two\nthree"


def test_ctrl_c_and_a_full_disk_leave_nothing_behind(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparing, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(["a.txt"], Path("out"))
    monkeypatch.undo()
    monkeypatch.chdir(texts)
    monkeypatch.setattr(files, "fsync", full)
    with pytest.raises(UserError, match="out: No space left on device"):
        prepare(["a.txt"], Path("out"))
    assert names_in(texts) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_no_store(end: signal.Signals, tmp_path: Path) -> None:
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
        assert names_in(tmp_path) == ["big.txt"]
    (tmp_path / "small.txt").write_text("a b")
    assert len(prepare([str(tmp_path / "small.txt")], tmp_path / "out")[0]) == 2


def test_a_folder_created_in_the_meantime_is_kept(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = files.fsync

    def create_out(path: Path) -> None:
        (texts / "out").mkdir(exist_ok=True)
        (texts / "out" / "precious").touch()
        fsync(path)

    monkeypatch.setattr(files, "fsync", create_out)
    with pytest.raises(UserError, match="out was created by another process"):
        prepare(["a.txt"], Path("out"))
    assert names_in(texts) == ["a.txt", "b.txt", "out"]
    assert names_in(texts / "out") == ["precious"]


# --- open_tokens and its cache


def test_open_tokens_requires_the_same_tokenizer(texts: Path) -> None:
    prepare(["a.txt"], Path("out"))
    assert open_tokens("out", "gpt2").counts == open_tokens(Path("a.txt"), "gpt2").counts
    with pytest.raises(UserError, match=rf"gpt2 \({GPT2.fingerprint[:8]}\), but {BPE.name} \({BPE.fingerprint[:8]}\)"):
        open_tokens("out", BPE)
    with pytest.raises(UserError, match="bpe-300"):
        open_tokens("out", "bpe-300")
    (texts / "out" / "store.json").unlink()
    with pytest.raises(UserError, match="not a token store"):
        open_tokens("out", "gpt2")


def test_open_tokens_with_a_trained_tokenizer_needs_only_its_name(texts: Path) -> None:
    (store,) = prepare(["a.txt"], Path("out"), "bpe-260")
    assert open_tokens("out", "bpe-260").identity == store.identity


def test_open_tokens_of_a_folder_of_stores(corpora_folder: Path, tmp_path: Path) -> None:
    prepare(["pg19"], tmp_path / "out", root=corpora_folder)
    with pytest.raises(UserError, match=r"out/test or .*out/train"):
        open_tokens(tmp_path / "out", "gpt2")
    with pytest.raises(UserError, match="pg19:train"):
        open_tokens("pg19", "gpt2", root=corpora_folder)
    assert open_tokens("pg19:test", "gpt2", tmp_path / "cache", corpora_folder).name == "pg19:test"


def test_open_tokens_prepares_a_text_once(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_prepared("a.txt")
    first = open_tokens("a.txt", "gpt2")
    assert is_prepared("a.txt")
    assert is_prepared(str(first.path))
    assert not is_prepared("gone.txt")
    assert first.path.is_relative_to(texts / "cache")
    written = list[str]()
    write = preparing._write_store
    monkeypatch.setattr(preparing, "_write_store", lambda *args: written.append("store") or write(*args))
    assert open_tokens("a.txt", GPT2).path == first.path
    assert written == []
    assert open_tokens("a.txt", BPE).path != first.path
    (texts / "a.txt").write_text("other words")
    assert GPT2.decode(open_tokens("a.txt", "gpt2").tokens) == "other words"
    assert open_tokens("b.txt", "gpt2", cache=texts / "elsewhere").path.is_relative_to(texts / "elsewhere")
    assert written == ["store"] * 3


@pytest.mark.parametrize("tokenizer", ["gpt2", "bpe-260"])
def test_cached_tokens_of_an_early_version_are_used_unless_line_ends_have_changed(
    tokenizer: str, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"a.txt": b"one two\nthree", "crlf.txt": b"one\r\ntwo", "bom.txt": b"\xef\xbb\xbfone", "cr.txt": b"a\rb"}
    for name, content in contents.items():
        (texts / name).write_bytes(content)
    monkeypatch.setattr(corpora, "decode", lambda blocks, location: iter([b"".join(blocks).decode()]))
    early = {name: open_tokens(name, tokenizer) for name in contents}
    monkeypatch.undo()
    monkeypatch.chdir(texts)
    monkeypatch.setenv("LOGPAST_CACHE", str(texts / "cache"))
    stat = (texts / "a.txt").stat()
    key = [1, "a.txt", [[str(texts / "a.txt"), stat.st_size, stat.st_mtime_ns]]]
    key.append(GPT2.fingerprint if tokenizer == "gpt2" else tokenizer)
    assert early["a.txt"].path.name == f"a.txt-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    assert open_tokens("a.txt", tokenizer).path == early["a.txt"].path
    for name in ("crlf.txt", "bom.txt", "cr.txt"):
        assert not is_prepared(name, tokenizer)
        now = open_tokens(name, tokenizer)
        assert is_prepared(name, tokenizer)
        assert open_tokens(name, tokenizer).path == now.path != early[name].path
        text = contents[name].decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        assert now.load_tokenizer().decode(now.tokens) == text
        assert (now.counts.bytes, now.counts.lines) == (len(text), 1 + text.count("\n"))
        old = TokenStore.open(early[name].path)  # still opens, as it was
        assert old.load_tokenizer().decode(old.tokens) == contents[name].decode()


def test_two_processes_may_prepare_the_same_text(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert names_in(texts / "cache" / "tokens") == [stores[0].path.name]
