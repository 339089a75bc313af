"""benchmarks/pretrained_gap.py: the sliding cache and the pieces as defined, and a report that is resumed."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import pretrained_gap as gap

from logpast.data import TokenStore
from logpast.util.errors import UserError
from models.hf.tiny import VOCABULARY, save_tiny, tiny

transformers = pytest.importorskip("transformers")

IDS = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (2, 40)))


@torch.no_grad()
def step_by_step(model: Any, ids: torch.Tensor, reach: int) -> torch.Tensor:
    """Logits, one token at a time, with a cache that drops its oldest entry that is no sink."""
    kept, found = list[tuple[torch.Tensor, torch.Tensor]](), []
    for position in range(ids.shape[1]):
        cache = transformers.DynamicCache(kept)
        where = torch.full((len(ids), 1), position)
        out = model(input_ids=ids[:, position : position + 1], past_key_values=cache, position_ids=where)
        found.append(out.logits)
        states = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
        size = states[0][0].shape[2]
        stay = [i for i in range(size) if i < gap.SINKS or i > size - reach]
        kept = [(keys[:, :, stay], values[:, :, stay]) for keys, values in states]
        assert len(stay) <= gap.SINKS + reach - 1
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_sliding_attention_equals_a_cache_that_drops_its_oldest_entry(family: str) -> None:
    model = tiny(family)
    attached = gap.build(gap.System("sliding", 7), model, piece=40, sharpness=100)
    expected = step_by_step(model, IDS, 7)
    with torch.no_grad():
        found = attached.logits(attached.encode(IDS[:, :0], IDS))
        full = model(input_ids=IDS).logits
    assert (found - expected).abs().max() < 1e-4
    assert (full - expected)[:, 12:].abs().max() > 0.1


def text() -> TokenStore:
    """Documents of 10, 25, 8 and 20 tokens."""
    ids = np.random.default_rng(0).integers(3, 12, 63)
    return TokenStore.in_memory(np.split(ids, [10, 35, 43]), VOCABULARY, eot=1)


def test_second_half_of_each_piece_of_a_document_is_scored() -> None:
    store = text()
    pieces = gap.cut(store, 10, None, "document")
    assert pieces.document.tolist() == [0, 1, 1, 2, 3, 3]
    assert pieces.store.documents.tokens.tolist() == [10, 10, 10, 8, 10, 10]  # what is left of a document is too short
    scored = np.split(pieces.scored, np.cumsum(pieces.store.documents.tokens)[:-1])
    assert [part.tolist() for part in scored] == [[False] * 5 + [True] * (len(part) - 5) for part in scored]
    assert np.array_equal(pieces.store.tokens[10:30], store.tokens[10:30])
    sums, tokens = gap.by_document(np.arange(58.0), pieces)
    assert tokens.tolist() == [5, 10, 3, 10]
    assert sums.tolist() == [sum(range(5, 10)), sum([*range(15, 20), *range(25, 30)]), 35 + 36 + 37,
                             sum([*range(43, 48), *range(53, 58)])]  # fmt: skip
    assert len(gap.cut(store, 10, 3, "document").document) == 3
    assert gap.cut(store, 40, None, "corpus").store.documents.tokens.tolist() == [40, 23]
    with pytest.raises(UserError, match="more than 50 tokens"):
        gap.cut(store, 100, None, "document")


def test_no_system_uses_what_came_before_a_piece_or_comes_later() -> None:
    """Tokens 30 to 34 are scored, of pieces 0 to 19 and 20 to 39."""
    texts = [np.random.default_rng(0).integers(3, 12, 40) for _ in range(3)]
    texts[1][[*range(20), *range(35, 40)]] = 13
    texts[2][20:25] = 13
    for system in (gap.System("disjoint", 5, 3), gap.System("sliding", 5), gap.System("full", 20)):
        attached, found = gap.build(system, tiny(), piece=20, sharpness=100), []
        for ids in texts:
            pieces = gap.cut(TokenStore.in_memory([ids], VOCABULARY, eot=1), 20, None, "document")
            pieces = pieces._replace(scored=(np.arange(40) >= 30) & (np.arange(40) < 35))
            found.append([numbers["nats_per_token"] for _, numbers in gap.measure(attached, pieces, 40, "scoring")])
        assert found[0] == pytest.approx(found[1], abs=1e-5), system
        assert abs(found[0][1] - found[2][1]) > 1e-3, system  # recall looks back to the start of the piece


def test_report_has_each_system_alone_and_with_recall_and_is_resumed(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    save_tiny(tmp_path / "model", [(books / "0.txt").read_text()])
    monkeypatch.setenv("LOGPAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gap, "systems_of", lambda piece, slots: [
        gap.System("disjoint", 16), gap.System("sliding", 16), gap.System("full", piece),
        gap.System("disjoint", 16, slots, "none"), gap.System("disjoint", 16, slots, "lora"),
    ])  # fmt: skip
    words = f"x --model {tmp_path / 'model'} --texts {books} --train {books} --out {tmp_path / 'out.json'} --device cpu"
    words += " --piece 64 --limit 2 --train_tokens 128 --steps 2 --lora_steps 1 --batch_tokens 64 --slots 5"
    words += " --streams_timed 1 2"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--systems", "disjoint-16"])
    gap.main()
    first = json.loads((tmp_path / "out.json").read_text())["rows"]
    monkeypatch.setattr(sys, "argv", words.split())
    gap.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows[:2] == first
    found = [(row["system"], row["recall"]) for row in rows]
    names = ["disjoint-16", "sliding-16", "full-64", "disjoint-16-tokens", "disjoint-16-slots-lora"]
    assert found == [(n, recall) for n in names for recall in (False, True) if (n, recall) != (names[3], True)]
    pair, ids = 2 * 2 * 2 * 16, 4 * 64  # bytes of two layers with two heads of 8; of the ids of a piece
    states = {(row["system"], row["recall"]): row["state_bytes"] for row in rows}
    assert states["disjoint-16", False] == 17 * pair
    assert states["sliding-16", True] == 20 * pair + ids
    assert states["full-64", False] == 64 * pair
    assert states["disjoint-16-tokens", False] == 22 * pair
    for plain, recall in (rows[0:2], rows[2:4], rows[4:6]):
        difference = recall["nats_per_token"] - plain["nats_per_token"]
        assert recall["minus_without_recall"]["nats_per_token"] == pytest.approx(difference)
        assert plain["ms_per_token"]["2"] > 0
    monkeypatch.setattr(gap, "ms_per_token", lambda attached, system, past, count, recall: 7.0 + recall)
    other = tmp_path / "other.json"
    other.write_text((tmp_path / "out.json").read_text())
    words_of_times = [*words.split(), "--times", str(tmp_path / "out.json"), str(other), "--systems", "full-64"]
    monkeypatch.setattr(sys, "argv", words_of_times)
    gap.main()
    report = json.loads((tmp_path / "out.json").read_text())
    timed = report["rows"]
    assert json.loads(other.read_text()) == report
    assert report["times"]["streams"] == [1, 2]
    assert [row["ms_per_token"] for row in timed[4:6]] == [{"1": 7.0, "2": 7.0}, {"1": 8.0, "2": 8.0}]
    assert timed[:4] == rows[:4]
    monkeypatch.setattr(sys, "argv", [*words.split(), "--seed", "1"])
    with pytest.raises(UserError, match="has another recipe"):
        gap.main()
    monkeypatch.setattr(sys, "argv", [*words.split(), "--systems", "wide"])
    with pytest.raises(UserError, match="unknown systems: wide"):
        gap.main()
