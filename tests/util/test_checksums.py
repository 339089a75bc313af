"""Checksums of folders and of JSON objects."""

import json
from pathlib import Path

import pytest

from logpast.util.checksums import read_sums, seal, unseal, verify_folder, write_sums
from logpast.util.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("ours")
    write_sums(tmp_path)
    return tmp_path


def test_changed_files_are_named(folder: Path) -> None:
    verify_folder(folder, "make it again")
    (folder / "a.json").write_text("[]")
    with pytest.raises(UserError, match=f"{folder / 'a.json'} has changed.*make it again"):
        verify_folder(folder, "make it again")
    (folder / "SHA256SUMS").unlink()
    verify_folder(folder, "make it again")


def test_every_file_that_is_read_must_be_listed(folder: Path) -> None:
    (folder / "more.txt").touch()
    assert read_sums(folder / "SHA256SUMS", "make it again").keys() == {"a.json", "notes.txt"}
    (folder / "b.safetensors").touch()
    with pytest.raises(UserError, match=r"does not list b.safetensors; make it again"):
        verify_folder(folder, "make it again")


@pytest.mark.parametrize("content", [b"", b"0123  a.json\n", b"\xff"])
def test_a_damaged_list_is_refused(folder: Path, content: bytes) -> None:
    (folder / "SHA256SUMS").write_bytes(content)
    with pytest.raises(UserError, match=r"SHA256SUMS .*make it again"):
        verify_folder(folder, "make it again")


def test_a_changed_object_is_noticed_and_an_unsealed_one_is_accepted() -> None:
    values = {"ppl": 1e-7, "name": "τ", "list": [1, None, {"a": True}]}
    text = json.dumps(seal(values), ensure_ascii=False)
    assert unseal(json.loads(text)) == values
    assert unseal(values) == values
    with pytest.raises(ValueError, match="crc32"):
        unseal(json.loads(text.replace("1e-07", "2e-07")))
