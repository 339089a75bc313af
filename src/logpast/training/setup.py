"""Prepares a run: device, data, model, batches, optimizer, carried state, progress, run folder. `loop.Run` calls these
in order; each function takes what the earlier ones made.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from logpast.data import TokenStore, is_store, open_tokens
from logpast.data.batching import Batches, Lanes
from logpast.evaluation.overlap import training_overlap, warn
from logpast.models import LanguageModel, Recurrent, State, build
from logpast.training.checkpoint import Checkpoint
from logpast.training.compile import compile_model
from logpast.training.config import DataConfig, TrainConfig
from logpast.training.devices import Launcher, environment, fabric_settings, unsharded
from logpast.training.init_from import Source, open_source
from logpast.training.log import Log
from logpast.training.optimizer import build_optimizer, freeze
from logpast.training.resume import find_resumption, locked_run_dir, reading_run_dir
from logpast.util.environment import describe, revision
from logpast.util.errors import UserError

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def make_fabric(config: TrainConfig, launcher: Launcher | None = None) -> Fabric:
    """Lightning Fabric for the devices and the precision of a run, with its processes started."""
    from lightning_fabric import Fabric  # takes seconds to import, so only where it is used
    from lightning_fabric.plugins.precision import DoublePrecision, MixedPrecision, Precision

    class Mixed(MixedPrecision):
        """Does not cast inputs: they are token ids, and a carried state that must keep its precision."""

        def convert_input(self, data: Any) -> Any:
            return data

    class Double(DoublePrecision):
        """Does not cast outputs to float32: losses, and a carried state."""

        def convert_output(self, data: Any) -> Any:
            return data

    mixed = Mixed("bf16-mixed", "cpu")
    precision = {"32-true": Precision(), "64-true": Double(), "bf16-mixed": mixed}[config.precision]
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            plugins=[precision, environment(launcher)],
            **fabric_settings(config, launcher),
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"accelerator={config.accelerator} with devices={config.devices} cannot be used: {error}"
        ) from None
    if fabric.device.type == "mps" and config.precision == "64-true":
        raise UserError("precision=64-true needs a CPU or CUDA device; give --accelerator cpu")
    mixed.device = fabric.device.type  # known only now
    fabric.launch()
    return fabric


def open_data(data: DataConfig) -> tuple[TokenStore, TokenStore | None]:
    """Training and validation tokens, both of the training text's tokenizer."""
    train_store = open_tokens(data.train, None if is_store(data.train) else data.tokenizer)
    return train_store, open_tokens(data.validation, train_store.path) if data.validation else None


def open_inputs(
    config: TrainConfig, fabric: Fabric
) -> tuple[TrainConfig, TokenStore, TokenStore | None, Checkpoint | None]:
    """The config with the tokenizer that is used, training and validation tokens, and the checkpoint to resume from."""
    with fabric.rank_zero_first():  # it tokenizes, the others find the tokens in the cache
        store, validation = open_data(config.data)
        if config.data.tokenizer and is_store(config.data.train):  # a token store has its own, whatever a recipe says
            config = replace(config, data=replace(config.data, tokenizer=store.tokenizer.name))
        if validation and fabric.global_rank == 0 and (overlap := training_overlap(validation, store.identity, store)):
            warn(validation, overlap, "validate on held-out text (--data.validation) to choose the best checkpoint")
        with reading_run_dir(config.run) if fabric.global_rank == 0 else nullcontext():
            return config, store, validation, find_resumption(config, store, validation)


def open_initial_weights(config: TrainConfig, store: TokenStore, resumed: Checkpoint | None) -> Source | None:
    """The source of the initial weights, for a new run that names one."""
    if resumed or config.init_from is None:
        return None
    source = open_source(config.init_from)
    source.check_tokenizer(store)
    return source


