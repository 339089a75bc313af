"""Cells: training and scoring of one run, in its own process."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from logpast.data import TokenStore
from logpast.sweeps import cell as cells_module
from logpast.sweeps import runners
from logpast.sweeps.cell import run_cell, work
from logpast.sweeps.grid import cells_of, read_config
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, TrainConfig
from logpast.util.errors import UserError

SweepFile = Callable[..., Path]


def test_speed_leaves_out_the_first_record(tmp_path: Path) -> None:
    """Which includes compilation."""
    records = [{"step": step, "tokens_per_second": speed} for step, speed in enumerate([1.0, 10.0, 30.0])]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"step": 2, "validation_loss": 1}]))
    assert cells_module.tokens_per_second(tmp_path) == 20
    log.write_text(json.dumps(records[0]))
    assert cells_module.tokens_per_second(tmp_path) == 1


def test_seconds_include_the_time_before_a_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "run_cell", lambda *_: {"train_seconds": 200, "scores": {"seconds": 5}})
    whole = SimpleNamespace(state={"seconds": 1000})  # the best checkpoint is from before the end
    monkeypatch.setattr(cells_module, "find_checkpoint", lambda run, which: {"latest": whole}[which])
    config = TrainConfig(tmp_path, DataConfig("text"), steps=1).to_dict()
    assert work({"config": config, "test": "text", "log": str(tmp_path / "log")})["seconds"] == 1005


def test_steps_and_validate_every_must_not_change_on_resuming(train_config: TrainConfig) -> None:
    """Or the result would not be that of the recorded settings: `train` would extend the run."""
    run_cell(replace(train_config, steps=4), train_config.data.train)
    for steps, every, changed in ((4, 7, "validate_every=10, now it is 7"), (5, 10, "steps=4, now it is 5")):
        with pytest.raises(UserError, match=changed):
            run_cell(replace(train_config, steps=steps, validate_every=every, resume="auto"), train_config.data.train)
    free = replace(
        train_config, steps=4, run=train_config.run.with_name("free"), data=DataConfig(train_config.data.train)
    )
    run_cell(free, train_config.data.train)
    run_cell(replace(free, validate_every=7, resume="auto"), train_config.data.train)


def test_peak_memory_does_not_include_earlier_runs(train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has reference cycles, which stay until garbage is collected."""
    left = type("Left", (), {})()
    left.itself = left
    gone = weakref.ref(left)
    del left
    seen = []

    def watched(config: TrainConfig) -> None:
        seen.append(gone())
        raise KeyboardInterrupt

    monkeypatch.setattr(cells_module, "train", watched)
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_cell(train_config, "kjv:test")
    finally:
        gc.enable()
    assert seen == [None]


def test_only_one_process_runs_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "GRACE_SECONDS", 0.1)
    log = tmp_path / "cell.log"
    with cells_module._logging_to(log), pytest.raises(UserError, match=r"cell\.log is locked"):
        work({"log": str(log), "config": {}, "test": ""})
    assert runners._last_line(log).startswith("another process")  # which the sweep reports


def test_rows_survive_json(sweep_file: SweepFile) -> None:
    """A process prints what `work` returns."""
    file = sweep_file(set={"steps": 2})
    (cell, *_) = cells_of(read_config(file), file, file.parent / "out")
    log = cell.config.run.with_name("cell.log")
    row = work({"config": cell.config.to_dict(), "test": cell.test, "log": str(log)})
    assert json.loads(json.dumps(row)) == row
    assert row["seconds"] >= row["train_seconds"]
    assert row["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("training", "scoring"), [("32-true", "float32"), ("bf16-mixed", "bfloat16"), ("64-true", "float64")]
)
def test_scoring_uses_the_precision_of_training(train_config: TrainConfig, training: str, scoring: str) -> None:
    config = replace(train_config, steps=4, precision=training)  # type: ignore[arg-type]
    row = run_cell(config, config.data.train)
    assert row["scores"]["precision"] == scoring
    nats = row["scores"]["nats"] / row["scores"]["tokens"]
    assert nats == pytest.approx(find_checkpoint(config.run).state["best"]["nats_per_token"], rel=1e-6)


def test_rows_count_tokens_that_never_occur_in_the_training_text(
    train_config: TrainConfig, store: TokenStore, tmp_path: Path
) -> None:
    """With the tokenizer of the store, whatever the recipe says."""
    texts = {"a.txt": "the quick brown fox\n" * 9, "b.txt": "zebra zebra ÿ\n" * 9}
    (folder := tmp_path / "test").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    config = replace(train_config, steps=2, data=replace(train_config.data, tokenizer="gpt2"))
    known = set(store.tokens.tolist())
    documents = run_cell(config, str(folder))["scores"]["by_document"]
    scored = [store.load_tokenizer().encode(text) for text in texts.values()]
    assert documents["tokens"] == [len(ids) for ids in scored]
    assert documents["unseen"] == [sum(token not in known for token in ids) for ids in scored]
    assert documents["unseen"][1] > 9
