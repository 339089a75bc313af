"""The command `logpast analyze`: its files, wrong arguments, drawing again, continuing after an interruption."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from logpast.analysis import passes
from logpast.analysis.analyze import analyze
from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.data.prepare import is_prepared, prepare
from logpast.evaluation.scoring import score
from logpast.models import RecentConfig
from logpast.reporting.differences import in_words
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, TrainConfig
from logpast.training.loop import train
from logpast.util.files import exclusive_lock


def test_page_is_drawn_again_without_the_model(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(done / "analysis.json", elsewhere)
    with pytest.raises(SystemExit) as stop:
        main(["analyze", str(elsewhere)])
    assert not stop.value.code, capsys.readouterr().err
    pages = [(folder / "report.html").read_text().splitlines() for folder in (done, elsewhere)]
    first, again = ([line for line in page if "<img" not in line] for page in pages)
    assert first == again
    assert pages[0] != first  # there are images
    assert str(elsewhere / "report.html") in capsys.readouterr().out


def test_bug_in_drawing_is_not_blamed_on_the_file(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(result: dict[str, Any]) -> str:
        raise TypeError("a bug")

    shutil.copy(done / "analysis.json", tmp_path)
    monkeypatch.setattr("logpast.analysis.analyze.draw", fail)
    with pytest.raises(TypeError, match="a bug"):
        analyze(tmp_path)


def test_page_that_cannot_be_drawn_loses_no_numbers(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(result: dict[str, Any]) -> str:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("logpast.analysis.analyze.draw", fail)
    with pytest.raises(RuntimeError):
        analyze(runs["plain"], str(store.path), out=tmp_path / "out", limit=50, finest=1, device="cpu")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"analysis.json", "nats.safetensors", "SHA256SUMS"}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    monkeypatch.undo()
    analyze(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("no_plots")
def test_summary_compares_losses_in_words(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = analyze(runs["memory"], str(store.path), runs["control"], tmp_path / "out", 50, 1, device="cpu")
    printed = capsys.readouterr().out
    gain = result["scores"]["all"]["gain"]
    (low, high), slots = gain["interval"][0], result["slots"]["all"]
    assert f"loss against the control       {in_words(-gain['nats'][0], [-high, -low])}\n" in printed
    assert f"loss, all slots zero           {in_words(slots['increase'], slots['interval'])}\n" in printed
    for way in ("cut", "replaced", "shuffled"):
        assert f"loss, whole past {way:13} {in_words(result['lags'][way]['increase'][0])}" in printed
    assert f"intervals: {result['intervals']}\n" in printed
    assert str(tmp_path / "out" / "report.html") in printed


@pytest.mark.usefixtures("no_plots")
def test_summary_of_a_model_with_recall_has_its_gain_and_its_gate(
    runs: dict[str, Path], store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = analyze(runs["xl recall"], str(store.path), out=tmp_path / "out", limit=50, finest=1, device="cpu")
    printed, part = capsys.readouterr().out, result["recall"]
    assert f"loss against own, no recall    {in_words(-part['gain']['all']['gain']['nats'][0])}" in printed
    assert f"weight of recall's copies      {part['gate']['weight']:.1%} on average; below 1 % at" in printed


def test_description_identifies_the_weights(result: dict[str, Any], runs: dict[str, Path]) -> None:
    for name, run, slots in (("model", "memory", 17), ("control", "control", 5)):
        file = find_checkpoint(runs[run]).path / "model.safetensors"
        assert result[name]["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert result[name]["recipe"]["model"]["slots"] == slots
        assert result[name]["step"] == 20
    assert result["model"]["history"] == 16
    assert len(result["data"]["sha256"]) == 64
    assert result["hardware"]["device"] == "cpu"


def test_float64_and_streams_by_document(runs: dict[str, Path], store: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = analyze(runs["memory"], str(store.path), out=out, limit=50, finest=1, streams="document",
                     precision="float64", device="cpu")  # fmt: skip
    saved = load_file(out / "nats.safetensors")["model"]
    assert saved.dtype == np.float64
    model = find_checkpoint(runs["memory"]).load_model().double()
    expected = score(model, store, 8, model.history, 4, "document")
    np.testing.assert_allclose(saved, expected, rtol=1e-12)
    lengths = store.documents.tokens.tolist()
    assert result["position"]["each"]["tokens"][0] == sum(-(-length // 8) for length in lengths)


@pytest.mark.usefixtures("no_plots")
def test_tokens_are_counted_in_the_training_text_if_it_is_available(
    runs: dict[str, Path], store: TokenStore, books: Path, tmp_path: Path
) -> None:
    text, how = str(books / "1.txt"), dict[str, Any](limit=50, finest=1, device="cpu")
    trained = analyze(runs["plain"], text, out=tmp_path / "1", **how)["frequency"]
    assert (trained["counted_in"], trained["counted_tokens"]) == (store.name, len(store))
    chosen = analyze(runs["plain"], text, out=tmp_path / "2", counts=text, **how)["frequency"]
    assert chosen["counted_tokens"] == sum(chosen["tokens"]) < len(store)
    moved = tmp_path / "moved"
    shutil.copytree(find_checkpoint(runs["plain"]).path, moved)
    config = (moved / "config.yaml").read_text()
    assert str(store.path) in config
    (moved / "config.yaml").write_text(config.replace(str(store.path), str(tmp_path / "gone")))
    (moved / "SHA256SUMS").unlink()
    own = analyze(moved, text, out=tmp_path / "3", **how)["frequency"]
    assert own["counted_tokens"] == sum(own["tokens"])
    (moved / "config.yaml").write_text(config)
    state = json.loads((moved / "state.json").read_text())
    state["data"]["sha256"] = "of another text"
    (moved / "state.json").write_text(json.dumps(state))
    assert analyze(moved, text, out=tmp_path / "4", **how)["frequency"]["counted_tokens"] == own["counted_tokens"]


def test_is_prepared(books: Path, store: TokenStore, tmp_path: Path) -> None:
    text = str(books / "0.txt")
    for tokenizer in (str(store.path), "bpe-290"):
        assert not is_prepared(text, tokenizer, tmp_path)
        open_tokens(text, tokenizer, tmp_path)
        assert is_prepared(text, tokenizer, tmp_path)
    assert is_prepared(str(store.path))
    assert not is_prepared(str(tmp_path / "nowhere.txt"), str(store.path), tmp_path)


def test_wrong_arguments_are_errors_in_one_line(
    runs: dict[str, Path], store: TokenStore, books: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    memory, text, out = runs["memory"], store.path, tmp_path / "out"
    assert str(tmp_path / "nowhere") in error_of(tmp_path / "nowhere", "--data", text)
    assert "--data" in error_of(memory)
    assert "limit must be" in error_of(memory, "--data", text, "--limit", 0)
    assert "finest must be" in error_of(memory, "--data", text, "--finest", 0)
    assert "batch_size must be" in error_of(memory, "--data", text, "--batch_size", 0)
    assert "seed must be" in error_of(memory, "--data", text, "--seed", 10**23)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in error_of(memory, "--data", text, "--out", tmp_path / "link")
    short = tmp_path / "short.txt"
    short.write_text("In the")
    assert "use more text" in error_of(memory, "--data", short, "--out", out)
    prepare([str(books)], tmp_path / "other", "bpe-280", workers=1)
    train(TrainConfig(run=tmp_path / "control", data=DataConfig(train=str(tmp_path / "other")),
                      model=RecentConfig(slots=5, window=8, layers=1, heads=2, width=16), steps=1, batch_size=2,
                      accelerator="cpu", tensorboard=False))  # fmt: skip
    assert "another tokenizer" in error_of(memory, "--data", text, "--control", tmp_path / "control", "--out", out)
    assert not out.exists()


def test_nothing_is_overwritten(
    done: Path, runs: dict[str, Path], store: TokenStore, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    before = (done / "analysis.json").read_bytes()
    error = error_of(runs["memory"], "--data", store.path, "--out", done)
    assert f"{done} exists already" in error
    assert f"`logpast analyze {done}`" in error
    assert "--data" in error_of(done, "--data", store.path)
    assert "--out and --limit" in error_of(done, "--out", tmp_path / "other", "--limit", 5)
    assert (done / "analysis.json").read_bytes() == before
    (tmp_path / "analysis.json").write_text('{"format": "something else"}')
    (tmp_path / "report.html").write_text("mine")
    assert "something else" in error_of(tmp_path)
    (tmp_path / "analysis.json").write_text("{")
    assert "analysis.json" in error_of(tmp_path / "analysis.json")
    assert (tmp_path / "report.html").read_text() == "mine"


@pytest.mark.usefixtures("no_plots")
def test_interrupted_analysis_continues(
    runs: dict[str, Path], store: TokenStore, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], error_of: Callable[..., str], approximately: Callable[[Any], Any],
) -> None:  # fmt: skip
    out, batch_sizes, stop_after = tmp_path / "out", list[int](), 12

    def interrupted_score(*args: Any, **options: Any) -> Any:
        if len(batch_sizes) == stop_after:
            raise KeyboardInterrupt
        batch_sizes.append(args[4])
        return score(*args, **options)

    monkeypatch.setattr(passes, "score", interrupted_score)
    ask = [str(each) for each in (runs["memory"], "--data", store.path, "--control", runs["control"], "--out", out)]
    ask += ["--limit", "205", "--finest", "4", "--device", "cpu"]
    with pytest.raises(SystemExit, match="130"):
        main(["analyze", *ask])
    assert "the same command continues" in capsys.readouterr().err
    assert not out.exists()
    (hidden,) = tmp_path.iterdir()
    assert {"model.safetensors", "control.safetensors", "slot 3 silent.safetensors"} <= {
        file.name for file in hidden.iterdir()
    }
    (hidden / "control.safetensors").write_bytes(b"half")
    save_file({"nats": np.zeros(3)}, hidden / "slot 3 silent.safetensors")  # without our metadata
    shutil.copy(hidden / "slot 1 silent.safetensors", hidden / "slot 2 silent.safetensors")

    with exclusive_lock(hidden):  # a second process at the same time
        assert hidden.name in error_of(*ask)
    stop_after = 999
    with passes.safe_open(hidden / "model.safetensors", "numpy") as file:
        nats, metadata = file.get_tensor("nats"), file.metadata() | {"seconds": "1000"}
    save_file({"nats": nats}, hidden / "model.safetensors", metadata)
    with pytest.raises(SystemExit, match="0"):
        main(["analyze", *ask, "--batch_size", "3"])  # which does not change the nats
    assert "9 of 42 passes" in capsys.readouterr().err
    assert batch_sizes.count(3) == 42 - 9
    again = json.loads((out / "analysis.json").read_text())
    assert 1000 < again["seconds"] < 2000
    for each in (result, again):
        for name in ("recorded", "seconds", "settings"):
            each.pop(name)
    assert again == approximately(result)
    assert list(tmp_path.iterdir()) == [out]
