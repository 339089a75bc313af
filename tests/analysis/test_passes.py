"""The passes of an analysis: what each computes, and which finished ones an interrupted analysis continues from."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from logpast.analysis import passes, probes
from logpast.analysis.analyze import analyze
from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import LogMemoryTransformer
from logpast.training.checkpoint import find_checkpoint
from logpast.util.checksums import unseal
from logpast.util.errors import UserError


def test_each_pass_computes_what_its_name_says(
    nats: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore
) -> None:
    model = find_checkpoint(runs["memory"]).load_model()
    assert isinstance(model, LogMemoryTransformer)
    keys = probes.random_keys(model.history, seed=0)
    changes: dict[str, dict[str, probes.Change]] = {
        "slot 1 silent": {"slots": probes.zero_slots([16])}, "slot 17 silent": {"slots": probes.zero_slots([0])}
    } | {f"cut beyond {lag}": {"ids": probes.cut_beyond(lag)} for lag in (0, 1, 4)}  # fmt: skip
    changes |= {f"shuffled beyond {lag}": {"ids": probes.shuffled_beyond(lag, keys)} for lag in (0, 4)}
    pasts = probes.random_pasts(store, model.history, seed=0)
    changes |= {f"replaced beyond {lag}": {"ids": probes.replaced_beyond(lag, pasts)} for lag in (0, 4)}
    for name, change in changes.items():
        with probes.changed_past(model, **change):
            expected = score(model, store, 8, model.history, 5, limit=205)[:205]
        np.testing.assert_allclose(nats[name], expected, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("no_plots")
def test_nats_depend_on_the_seed_but_not_on_the_batch_size(
    nats: dict[str, np.ndarray], runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"limit": 205, "finest": 1, "device": "cpu", "batch_size": 3}
    analyze(runs["memory"], str(store.path), out=tmp_path / "same", **how)
    same = load_file(tmp_path / "same" / "nats.safetensors")
    assert "shuffled beyond 2" in same
    for name, values in same.items():
        np.testing.assert_allclose(values, nats[name], rtol=1e-4, atol=1e-5)
    analyze(runs["memory"], str(store.path), out=tmp_path / "other", seed=1, **how)
    other = load_file(tmp_path / "other" / "nats.safetensors")
    np.testing.assert_array_equal(other["cut beyond 2"], same["cut beyond 2"])
    for way in ("shuffled", "replaced"):
        assert not np.allclose(other[f"{way} beyond 2"], same[f"{way} beyond 2"], rtol=1e-4)


def test_progress_bar_ends_at_the_cost_of_the_plan(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    model = find_checkpoint(runs["control"]).load_model()
    assert passes.Pass("x", model, 40, 2).cost == 40 * 8 / 2
    plan = passes.plan_passes(model, None, store, 40, 4, 0, torch.device("cpu"))
    shown: list[int] = []
    bar: Any = SimpleNamespace(update=lambda done, note: shown.append(done))
    done = passes.FinishedPasses(tmp_path, plan, {}, {model: "x"})
    found = passes.run(plan, done, store, "corpus", 5, torch.device("cpu"), "float32", bar)
    assert {kind: list(each) for kind, each in found.items()} == {k: [one.name for one in v] for k, v in plan.items()}
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(sum(one.cost for kind in plan.values() for one in kind), abs=8 * 4)
    assert passes.FinishedPasses(tmp_path, plan, {}, {model: "x"}).nats.keys() == done.nats.keys()
    assert not passes.FinishedPasses(tmp_path, plan, {"device": "cuda"}, {model: "x"}).nats


@pytest.mark.parametrize(("history", "lags"), [(0, [0]), (1, [0, 1]), (5, [0, 1, 2, 4, 5]), (8, [0, 1, 2, 4, 8])])
def test_lags_are_powers_of_two_up_to_the_history(history: int, lags: list[int]) -> None:
    assert passes.probed_lags(history) == lags


@pytest.mark.parametrize(
    ("window", "finest", "strides"),
    [(8, 1, [8]), (8, 4, [8, 4, 2]), (8, 99, [8, 4, 2, 1]), (10, 4, [10, 5]), (10, 5, [10, 5, 2])],
)
def test_strides_are_halved_until_they_cost_too_much(window: int, finest: int, strides: list[int]) -> None:
    assert passes.halved_strides(window, finest) == strides


@pytest.mark.parametrize("factor", [1e5, math.nan])
def test_model_that_diverged_is_an_error(
    factor: float, runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    shutil.copytree(runs["memory"], tmp_path / "wild")
    for file in (tmp_path / "wild").rglob("model.safetensors"):
        tensors = load_file(file)
        save_file(tensors | {"table.weight": np.float32(factor) * tensors["table.weight"]}, file)
        file.with_name("SHA256SUMS").unlink()
    with pytest.raises(UserError, match=r"control: .* diverged"):
        analyze(runs["memory"], str(store.path), control=tmp_path / "wild", out=tmp_path / "out", limit=40)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"model: .* diverged"):
        analyze(tmp_path / "wild", str(store.path), out=tmp_path / "other", limit=40)
    assert not list(tmp_path.glob("*other*"))


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Analyze, but interrupt before anything is written: what it says about passes that are finished already."""
    said: list[str] = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def run(*given: Any, **options: Any) -> str:
        said.clear()
        with pytest.raises(KeyboardInterrupt):
            analyze(*given, **{"out": tmp_path / "out", "limit": 50, "finest": 1, "device": "cpu"} | options)
        return "".join(text for text in said if "finished already" in text)

    monkeypatch.setattr(passes.ProgressBar, "say", lambda _, text: said.append(text))
    monkeypatch.setattr("logpast.analysis.analyze._write", interrupt)
    return run


