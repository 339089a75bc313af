"""Each part of analysis.json against the saved nats of every token."""

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from logpast.analysis.analyze import analyze
from logpast.analysis.schema import WAYS
from logpast.data import TokenStore, open_tokens
from logpast.evaluation import metrics
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.models import LogMemoryTransformer
from logpast.training.checkpoint import find_checkpoint

Nats = dict[str, np.ndarray]


def mean(values: Iterable[float]) -> Any:
    return pytest.approx(np.mean(np.asarray(list(values), float)), abs=1e-6)


def test_nats_and_perplexity_are_those_of_eval(
    runs: dict[str, Path], store: TokenStore, result: dict[str, Any], nats: Nats
) -> None:
    for name, run in (("model", "memory"), ("control", "control")):
        scores = evaluate(runs[run], str(store.path), device="cpu")
        assert float(nats[name].sum(dtype=float)) == pytest.approx(scores["nats"], rel=1e-6)
        assert result["scores"][name]["ppl_token"] == pytest.approx(scores["ppl_token"], rel=1e-5)
        assert len(nats[name]) == scores["tokens"] == result["data"]["tokens"]
    gain = result["scores"]["all"]["gain"]
    assert gain["nats"][0] == mean(nats["control"].astype(float) - nats["model"])
    assert gain["interval"][0][0] < gain["nats"][0] < gain["interval"][0][1]


def test_by_position_in_the_window(result: dict[str, Any], nats: Nats) -> None:
    each, binned = result["position"]["each"], result["position"]["binned"]
    assert (binned["from"], binned["to"]) == ([0, 1, 2, 4], [0, 1, 3, 7])
    assert sum(each["tokens"]) == sum(binned["tokens"]) == len(nats["model"])
    for position in range(8):
        assert each["model"]["nats"][position] == mean(nats["model"][position::8])
        assert each["control"]["nats"][position] == mean(nats["control"][position::8])
    gain = nats["control"].astype(float) - nats["model"]
    for i, (first, last) in enumerate(zip(binned["from"], binned["to"], strict=True)):
        assert binned["gain"]["nats"][i] == mean(g for n, g in enumerate(gain) if first <= n % 8 <= last)


def test_by_frequency(result: dict[str, Any], nats: Nats, store: TokenStore) -> None:
    part, counts = result["frequency"], Counter(store.tokens.tolist())
    assert (part["counted_in"], part["counted_tokens"]) == (store.name, len(store))
    assert sum(part["tokens"]) == len(store)
    assert len(part["from"]) >= 3
    for i, (first, last) in enumerate(zip(part["from"], part["to"], strict=True)):
        bin_ = [float(n) for n, token in zip(nats["model"], store.tokens.tolist(), strict=True)
                if first <= counts[token] <= last]  # fmt: skip
        assert part["tokens"][i] == len(bin_)
        assert part["model"]["nats"][i] == mean(bin_)


def test_tokens_with_the_highest_and_the_lowest_gain(result: dict[str, Any], nats: Nats, store: TokenStore) -> None:
    sums: dict[int, float] = {}
    for i, gain in zip(store.tokens.tolist(), nats["control"] - nats["model"], strict=True):
        sums[i] = sums.get(i, 0.0) + float(gain)
    order = sorted(sums, key=sums.__getitem__)
    found = result["by_token"]
    assert [each["id"] for each in found["gained"]] == [i for i in order[::-1][:12] if sums[i] > 0]
    assert [each["id"] for each in found["lost"]] == [i for i in order[:12] if sums[i] < 0]
    books = [
        store.tokens[a : a + n].tolist() for a, n in zip(store.documents.start, store.documents.tokens, strict=True)
    ]
    for each in found["gained"] + found["lost"]:
        assert each["gain"] == pytest.approx(sums[each["id"]], abs=1e-6)
        assert each["token"] == store.load_tokenizer().decode([each["id"]])
        assert each["places"] == sum(book.count(each["id"]) for book in books)
        assert each["documents"] == sum(each["id"] in book for book in books)


def test_by_last_occurrence(result: dict[str, Any], nats: Nats, store: TokenStore) -> None:
    """In the window, among the control's 5 tokens before it, among the model's 16, farther back, never."""
    where, stream = result["last_seen"]["where"], [-1, *store.tokens.tolist()]
    gains: list[list[float]] = [[] for _ in range(5)]
    for target in range(1, len(stream)):
        start = (target - 1) // 8 * 8
        views = (start, max(0, start - 5), max(0, start - 16), 0)
        kind = sum(stream[target] not in stream[first:target] for first in views)
        gains[kind].append(float(nats["control"][target - 1]) - float(nats["model"][target - 1]))
    assert len(where["kinds"]) == 5
    assert where["tokens"] == [len(kind) for kind in gains]
    for kind in range(5):
        assert where["gain"]["nats"][kind] == mean(gains[kind])
    lags = result["last_seen"]["by_lag"]
    assert sum(lags["tokens"]) == len(store)
    assert (lags["from"][:4], lags["to"][:4]) == ([-1, 0, 1, 2], [-1, 0, 1, 3])
    assert lags["tokens"][:2] == [len(gains[4]), len(gains[0])]


