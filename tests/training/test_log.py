"""log.jsonl and TensorBoard."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from logpast.training.checkpoint import sorted_checkpoints
from logpast.training.config import TrainConfig
from logpast.training.log import Log, last_record, read_log
from logpast.training.loop import train
from logpast.util.errors import UserError
from logpast.util.files import sha256_of

FIELDS = {"epoch": 1.5, "tokens_per_second": 2.0}
LINES = [json.dumps({"step": step, "loss": 1 / step} | FIELDS) for step in range(1, 500)]


def test_last_record_of_training_is_found_from_the_end(tmp_path: Path) -> None:
    assert last_record(tmp_path) == {}
    (tmp_path / "log.jsonl").write_text("\n".join([*LINES, '{"step": 499, "validation_loss": 2}', '{"step": 500, "lo']))
    assert last_record(tmp_path) == {"step": 499, "loss": 1 / 499} | FIELDS


def test_a_last_line_cut_off_by_a_kill_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("\n".join([*LINES, '{"step": 500, "lo']))
    assert len(read_log(tmp_path)) == 499


@pytest.mark.parametrize("damaged", [b'{"step": 2, "lo', b"null", b'{"stp": 3}', b'{"step": "x"}', b"\xff\xfe"])
def test_damaged_lines_are_refused_by_number(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([LINES[0].encode(), damaged, LINES[2].encode()]))
    with pytest.raises(UserError, match=r"log.jsonl, line 2"):
        read_log(tmp_path)


def test_a_log_may_be_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "kept.jsonl").write_text("\n".join(LINES[:3]))
    assert [record["step"] for record in read_log(tmp_path / "kept.jsonl")] == [1, 2, 3]


def test_infinity_is_null_in_json(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(1, ppl=math.inf, loss=800.0)
    log.close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "ppl": null, "loss": 800.0}\n'


def test_records_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("\n".join(LINES[:6]))
    Log(tmp_path, step=4).close()
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3, 4]


def test_tensorboard_shows_each_step_once_after_resuming(train_config: TrainConfig) -> None:
    config = replace(train_config, steps=6, checkpoint_every=4, validate_every=6, log_every=1, tensorboard=True)
    train(config)
    shutil.rmtree(sorted_checkpoints(config.run)[-1])
    train(replace(config, resume="auto"))
    shown = EventAccumulator(str(config.run / "tensorboard")).Reload()
    assert [point.step for point in shown.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_tensorboard_with_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, tensorboard=True)
    assert log.board is not None
    log.board.path = Path("/dev/full")
    for step in (1, 2):
        log.write(step, loss=2.0)
    log.close()
    warning = capfd.readouterr().err
    assert "TensorBoard" in warning
    assert warning.count("\n") == 1
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2]


def test_a_log_that_changed_before_the_resumed_step_is_refused(
    train_config: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(train_config, steps=6, checkpoint_every=4, validate_every=6)
    train(config)
    shutil.rmtree(sorted_checkpoints(config.run)[-1])
    log = config.run / "log.jsonl"
    whole, resumed = log.read_text(), replace(config, resume="auto")
    for damaged in (whole.replace('"tokens": ', '"tokens": 1', 1), whole[:100]):
        log.write_text(damaged)
        with pytest.raises(UserError, match=f"{log} has changed since step 4.*restore it, or move it away"):
            train(resumed)
    log.unlink()
    train(resumed)
    assert "log.jsonl is missing" in capfd.readouterr().err
    assert [record["step"] for record in read_log(config.run)] == [5, 6, 6]


def test_a_folder_that_was_deleted_during_a_run_is_noticed(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(1, loss=2.0)
    assert log.state() == {"bytes": 25, "sha256": sha256_of(tmp_path / "log.jsonl")}
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(UserError, match=f"{tmp_path} was deleted"):
        log.state()
    Log(tmp_path).close()  # of another run
    with pytest.raises(UserError, match=f"{tmp_path} was deleted or replaced"):
        log.state()
    log.close()
