"""Several devices: who starts the processes, how they share the work, and models that are sharded (FSDP2).

With `ddp` every process holds the whole model. With `fsdp` it holds its share of each parameter, with the gradient and
the moments. All parameters are one group: they are gathered for a step and for scoring. Smaller groups do not fit our
models: the embedding table is used at both ends, and a block computes the norm of the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from logpast.training.config import TrainConfig
from logpast.util.errors import UserError

if TYPE_CHECKING:
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from torch.distributed.device_mesh import DeviceMesh


class Launcher(NamedTuple):
    """A program that has started the processes of a run: how many, and on how many nodes."""

    name: str
    processes: int
    nodes: int


def find_launcher() -> Launcher | None:
    """None if this process has to start the others, as `logpast train --devices N` does."""
    env = os.environ
    if torch.distributed.is_torchelastic_launched():
        return Launcher("torchrun", int(env["WORLD_SIZE"]), int(env["GROUP_WORLD_SIZE"]))
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # the script of a job and a shell on a node have none, or 1
        return Launcher("srun", int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_STEP_NUM_NODES"]))
    return None


def with_launcher(config: TrainConfig, launcher: Launcher | None) -> TrainConfig:
    """The config with as many devices as there are processes."""
    if launcher is None:
        return config
    if config.devices not in (1, launcher.processes):
        raise UserError(
            f"devices={config.devices}, but {launcher.name} has started {launcher.processes} processes; give "
            f"--devices {launcher.processes}, or leave devices out"
        )
    return replace(config, devices=launcher.processes)


def fabric_settings(config: TrainConfig, launcher: Launcher | None) -> dict[str, Any]:
    """What Fabric needs to know about devices."""
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    nodes = launcher.nodes if launcher else 1
    strategy: Any = "auto"
    timeout = timedelta(seconds=config.timeout)
    if config.strategy == "fsdp":
        strategy = ModelParallelStrategy(
            _shard, data_parallel_size=config.devices, tensor_parallel_size=1, timeout=timeout
        )
    elif config.devices > 1:
        # buffers are constants; sharing them would require all processes to score equally many batches
        strategy = DDPStrategy(broadcast_buffers=False, timeout=timeout)
    return {"devices": config.devices // nodes, "num_nodes": nodes, "strategy": strategy}


def environment(launcher: Launcher | None) -> ClusterEnvironment:
    """Where Fabric finds the ranks. Left to itself, it would wait for other processes in any script of a Slurm job."""
    from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

    known = {"torchrun": TorchElasticEnvironment, "srun": SLURMEnvironment}
    return known[launcher.name]() if launcher else LightningEnvironment()


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # slow to import, as all that imports DTensor

    fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)
    return model


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Every process holds the whole model for a while, and can use it without the others."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process has to call this."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """The same tensors, whole and on the CPU, for the process that is to `keep` them; all have to call this."""
    parts = ((name, whole(tensor.detach())) for name, tensor in tensors.items())
    return {name: tensor.cpu() for name, tensor in parts if keep}


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor on the device of a parameter, sharded as the parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:  # AdamW counts steps in a scalar
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
