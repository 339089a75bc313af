"""From the name of a text to its documents: files, folders, globs, known corpora, the hub."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logpast.data import corpora, hub, open_tokens
from logpast.data.corpora import Checksum, Source, find, read, splits_overlap
from logpast.util.errors import UserError

TEST_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder of corpora, and no `datasets` to download them with."""
    monkeypatch.delenv("LOGPAST_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)


def documents(source: Source, checksum: Checksum | None = None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for title, text in read(source, checksum or Checksum()):
        assert text
        if title is not None:
            found.append((title, text))
        else:
            found[-1] = (found[-1][0], found[-1][1] + text)
    return found


def test_files_folders_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".trash").mkdir()
    for name in ("b.TXT", "a.txt", "deep/er/c.txt", "deep/d.md", ".hidden.txt", ".trash/e.txt"):
        (tmp_path / name).write_text(f"this is {name}")
    (tmp_path / "deep" / "folder.txt").mkdir()
    assert documents(find("a.txt")) == [("a.txt", "this is a.txt")]
    assert [title for title, _ in documents(find("."))] == ["a.txt", "b.TXT", "deep/er/c.txt"]
    assert documents(find("./deep/*.md")) == [("deep/d.md", "this is deep/d.md")]
    assert [title for title, _ in documents(find("**/*.txt"))] == ["a.txt", "deep/er/c.txt"]
    assert find("a.txt").size == 13
    assert find(".").stamp != find("a.txt").stamp


def test_a_corpus_takes_precedence_over_a_file_unless_given_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pg19:test", "pg19.txt", "mine"):
        (tmp_path / name).write_text("own text")
    with pytest.raises(UserError, match="pg19:test"):
        find("pg19:test").probe()
    for path in ("./pg19:test", "pg19.txt", "mine"):
        assert documents(find(path))[0][1] == "own text"


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 1 << 20])
def test_every_source_is_read_by_the_same_rule(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte-order mark, and LF as line end: in a file, a folder, a glob, WikiText's format and a known corpus."""
    monkeypatch.setattr(corpora, "BLOCK", block)
    folder = tmp_path / "pg19" / "test"
    folder.mkdir(parents=True)
    content = "\ufeffé\r\n\r\nb\rc\r\r\nd\n\r".encode()
    for path in (folder / "20.txt", tmp_path / "a.raw"):
        path.write_bytes(content)
    for source in (str(folder / "20.txt"), str(folder), f"{folder}/*", str(tmp_path / "a.raw")):
        assert [text for _, text in documents(find(source))] == ["é\n\nb\nc\n\nd\n\n"]
    checksum = Checksum()
    assert documents(find("pg19:test", tmp_path), checksum) == [("20", "é\n\nb\nc\n\nd\n\n")]
    assert checksum.size == find("pg19:test", tmp_path).size == len(content)  # counted before line ends change


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("", "the name of a text is empty"),
        ("x" * 300, "too long"),
        ("wikitxt103:test", "did you mean wikitext103:test"),
        ("pg-19", "did you mean pg19"),
        ("wikitext103", "write wikitext103:train"),
        ("nothing/like/it.txt", "nothing/like/it.txt.*wikitext103:train, "),
        ("wikitext103:tset", "write wikitext103:test .*train, validation, test"),
        ("wiki22k:validation", "write wiki22k:train"),
        ("wiki22k:tran[:5]", "'tran': write wiki22k:train"),
        ("wiki22k:train[-5:]", "write wiki22k:train"),
        ("wiki22k:train[:5][::2]", "write wiki22k:train"),
        ("wiki22k:train[::0]", r"wiki22k:train\[::0\] selects no documents"),
        ("wiki22k:train[5:5]", r"wiki22k:train\[5:5\] selects no documents"),
        ("wiki22k:train", r"wiki22k/train\.raw .*LOGPAST_DATA .*not set"),
        ("pg19:test", r"pg19/test/\*\.txt .*pip install 'logpast\[data\]'"),
        ("wikitext103:train", r"wiki\.train\.raw .*pip install 'logpast\[data\]'"),
        ("empty.txt", r"empty\.txt is empty"),
        ("empty", r"no \*\.txt below the folder empty"),
        ("*.rst", r"no file matches \*\.rst"),
    ],
)
def test_a_text_that_cannot_be_found_is_named(
    spec: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=names) as error:
        documents(find(spec))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "file"),
    [("wiki22k:train", "wiki22k/train.raw"), ("wikitext103:test[:1]", "wikitext103/wiki.test.raw")],
)
def test_a_missing_folder_of_corpora_is_named(
    spec: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is downloaded in its place."""
    monkeypatch.setenv("LOGPAST_DATA", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=rf"LOGPAST_DATA names .*gone, which is not a folder.* {file}"):
        find(spec)
    with pytest.raises(UserError, match=r"--root names .*typo"):
        find(spec, tmp_path / "typo")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("here")
    source = find(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: No such file"):
        documents(source)


# --- WikiText's articles


def articles(text: str, size: int) -> list[tuple[str, str]]:
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    source = Source("wiki", lambda: iter([corpora.Item("wiki", "wiki", (b.encode() for b in blocks))]), articles=True)
    return documents(source)


def articles_by_lines(text: str) -> list[tuple[str, str]]:
    """The definition of articles, line by line."""
    lines = text.split("\n")
    starts = [0]
    titles = []
    for before, line, after, i in zip(["", *lines], lines, [*lines[1:], None], range(len(lines)), strict=False):
        title = line.removeprefix(" = ").removesuffix(" = ")
        if after is None or before.strip(" ") or after.strip(" ") or len(line) < len(title) + 6 or not title:
            continue
        if not title.startswith("= ") and not title.endswith(" ="):
            if titles:
                starts.append(sum(len(x) + 1 for x in lines[:i]))
            titles.append(title)
    return [(t, text[a:b]) for t, a, b in zip(titles or ["wiki"], starts, [*starts[1:], None], strict=True)]


def test_articles_start_at_their_titles() -> None:
    text = " \n = One = \n \n x \n = not a title = \n = = Part = = \n \n y \n \n"
    text += " = Two = 2 = \n\n = Three = \n \n z"
    first = text[: text.index(" = Two")]
    assert articles(text, 1000) == [
        ("One", first),
        ("Two = 2", " = Two = 2 = \n\n"),
        ("Three", " = Three = \n \n z"),
    ]
    assert articles("no title\n", 4) == [("wiki", "no title\n")]
    assert articles(" = A = \n", 3) == [("A", " = A = \n")]
    assert articles("before \n \n = A = \n \n", 3) == [("A", "before \n \n = A = \n \n")]


TITLES = [" = A = \n", " = B = C = \n", " = = S = = \n", " = = S = \n", " = S = = \n", " = \n", " = A =\n", "= A = \n"]
lines = st.sampled_from([" \n", "\n", " x = y \n", "é \n", *TITLES])


@settings(deadline=None)
@given(text=st.lists(lines, min_size=1, max_size=30).map("".join), size=st.integers(1, 40))
def test_articles_do_not_depend_on_the_block_size(text: str, size: int) -> None:
    found = articles(text, size)
    assert "".join(part for _, part in found) == text
    assert found == articles_by_lines(text)


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_a_slice_of_a_split(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By document number, for files and for articles, with any block size."""
    monkeypatch.setattr(corpora, "BLOCK", block)
    (tmp_path / "pg19" / "test").mkdir(parents=True)
    (tmp_path / "wiki22k").mkdir()
    for number in range(5):
        (tmp_path / "pg19" / "test" / f"{number}.txt").write_text(f"book {number}\n")
    parts = [f" \n = {number} = \n \n text {number} \n" for number in range(5)]
    (tmp_path / "wiki22k" / "train.raw").write_text("".join(parts))
    for split in ("pg19:test", "wiki22k:train"):
        whole = documents(find(split, tmp_path))
        assert len(whole) == 5
        for some, wanted in (("[:2]", whole[:2]), ("[::2]", whole[::2]), ("[1:4:]", whole[1:4]), ("[3:9]", whole[3:])):
            source = find(split + some, tmp_path)
            assert documents(source) == wanted
            assert source.name == split + some
    with pytest.raises(UserError, match=r"pg19:test\[7:\] selects no documents: the split has 5"):
        open_tokens("pg19:test[7:]", "gpt2", tmp_path / "cache", tmp_path)
    assert open_tokens("pg19:test[3:]", "gpt2", tmp_path / "cache", tmp_path).counts.documents == 2


@pytest.mark.parametrize("split", ["validation", "test"])
def test_wikitext_has_sixty_articles(split: str, data_root: Path) -> None:
    found = documents(find(f"wikitext103:{split}"))
    assert len(found) == 60
    assert found[0][0] == {"validation": "Homarus gammarus", "test": "Robert Boulter"}[split]
    assert all(text.startswith(f" = {title} = \n \n") for title, text in found[1:])
    file = data_root / "wikitext103" / corpora.CORPORA["wikitext103"].splits[split][0]
    assert "".join(text for _, text in found) == file.read_bytes().decode()


@pytest.mark.usefixtures("data_root")
def test_wiki22k_is_read_in_short_passages() -> None:
    titles, longest = 0, 0
    for title, text in read(find("wiki22k:train"), Checksum()):
        titles += title is not None
        longest = max(longest, len(text))
    assert titles == 22_663
    assert longest < 2 * corpora.BLOCK


# --- the hub


class Hub:
    """Replaces `datasets.load_dataset`: real datasets from given rows, without a network."""

    def __init__(self, rows: list[dict[str, Any]], fail_after: int | None = None) -> None:
        self.rows, self.fail_after = rows, fail_after
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *place: str, split: str, streaming: bool) -> Any:
        import datasets

        self.asked.append((*place, split, streaming))
        if not streaming:
            return datasets.Dataset.from_list(self.rows)
        return datasets.IterableDataset.from_generator(self.stream)

    def stream(self) -> Iterator[dict[str, Any]]:
        for n, row in enumerate(self.rows):
            if n == self.fail_after:
                raise ConnectionError("connection\nlost")
            yield row


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("LOGPAST_DATA", raising=False)
    monkeypatch.setattr(hub, "connection_problem", lambda *server: None)
    return lambda hub: monkeypatch.setattr(datasets, "load_dataset", hub)


