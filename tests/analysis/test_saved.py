"""A finished analysis read back: damaged files, and an analysis as the control of another model."""

import json
import math
import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from logpast.analysis.analyze import analyze
from logpast.analysis.saved import read_analysis
from logpast.data import TokenStore
from logpast.util.errors import UserError


def test_analysis_is_read_by_its_folder_or_its_file(done: Path, result: dict[str, Any]) -> None:
    assert read_analysis(done) == read_analysis(done / "analysis.json") == result


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("frequency.from", [], "frequency"),
        ("model.run", None, "model.run"),
        ("control", {"run": "x"}, "control.system"),
        ("scores.model.ppl_token", math.nan, "NaN"),
        ("format", "another", "another"),
        ("lags", 3, "."),
    ],
)
def test_damaged_analysis_is_an_error_in_one_line_and_the_page_stays(
    place: str, value: object, named: str, result: dict[str, Any], tmp_path: Path
) -> None:
    *path, last = place.split(".")
    reduce(getitem, path, result)[last] = value
    (tmp_path / "analysis.json").write_text(json.dumps(result))
    (tmp_path / "report.html").write_text("the old page")
    with pytest.raises(UserError, match=named) as error:
        analyze(tmp_path)
    assert str(tmp_path / "analysis.json") in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "report.html").read_text() == "the old page"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": "logpast analysis 1"}', "\udcff"])
def test_file_that_is_no_analysis_is_an_error_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "analysis.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"analysis\.json") as error:
        read_analysis(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_plots")
def test_finished_analysis_as_control_gives_the_same_numbers_as_the_model(
    done: Path, result: dict[str, Any], done_control: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path,
    approximately: Callable[[Any], Any],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    ours = analyze(runs["memory"], str(store.path), done_control, out, limit=205, finest=4, device="cpu")
    assert ours["control"] == result["control"]
    for part in ("scores", "position", "frequency", "last_seen", "stride"):
        assert ours[part] == approximately(result[part]), part
    assert (load_file(out / "nats.safetensors")["control"] == load_file(done / "nats.safetensors")["control"]).all()


@pytest.mark.usefixtures("no_plots")
def test_strides_of_a_saved_control_need_the_same_limit(
    done_control: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    file = done_control / "analysis.json"
    result = analyze(runs["memory"], str(store.path), file, out, limit=100, finest=1, device="cpu")
    assert "control" not in result["stride"]
    assert "205" in result["stride"]["control_absent"]
    assert "--limit" in result["stride"]["control_absent"]
    assert f"The control is not shown: {result['stride']['control_absent']}" in (out / "report.html").read_text()


def test_control_of_another_text_or_with_other_settings_is_an_error(
    done_control: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    ask = [runs["memory"], "--control", done_control, "--out", tmp_path / "no", "--data"]
    other = tmp_path / "other.txt"
    other.write_text("And God said, Let there be light: and there was light. " * 9)
    assert "another text" in error_of(*ask, other)
    assert "streams=corpus" in error_of(*ask, store.path, "--streams", "document")
    assert "precision=float32" in error_of(*ask, store.path, "--precision", "float64")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda result, nats: {"model": np.where(nats < nats.mean(), np.nan, nats).astype(nats.dtype)}, "finite"),
        (lambda result, nats: {"model": np.stack([nats, nats], axis=1)}, "nats.safetensors"),
        (lambda result, nats: {"model": nats.astype(np.int32)}, "int32"),
        (lambda result, nats: {"control": nats}, "nats.safetensors"),
        (lambda result, nats: result["model"].pop("run") and {"model": nats}, "model.run"),
        (lambda result, nats: result["stride"]["model"].pop("cost") and {"model": nats}, "stride.model.cost"),
        (lambda result, nats: result["model"].update(window=-8) or {"model": nats}, "model.window"),
        (lambda result, nats: result["data"].update(documents=1) or {"model": nats}, "another text"),
        (lambda result, nats: result["data"].update(tokenizer="x") or {"model": nats}, "another tokenizer"),
    ],
)
def test_damaged_control_is_an_error_before_any_work(
    done_control: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path, damage: Any, named: str,
    error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("logpast.analysis.analyze.run", lambda *_: pytest.fail("scored before the check"))
    folder, result = tmp_path / "damaged", json.loads((done_control / "analysis.json").read_text())
    folder.mkdir()
    save_file(damage(result, load_file(done_control / "nats.safetensors")["model"]), folder / "nats.safetensors")
    (folder / "analysis.json").write_text(json.dumps(result))
    ask = [runs["memory"], "--data", store.path, "--control", folder, "--limit", 205, "--out", tmp_path / "no"]
    assert named in error_of(*ask)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("content", [b"", None])
def test_nats_of_a_control_that_cannot_be_read_are_an_error(
    content: bytes | None, done_control: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path,
    error_of: Callable[..., str],
) -> None:  # fmt: skip
    folder = tmp_path / "control"
    shutil.copytree(done_control, folder)
    (folder / "nats.safetensors").unlink()
    if content is not None:
        (folder / "nats.safetensors").write_bytes(content)
    error = error_of(runs["memory"], "--data", store.path, "--control", folder, "--out", tmp_path / "no")
    assert str(folder / "nats.safetensors") in error