def test_finished_passes_of_other_weights_or_settings_are_ignored(
    runs: dict[str, Path], store: TokenStore, finished: Callable[..., str]
) -> None:
    finished(runs["control"], str(store.path))
    for run, other in (
        ("control", {"seed": 1}), ("control", {"precision": "float64"}), ("control", {"streams": "document"}),
        ("memory", {}), ("control", {}),
    ):  # fmt: skip
        assert not finished(runs[run], str(store.path), **other)
    said = finished(runs["control"], str(store.path), limit=40)
    assert said.startswith("1 of 22 passes")  # the one over the whole text
    for control, number in (("plain", 22), ("memory", 22), ("memory", 23)):  # of 23; another control is scored again
        said = finished(runs["control"], str(store.path), runs[control], limit=40)
        assert said.startswith(f"{number} of 23 passes")


@pytest.mark.parametrize("what", ["nothing", "filters", "documents", "code", "text"])
def test_finished_passes_of_another_model_text_or_code_are_ignored(
    what: str, runs: dict[str, Path], store: TokenStore, tmp_path: Path, finished: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, text = tmp_path / "run", tmp_path / "text"
    shutil.copytree(runs["memory"], run)
    shutil.copytree(store.path, text)
    finished(run, str(text))
    if what == "filters":  # which are not among the weights
        config = find_checkpoint(run).path / "config.yaml"
        config.write_text(config.read_text().replace("sharpness: 20", "sharpness: 40"))
        config.with_name("SHA256SUMS").unlink()
    elif what == "documents":  # the same tokens, another boundary
        head, first, second, *rest = (text / "documents.tsv").read_text().splitlines()
        one, two = (list(map(int, row.split("\t")[:2])) for row in (first, second))
        first = "\t".join([str(one[0]), str(one[1] - 1), *first.split("\t")[2:]])
        second = "\t".join([str(two[0] - 1), str(two[1] + 1), *second.split("\t")[2:]])
        (text / "documents.tsv").write_text("\n".join([head, first, second, *rest, ""]))
        update_checksum(text, "documents.tsv")
    elif what == "code":
        monkeypatch.setattr("logpast.analysis.analyze.code_sha256", lambda: "other")
    elif what == "text":
        tokens = np.fromfile(text / "tokens.bin", dtype="<u2")
        tokens[-1] = tokens[-2]
        tokens.tofile(text / "tokens.bin")
        update_checksum(text, "tokens.bin")
    assert bool(finished(run, str(text))) == (what == "nothing")


def update_checksum(store: Path, file: str) -> None:
    about = unseal(json.loads((store / "store.json").read_text()))
    about["sha256"][file] = hashlib.sha256((store / file).read_bytes()).hexdigest()
    (store / "store.json").write_text(json.dumps(about))