def wikitext_rows(split: str, data_root: Path) -> list[dict[str, Any]]:
    """The hub's rows: the lines of the raw file, with blank lines empty."""
    name = corpora.CORPORA["wikitext103"].splits[split][0]
    lines = (data_root / "wikitext103" / name).read_bytes().decode().split("\n")[:-1]
    return [{"text": line + "\n" if line.strip() else ""} for line in lines]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_wikitext_from_the_hub_equals_the_raw_file(split: str, data_root: Path, use_hub: Any) -> None:
    fake = Hub(wikitext_rows(split, data_root))
    local = documents(find(f"wikitext103:{split}", data_root))
    use_hub(fake)
    checksum = Checksum()
    assert documents(find(f"wikitext103:{split}"), checksum) == local
    assert fake.asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", split, False)]
    if split == "test":
        assert (checksum.size, checksum.hash.hexdigest()) == (1_290_590, TEST_SHA256)


def test_a_changed_test_set_is_refused(data_root: Path, use_hub: Any, tmp_path: Path) -> None:
    rows = wikitext_rows("test", data_root)
    rows[1]["text"] = rows[1]["text"].replace("Robert", "Rupert")
    use_hub(Hub(rows))
    with pytest.raises(UserError, match="official wikitext103:test"):
        documents(find("wikitext103:test"))
    with pytest.raises(UserError, match="official wikitext103:test"):
        documents(find("wikitext103:test[:1]"))
    (tmp_path / "wikitext103").mkdir()
    (tmp_path / "wikitext103" / "wiki.test.raw").write_text("".join(row["text"] for row in rows))
    with pytest.raises(UserError, match="official wikitext103:test"):
        documents(find("wikitext103:test", tmp_path))


