"""Which files of a folder are documents, what is refused, and how bytes become text."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from logpast.data.text_files import decode, describe, files_below, files_matching
from logpast.util.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one document; more of them outside."""
    for name in ("books/a.txt", "elsewhere/b.txt", "elsewhere/deep/c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    return tmp_path / "books"


def test_links_to_files_and_folders_are_followed(folder: Path) -> None:
    (folder / "link.txt").symlink_to("../elsewhere/b.txt")
    (folder / "linked").symlink_to(folder.parent / "elsewhere" / "deep")
    assert list(files_below(folder).files) == ["a.txt", "link.txt", "linked/c.TXT"]
    assert files_below(folder).left_out == {}


def test_a_file_or_folder_that_is_linked_twice_is_taken_once(folder: Path) -> None:
    """By its own name, if that is below the folder. Links in a circle end."""
    (folder / "Again.txt").symlink_to("a.txt")
    (folder / "circle").symlink_to(".")
    (folder / "elsewhere").symlink_to("../elsewhere")
    (folder / "same").symlink_to("../elsewhere")
    (folder.parent / "elsewhere" / "back").symlink_to(folder)
    assert list(files_below(folder).files) == ["a.txt", "elsewhere/b.txt", "elsewhere/deep/c.TXT"]
    assert files_below(folder).left_out == {"linked twice": ["Again.txt", "circle/", "elsewhere/back/", "same/"]}
    found = files_matching(f"{folder}/*.txt")
    assert list(found.files) == [f"{folder}/a.txt"]
    assert found.left_out == {"linked twice": [f"{folder}/Again.txt"]}


def broken_link(path: Path) -> None:
    path.symlink_to("gone")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def named_pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # its name may be 100 characters long


@pytest.mark.parametrize("name", ["b.txt", "b"])
@pytest.mark.parametrize("make", [broken_link, link_to_itself, named_pipe, unix_socket])
def test_what_cannot_be_read_is_refused(
    make: Callable[[Path], None], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    make(folder / name)
    if name == "b" and make in (named_pipe, unix_socket):
        assert files_below(folder).left_out == {"not *.txt": ["b"]}
    else:  # a broken link without .txt may have led to a folder of texts
        reason = "is a broken link" if "link" in make.__name__ else "is not a regular file"
        with pytest.raises(UserError, match=rf"books/{name} {reason}"):
            files_below(folder)
    with pytest.raises(UserError, match=f"books/{name} is "):
        files_matching(f"{folder}/*")


def test_without_permission_to_read_a_file_or_folder_it_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "deep").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "a.txt")
    with pytest.raises(UserError, match=r"books/a\.txt: Permission denied; `chmod"):
        files_below(folder)
    monkeypatch.undo()
    scandir = os.scandir

    def deny(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(UserError, match=r"books/deep: Permission denied; `chmod"):
        files_below(folder)


def test_what_is_left_out_is_described_by_number_and_first_names(folder: Path) -> None:
    for name in (".git/x.txt", ".hidden.txt", "deep/e.txt", *(f"{n}.md" for n in range(1200)), "odd\n\x1b[1m.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / "deep" / "empty.txt").touch()
    found = files_below(folder)
    assert list(found.files) == ["a.txt", "deep/e.txt"]
    text = describe(found.left_out)
    assert "hidden: 2 (.git/, .hidden.txt)" in text
    assert "not *.txt: 1,201 (0.md, 1.md, 10.md, …)" in text
    assert "empty: 1 (deep/empty.txt)" in text
    assert describe({"not *.txt": found.left_out["not *.txt"][-1:]}) == r"not *.txt: 1 ('odd\n\x1b[1m.png')"
    assert files_matching(f"{folder}/[ad]*").left_out == {"folder": [f"{folder}/deep/"]}
    assert "folder" not in files_matching(f"{folder}/**/*").left_out  # what is in it matches, too


# --- from bytes to text


@pytest.mark.parametrize("size", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a\r\nb\rc\n\rd\r\r\n", "a\nb\nc\n\nd\n\n"),
        (b"\xef\xbb\xbfa\r\n", "a\n"),
        ("\ufeff".encode(), ""),
        ("a\ufeffb\x00\x85\u2028".encode(), "a\ufeffb\x00\x85\u2028"),
    ],
)
def test_line_ends_become_lf_and_a_byte_order_mark_is_removed(size: int, content: bytes, text: str) -> None:
    assert "".join(decode((content[n : n + size] for n in range(0, len(content), size)), "x")) == text


@pytest.mark.parametrize("size", [1, 2, 3, 64])
@pytest.mark.parametrize(
    ("content", "byte"),
    [
        (b"abc\xff", 3),
        ("éa".encode() + b"\xe2\x82", 3),
        (b"\xc3(", 0),
        ("日本".encode() + b"\x80a", 6),
        (b"\xef\xbb\xbfa\xff", 4),
    ],
)
def test_the_first_invalid_byte_is_named(size: int, content: bytes, byte: int) -> None:
    with pytest.raises(UserError, match=rf"a\.txt is not UTF-8 at byte {byte}:"):
        list(decode((content[n : n + size] for n in range(0, len(content), size)), "a.txt"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin1"])
def test_another_encoding_is_recognized(encoding: str) -> None:
    with pytest.raises(UserError, match=f"iconv -f {encoding} -t utf-8"):
        list(decode(["Über".encode(encoding)], "a.txt"))
