"""Small texts to prepare."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two small texts and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGPAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("one two\nthree")
    (tmp_path / "b.txt").write_text("four\n\n")
    return tmp_path


@pytest.fixture
def corpora_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like LOGPAST_DATA with PG-19's train and test splits; nothing else can be obtained."""
    for split, text in {"train": "a rose is a rose\r\n" * 30, "test": "is it not a rose?\r\n"}.items():
        (tmp_path / "root" / "pg19" / split).mkdir(parents=True)
        (tmp_path / "root" / "pg19" / split / "1.txt").write_bytes(text.encode())
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path / "root"