def book(number: int, text: str) -> dict[str, Any]:
    url = f"http://www.gutenberg.org/ebooks/{number}" if number else None
    return {"short_book_title": f"Book {number}", "publication_date": 1900, "url": url, "text": text}


def test_pg19_from_the_hub(use_hub: Any) -> None:
    fake = Hub([book(860, "a\r\nb"), book(0, "c")])
    use_hub(fake)
    source = find("pg19:test")
    assert fake.asked == []  # nothing is downloaded before it is read
    checksum = Checksum()
    assert documents(source, checksum) == [("860", "a\nb"), ("Book 0", "c")]
    assert (checksum.size, checksum.hash.hexdigest()) == (5, hashlib.sha256(b"a\r\nbc").hexdigest())
    assert source.size is None
    source.probe()
    assert fake.asked == [("emozilla/pg19", "test", True)]


def test_an_empty_book_of_the_hub_is_named(use_hub: Any) -> None:
    use_hub(Hub([book(7, "")]))
    with pytest.raises(UserError, match="pg19:test, book 7"):
        documents(find("pg19:test"))


def test_the_hub_cannot_be_reached(use_hub: Any) -> None:
    def offline(*place: str, **options: Any) -> None:
        raise ConnectionError("no\nroute")

    use_hub(offline)
    with pytest.raises(UserError, match=r"wikitext103:test .*ConnectionError: no route"):
        find("wikitext103:test").probe()
    use_hub(Hub([book(1, "a"), book(2, "b")], fail_after=1))
    with pytest.raises(UserError, match=r"pg19:train .*connection lost"):
        documents(find("pg19:train"))
    assert documents(find("pg19:train[:1]")) == [("1", "a")]  # the rest is not downloaded


