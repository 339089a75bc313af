"""Several processes: who starts them, sharded models, signals, other numbers of processes when resuming."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from safetensors.torch import load_file

from logpast.cli import main
from logpast.models import RecurrentMemoryConfig
from logpast.training.checkpoint import checkpoint_path, find_checkpoint
from logpast.training.compile import is_compiled
from logpast.training.config import TrainConfig
from logpast.training.devices import Launcher, environment, fabric_settings, find_launcher, with_launcher
from logpast.training.log import read_log
from logpast.training.loop import train
from logpast.util.errors import UserError
from markdown_pages import ROOT
from training.helpers import assert_bit_equal, weights

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2", "RANK": "9", "LOCAL_RANK": "1"}
SRUN = {
    "SLURM_JOB_ID": "1234", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[07-08]",
}  # fmt: skip
BATCH = {name: value for name, value in SRUN.items() if "STEP" not in name}  # in the script of the job, without srun
SHELL = BATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}


def set_environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name in {*os.environ, *TORCHRUN, *SRUN}:
        if name in TORCHRUN or name.startswith("SLURM_"):
            monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("values", "launcher", "kind"),
    [
        ({}, None, LightningEnvironment),
        (TORCHRUN, Launcher("torchrun", 16, 2), TorchElasticEnvironment),
        (SRUN, Launcher("srun", 16, 2), SLURMEnvironment),
        (SRUN | TORCHRUN, Launcher("torchrun", 16, 2), TorchElasticEnvironment),
        (BATCH, None, LightningEnvironment),
        (SHELL, None, LightningEnvironment),
    ],
    ids=["none", "torchrun", "srun", "torchrun by srun", "script of a job", "shell of a job"],
)
def test_processes_of_torchrun_and_srun_are_found(
    values: dict[str, str], launcher: Launcher | None, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, values)
    monkeypatch.setenv("MASTER_ADDR", "")  # so that it is put back at the end: Fabric sets it under Slurm
    monkeypatch.delenv("MASTER_ADDR")
    assert find_launcher() == launcher
    found = environment(launcher)
    assert type(found) is kind
    if launcher:
        found.validate_settings(8, 2)
        assert (found.global_rank(), found.local_rank(), found.world_size()) == (9, 1, 16)
    if launcher and launcher.name == "srun":
        assert found.main_address == "gpu07"


def test_devices_are_those_of_the_launcher(train_config: TrainConfig) -> None:
    launcher = Launcher("torchrun", 16, 2)
    given = with_launcher(train_config, launcher)
    assert given.devices == 16
    assert with_launcher(given, launcher) == given
    assert with_launcher(train_config, None) == train_config
    assert {name: fabric_settings(given, launcher)[name] for name in ("devices", "num_nodes")} == {
        "devices": 8, "num_nodes": 2,
    }  # fmt: skip
    with pytest.raises(UserError, match="--devices 16"):
        with_launcher(replace(train_config, devices=8), launcher)
    with pytest.raises(UserError, match="batch_size"):
        with_launcher(replace(train_config, batch_size=8), launcher)


def test_the_strategy_is_ddp_unless_fsdp_is_asked_for(train_config: TrainConfig) -> None:
    found = [
        fabric_settings(replace(train_config, devices=devices, strategy=strategy), None)["strategy"]
        for devices, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
    ]
    assert found[0] == "auto"
    assert [type(each) for each in found[1:]] == [DDPStrategy, ModelParallelStrategy]


def test_fsdp_is_not_compiled(train_config: TrainConfig) -> None:
    cuda, fsdp = torch.device("cuda"), replace(train_config, strategy="fsdp")
    assert is_compiled(train_config, cuda)
    assert not is_compiled(fsdp, cuda)
    with pytest.raises(UserError, match="compile"):
        replace(fsdp, compile=True)


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "src/logpast/recipes").glob("paper-*.yaml")))
@pytest.mark.parametrize("devices", [8, 16])
def test_batches_of_the_papers_recipes_divide_among_8_and_16_gpus(
    recipe: str, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--config", recipe, "--devices", str(devices), "--print_config"]
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert not stop.value.code
    assert TrainConfig.from_dict(yaml.safe_load(capsys.readouterr().out)).devices == devices


# With real processes

LONG = 1500  # seconds: processes take a minute to start where others use the cores


@pytest.fixture
def double(train_config: TrainConfig) -> TrainConfig:
    return replace(train_config, precision="64-true", validate_every=100, checkpoint_every=100, keep=9)


@contextmanager
def started(launcher: str, ranks: int, config: TrainConfig) -> Iterator[subprocess.Popen[str]]:
    """The command, with so many processes; all are killed at the end."""
    recipe = config.run.with_name(f"{config.run.name}.yaml")
    recipe.write_text(yaml.safe_dump(replace(config, devices=ranks if launcher == "logpast" else 1).to_dict()))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    start = torchrun if launcher == "torchrun" else []
    command = [sys.executable, *start, "-m", "logpast", "train", "--config", str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for each in [*children(process.pid), process.pid]:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def run_to_end(launcher: str, ranks: int, config: TrainConfig) -> None:
    with started(launcher, ranks, config) as process:
        errors = process.communicate(timeout=LONG)[1]
        assert process.returncode == 0, errors


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def rank_of(pid: int) -> str:
    """What the process was given by its launcher."""
    found = re.search(rb"\0LOCAL_RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return found[1].decode() if found else "none"


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONG
    while not (run / "log.jsonl").exists() or len(read_log(run)) < steps:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "target", "strategy"),
    [
        ("logpast", "launcher", "ddp"),
        ("logpast", "1", "fsdp"),
        ("torchrun", "launcher", "fsdp"),
        ("torchrun", "all", "ddp"),
        ("torchrun", "1", "ddp"),
    ],
)
def test_a_signal_to_one_process_saves_and_stops_all(
    double: TrainConfig, launcher: str, target: str, strategy: Any
) -> None:
    """All stop after the same step; resuming ends with the same bits as a run that was not stopped."""
    config = replace(double, steps=400, validate_every=1000, checkpoint_every=1000, strategy=strategy)
    with started(launcher, 2, config) as process:
        wait_for_steps(config.run, 20, process)
        ranks = {rank_of(child): child for child in children(process.pid)}
        for pid in {"launcher": [process.pid], "1": [ranks["1"]], "all": [process.pid, *ranks.values()]}[target]:
            os.kill(pid, signal.SIGTERM)
        errors = process.communicate(timeout=LONG)[1]
    assert process.returncode not in (0, -signal.SIGKILL), errors
    deadline = time.monotonic() + 30
    while any(map(is_running, ranks.values())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stopped = find_checkpoint(config.run, "latest")
    assert 20 <= stopped.step < 400
    assert read_log(config.run)[-1]["step"] == stopped.step
    run_to_end(launcher, 2, replace(config, resume="auto"))
    undisturbed = replace(config, run=config.run.with_name("undisturbed"))
    run_to_end(launcher, 2, undisturbed)
    assert_bit_equal(weights(config.run), weights(undisturbed.run))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["memory", "recurrent"])
def test_a_run_resumes_with_another_number_of_processes(double: TrainConfig, model: str) -> None:
    """And with another strategy; a recurrent system needs the state of all rows."""
    config = replace(double, steps=30, checkpoint_every=10, batch_size=8)
    if model == "recurrent":
        sizes: dict[str, Any] = {"window": 8, "layers": 2, "heads": 2, "width": 16, "segments": 2}
        config = replace(config, model=RecurrentMemoryConfig(memory_tokens=3, **sizes))
    train(config)
    resume: str | bool = False
    parts: list[tuple[str, int, Any]] = [("logpast", 4, "fsdp"), ("logpast", 1, "ddp"), ("torchrun", 2, "fsdp")]
    for part, (launcher, ranks, strategy) in enumerate(parts):
        run = config.run.with_name(f"part {part}")
        run_to_end(launcher, ranks, replace(config, run=run, resume=resume, strategy=strategy))
        resume = str(checkpoint_path(run, 10 * (part + 1)))
    for file in ["model", "optimizer", *(["carried"] if model == "recurrent" else [])]:
        one, other = (load_file(find_checkpoint(r, "latest").path / f"{file}.safetensors") for r in (config.run, run))
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-10)


SRUN_STUB = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
export SLURM_JOB_ID=$$ SLURM_NODELIST=localhost,other SLURM_NNODES=2 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2
export SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_JOB_NAME=logpast
for rank in 0 1 2 3; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) SLURM_NODEID=$((rank / 2)) "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait $pid || exit; done
"""


@pytest.mark.slow
def test_the_slurm_script_trains_on_all_nodes(double: TrainConfig, tmp_path: Path) -> None:
    """With a stand-in for srun that starts the processes of two nodes here."""
    stub = tmp_path / "srun"
    stub.write_text(SRUN_STUB)
    stub.chmod(0o755)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(double.to_dict()))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "docs" / "train.sbatch"), "--config", str(recipe)]
    for run, options in (("ddp", []), ("fsdp", ["--strategy", "fsdp"])):
        several = [*command, "--run", str(tmp_path / run), *options]
        done = subprocess.run(several, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 0, done.stderr
        assert "4 × cpu" in done.stdout + done.stderr
        assert find_checkpoint(tmp_path / run).config.devices == 4
    train(double)
    for run in ("ddp", "fsdp"):
        for name, value in weights(double.run).items():
            torch.testing.assert_close(weights(tmp_path / run)[name], value, rtol=1e-9, atol=1e-10)
