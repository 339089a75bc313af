"""What analysis.json must hold."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from logpast.analysis.analyze import analyze
from logpast.analysis.schema import validate
from logpast.data import TokenStore

SAVED = sorted((Path(__file__).parents[2] / "results" / "analyses").glob("*/analysis.json"))


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.parent.name)
def test_saved_analyses_of_older_versions_are_valid(file: Path) -> None:
    validate(json.loads(file.read_text()))


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("name", ["memory", "control", "plain", "xl"])
def test_new_analyses_are_valid(name: str, runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    analyze(runs[name], str(store.path), out=tmp_path / "out", limit=50, finest=2, streams="document", device="cpu")
    validate(json.loads((tmp_path / "out" / "analysis.json").read_text()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", "another"),
        ("control", {"run": "x"}),
        ("model.run", None),
        ("model.window", 0),
        ("data.tokens", 1.5),
        ("data.documents", -1),
        ("hardware", []),
        ("seconds", "1"),
        ("scores.model.ppl_token", None),
        ("scores.all.gain", None),
        ("position.each.tokens", []),
        ("position.binned.model.nats", [1.0]),
        ("frequency.from", []),
        ("last_seen.where.kinds", ["one"]),
        ("last_seen.by_lag.gain.interval", [[0.0]]),
        ("by_token.gained", [{"token": "x"}]),
        ("slots.all.increase", True),
        ("lags.cut.increase", [1.0]),
        ("lags.shuffled", 5),
        ("stride.model.stride", [0, 1, 2]),
        ("documents", {"absent": 1}),
        ("data.training_overlap", 1),
    ],
)
def test_wrong_value_is_named(place: str, value: object, result: dict[str, Any]) -> None:
    validate(result)
    *path, last = place.split(".")
    reduce(getitem, path, result)[last] = value
    with pytest.raises(ValueError, match=place.split(".")[0]):
        validate(result)


@pytest.mark.parametrize(
    "place",
    ["model.system", "position.binned.to", "frequency.counted_in", "lags.cut", "stride.model", "by_token.lost"],
)
def test_missing_value_is_named(place: str, result: dict[str, Any]) -> None:
    *path, last = place.split(".")
    del reduce(getitem, path, result)[last]
    with pytest.raises(ValueError, match=f"it has no {place}"):
        validate(result)


@pytest.mark.parametrize("place", ["documents", "by_token", "lags.replaced", "stride.control"])
def test_value_that_older_analyses_lack_may_be_missing(place: str, result: dict[str, Any]) -> None:
    *path, last = place.split(".")
    del reduce(getitem, path, result)[last]
    validate(result)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("gain.all.gain", None),
        ("gain.equals.kinds", ["one"]),
        ("components.own.weight", "1"),
        ("components.weight", [1.0]),
        ("components.by_lag.to", [8]),
        ("gate.open", None),
        ("gate.calibration.share", [0.5] * 99),
        ("passages.gained", [{"token": "x"}]),
    ],
)
def test_wrong_value_of_recall_is_named(place: str, value: object, result_recall: dict[str, Any]) -> None:
    validate(result_recall)
    *path, last = place.split(".")
    reduce(getitem, path, result_recall["recall"])[last] = value
    with pytest.raises(ValueError, match=rf"recall\.{place.split('.')[0]}"):
        validate(result_recall)
