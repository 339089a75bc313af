"""Checkpoints: the best one is kept, damage is noticed, what only training needs can be deleted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from logpast.data.prepare import prepare
from logpast.models import TransformerXLConfig
from logpast.training.checkpoint import drop_optimizer_state, find_checkpoint, open_checkpoint, sorted_checkpoints
from logpast.training.config import TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError
from training.helpers import WORSENING, assert_bit_equal, weights


def test_the_best_checkpoint_is_kept_and_old_ones_are_deleted(train_config: TrainConfig) -> None:
    """Of a model that gets worse, so that the best checkpoint is old."""
    config = replace(train_config, optimizer=WORSENING, validate_every=5)
    state = train(config)
    assert state["best"]["step"] < 30
    steps = [int(c.name[5:]) for c in sorted_checkpoints(config.run)]
    assert len(steps) <= 3
    assert state["best"]["step"] in steps
    assert steps[-1] == 30
    assert find_checkpoint(config.run).step == state["best"]["step"]
    assert find_checkpoint(config.run, "latest").step == 30


def test_a_missing_best_checkpoint_gives_a_warning_and_the_latest(
    train_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(train_config, optimizer=WORSENING, validate_every=4)
    best = train(config)["best"]["step"]
    shutil.rmtree(config.run / "checkpoints" / f"step-{best:08d}")
    assert find_checkpoint(config.run).step == 30
    assert "warning: no best checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "config.yaml"])
def test_a_truncated_checkpoint_is_skipped(
    train_config: TrainConfig, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(train_config, steps=8, validate_every=100, data=replace(train_config.data, validation=None))
    train(config)
    whole = weights(config.run)
    earlier, last = sorted_checkpoints(config.run)
    content = (last / file).read_bytes()
    (last / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=str(last)):
        open_checkpoint(last)
    assert find_checkpoint(config.run, "latest").path == earlier
    assert f"warning: {last}" in capsys.readouterr().err
    train(replace(config, resume="auto"))
    assert_bit_equal(whole, weights(config.run))
    assert find_checkpoint(config.run, "latest").path == last


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_wrong_checksum_is_noticed(train_config: TrainConfig, file: str) -> None:
    config = replace(train_config, steps=2)
    train(config)
    (folder,) = sorted_checkpoints(config.run)
    content = bytearray((folder / file).read_bytes())
    content[-8:] = bytes(8)
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file}.*checksum.*sums"):
        open_checkpoint(folder)._load(file)


@pytest.mark.parametrize(
    "state", [{"sizes": {}}, {"sizes": {}, "step": 1}, {"sizes": {}, "step": None, "data": {"tokenizer": ""}}]
)
def test_an_incomplete_state_json_is_refused(train_config: TrainConfig, state: dict[str, Any]) -> None:
    train(replace(train_config, steps=1))
    (folder,) = sorted_checkpoints(train_config.run)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=str(folder)):
        open_checkpoint(folder)


def test_a_swapped_tokenizer_is_noticed(train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
    train(replace(train_config, steps=4))
    found = find_checkpoint(train_config.run)
    prepare([str(books / "1.txt")], tmp_path / "other", tokenizer="bpe-299")
    swapped = (tmp_path / "other" / "tokenizer.json").read_bytes()
    (found.path / "tokenizer.json").write_bytes(swapped)
    state = json.loads((found.path / "state.json").read_text())
    state["sizes"]["tokenizer.json"] = len(swapped)
    (found.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"tokenizer.json is not the tokenizer"):
        find_checkpoint(train_config.run).load_tokenizer()


@pytest.mark.parametrize("where", ["nowhere", ""])
def test_no_checkpoint_is_an_error_that_names_the_folder(tmp_path: Path, where: str) -> None:
    with pytest.raises(UserError, match=str(tmp_path / where)):
        find_checkpoint(tmp_path / where)


@pytest.mark.parametrize("system", ["log_memory", "transformer_xl"])
def test_a_finished_run_needs_no_optimizer_state(train_config: TrainConfig, system: str) -> None:
    if system == "transformer_xl":
        train_config = replace(train_config, model=TransformerXLConfig(window=8, layers=1, heads=2, width=16, memory=8))
    config = replace(train_config, steps=4, checkpoint_every=2, validate_every=4, keep=9)
    train(config)
    before = {folder.name: open_checkpoint(folder).weights() for folder in sorted_checkpoints(config.run)}
    first, last = sorted_checkpoints(config.run)
    (first / "model.safetensors").write_bytes(b"")
    drop_optimizer_state(config.run)
    assert (first / "optimizer.safetensors").exists()  # a damaged checkpoint is left as it is
    assert not [*last.glob("optimizer*"), *last.glob("carried*")]
    kept = find_checkpoint(config.run)
    assert all(torch.equal(weight, before[last.name][name]) for name, weight in kept.weights().items())
    kept.load_model()
    assert train(replace(config, resume="auto"))["step"] == 4
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps(state | {"step": 3}))
    with pytest.raises(UserError, match=r"has no optimizer.safetensors"):
        train(replace(config, resume="auto"))
