"""`logpast analyze` end to end: each part against the saved nats, systems it half applies to, mistakes, the page."""

import copy
import functools
import hashlib
import json
import math
import operator
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from logpast.analysis import page as analysis_page
from logpast.analysis import passes, probes
from logpast.analysis.analyze import analyze
from logpast.analysis.saved import WAYS
from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.data.prepare import is_prepared, prepare
from logpast.evaluation import metrics
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.models import LogMemoryConfig, LogMemoryTransformer, ModelConfig, RecentConfig, TransformerXLConfig
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError
from logpast.util.files import exclusive_lock

SIZES = {"window": 8, "layers": 1, "heads": 2, "width": 16}
MODELS: dict[str, ModelConfig] = {
    "memory": LogMemoryConfig(slots=17, sharpness=20, **SIZES),
    "control": RecentConfig(slots=5, **SIZES),
    "plain": RecentConfig(slots=0, **SIZES),
    "xl": TransformerXLConfig(memory=8, **SIZES),
}
PLOTS = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict[str, Path]:
    """A model of each kind, hardly trained."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model in MODELS.items():
        train(TrainConfig(
            run=folder / name, data=DataConfig(train=str(store.path)), model=model, steps=20, batch_size=8,
            optimizer=OptimizerConfig(1e-2, 1e-3, warmup_steps=2), accelerator="cpu", tensorboard=False,
        ))  # fmt: skip
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def done(runs: dict[str, Path], store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The memory model beside its control."""
    out = tmp_path_factory.mktemp("done") / "analysis"
    analyze(runs["memory"], str(store.path), runs["control"], out, limit=205, finest=4, device="cpu")
    return out


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their pictures, which take longer than small analyses: for tests that do not look at them."""
    monkeypatch.setattr("logpast.reporting.html.rendered", lambda figure: b"")


@pytest.fixture
def result(done: Path) -> dict[str, Any]:
    return json.loads((done / "analysis.json").read_text())


@pytest.fixture
def nats(done: Path) -> dict[str, np.ndarray]:
    return load_file(done / "nats.safetensors")


def mean(values: list[float]) -> Any:
    return pytest.approx(math.fsum(values) / len(values), abs=1e-6)


def test_nats_are_those_of_eval(
    runs: dict[str, Path], store: TokenStore, result: dict[str, Any], nats: dict[str, np.ndarray]
) -> None:
    for name, run in (("model", "memory"), ("control", "control")):
        scores = evaluate(runs[run], str(store.path), device="cpu")
        assert float(nats[name].sum(dtype=float)) == pytest.approx(scores["nats"], rel=1e-6)
        assert result["scores"][name]["ppl_token"] == pytest.approx(scores["ppl_token"], rel=1e-5)
        assert len(nats[name]) == scores["tokens"] == result["data"]["tokens"]
    gain = result["scores"]["all"]["gain"]
    assert gain["nats"][0] == mean(list(nats["control"].astype(float) - nats["model"]))
    assert gain["interval"][0][0] < gain["nats"][0] < gain["interval"][0][1]


def test_by_position(result: dict[str, Any], nats: dict[str, np.ndarray]) -> None:
    each, binned = result["position"]["each"], result["position"]["binned"]
    assert (binned["from"], binned["to"]) == ([0, 1, 2, 4], [0, 1, 3, 7])
    assert sum(each["tokens"]) == sum(binned["tokens"]) == len(nats["model"])
    for position in range(8):
        assert each["model"]["nats"][position] == mean([float(n) for n in nats["model"][position::8]])
        assert each["control"]["nats"][position] == mean([float(n) for n in nats["control"][position::8]])
    gain = [float(c) - float(m) for c, m in zip(nats["control"], nats["model"], strict=True)]
    for i, (first, last) in enumerate(zip(binned["from"], binned["to"], strict=True)):
        assert binned["gain"]["nats"][i] == mean([g for n, g in enumerate(gain) if first <= n % 8 <= last])


def test_by_frequency(result: dict[str, Any], nats: dict[str, np.ndarray], store: TokenStore) -> None:
    part, counts = result["frequency"], Counter(store.tokens.tolist())
    assert (part["counted_in"], part["counted_tokens"]) == (store.name, len(store))
    assert sum(part["tokens"]) == len(store)
    assert len(part["from"]) >= 3
    for i, (first, last) in enumerate(zip(part["from"], part["to"], strict=True)):
        bin_ = [float(n) for n, token in zip(nats["model"], store.tokens.tolist(), strict=True)
                if first <= counts[token] <= last]  # fmt: skip
        assert part["tokens"][i] == len(bin_)
        assert part["model"]["nats"][i] == mean(bin_)


def test_by_token(result: dict[str, Any], nats: dict[str, np.ndarray], store: TokenStore) -> None:
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


def test_tokens_on_the_page() -> None:
    """With signs that would be lost, or be taken for the page's own; shares only of a gain."""
    tokens = [{"token": " <b>\n\t", "places": 3, "documents": 2, "gain": 1.5}]
    shown = "<td><code>␣&lt;b&gt;⏎\\x09</code></td><td>3</td><td>2</td><td>+1.5</td>"
    for gain, share in ((0.3, "+50.0%"), (-0.3, "–")):
        page = analysis_page._by_token({"gained": tokens, "lost": []}, {"tokens": [10], "gain": {"nats": [gain]}})
        assert f"{shown}<td>{share}</td>" in page


