"""benchmarks/repetition.py: repeated 4-grams and the longest copy, against their definitions."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks import repetition

from logpast.data import TokenStore
from logpast.models import RecentConfig
from logpast.training.config import TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError


def occurs(tokens: list[int], part: list[int], first: int, last: int) -> bool:
    """Whether the part ends at one of the positions first … last − 1."""
    return any(tokens[end + 1 - len(part) : end + 1] == part for end in range(max(first, len(part) - 1), last))


def test_copies_are_those_found_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "BACK", 20)
    tokens, start = np.random.default_rng(0).integers(0, 2, 60).tolist(), 30
    repeated = [occurs(tokens, tokens[i - 3 : i + 1], i - 20, i) for i in range(start, 60)]
    assert 0 < sum(repeated) < 30
    parts = [
        tokens[a : b + 1]
        for b in range(start, 60)
        for a in range(start, b + 1)
        if occurs(tokens, tokens[a : b + 1], 0, b)
    ]
    assert repetition.copies(tokens, start) == (sum(repeated), max(map(len, parts)))


def test_loop_is_one_long_copy_and_new_tokens_are_none() -> None:
    assert repetition.copies([1, 2, 3] * 10, 10) == (20, 20)
    assert repetition.copies(list(range(30)), 10) == (0, 0)


def test_rows_of_the_text_and_of_each_model(
    tmp_path: Path, train_config: TrainConfig, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"slots": 3, "window": 8, "layers": 1, "heads": 2, "width": 16}
    for name, recall in (("recall", 32), ("control", 0)):
        model = RecentConfig(recall=recall, **sizes)
        train(replace(train_config, run=tmp_path / name, model=model, steps=2, tensorboard=False))
    words = f"x --checkpoint {tmp_path / 'recall'} --control {tmp_path / 'control'} --text {store.path}".split()
    words += f"--out {tmp_path / 'out.json'} --prompts 3 --prompt_tokens 20 --tokens 12".split()
    chosen = ["greedy", "top_p 0.95"]
    monkeypatch.setattr(sys, "argv", [*words, "--limits", "1", "0.5", "--decoding", *chosen])
    repetition.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    kinds = [("model", 1), ("model", 0.5), ("model, own words not copied", 1), ("control", None)]
    expected = [(kind, how, limit) for how in chosen for kind, limit in kinds]
    assert [(row["of"], row.get("decoding"), row.get("limit")) for row in rows] == [("text", None, None), *expected]
    starts = np.linspace(0, len(store) - 32, 3).astype(int)
    real = [repetition.copies(store.tokens[start : start + 32].tolist(), 20) for start in starts]
    assert rows[0]["rep_4"] == pytest.approx(sum(repeated for repeated, _ in real) / 36)
    assert rows[0]["longest_max"] == max(longest for _, longest in real)
    monkeypatch.setattr(sys, "argv", [*words, "--prompts", "10000"])
    with pytest.raises(UserError, match="too few for 10000"):
        repetition.main()
