"""The example of recall: the largest gain whose earlier passage the control does not see."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from logpast.data import TokenStore
from logpast.demo import example
from logpast.models import RecentConfig

ORDERS, VIEW, REACH = 2, 3, 8  # the control sees 3 tokens


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two documents. Targets 9, 17 and 22 follow the same two tokens as before; 17 too near, 22 in another document."""
    text = "abcxxxxabcxxabxabx..abc"
    ids = np.array([ord(letter) for letter in text])
    documents = SimpleNamespace(start=np.array([0, 20]), names=["first", "second"])
    model = RecentConfig(slots=1, window=2, recall=REACH, recall_orders=ORDERS, heads=1, width=1)
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    checkpoint = SimpleNamespace(config=SimpleNamespace(model=model), load_tokenizer=lambda: tokenizer)
    monkeypatch.setattr(example, "find_checkpoint", lambda run: checkpoint)
    monkeypatch.setattr(TokenStore, "open", lambda folder: SimpleNamespace(tokens=ids, documents=documents))
    np.save(tmp_path / "control.npy", np.full(len(ids), 2.0))
    return tmp_path


def found(home: Path, gains: dict[int, float]) -> dict[str, object] | None:
    nats = np.load(home / "control.npy")
    for target, gain in gains.items():
        nats[target] -= gain
    np.save(home / "recall.npy", nats)
    return example.find_example(home)


def test_the_largest_gain_with_an_earlier_copy_is_found(home: Path) -> None:
    result = found(home, {9: 1.0, 4: 1.5})  # token 4 was not copied
    assert result == {
        "chapter": "first", "token": "c", "context": "abcxxxxab", "earlier": "ab", "tokens_ago": 7,
        "control": pytest.approx(np.exp(-2)), "recall": pytest.approx(np.exp(-1)),
    }  # fmt: skip
    assert "probability 0.37, control 0.14" in example.as_text(result)
    assert "ab«c»" in example.as_text(result)


@pytest.mark.parametrize(
    "gains", [{17: 1.0}, {22: 1.0}, {9: -1.0}, {}], ids=["in the control's view", "other document", "loss", "no gain"]
)
def test_no_example_without_a_gain_from_an_earlier_passage(home: Path, gains: dict[int, float]) -> None:
    assert found(home, gains) is None
    assert "nothing" in example.as_text(None)