def make_model(
    config: TrainConfig, store: TokenStore, start: Checkpoint | Source | None, compiled: bool, device: torch.device
) -> LanguageModel:
    """The model with its initial weights, which depend on the seed alone, or with those to start from."""
    torch.manual_seed(config.seed)
    sizes = config.model
    if start and sizes.vocabulary is None:
        sizes = replace(sizes, vocabulary=start.vocabulary)
    model = build(sizes, store.tokenizer.size)
    if config.precision == "64-true" and isinstance(start, Source):
        model.double()  # before the weights are copied, which may be in double precision
    if start:
        start.load_weights(model)
    freeze(model, config.freeze)
    return compile_model(model, device) if compiled else model


def make_batches(config: TrainConfig, store: TokenStore, model: LanguageModel, device: torch.device) -> Batches | Lanes:
    """Windows in random order, or consecutive segments for a recurrent system."""
    size, data = config.batch_size, config.data
    shared = config.seed, data.streams, data.jitter, device, model.config.recall_form
    if isinstance(model, Recurrent):
        return Lanes(store, model.window, size, model.config.segments, *shared)
    return Batches(store, model.window, model.history, size, *shared)


def make_optimizer(
    config: TrainConfig, fabric: Fabric, model: LanguageModel, resumed: Checkpoint | None
) -> tuple[Any, Any]:
    """The model and its optimizer, on the device and wrapped by Fabric."""
    wrapped = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(build_optimizer(model, config.optimizer, fabric.device))
    if resumed:
        resumed.load_optimizer(model, optimizer)
    return wrapped, optimizer


def rows_of_process(config: TrainConfig, fabric: Fabric) -> slice:
    """The rows of each batch that this process trains on."""
    share = config.batch_size // fabric.world_size
    return slice(fabric.global_rank * share, (fabric.global_rank + 1) * share)


def make_carried_state(model: LanguageModel, rows: slice, resumed: Checkpoint | None) -> State | None:
    """What a recurrent system carries from step to step, for the rows of this process; None for other systems."""
    if not isinstance(model, Recurrent):
        return None
    with unsharded(model):
        carried = {name: value.detach().clone() for name, value in model.start(rows.stop - rows.start).items()}
    for name, value in (resumed.carried() if resumed else {}).items():
        carried[name].copy_(value[rows])
    return carried


def make_state(
    fabric: Fabric,
    model: LanguageModel,
    store: TokenStore,
    validation: TokenStore | None,
    total: int,
    resumed: Checkpoint | None,
    source: Source | None,
) -> dict[str, Any]:
    """What each checkpoint saves as state.json: progress so far, and facts about the run."""
    progress: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "best": None}
    if resumed:
        progress = dict(resumed.state)
    if source:
        progress["init_from"] = source.identity
    if resumed and resumed.state["total_steps"] != total:
        before = {"step": resumed.step, "total_steps": resumed.state["total_steps"]}
        progress["extended"] = [*progress.get("extended", []), before]
    return progress | {
        "total_steps": total,
        "parameters": model.parameter_count(),
        "data": store.identity,
        "validation_data": validation.identity if validation else None,
        "revision": revision(),
        "hardware": describe(fabric.device),
    }


def open_run_dir(config: TrainConfig, fabric: Fabric, resumed: Checkpoint | None, step: int) -> tuple[ExitStack, Log]:
    """The locked run folder, to be closed at the end, and its log. Only the first process writes."""
    folder, log, problem = ExitStack(), Log(), None
    if fabric.global_rank == 0:
        try:
            folder.enter_context(locked_run_dir(config, resumed))
            same = resumed and resumed.path.resolve().parent.parent == config.run.resolve()
            log = Log(config.run, config.tensorboard, step, resumed.state.get("log") if resumed and same else None)
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write {config.run}: {error.strerror}; free some space or give another --run folder"
    if problem := fabric.broadcast(problem):  # all processes must end, not only the first
        folder.close()  # releases the lock even if the caller keeps the exception, as a notebook does
        raise UserError(problem)
    return folder, log