def test_a_file_without_titles_is_not_loaded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MAX_UNTITLED", 1000)
    read_blocks = []

    def blocks() -> Iterator[str]:
        for number in range(100):
            read_blocks.append(number)
            yield "no title here\n" * 10

    passages = corpora._articles(blocks(), "f.raw")
    first = next(passages)
    assert (first.title, len(read_blocks)) == ("f.raw", 8)
    assert first.text + "".join(passage.text for passage in passages) == "no title here\n" * 1000


def test_wiki22k_test_is_every_fiftieth_article_and_rest_are_the_others(tmp_path: Path) -> None:
    file = tmp_path / "wiki22k" / "train.raw"
    file.parent.mkdir()
    file.write_text("".join(f" \n = Article {number} = \n \n Text {number} . \n" for number in range(120)))

    def titles(split: str) -> list[str | None]:
        passages = read(find(f"wiki22k:{split}", tmp_path), Checksum())
        return [passage.title for passage in passages if passage.title is not None]

    every = titles("train")
    assert len(every) == 120
    assert titles("test") == [every[49], every[99]]
    assert titles("rest") == [title for title in every if title not in titles("test")]
    assert titles("test[1:]") == [every[99]]
    assert titles("rest[48:50]") == [every[48], every[50]]


def test_pg19_both_are_train_and_more(tmp_path: Path) -> None:
    for split, numbers in (("train", (11, 12)), ("more", (3, 20))):
        (tmp_path / "pg19" / split).mkdir(parents=True)
        for number in numbers:
            (tmp_path / "pg19" / split / f"{number}.txt").write_text(f"book {number}\r\n")
    found = [passage.title for passage in read(find("pg19:both", tmp_path), Checksum())]
    assert found == ["11", "12", "20", "3"]
    (tmp_path / "pg19" / "more" / "3.txt").unlink()
    (tmp_path / "pg19" / "more" / "20.txt").unlink()
    with pytest.raises(UserError, match=r"pg19/more/\*\.txt"):
        find("pg19:both", tmp_path)


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("wiki22k:test", "wiki22k:train", True),
        ("wiki22k:rest", "wiki22k:train", True),
        ("wiki22k:test", "wiki22k:rest", False),
        ("wiki22k:test", "wiki22k:train[:49]", False),  # its first article is the fiftieth
        ("wiki22k:test[1:]", "wiki22k:train[:100]", True),
        ("pg19:train", "pg19:both", True),
        ("pg19:more", "pg19:both", True),
        ("pg19:more", "pg19:train", False),
        ("pg19:train[:50]", "pg19:train[50:]", False),
        ("pg19:train[::2]", "pg19:train[1::2]", False),
        ("pg19:train[::2]", "pg19:train[::3]", True),
        ("kjv:test", "kjv:train", False),
        ("kjv:train[:5]", "kjv:train", True),
        ("wikitext103:test", "wiki22k:train", False),
        ("mine.txt", "mine.txt", False),
        ("mine.txt + pg19:train", "pg19:both + other.txt", True),
    ],
)
def test_splits_that_share_documents(one: str, other: str, overlap: bool) -> None:
    assert splits_overlap(one, other) == splits_overlap(other, one) == overlap


def test_the_home_of_an_unknown_user_is_no_file() -> None:
    with pytest.raises(UserError, match="no file, folder or corpus '~no-such-user/x'"):
        find("~no-such-user/x")