def test_by_last_occurrence(result: dict[str, Any], nats: dict[str, np.ndarray], store: TokenStore) -> None:
    """In the window, before it and among the control's 5, farther and among the model's 16, still farther, never."""
    where, stream = result["last_seen"]["where"], [-1, *store.tokens.tolist()]
    gains: list[list[float]] = [[] for _ in range(5)]
    for target in range(1, len(stream)):
        start = (target - 1) // 8 * 8
        sights = (start, max(0, start - 5), max(0, start - 16), 0)
        kind = sum(stream[target] not in stream[first:target] for first in sights)
        gains[kind].append(float(nats["control"][target - 1]) - float(nats["model"][target - 1]))
    assert len(where["kinds"]) == 5
    assert where["tokens"] == [len(kind) for kind in gains]
    for kind in range(5):
        assert where["gain"]["nats"][kind] == mean(gains[kind])
    lags = result["last_seen"]["by_lag"]
    assert sum(lags["tokens"]) == len(store)
    assert (lags["from"][:4], lags["to"][:4]) == ([-1, 0, 1, 2], [-1, 0, 1, 3])
    assert lags["tokens"][:2] == [len(gains[4]), len(gains[0])]


def test_slots_and_lags(result: dict[str, Any], nats: dict[str, np.ndarray]) -> None:
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
        assert increase == mean(list(nats[name] - whole))
    assert len({round(value, 6) for value in slots["increase"]}) > 10  # each is another
    for way in WAYS:
        assert lags[way]["increase"][0] != 0
        assert lags[way]["increase"][-1] == 0
        assert lags[way]["interval"][-1] == [0, 0]


def test_each_pass_is_what_its_name_says(nats: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore) -> None:
    model = find_checkpoint(runs["memory"]).load_model()
    assert isinstance(model, LogMemoryTransformer)
    keys = probes.random_keys(model.history, seed=0)
    changes: dict[str, dict[str, probes.Change]] = {
        "slot 1 silent": {"slots": probes.silent([16])}, "slot 17 silent": {"slots": probes.silent([0])}
    } | {f"cut beyond {lag}": {"ids": probes.cut_beyond(lag)} for lag in (0, 1, 4)}  # fmt: skip
    changes |= {f"shuffled beyond {lag}": {"ids": probes.shuffled_beyond(lag, keys)} for lag in (0, 4)}
    pasts = probes.random_pasts(store, model.history, seed=0)
    changes |= {f"replaced beyond {lag}": {"ids": probes.replaced_beyond(lag, pasts)} for lag in (0, 4)}
    for name, change in changes.items():
        with probes.changed_past(model, **change):
            expected = score(model, store, 8, model.history, 5, limit=205)[:205]
        np.testing.assert_allclose(nats[name], expected, atol=1e-5, err_msg=name)