def test_increase_by_slot_and_by_lag(result: dict[str, Any], nats: Nats) -> None:
    slots, lags = result["slots"], result["lags"]
    whole = nats["model"][:205].astype(float)
    assert slots["tokens"] == lags["tokens"] == 205
    assert slots["lag"] == pytest.approx([2 ** (i / 4) for i in range(17)], abs=1e-5)
    assert lags["lag"] == [0, 1, 2, 4, 8, 16]
    increases = {f"slot {i} silent": slots["increase"][i - 1] for i in range(1, 18)}
    increases |= {"all slots silent": slots["all"]["increase"]}
    for way in WAYS:
        increases |= {f"{way} beyond {lag}": lags[way]["increase"][i] for i, lag in enumerate(lags["lag"])}
    for name, increase in increases.items():
        assert len(nats[name]) == 205
        assert increase == mean(nats[name] - whole)
    assert len({round(value, 6) for value in slots["increase"]}) > 10  # they differ from each other
    for way in WAYS:
        assert lags[way]["increase"][0] != 0
        assert lags[way]["increase"][-1] == 0
        assert lags[way]["interval"][-1] == [0, 0]


def test_by_stride(result: dict[str, Any], nats: Nats, runs: dict[str, Path], store: TokenStore) -> None:
    part = result["stride"]
    assert part["tokens"] == 205
    for name, run in (("model", "memory"), ("control", "control")):
        own, model = part[name], find_checkpoint(runs[run]).load_model()
        assert (own["stride"], own["cost"]) == ([8, 4, 2], [1, 2, 4])
        for i, stride in enumerate(own["stride"]):
            expected = score(model, store, 8, model.history, 5, stride=stride)[:205]
            assert own["ppl_token"][i] == pytest.approx(math.exp(expected.mean()), rel=1e-5)
            assert own["increase"][i] == pytest.approx(expected.mean() - nats[name][:205].mean(), abs=1e-6)
        assert own["interval"][0] == [0, 0]


