"""Columns that the page's scripts unpack again."""

import base64
import gzip
from pathlib import Path

import numpy as np
import pytest

from explore.conftest import index_of
from logpast.data import TokenStore
from logpast.explore.pack import Column, unsigned
from logpast.models import LogMemoryConfig
from logpast.training.checkpoint import find_checkpoint


def unpacked(column: Column) -> np.ndarray:
    return np.frombuffer(gzip.decompress(base64.b64decode(column.content)), f"<{column.kind}")


@pytest.mark.parametrize(("largest", "kind"), [(0, "u1"), (255, "u1"), (256, "u2"), (65535, "u2"), (65536, "u4")])
def test_unsigned_columns_have_the_smallest_type_that_holds_them(largest: int, kind: str) -> None:
    column = unsigned(np.array([0, largest]))
    assert column.kind == kind
    assert unpacked(column).tolist() == [0, largest]


def test_empty_column() -> None:
    assert unpacked(unsigned(np.zeros(0, np.int64))).size == 0


def test_first_value_of_all_tokens_comes_first() -> None:
    assert unpacked(Column.of(np.array([[1.5, 2], [3, 4]]), "f2")).tolist() == [1.5, 3, 2, 4]


def test_same_values_give_the_same_column() -> None:
    assert Column.of(np.arange(9.0), "f2") == Column.of(np.arange(9.0), "f2")


def test_index_says_what_the_page_has(page: Path, store: TokenStore) -> None:
    index = index_of(page)
    assert index["tokens"] == index["all"] == len(store)
    assert index["series"] == ["model", "no recall", "no memory", "neither", "control"]
    assert [name for name, _ in index["comparisons"]] == ["control", "no recall", "no memory"]
    assert [name for _, name in index["documents"]] == store.documents.names
    assert index["streams"] == store.documents.start.tolist()
    assert index["recall"] == {"reach": 64, "orders": 3, "edges": [16, 64]}
    assert set(index["types"]) == {
        "place", *(f"loss {name}" for name in index["series"]), "weights", "detailed", "own-pieces",
        "own-probabilities", "mixed-pieces", "mixed-probabilities", "filters", "attention",
    }  # fmt: skip


def test_slots_have_the_weights_of_their_filters(page: Path, runs: dict[str, Path]) -> None:
    config = find_checkpoint(runs["both"]).config.model
    assert isinstance(config, LogMemoryConfig)
    slots, content = index_of(page)["slots"], page.read_text(encoding="utf-8")
    begin = content.index('data-column="filters">') + len('data-column="filters">')
    weights = unpacked(Column("f2", content[begin : content.index("<", begin)]))
    assert slots["peaks"] == pytest.approx(config.bank.peaks)
    for (first, last), own in zip(slots["spans"], config.bank.weights, strict=True):
        part, weights = np.split(weights, [last - first + 1])
        assert part == pytest.approx(own[first - 1 : last] / own.max(), rel=1e-3, abs=1e-6)
        assert np.delete(own, np.s_[first - 1 : last]).max(initial=0) <= 0.003 * own.max()
    assert weights.size == 0