def test_the_bar_ends_where_the_plan_says(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    model = find_checkpoint(runs["control"]).load_model()
    assert passes.Pass("x", model, 40, 2).cost == 40 * 8 / 2
    plan = passes.plan_of(model, None, store, 40, 4, 0, torch.device("cpu"))
    told: list[int] = []
    bar: Any = SimpleNamespace(update=lambda done, note: told.append(done))
    done = passes.Done(tmp_path, plan, {}, {model: "x"})
    found = passes.run(plan, done, store, "corpus", 5, torch.device("cpu"), "float32", bar)
    assert {kind: list(each) for kind, each in found.items()} == {k: [one.name for one in v] for k, v in plan.items()}
    assert passes.Done(tmp_path, plan, {}, {model: "x"}).nats.keys() == done.nats.keys()
    assert not passes.Done(tmp_path, plan, {"device": "cuda"}, {model: "x"}).nats
    assert told == sorted(told)
    assert told[-1] == pytest.approx(sum(one.cost for kind in plan.values() for one in kind), abs=8 * 4)


def test_strides(result: dict[str, Any], nats: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore) -> None:
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


@pytest.mark.usefixtures("unpainted")
def test_only_the_slot_that_is_used_matters(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 17 slots all but the fifth nearest are empty to begin with."""
    front = LogMemoryTransformer.front

    def one_slot(self: LogMemoryTransformer, history: torch.Tensor) -> torch.Tensor:
        slots = front(self, history)
        return torch.cat([torch.zeros_like(slots[:, :12]), slots[:, 12:13], torch.zeros_like(slots[:, 13:])], dim=1)

    monkeypatch.setattr(LogMemoryTransformer, "front", one_slot)
    result = analyze(runs["memory"], str(store.path), out=tmp_path / "out", limit=100, finest=1, device="cpu")
    slots = result["slots"]
    assert slots["increase"][4] == slots["all"]["increase"] != 0
    assert [increase for i, increase in enumerate(slots["increase"]) if i != 4] == [0] * 16
    assert result["lags"]["cut"]["increase"][0] != 0


def test_a_control_looks_no_farther_than_its_slots(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    result = analyze(runs["control"], str(store.path), out=tmp_path / "out", limit=100, finest=1, device="cpu")
    assert result["slots"]["lag"] == [1, 2, 3, 4, 5]
    assert result["lags"]["lag"] == [0, 1, 2, 4, 5]
    assert result["lags"]["cut"]["increase"][3] != 0 == result["lags"]["cut"]["increase"][4]
    assert result["stride"]["model"]["stride"] == [8]
    assert result["control"] is None
    assert "gain" not in result["position"]["each"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") == PLOTS
    assert "after the memory's LayerNorm" not in page


@pytest.mark.usefixtures("unpainted")
def test_a_control_may_be_a_finished_analysis(
    done: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is the same as with the model itself, which may be gone."""
    kept, out, how = tmp_path / "kept", tmp_path / "out", {"limit": 205, "finest": 4, "device": "cpu"}
    analyze(runs["control"], str(store.path), out=kept, **how)  # type: ignore[arg-type]
    result = analyze(runs["memory"], str(store.path), kept, out, **how)  # type: ignore[arg-type]
    whole = json.loads((done / "analysis.json").read_text())
    assert result["control"] == whole["control"]
    for part in ("scores", "position", "frequency", "last_seen", "stride"):
        assert result[part] == approx(whole[part]), part
    assert (load_file(out / "nats.safetensors")["control"] == load_file(done / "nats.safetensors")["control"]).all()
    shorter = analyze(runs["memory"], str(store.path), kept / "analysis.json", tmp_path / "s", limit=100, device="cpu")
    assert "control" not in shorter["stride"]
    assert "report.html" in {file.name for file in (tmp_path / "s").iterdir()}

    ask = [runs["memory"], "--control", kept, "--out", tmp_path / "no", "--data"]
    other = tmp_path / "other.txt"
    other.write_text("And God said, Let there be light: and there was light. " * 9)
    assert error_of(capsys, *ask, other).endswith("; analyze the control on that, too\n")
    assert "was made with streams=corpus" in error_of(capsys, *ask, store.path, "--streams", "document")
    (kept / "nats.safetensors").write_bytes(b"")
    assert "analyze the control anew" in error_of(capsys, *ask, store.path)
    assert not (tmp_path / "no").exists()


def approx(value: Any) -> Any:
    """To what float32 keeps of the nats."""
    if isinstance(value, dict):
        return {name: approx(part) for name, part in value.items()}
    if isinstance(value, list):
        return [approx(part) for part in value]
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize(("name", "plots", "why"), [("plain", 4, "no slots"), ("xl", 3, "carries a state")])
def test_what_does_not_apply_is_said(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, name: str, plots: int, why: str
) -> None:
    out = tmp_path / "out"
    result = analyze(runs[name], str(store.path), runs["memory"], out, limit=100, finest=2, device="cpu")
    assert why in result["slots"]["absent"]
    assert why in result["lags"]["absent"]
    assert ("absent" in result["stride"]) == (name == "xl")
    page = (out / "report.html").read_text()
    assert page.count("<img") == plots
    assert page.count("Does not apply") == PLOTS - plots
    assert why in page
    assert sum(result["position"]["each"]["tokens"]) == len(store)
    kinds = result["last_seen"]["where"]["kinds"]  # of the control's 16 tokens before the window xl knows by its state
    alone = "" if name == "xl" else " alone"
    assert kinds == [
        "in the window", f"before it, in the control's sight{alone} (to lag 16)", "farther back", "never before",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lowest", "told"),
    [
        (
            [1, 1, 1, 0],
            "…, what lies beyond lag 2 still +0.5020 [+0.4020, +0.6020].",
        ),
        ([1, 1, 0, 0], "…, what lies beyond lag 1 still +0.5010 [+0.4010, +0.6010], beyond lag 2 no more than chance."),
        ([1, 0, 1, 0], "Cutting off all of it costs +0.5000 [+0.4000, +0.6000], beyond lag 1 no more than chance."),
        ([0, 1, 1, 0], "Cutting off all of it raises the loss by no more than chance."),
    ],
)
def test_how_far_back_ends_with_the_first_lag_that_is_chance(lowest: list[int], told: str) -> None:
    increase = [0.5 + lag / 1000 for lag in range(4)]
    intervals = [[value - 0.1 if real else -0.1, value + 0.1] for value, real in zip(increase, lowest, strict=True)]
    part = {"lag": [0, 1, 2, 4], "cut": {"increase": increase, "interval": intervals}}
    assert analysis_page._told_apart(part, "cut").endswith(told.lstrip("…"))


def test_how_many_slots_would_matter_by_chance() -> None:
    slots = {"increase": [0.0] * 40, "interval": [[-1.0, 1.0]] * 40, "lag": list(range(1, 41)), "tokens": 9,
             "intervals": "none", "all": {"increase": 0.0, "interval": None}}  # fmt: skip
    said = analysis_page._slots(slots, {"system": "recent"})
    assert (
        "of 40 slots 0 raise the loss and 0 lower it by an interval that leaves out zero, as 2 would by chance" in said
    )


def test_where_the_gain_lies_and_where_sight_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks stand within the bar of their lag, on its logarithmic scale: 6 of 4 … 7 is 1 + log2(7/4) − ½ along."""
    marks = dict[str, float]()
    monkeypatch.setattr(analysis_page, "_mark", lambda axis, place, label, height: marks.update({label: place}))
    gain = {"nats": [0.5, -0.25], "interval": [None, None]}
    both = {"model": {"nats": [1.0, 1.0]}, "control": {"nats": [1.5, 0.75]}, "gain": gain}
    where = {"kinds": ["near", "far"], "tokens": [4, 4]} | both
    lags = {"from": [2, 4], "to": [3, 7], "tokens": [4, 4], "gain": gain}
    parts, model = {"where": where, "by_lag": lags}, {"history": 6, "window": 8}
    analysis_page._last_seen(parts, model, {"history": 2, "window": 4})
    assert list(marks) == ["model's history ends"]
    page = analysis_page._last_seen(parts, model, {"history": 2, "window": 8})
    assert re.findall(r"(-?\d+)%</td></tr>", page) == ["200", "-100"]
    assert marks == {
        "model's history ends": pytest.approx(0.5 + math.log2(7 / 4)),
        "control's sight ends": pytest.approx(-0.5 + math.log2(3 / 2)),
    }


def test_the_page_has_every_plot_and_is_drawn_again_without_the_model(
    done: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (done / "report.html").read_text()
    assert page.count("<img") == page.count("data:image/png;base64,") == PLOTS
    assert "Does not apply" not in page
    own = (result["model"]["history"] + result["model"]["window"] - 1) / result["data"]["tokens"]
    for word in ("position in the window", "frequency", "last occurred", "Which slots", "How far back", "stride",
                 "after the memory's LayerNorm", result["revision"], f"chance some {own:.1%} of"):  # fmt: skip
        assert word in page
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(done / "analysis.json", elsewhere)
    with pytest.raises(SystemExit) as stop:
        main(["analyze", str(elsewhere)])
    assert not stop.value.code, capsys.readouterr().err
    again = (elsewhere / "report.html").read_text()
    assert again.count("<img") == PLOTS
    assert [line for line in again.splitlines() if "<img" not in line] == [
        line for line in page.splitlines() if "<img" not in line
    ]


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("frequency", "from"), [], "can be drawn: "),
        (("model", "run"), None, "can be drawn: "),
        (("control",), {"run": "x"}, "can be drawn: it has no "),
        (("scores", "model", "ppl_token"), math.nan, "can be read: NaN is no number"),
        (("format",), "another", "can be read: it says 'another'"),
    ],
)
def test_a_damaged_analysis_is_told_in_a_line(
    place: tuple[str, ...], value: object, told: str, result: dict[str, Any], tmp_path: Path
) -> None:
    damaged = copy.deepcopy(result)
    functools.reduce(operator.getitem, place[:-1], damaged)[place[-1]] = value
    (tmp_path / "analysis.json").write_text(json.dumps(damaged))
    (tmp_path / "report.html").write_text("of before")
    with pytest.raises(UserError, match=f"is not an analysis that {told}.*; analyze the model anew$") as error:
        analyze(tmp_path)
    assert "\n" not in str(error.value)
    assert (tmp_path / "report.html").read_text() == "of before"


@pytest.mark.usefixtures("unpainted")
def test_results_do_not_depend_on_the_batch_size_and_the_order_on_the_seed(
    done: Path, nats: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    how = {"limit": 205, "finest": 1, "device": "cpu", "batch_size": 3}
    analyze(runs["memory"], str(store.path), out=tmp_path / "same", **how)  # type: ignore[arg-type]
    same = load_file(tmp_path / "same" / "nats.safetensors")
    assert "shuffled beyond 2" in same
    for name, values in same.items():
        np.testing.assert_allclose(values, nats[name], rtol=1e-4, atol=1e-5)
    analyze(runs["memory"], str(store.path), out=tmp_path / "other", seed=1, **how)  # type: ignore[arg-type]
    other = load_file(tmp_path / "other" / "nats.safetensors")
    np.testing.assert_array_equal(other["cut beyond 2"], same["cut beyond 2"])
    for way in ("shuffled", "replaced"):
        assert not np.allclose(other[f"{way} beyond 2"], same[f"{way} beyond 2"], rtol=1e-4)


def test_float64_and_streams_by_document(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = analyze(runs["memory"], str(store.path), out=out, limit=50, finest=1, streams="document",
                     precision="float64", device="cpu")  # fmt: skip
    saved = load_file(out / "nats.safetensors")["model"]
    assert saved.dtype == np.float64
    model = find_checkpoint(runs["memory"]).load_model().double()
    expected = score(model, store, 8, model.history, 4, "document")
    np.testing.assert_allclose(saved, expected, rtol=1e-12)
    ends = store.documents.tokens.tolist()
    assert result["position"]["each"]["tokens"][0] == sum(-(-length // 8) for length in ends)


@pytest.mark.usefixtures("unpainted")
def test_counts_are_of_the_training_text_where_it_is_at_hand(
    runs: dict[str, Path], store: TokenStore, books: Path, tmp_path: Path
) -> None:
    text, how = str(books / "1.txt"), {"limit": 50, "finest": 1, "device": "cpu"}
    trained = analyze(runs["plain"], text, out=tmp_path / "1", **how)["frequency"]  # type: ignore[arg-type]
    assert (trained["counted_in"], trained["counted_tokens"]) == (store.name, len(store))
    chosen = analyze(runs["plain"], text, out=tmp_path / "2", counts=text, **how)["frequency"]  # type: ignore[arg-type]
    assert chosen["counted_tokens"] == sum(chosen["tokens"]) < len(store)
    step = find_checkpoint(runs["plain"]).path
    moved = tmp_path / "moved"
    shutil.copytree(step, moved)
    config = (moved / "config.yaml").read_text()
    assert str(store.path) in config
    (moved / "config.yaml").write_text(config.replace(str(store.path), str(tmp_path / "gone")))
    state = json.loads((moved / "state.json").read_text())
    state["sizes"]["config.yaml"] = (moved / "config.yaml").stat().st_size
    (moved / "state.json").write_text(json.dumps(state))
    own = analyze(moved, text, out=tmp_path / "3", **how)["frequency"]  # type: ignore[arg-type]
    assert own["counted_tokens"] == sum(own["tokens"])
    (moved / "config.yaml").write_text(config)
    state["data"]["sha256"] = "of another text"
    state["sizes"]["config.yaml"] = len(config.encode())
    (moved / "state.json").write_text(json.dumps(state))
    assert analyze(moved, text, out=tmp_path / "4", **how)["frequency"]["counted_tokens"] == own["counted_tokens"]  # type: ignore[arg-type]


def test_is_prepared(books: Path, store: TokenStore, tmp_path: Path) -> None:
    text = str(books / "0.txt")
    for tokenizer in (str(store.path), "bpe-290"):
        assert not is_prepared(text, tokenizer, tmp_path)
        open_tokens(text, tokenizer, tmp_path)
        assert is_prepared(text, tokenizer, tmp_path)
    assert is_prepared(str(store.path))
    assert not is_prepared(str(tmp_path / "nowhere.txt"), str(store.path), tmp_path)


def test_documents_with_much_that_was_never_seen_are_told_apart(
    runs: dict[str, Path], books: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    assert "absent" in result["documents"]
    (tmp_path / "texts").mkdir()
    shutil.copy(books / "0.txt", tmp_path / "texts" / "a.txt")
    (tmp_path / "texts" / "b.txt").write_text("ÄÖÜ " * 40)
    shutil.copy(books / "1.txt", tmp_path / "texts" / "c.txt")
    out, text = tmp_path / "out", str(tmp_path / "texts")
    found = analyze(runs["memory"], text, runs["control"], out, limit=10**6, finest=8, device="cpu")["documents"]
    assert (found["familiar"]["documents"], found["others"]["documents"]) == (2, 1)
    nats = load_file(out / "nats.safetensors")
    known = np.ones(len(nats["model"]), bool)
    scored = open_tokens(text, find_checkpoint(runs["memory"]).load_tokenizer())
    documents, blocks = scored.documents, probes.groups_of(scored, len(scored), 8)[0]
    known[documents.start[1] : documents.start[1] + documents.tokens[1]] = False
    for name, here in (("familiar", known), ("others", ~known)):
        part, gain = found[name], (nats["control"] - nats["model"])[here]
        assert part["all"]["tokens"] == [here.sum()] == [sum(part["position"]["tokens"])]
        assert part["all"]["gain"]["nats"][0] == mean(gain)
        first = np.flatnonzero(here)[np.flatnonzero(here) % 8 == 0]  # the first of each window
        assert part["position"]["model"]["nats"][0] == mean(nats["model"][first])
        lags = part["cut"]["lag"]
        lost = nats[f"cut beyond {lags[2]}"] - nats["model"]
        assert part["cut"]["increase"][2] == mean(lost[here])
        for values, told in ((lost[here], part["cut"]["interval"][2]), (gain, part["all"]["gain"]["interval"][0])):
            by_hand = metrics.by_kind(values, np.zeros(here.sum(), np.int64), 1, blocks[here])
            assert told == pytest.approx(by_hand["interval"][0], abs=1e-5)
        assert part["cut"]["tokens"] == here.sum()
    page, told = (out / "report.html").read_text(), capsys.readouterr().out
    assert "Familiar documents, and others" in page
    assert f"{found['others']['all']['gain']['nats'][0]:+.4f}" in page
    assert "  2 familiar " in told
    request.getfixturevalue("unpainted")  # enough of pictures
    del result["documents"]  # as in analyses of before
    assert "Familiar" not in analysis_page.draw(result)
    two = {"limit": 20, "streams": "document"}
    few = analyze(runs["memory"], text, out=tmp_path / "few", finest=8, device="cpu", **two)  # type: ignore[arg-type]
    assert few["documents"]["familiar"]["cut"]["tokens"] == 20
    assert "cut" not in few["documents"]["others"]
    assert few["documents"]["others"]["position"]["tokens"][0] == -(-documents.tokens[1] // 8)  # its own windows
    assert "familiar, 20 tokens" in (tmp_path / "few" / "report.html").read_text()
    assert few["documents"]["familiar"]["all"]["model"]["interval"] is not None
    other = analyze(runs["memory"], text, out=tmp_path / "other", finest=8, device="cpu", counts=str(books / "1.txt"))
    assert other["documents"] == {"absent": "the training text is not at hand, or another is counted"}
    alone = analyze(runs["plain"], text, out=tmp_path / "plain", finest=8, device="cpu")["documents"]
    assert "cut" not in alone["familiar"]
    assert "gain" not in alone["familiar"]["all"]


def test_identity_is_enough_to_know_the_weights_again(result: dict[str, Any], runs: dict[str, Path]) -> None:
    for name, run in (("model", "memory"), ("control", "control")):
        file = find_checkpoint(runs[run]).path / "model.safetensors"
        assert result[name]["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert result[name]["recipe"]["model"]["slots"] == MODELS[run].slots  # type: ignore[attr-defined]
        assert result[name]["step"] == 20
    assert result["model"]["history"] == 16
    assert len(result["data"]["sha256"]) == 64
    assert result["hardware"]["device"] == "cpu"


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *map(str, words)])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("logpast: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("factor", [1e5, math.nan])
def test_a_model_that_diverged_is_told(factor: float, runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    shutil.copytree(runs["memory"], tmp_path / "wild")
    for file in (tmp_path / "wild").rglob("model.safetensors"):
        tensors = load_file(file)
        save_file(tensors | {"table.weight": np.float32(factor) * tensors["table.weight"]}, file)
        state = json.loads(file.with_name("state.json").read_text())
        file.with_name("state.json").write_text(json.dumps(state | {"sums": {}}))
    with pytest.raises(UserError, match=r"control: its loss is .*, for its training diverged"):
        analyze(runs["memory"], str(store.path), control=tmp_path / "wild", out=tmp_path / "out", limit=40)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"model: its loss is"):
        analyze(tmp_path / "wild", str(store.path), out=tmp_path / "other", limit=40)
    assert not list(tmp_path.glob("*other*"))


def test_mistakes_are_told_in_a_line(
    runs: dict[str, Path], store: TokenStore, books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, text, out = runs["memory"], store.path, tmp_path / "out"
    assert "no checkpoint at" in error_of(capsys, tmp_path / "nowhere", "--data", text)
    assert "--data" in error_of(capsys, memory)
    assert "limit must be at least 1" in error_of(capsys, memory, "--data", text, "--limit", 0)
    assert "seed must be from 0" in error_of(capsys, memory, "--data", text, "--seed", 10**23)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in error_of(capsys, memory, "--data", text, "--out", tmp_path / "link")
    assert "finest must be at least 1" in error_of(capsys, memory, "--data", text, "--finest", 0)
    short = tmp_path / "short.txt"
    short.write_text("In the")
    assert "use more text" in error_of(capsys, memory, "--data", short, "--out", out)
    prepare([str(books)], tmp_path / "other", "bpe-280", workers=1)
    train(TrainConfig(run=tmp_path / "rival", data=DataConfig(train=str(tmp_path / "other")), model=MODELS["control"],
                      steps=1, batch_size=2, accelerator="cpu", tensorboard=False))  # fmt: skip
    assert "another tokenizer" in error_of(
        capsys, memory, "--data", text, "--control", tmp_path / "rival", "--out", out
    )
    assert not out.exists()


def test_nothing_is_overwritten(
    done: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (done / "analysis.json").read_bytes()
    told = error_of(capsys, runs["memory"], "--data", store.path, "--out", done)
    assert f"{done} exists already; draw its page again with `logpast analyze {done}`" in told
    assert "finished analysis" in error_of(capsys, done, "--data", store.path)
    told = error_of(capsys, done, "--out", tmp_path / "other", "--limit", 5)
    assert told.endswith("give a model, or no --out and --limit\n")
    assert (done / "analysis.json").read_bytes() == before
    (tmp_path / "analysis.json").write_text('{"format": "something else"}')
    (tmp_path / "report.html").write_text("mine")
    assert "something else" in error_of(capsys, tmp_path)
    (tmp_path / "analysis.json").write_text("{")
    assert "analyze the model anew" in error_of(capsys, tmp_path / "analysis.json")
    assert (tmp_path / "report.html").read_text() == "mine"


@pytest.fixture(scope="module")
def kept(runs: dict[str, Path], store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a control that is gone: its figures and its nats."""
    folder = tmp_path_factory.mktemp("kept") / "kept"
    analyze(runs["control"], str(store.path), out=folder, limit=205, finest=2, device="cpu")
    save_file({"model": load_file(folder / "nats.safetensors")["model"]}, folder / "nats.safetensors")
    return folder


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda result, nats: {"model": np.where(nats < nats.mean(), np.nan, nats).astype(nats.dtype)}, "are numbers"),
        (lambda result, nats: {"model": np.stack([nats, nats], axis=1)}, "not the nats of"),
        (lambda result, nats: {"model": nats.astype(np.int32)}, "not the nats of"),
        (lambda result, nats: {"control": nats}, "no tensor 'model' in nats.safetensors"),
        (lambda result, nats: result["model"].pop("run") and {"model": nats}, "no run in analysis.json"),
        (lambda result, nats: result["stride"]["model"].pop("cost") and {"model": nats}, "no stride.cost in"),
        (lambda result, nats: result["model"].update(window=-8) or {"model": nats}, "its window is -8"),
        (lambda result, nats: result["data"].update(documents=1) or {"model": nats}, "is of another text than"),
        (lambda result, nats: result["data"].update(tokenizer="x") or {"model": nats}, "with another tokenizer than"),
    ],
)
def test_a_spoilt_control_is_refused_before_the_work(
    kept: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path, spoil: Any, told: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("logpast.analysis.analyze.run", lambda *_: pytest.fail("it went to work"))
    folder, result = tmp_path / "spoilt", json.loads((kept / "analysis.json").read_text())
    folder.mkdir()
    save_file(spoil(result, load_file(kept / "nats.safetensors")["model"]), folder / "nats.safetensors")
    (folder / "analysis.json").write_text(json.dumps(result))
    ask = [runs["memory"], "--data", store.path, "--control", folder, "--limit", 205, "--out", tmp_path / "no"]
    assert told in error_of(capsys, *ask)
    assert not (tmp_path / "no").exists()


@pytest.mark.usefixtures("unpainted")
def test_the_page_says_what_a_kept_control_lacks(
    kept: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    how = {"limit": 100, "finest": 1, "device": "cpu"}
    analyze(runs["memory"], str(store.path), kept, tmp_path / "1", **how)  # type: ignore[arg-type]
    page = (tmp_path / "1" / "report.html").read_text()
    assert "The control is not shown: its analysis scored 205 tokens so, not 100; give both the same --limit." in page
    assert "The control's own windows" not in page
    other = tmp_path / "other"
    shutil.copytree(kept, other)
    result = json.loads((other / "analysis.json").read_text())
    result["model"]["window"] = 16
    (other / "analysis.json").write_text(json.dumps(result))
    analyze(runs["memory"], str(store.path), other, tmp_path / "2", **how)  # type: ignore[arg-type]
    assert "The control's own windows are of 16 tokens" in (tmp_path / "2" / "report.html").read_text()


def test_a_page_that_cannot_be_drawn_takes_no_figures_away(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(result: dict[str, Any]) -> str:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("logpast.analysis.analyze.draw", fail)
    with pytest.raises(RuntimeError):
        analyze(runs["plain"], str(store.path), out=tmp_path / "out", limit=50, finest=1, device="cpu")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"analysis.json", "nats.safetensors"}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    monkeypatch.undo()
    analyze(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("unpainted")
def test_an_interrupted_analysis_goes_on(
    runs: dict[str, Path], store: TokenStore, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, scored, stop_after = tmp_path / "out", list[int](), 12

    def until(*args: Any, **options: Any) -> Any:
        if len(scored) == stop_after:
            raise KeyboardInterrupt
        scored.append(args[4])  # the batch size
        return score(*args, **options)

    monkeypatch.setattr(passes, "score", until)
    ask = [str(each) for each in (runs["memory"], "--data", store.path, "--control", runs["control"], "--out", out)]
    ask += ["--limit", "205", "--finest", "4", "--device", "cpu"]
    with pytest.raises(SystemExit, match="130"):
        main(["analyze", *ask])
    assert "the same command goes on" in capsys.readouterr().err
    assert not out.exists()
    (hidden,) = tmp_path.iterdir()
    assert {"model.safetensors", "control.safetensors", "slot 3 silent.safetensors"} <= {
        f.name for f in hidden.iterdir()
    }
    (hidden / "control.safetensors").write_bytes(b"half")
    save_file({"nats": np.zeros(3)}, hidden / "slot 3 silent.safetensors")  # not one of ours
    shutil.copy(hidden / "slot 1 silent.safetensors", hidden / "slot 2 silent.safetensors")

    with exclusive_lock(hidden):  # a second one at the same time
        assert "another command is at work in" in error_of(capsys, *ask)
    stop_after, whole = 999, json.loads((done / "analysis.json").read_text())
    with passes.safe_open(hidden / "model.safetensors", "numpy") as file:
        nats, told = file.get_tensor("nats"), file.metadata() | {"seconds": "1000"}
    save_file({"nats": nats}, hidden / "model.safetensors", told)
    with pytest.raises(SystemExit, match="0"):
        main(["analyze", *ask, "--batch_size", "3"])  # which changes no nats
    assert "9 of 42 passes are done already" in capsys.readouterr().err
    assert scored.count(3) == 42 - 9
    again = json.loads((out / "analysis.json").read_text())
    assert 1000 < again["seconds"] < 2000
    for result in (whole, again):
        for name in ("recorded", "seconds", "settings"):
            result.pop(name)
    assert again == approx(whole)
    assert list(tmp_path.iterdir()) == [out]


@pytest.fixture
def already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Analyze, but be interrupted before anything is written: what it says of passes that are done already."""
    said: list[str] = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def do(*given: Any, **how: Any) -> str:
        said.clear()
        with pytest.raises(KeyboardInterrupt):
            analyze(*given, **{"out": tmp_path / "out", "limit": 50, "finest": 1, "device": "cpu"} | how)
        return "".join(text for text in said if "done already" in text)

    monkeypatch.setattr(passes.ProgressBar, "say", lambda _, text: said.append(text))
    monkeypatch.setattr("logpast.analysis.analyze._write", interrupt)
    return do


def test_passes_of_other_weights_or_another_way_are_not_gone_on_with(
    runs: dict[str, Path], store: TokenStore, already: Callable[..., str]
) -> None:
    already(runs["control"], str(store.path))
    for run, other in (
        ("control", {"seed": 1}), ("control", {"precision": "float64"}), ("control", {"streams": "document"}),
        ("memory", {}), ("control", {}),
    ):  # fmt: skip
        assert not already(runs[run], str(store.path), **other)
    told = already(runs["control"], str(store.path), limit=40)
    assert told == "1 of 22 passes are done already"  # that of the whole text
    for control, are_done in (("plain", 22), ("memory", 22), ("memory", 23)):  # of 23: another control is scored anew
        told = already(runs["control"], str(store.path), runs[control], limit=40)
        assert told == f"{are_done} of 23 passes are done already"


@pytest.mark.parametrize("what", ["nothing", "filters", "documents", "code", "text"])
def test_passes_of_another_model_text_or_code_are_not_gone_on_with(
    what: str, runs: dict[str, Path], store: TokenStore, tmp_path: Path, already: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, text = tmp_path / "run", tmp_path / "text"
    shutil.copytree(runs["memory"], run)
    shutil.copytree(store.path, text)
    already(run, str(text))
    if what == "filters":  # which are not among the weights
        config = find_checkpoint(run).path / "config.yaml"
        config.write_text(config.read_text().replace("sharpness: 20", "sharpness: 40"))
    elif what == "documents":  # the same tokens, another boundary
        head, first, second, *rest = (text / "documents.tsv").read_text().splitlines()
        one, two = (list(map(int, row.split("\t")[:2])) for row in (first, second))
        first = "\t".join([str(one[0]), str(one[1] - 1), *first.split("\t")[2:]])
        second = "\t".join([str(two[0] - 1), str(two[1] + 1), *second.split("\t")[2:]])
        (text / "documents.tsv").write_text("\n".join([head, first, second, *rest, ""]))
        about = json.loads((text / "store.json").read_text())
        about["sha256"]["documents.tsv"] = hashlib.sha256((text / "documents.tsv").read_bytes()).hexdigest()
        (text / "store.json").write_text(json.dumps(about))
    elif what == "code":
        monkeypatch.setattr("logpast.analysis.analyze.code_sha256", lambda: "other")
    elif what == "text":
        tokens = np.fromfile(text / "tokens.bin", dtype="<u2")
        tokens[-1] = tokens[-2]
        tokens.tofile(text / "tokens.bin")
        about = json.loads((text / "store.json").read_text())
        about["sha256"]["tokens.bin"] = hashlib.sha256((text / "tokens.bin").read_bytes()).hexdigest()
        (text / "store.json").write_text(json.dumps(about))
    assert bool(already(run, str(text))) == (what == "nothing")
