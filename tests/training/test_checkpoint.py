"""Checkpoints: the best one is kept, damage is noticed, what only training needs can be deleted."""

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from logpast.data.prepare import prepare
from logpast.models import TransformerXLConfig
from logpast.training import loop
from logpast.training.checkpoint import (
    FOR_TRAINING,
    drop_optimizer_state,
    find_checkpoint,
    open_checkpoint,
    sorted_checkpoints,
)
from logpast.training.config import TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError
from training.helpers import RECURRENT, WORSENING, assert_bit_equal, weights


def test_the_best_checkpoint_is_kept_and_old_ones_are_deleted(train_config: TrainConfig) -> None:
    """Of a model that gets worse, so that the best checkpoint is old."""
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, optimizer=WORSENING, validate_every=5, data=data)
    state = train(config)
    assert state["best"]["step"] < 30
    steps = [int(c.name[5:]) for c in sorted_checkpoints(config.run)]
    assert len(steps) <= 3
    assert state["best"]["step"] in steps
    assert steps[-1] == 30
    assert find_checkpoint(config.run).step == state["best"]["step"]
    assert find_checkpoint(config.run, "latest").step == 30


def test_no_checkpoint_gets_into_a_run_that_replaces_this_one(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that happens while this one is about to be saved."""
    other = replace(train_config, run=train_config.run.with_name("other"), steps=3, seed=1)
    train(other)
    files = sorted(other.run.rglob("*"))

    def moments(*_: Any) -> dict[str, Any]:
        train_config.run.rename(train_config.run.with_name("moved"))
        other.run.rename(train_config.run)
        return {}

    monkeypatch.setattr(loop, "moments_of", moments)
    with pytest.raises(UserError, match=f"{train_config.run} was deleted or replaced"):
        train(replace(train_config, steps=2))
    train_config.run.rename(other.run)
    assert sorted(other.run.rglob("*")) == files


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("latest", [True, False], ids=["which is the latest", "which is an earlier one"])
def test_a_damaged_best_checkpoint_is_refused_and_another_is_named(train_config: TrainConfig, latest: bool) -> None:
    data = replace(train_config.data, validation_tokens=50)
    config = replace(train_config, steps=6, checkpoint_every=2, validate_every=2, keep=9, data=data)
    train(config if latest else replace(config, optimizer=WORSENING, steps=12))
    best = find_checkpoint(config.run).path
    others = [folder for folder in sorted_checkpoints(config.run) if folder != best]
    assert (best > others[-1]) == latest
    flip(best / "model.safetensors")
    flip(others[-1] / "model.safetensors")
    with pytest.raises(UserError, match=f"{best}/model.safetensors .*{others[-2]}"):
        find_checkpoint(config.run)
    assert find_checkpoint(others[-2]).load_model()  # what the message recommends
    shutil.rmtree(best)
    with pytest.raises(UserError, match=f"best checkpoint of {config.run}.*{others[-2]}"):
        find_checkpoint(config.run)


def test_a_checkpoint_with_any_damaged_file_is_passed_over_and_kept(
    train_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    data = replace(train_config.data, validation=None)
    config = replace(train_config, steps=6, checkpoint_every=3, model=RECURRENT, batch_size=4, data=data)
    train(config)
    whole = weights(config.run)
    earlier, last = sorted_checkpoints(config.run)
    files = sorted(last.iterdir())
    assert [file.name for file in files if "safetensors" not in file.name] == [
        "SHA256SUMS", "config.yaml", "state.json", "tokenizer.json",
    ]  # fmt: skip
    for damage, file in product((flip, truncate, Path.unlink), files):
        content = file.read_bytes()
        damage(file)
        if damage is not Path.unlink or file.name not in ("SHA256SUMS", *FOR_TRAINING):  # these may be missing
            assert find_checkpoint(config.run, "latest", for_training=True).path == earlier, (damage, file)
            assert f"warning: {last}" in capsys.readouterr().err
        file.write_bytes(content)
    assert find_checkpoint(config.run, "latest", for_training=True).path == last
    flip(last / "carried.safetensors")
    train(replace(config, resume="auto"))
    assert_bit_equal(whole, weights(config.run))
    assert (config.run / "abandoned" / last.name / "carried.safetensors").exists()


def test_an_edited_checkpoint_is_refused_unless_its_checksums_are_deleted(
    train_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(replace(train_config, steps=1))
    (folder,) = sorted_checkpoints(train_config.run)
    for line in (folder / "SHA256SUMS").read_text().splitlines():  # the format of sha256sum
        value, name = line.split("  ")
        assert value == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("sharpness: 20", "sharpness: 90"))
    with pytest.raises(UserError, match=f"{config} has changed.*delete {folder}/SHA256SUMS"):
        find_checkpoint(train_config.run)
    (folder / "SHA256SUMS").unlink()
    capsys.readouterr()
    assert find_checkpoint(train_config.run).config.model.sharpness == 90  # type: ignore[attr-defined]
    assert f"warning: {folder} has no SHA256SUMS" in capsys.readouterr().err


def test_checkpoints_of_earlier_versions_are_verified_and_resumed(train_config: TrainConfig) -> None:
    """Sizes and some checksums were in state.json."""
    config = replace(train_config, steps=4, checkpoint_every=2)
    train(config)
    whole = weights(config.run)
    first, last = sorted_checkpoints(config.run)
    shutil.rmtree(last)
    (first / "SHA256SUMS").unlink()
    sizes = {file.name: file.stat().st_size for file in first.iterdir() if file.name != "state.json"}
    model = first / "model.safetensors"
    sums = {model.name: hashlib.sha256(model.read_bytes()).hexdigest()}
    state = json.loads((first / "state.json").read_text())
    (first / "state.json").write_text(json.dumps(state | {"sizes": sizes, "sums": sums}))
    for damage, file in ((flip, model), (truncate, model), (truncate, first / "config.yaml")):
        content = file.read_bytes()
        damage(file)
        with pytest.raises(UserError, match=f"{file} .*state.json"):
            open_checkpoint(first)
        file.write_bytes(content)
    train(replace(config, resume="auto"))
    assert_bit_equal(whole, weights(config.run))
    assert open_checkpoint(last).state.keys() == state.keys()


def test_damaged_files_without_checksums_are_refused_in_words(train_config: TrainConfig) -> None:
    train(replace(train_config, steps=1))
    (folder,) = sorted_checkpoints(train_config.run)
    (folder / "SHA256SUMS").unlink()
    state = json.loads((folder / "state.json").read_text())
    config = (folder / "config.yaml").read_text()
    for file, content, problem in [
        ("state.json", "[]", "dictionary"),
        ("state.json", "{", "Expecting property name"),
        ("state.json", json.dumps({name: state[name] for name in state.keys() - {"best"}}), "has no best"),
        ("state.json", json.dumps(state | {"step": None}), "step"),
        ("state.json", json.dumps(state | {"data": {}}), "tokenizer"),
        ("state.json", json.dumps(state | {"best": {"step": "../../other"}}), r"best\.step is '\.\./\.\./other'"),
        ("state.json", json.dumps(state | {"best": {"step": 1e300}}), r"best\.step is 1e\+300"),
        ("state.json", json.dumps(state | {"seconds": None}), "seconds is None"),
        ("state.json", "[" * 100_000, "nested too deeply"),
        ("config.yaml", "[" * 5_000, "nested too deeply"),
        ("config.yaml", "&a [*a]", r"\*a contains itself"),
        ("config.yaml", "{run: x, model: &a {b: *a}}", r"\*a contains itself"),
        ("config.yaml", "run: x", "has no model"),
        ("config.yaml", config.replace("slots:", "slotz:"), "slotz"),
    ]:
        before = (folder / file).read_text()
        (folder / file).write_text(content)
        with pytest.raises(UserError, match=f"{folder}/{file} .*{problem}") as error:
            open_checkpoint(folder)
        assert "Error" not in str(error.value)  # the name of an exception
        (folder / file).write_text(before)
    open_checkpoint(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("width", 2**30), ("layers", 10**9), ("mlp", 2**40), ("vocabulary", 2**40), ("vocabulary", None)],
)
def test_a_config_of_a_larger_model_is_refused_before_that_is_allocated(
    train_config: TrainConfig, setting: str, value: int | None
) -> None:
    train(replace(train_config, steps=1))
    checkpoint = find_checkpoint(train_config.run)
    checkpoint.config = replace(checkpoint.config, model=replace(checkpoint.config.model, **{setting: value}))
    with pytest.raises(UserError, match=r"model\.safetensors does not fit config\.yaml"):
        checkpoint.load_model()


@pytest.mark.parametrize("weights", [{}, {"table.weight": torch.zeros(3, dtype=torch.int8)}])
def test_weights_that_are_no_numbers_of_a_model_are_refused(
    train_config: TrainConfig, weights: dict[str, torch.Tensor]
) -> None:
    train(replace(train_config, steps=1))
    checkpoint = find_checkpoint(train_config.run)
    model = checkpoint.load_model()
    save_file(weights, checkpoint.path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors has no weights"):
        checkpoint.load_weights(model)


def test_a_swapped_tokenizer_is_noticed(train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
    train(replace(train_config, steps=4))
    found = find_checkpoint(train_config.run)
    prepare([str(books / "1.txt")], tmp_path / "other", tokenizer="bpe-299")
    swapped = (tmp_path / "other" / "tokenizer.json").read_bytes()
    (found.path / "tokenizer.json").write_bytes(swapped)
    (found.path / "SHA256SUMS").unlink()
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
    listed = (last / "SHA256SUMS").read_text()
    assert all(Path(last / line.split()[1]).exists() for line in listed.splitlines())  # for `sha256sum -c`
    with pytest.raises(UserError, match=f"has no optimizer.safetensors.*--init_from {last}"):
        train(replace(config, steps=5, resume="auto"))