@pytest.mark.usefixtures("no_plots")
def test_only_the_slot_that_is_used_matters(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 17 slots, all but the fifth nearest are zero from the start."""
    make_slots = LogMemoryTransformer.make_slots

    def one_slot(self: LogMemoryTransformer, history: torch.Tensor) -> torch.Tensor:
        slots = make_slots(self, history)
        return torch.cat([torch.zeros_like(slots[:, :12]), slots[:, 12:13], torch.zeros_like(slots[:, 13:])], dim=1)

    monkeypatch.setattr(LogMemoryTransformer, "make_slots", one_slot)
    result = analyze(runs["memory"], str(store.path), out=tmp_path / "out", limit=100, finest=1, device="cpu")
    slots = result["slots"]
    assert slots["increase"][4] == slots["all"]["increase"] != 0
    assert [increase for i, increase in enumerate(slots["increase"]) if i != 4] == [0] * 16
    assert result["lags"]["cut"]["increase"][0] != 0


def test_history_of_the_control_ends_at_its_slots(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    result = analyze(runs["control"], str(store.path), out=tmp_path / "out", limit=100, finest=1, device="cpu")
    assert result["slots"]["lag"] == [1, 2, 3, 4, 5]
    assert result["lags"]["lag"] == [0, 1, 2, 4, 5]
    assert result["lags"]["cut"]["increase"][3] != 0 == result["lags"]["cut"]["increase"][4]
    assert result["stride"]["model"]["stride"] == [8]
    assert result["control"] is None
    assert "gain" not in result["position"]["each"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") == 6
    assert "after the memory's LayerNorm" not in page


@pytest.mark.parametrize(("name", "plots", "why"), [("plain", 4, "no slots"), ("xl", 3, "recurrent")])
def test_parts_that_do_not_apply_say_why(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, name: str, plots: int, why: str
) -> None:
    out = tmp_path / "out"
    result = analyze(runs[name], str(store.path), runs["memory"], out, limit=100, finest=2, device="cpu")
    assert why in result["slots"]["absent"]
    assert why in result["lags"]["absent"]
    assert ("absent" in result["stride"]) == (name == "xl")
    page = (out / "report.html").read_text()
    assert page.count("<img") == plots
    assert page.count("Does not apply") == 6 - plots
    assert why in page
    assert sum(result["position"]["each"]["tokens"]) == len(store)
    kinds = result["last_seen"]["where"]["kinds"]  # xl knows the control's 16 tokens before the window by its state
    only = "" if name == "xl" else " only"
    assert kinds == [
        "in the window", f"before the window, in the control's history{only} (up to lag 16)", "farther back",
        "never before",
    ]  # fmt: skip


@pytest.fixture
def partly_unseen(books: Path, tmp_path: Path) -> Path:
    """Three documents; the training text has no token of the second."""
    folder = tmp_path / "texts"
    folder.mkdir()
    shutil.copy(books / "0.txt", folder / "a.txt")
    (folder / "b.txt").write_text("ÄÖÜ " * 40)
    shutil.copy(books / "1.txt", folder / "c.txt")
    return folder


@pytest.mark.usefixtures("no_plots")
def test_in_vocabulary_documents_and_others(
    runs: dict[str, Path], books: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent" in result["documents"]
    out, folder = tmp_path / "out", tmp_path / "texts"
    folder.mkdir()
    lines = (books / "0.txt").read_text().splitlines(keepends=True)
    for number in range(20):  # every other one has no token of the training text
        text = "".join(lines[: 1 + number // 2 % 4]) if number % 2 == 0 else "ÄÖÜ " * number
        (folder / f"{number:02}.txt").write_text(text)
    found = analyze(runs["memory"], str(folder), runs["control"], out, limit=10**6, finest=1, device="cpu")["documents"]
    assert (found["familiar"]["documents"], found["others"]["documents"]) == (10, 10)
    nats = load_file(out / "nats.safetensors")
    scored = open_tokens(str(folder), find_checkpoint(runs["memory"]).load_tokenizer())
    document = np.repeat(np.arange(20), scored.documents.tokens)
    known = document % 2 == 0
    for name, here in (("familiar", known), ("others", ~known)):
        part, gain = found[name], (nats["control"] - nats["model"])[here]
        assert part["all"]["tokens"] == [here.sum()] == [sum(part["position"]["tokens"])]
        assert part["all"]["gain"]["nats"][0] == mean(gain)
        first = np.flatnonzero(here)[np.flatnonzero(here) % 8 == 0]  # the first token of each window
        assert part["position"]["model"]["nats"][0] == mean(nats["model"][first])
        lags = part["cut"]["lag"]
        increase = nats[f"cut beyond {lags[2]}"] - nats["model"]
        assert part["cut"]["increase"][2] == mean(increase[here])
        intervals = ((increase[here], part["cut"]["interval"][2]), (gain, part["all"]["gain"]["interval"][0]))
        for values, interval in intervals:
            by_hand = metrics.by_kind(values, np.zeros(here.sum(), np.int64), 1, document[here])
            assert interval == pytest.approx(by_hand["interval"][0], abs=1e-5)
        assert part["cut"]["tokens"] == here.sum()
    page, printed = (out / "report.html").read_text(), capsys.readouterr().out
    assert ">In-vocabulary documents and others</h2>" in page
    assert f"{-found['others']['all']['gain']['nats'][0]:+.4f}" in page
    assert "10 in-vocabulary" in printed


@pytest.mark.usefixtures("no_plots")
def test_fewer_than_ten_documents_have_no_interval(runs: dict[str, Path], partly_unseen: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = analyze(runs["memory"], str(partly_unseen), runs["control"], out, limit=100, finest=2, device="cpu")
    assert "too few documents (3)" in result["intervals"]
    assert "too few documents (1)" in result["lags"]["intervals"]
    assert {str(value) for value in intervals_of(result)} == {"None"}
    page = (out / "report.html").read_text()
    assert "[+" not in page
    assert "[-" not in page
    assert "% interval" not in page
    assert f"Cutting off the whole past changes the loss by {result['lags']['cut']['increase'][0]:+.4f}." in page


def intervals_of(part: Any) -> Iterator[Any]:
    """All intervals of an analysis."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "interval":
                yield from value if isinstance(value, list) else [value]
            else:
                yield from intervals_of(value)


@pytest.mark.usefixtures("no_plots")
def test_documents_beyond_the_limit_have_no_changed_past(
    runs: dict[str, Path], partly_unseen: Path, tmp_path: Path
) -> None:
    result = analyze(runs["memory"], str(partly_unseen), out=tmp_path / "out", finest=8, device="cpu", limit=20,
                     streams="document")  # fmt: skip
    documents = result["documents"]
    assert documents["familiar"]["cut"]["tokens"] == 20
    assert "cut" not in documents["others"]
    scored = open_tokens(str(partly_unseen), find_checkpoint(runs["memory"]).load_tokenizer()).documents
    assert documents["others"]["position"]["tokens"][0] == -(-scored.tokens[1] // 8)  # its own windows
    assert "in-vocabulary, 20 tokens" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.usefixtures("no_plots")
def test_documents_need_the_training_text_but_neither_slots_nor_a_control(
    runs: dict[str, Path], partly_unseen: Path, books: Path, tmp_path: Path
) -> None:
    text, counts = str(partly_unseen), str(books / "1.txt")
    other = analyze(runs["memory"], text, out=tmp_path / "other", finest=8, device="cpu", counts=counts)
    assert list(other["documents"]) == ["absent"]
    assert "training text" in other["documents"]["absent"]
    assert other["documents"]["absent"] in (tmp_path / "other" / "report.html").read_text()
    alone = analyze(runs["plain"], text, out=tmp_path / "plain", finest=8, device="cpu")["documents"]
    assert "cut" not in alone["familiar"]
    assert "gain" not in alone["familiar"]["all"]
