"""What is made before the first step: device, data, model, batches, state, run folder."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logpast.data import TokenStore
from logpast.data.batching import Batches, Lanes
from logpast.models import Recurrent, build
from logpast.training import setup
from logpast.training.checkpoint import find_checkpoint, sorted_checkpoints
from logpast.training.config import DataConfig, TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError
from training.helpers import RECURRENT, assert_bit_equal

CPU = torch.device("cpu")


def test_initial_weights_depend_on_the_seed_alone(train_config: TrainConfig, store: TokenStore) -> None:
    torch.manual_seed(99)
    first, same, other = (
        setup.make_model(replace(train_config, seed=seed), store, None, False, CPU).state_dict() for seed in (0, 0, 1)
    )
    assert_bit_equal(first, same)
    assert not torch.equal(first["table.weight"], other["table.weight"])


def test_a_resumed_model_has_the_weights_of_its_checkpoint(train_config: TrainConfig, store: TokenStore) -> None:
    train(replace(train_config, steps=2))
    found = find_checkpoint(train_config.run)
    assert_bit_equal(setup.make_model(train_config, store, found, False, CPU).state_dict(), found.weights())


def test_recurrent_systems_get_consecutive_segments(train_config: TrainConfig, store: TokenStore) -> None:
    for model, kind in ((train_config.model, Batches), (RECURRENT, Lanes)):
        made = setup.make_batches(train_config, store, build(model, store.tokenizer.size), CPU)
        assert type(made) is kind
        assert len(made.at(0).tokens) == train_config.batch_size


def test_processes_share_the_rows_of_a_batch(train_config: TrainConfig) -> None:
    rows = [
        setup.rows_of_process(train_config, SimpleNamespace(global_rank=rank, world_size=4))  # type: ignore[arg-type]
        for rank in range(4)
    ]
    assert [list(range(16))[part] for part in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_carried_state_is_of_the_rows_of_this_process(train_config: TrainConfig, store: TokenStore) -> None:
    config = replace(train_config, model=RECURRENT, batch_size=4, steps=2)
    train(config)
    found, model = find_checkpoint(config.run), build(RECURRENT, store.tokenizer.size)
    assert isinstance(model, Recurrent)
    fresh = setup.make_carried_state(model, slice(1, 3), None)
    resumed = setup.make_carried_state(model, slice(1, 3), found)
    assert fresh is not None
    assert resumed is not None
    assert_bit_equal(fresh, model.start(2))
    assert_bit_equal(resumed, {name: value[1:3] for name, value in found.carried().items()})
    stateless = build(train_config.model, store.tokenizer.size)
    assert setup.make_carried_state(stateless, slice(0, 4), None) is None


def test_text_shorter_than_a_window_is_refused(train_config: TrainConfig, tmp_path: Path, store: TokenStore) -> None:
    (tmp_path / "short.txt").write_text("Hi.")
    config = replace(train_config, data=DataConfig(train=str(tmp_path / "short.txt"), tokenizer=str(store.path)))
    with pytest.raises(UserError, match=r"short.txt"):
        train(config)
    assert not config.run.exists()


def test_validating_on_training_text_is_a_warning(
    train_config: TrainConfig, tmp_path: Path, books: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning_of(validation: str) -> str:
        setup.open_inputs(
            replace(train_config, data=replace(train_config.data, validation=validation)),
            SimpleNamespace(global_rank=0, rank_zero_first=nullcontext),  # type: ignore[arg-type]
        )
        return capsys.readouterr().err

    whole = warning_of(str(train_config.data.train))
    assert whole.startswith("logpast: warning: ")
    assert whole.count("\n") == 1
    assert "it is the training text" in whole
    assert "--data.validation" in whole
    (tmp_path / "other.txt").write_text("And God saw every thing that he had made, and, behold, it was very good.")
    assert warning_of(str(tmp_path / "other.txt")) == ""
    (tmp_path / "mixed").mkdir()
    for file in (tmp_path / "other.txt", books / "1.txt"):
        shutil.copy(file, tmp_path / "mixed")
    assert "1 of its 2 documents" in warning_of(str(tmp_path / "mixed"))


def test_a_token_store_has_its_own_tokenizer(train_config: TrainConfig, store: TokenStore) -> None:
    """The tokenizer of the recipe is ignored, also when resuming."""
    data = replace(train_config.data, tokenizer="bpe-4096")
    train(replace(train_config, steps=2, data=data))
    assert find_checkpoint(train_config.run).config.data.tokenizer == store.tokenizer.name == "bpe-300"
    for tokenizer in ("bpe-4096", "gpt2", None):
        train(replace(train_config, steps=2, data=replace(data, tokenizer=tokenizer), resume="auto"))


def test_a_run_folder_that_cannot_be_written_is_an_error(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*where: Any) -> Any:
        if where:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(setup, "Log", denied)
    with pytest.raises(UserError, match=f"{train_config.run}: Permission denied"):
        train(train_config)


def test_an_exception_that_is_kept_does_not_keep_the_lock(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=8, keep=2)
    train(config)
    shutil.rmtree(sorted_checkpoints(config.run)[-1])
    log = config.run / "log.jsonl"
    content = log.read_text()
    log.write_text("damaged\n" + content)
    with pytest.raises(UserError) as error:
        train(replace(config, resume="auto"))
    log.write_text(content)
    train(replace(config, resume="auto"))
    assert "log.jsonl" in str(error.value)
