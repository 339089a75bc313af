"""The token store: checked when opened, and stores of ids in memory."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logpast.data import Counts, TokenStore, is_store, open_tokens, train_bpe
from logpast.data.prepare import prepare
from logpast.util.checksums import unseal
from logpast.util.errors import UserError
from logpast.util.files import sha256_of


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def edit_json(**changes: Any) -> Callable[[Path], None]:
    return edit("store.json", lambda content: json.dumps({**unseal(json.loads(content)), **changes}).encode())


def flip_last_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (edit("tokens.bin", lambda content: content[:-2]), "tokens.bin has 6 bytes, not 8"),
    "odd size": (edit("tokens.bin", lambda content: content[:-1]), "tokens.bin has 7 bytes, not 8"),
    "one bit": (edit("tokens.bin", flip_last_bit), "tokens.bin.*SHA-256"),
    "no tokens": (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin"),
    "no documents": (lambda folder: (folder / "documents.tsv").unlink(), "documents.tsv"),
    "a name": (edit("documents.tsv", lambda content: content.replace(b"a.txt", b"b.txt")), "documents.tsv.*SHA-256"),
    "half a json": (edit("store.json", lambda content: content[:50]), "damaged"),
    "another json": (edit("store.json", lambda content: b"[1]"), "damaged"),
    "another format": (edit_json(format="mine"), "store.json: format .*mine"),
    "newer": (edit_json(version=2), "store.json: version is 2"),
    "words": (edit_json(words=99), "documents.tsv .*words=3.*words=99"),
    "tokens": (edit_json(tokens=5), "tokens.bin has 8 bytes, not 10"),
    "dtype": (edit_json(dtype="<f4"), "store.json: dtype .*<f4"),
    "tokenizer": (edit_json(tokenizer={"name": "gpt2"}), "damaged"),
    "no checksums": (edit_json(sha256={}), r"store.json: it has no sha256\.tokens\.bin"),
    "a negative count": (edit_json(lines=-1), "store.json: lines is -1"),
    "a large count": (edit_json(tokens=1e300), "store.json: tokens is 1e[+]300"),
    "deep nesting": (edit("store.json", lambda content: b"[" * 100_000), "store.json: .*nested too deeply"),
}


@pytest.mark.parametrize(("damage", "names"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_when_a_store_is_opened(damage: Callable[[Path], None], names: str, texts: Path) -> None:
    (store,) = prepare(["a.txt"], Path("out"))
    assert len(store) == 4
    damage(store.path)
    assert is_store("out")
    with pytest.raises(UserError, match=names) as error:
        TokenStore.open("out")
    assert re.search(r"^out is damaged: .*; delete it and prepare it again$", str(error.value))


def test_an_id_beyond_the_vocabulary_is_found(texts: Path) -> None:
    (store,) = prepare(["a.txt"], Path("out"))
    tokens = np.full(4, 60_000, "<u2").tobytes()
    (store.path / "tokens.bin").write_bytes(tokens)
    sums = {name: sha256_of(store.path / name) for name in ("tokens.bin", "documents.tsv")}
    edit_json(sha256=sums)(store.path)
    with pytest.raises(UserError, match=r"tokens\.bin has the id 60000, beyond the vocabulary of 50257"):
        TokenStore.open("out")


def test_documents_must_follow_each_other(texts: Path) -> None:
    (store,) = prepare(["a.txt", "b.txt"], Path("out"))
    table = (store.path / "documents.tsv").read_bytes().replace(b"\n4\t", b"\n3\t")
    (store.path / "documents.tsv").write_bytes(table)
    edit_json(sha256={"tokens.bin": store.sha256, "documents.tsv": hashlib.sha256(table).hexdigest()})(store.path)
    with pytest.raises(UserError, match=r"documents\.tsv has a document that does not start"):
        TokenStore.open("out")


def test_counts_of_documents_are_not_negative(texts: Path) -> None:
    (store,) = prepare(["a.txt", "b.txt"], Path("out"))
    names, first, second = (line.split("\t") for line in (store.path / "documents.tsv").read_text().splitlines())
    words = int(first[2]) + int(second[2])
    first[2], second[2] = str(words + 5), "-5"  # with the same sum
    table = "".join("\t".join(line) + "\n" for line in (names, first, second)).encode()
    (store.path / "documents.tsv").write_bytes(table)
    edit_json(sha256={"tokens.bin": store.sha256, "documents.tsv": hashlib.sha256(table).hexdigest()})(store.path)
    with pytest.raises(UserError, match=r"documents\.tsv has a document with negative counts"):
        TokenStore.open("out")


def test_a_folder_without_store_json_is_no_store(texts: Path) -> None:
    assert not is_store(texts)
    with pytest.raises(UserError, match=r"no store\.json.*logpast data prepare"):
        TokenStore.open(texts)


def test_a_replaced_tokenizer_is_refused(texts: Path) -> None:
    (store,) = prepare(["a.txt"], Path("out"))
    train_bpe(["a b c"], 260).save(store.path)
    with pytest.raises(UserError, match=r"out/tokenizer\.json"):
        TokenStore.open("out").load_tokenizer()


@pytest.mark.parametrize("documents", [[], [[5]], [[-1]], [[1.5]], [[1], [65541]], [[[1]]]])
def test_a_store_in_memory_takes_only_ids(documents: list[Any]) -> None:
    with pytest.raises(UserError, match="whole numbers from 0 to 4"):
        TokenStore.in_memory(documents, size=5, eot=0)


@pytest.mark.parametrize("eot", [10, -1])
def test_end_of_text_must_be_in_the_vocabulary(eot: int) -> None:
    with pytest.raises(UserError, match=f"eot.*from 0 to 9, got {eot}"):
        TokenStore.in_memory([[1, 2]], size=10, eot=eot)


def test_a_store_in_memory() -> None:
    store = TokenStore.in_memory([[1, 2, 3], [4]], size=5, eot=0)
    assert store.tokens.tolist() == [1, 2, 3, 4]
    assert store.documents.start.tolist() == [0, 3]
    assert store.counts == Counts(tokens=4, words=4, lines=2, bytes=4, documents=2)
    assert (store.tokenizer.size, store.tokenizer.eot, len(store)) == (5, 0, 4)


def test_repr_is_one_short_line(texts: Path) -> None:
    store = open_tokens(texts, "gpt2")
    assert repr(store).startswith(f"<TokenStore {store.name}: {len(store):,} tokens (gpt2) in ")
    assert "\n" not in repr(store)
    assert "array" not in repr(store)


def test_a_change_in_what_store_json_says_is_noticed(store: TokenStore, tmp_path: Path) -> None:
    shutil.copytree(store.path, folder := tmp_path / "store")
    about = folder / "store.json"
    about.write_text(about.read_text().replace(f'"name": "{store.name}"', '"name": "another"', 1))
    assert '"another"' in about.read_text()
    with pytest.raises(UserError, match=f"{folder} is damaged: store.json.*crc32"):
        TokenStore.open(folder)
