"""The passes over the text that an analysis consists of, and their nats.

The model scores the text once, and so does the control if it is available. The first tokens are scored many times: with
each slot set to zero, with the past cut off, replaced or shuffled beyond a lag, and with overlapping windows. A model
with recall scores the text once more without it, and the first tokens for the weights of recall's components.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from logpast.analysis.probes import (
    Change,
    changed_past,
    cut_beyond,
    powers_of_two,
    random_keys,
    random_pasts,
    recall_components,
    replaced_beyond,
    shuffled_beyond,
    without_recall,
    zero_slots,
)
from logpast.analysis.saved import SavedControl
from logpast.data import TokenStore
from logpast.data.batching import Streams
from logpast.evaluation.evaluate import arithmetic
from logpast.evaluation.scoring import score
from logpast.models import LanguageModel, Transformer
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, exclusive_lock
from logpast.util.progress import ProgressBar
from logpast.util.serialization import to_json

Array = NDArray[np.float64]
Nats = dict[str, dict[str, Array]]  # as in the plan: kind -> name of a pass -> nats of each token
Control = LanguageModel | SavedControl
MAX_LOSS = 700  # nats; the perplexity of a larger loss overflows


class Pass(NamedTuple):
    """One scoring of the first tokens of the text, or of all."""

    name: str
    model: LanguageModel
    tokens: int
    stride: int
    change: dict[str, Change] = {}  # noqa: RUF012 (never written to)
    """of the past: arguments of `changed_past`"""
    shape: tuple[int, ...] = ()
    """of what is computed for each token, if that is not its loss"""

    @property
    def cost(self) -> float:
        """How many tokens the model reads: more than are scored if windows overlap."""
        return self.tokens * self.model.window / self.stride


Plan = dict[str, list[Pass]]  # by kind


def plan_passes(
    model: LanguageModel,
    control: Control | None,
    store: TokenStore,
    probed: int,
    finest: int,
    seed: int,
    device: torch.device,
) -> Plan:
    """All passes by kind, in the order in which they run; `probed` tokens are scored many times."""
    plan = {"model": [Pass("model", model, len(store), model.window)]}
    if isinstance(control, LanguageModel):
        plan["control"] = [Pass("control", control, len(store), control.window)]
    if isinstance(model, Transformer) and model.slots:
        positions = list(range(model.slots))[::-1]  # the nearest slot is the last in the sequence
        lags, keys = probed_lags(model.history), random_keys(model.history, seed, device)
        pasts = random_pasts(store, model.history, seed, device)
        # names of passes are names of tensors in nats.safetensors
        changes: dict[str, dict[str, dict[str, Change]]] = {
            "slots": {f"slot {n} silent": {"slots": zero_slots([at])} for n, at in enumerate(positions, start=1)},
            "all slots": {"all slots silent": {"slots": zero_slots(positions)}},
            "cut": {f"cut beyond {lag}": {"ids": cut_beyond(lag)} for lag in lags},
            "replaced": {f"replaced beyond {lag}": {"ids": replaced_beyond(lag, pasts)} for lag in lags},
            "shuffled": {f"shuffled beyond {lag}": {"ids": shuffled_beyond(lag, keys)} for lag in lags},
        }
        for kind, by_name in changes.items():
            plan[kind] = [Pass(name, model, probed, model.window, change) for name, change in by_name.items()]
    if form := model.config.recall_form:
        shape = (2, 1 + (form.orders + 1) * len(form.edges))
        without = Pass("without recall", model, len(store), model.window, {"nats": without_recall})
        plan["without recall"] = [without]
        plan["recall"] = [
            without._replace(name="recall", tokens=probed, change={"nats": recall_components}, shape=shape)
        ]
    for name, each in (("model", model), ("control", control)):
        if isinstance(each, Transformer):
            strides = halved_strides(each.window, finest)[1:]
            plan[f"{name} by stride"] = [Pass(f"{name}, stride {s}", each, probed, s) for s in strides]
    return plan


class FinishedPasses:
    """The nats of finished passes, one file per pass, from which an interrupted analysis continues."""

    def __init__(self, folder: Path, plan: Plan, inputs: dict[str, Any], models: dict[LanguageModel, Any]) -> None:
        """Read the finished passes of a plan.

        Args:
            folder: where they are.
            plan: passes of any other model, text or setting are ignored.
            inputs: all that the nats depend on besides the model.
            models: each model with a description of its weights and recipe.
        """
        self.folder, self.inputs, self.models = folder, inputs, models
        self.nats: dict[str, Array] = {}
        self.cost = self.seconds = 0.0
        for one in (one for passes in plan.values() for one in passes):
            with suppress(OSError, KeyError, ValueError, SafetensorError), safe_open(self._file(one), "numpy") as file:
                metadata = file.metadata() or {}
                if metadata["of"] == self._key(one):
                    self._add(one, file.get_tensor("nats"), float(metadata["seconds"]))

    def save(self, one: Pass, nats: Array, seconds: float) -> None:
        atomic_write(self._file(one), save({"nats": nats}, {"of": self._key(one), "seconds": f"{seconds:.3f}"}))
        self._add(one, nats, seconds)

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _add(self, one: Pass, nats: Array, seconds: float) -> None:
        self.nats[one.name] = nats
        self.cost += one.cost
        self.seconds += seconds

    def _file(self, one: Pass) -> Path:
        return self.folder / f"{one.name}.safetensors"

    def _key(self, one: Pass) -> str:
        """All that the nats of a pass depend on; its name stands for stride and change."""
        return to_json(self.inputs | {"pass": one.name, "model": self.models[one.model], "tokens": one.tokens})


@contextmanager
def finished_passes(
    folder: Path, plan: Plan, inputs: dict[str, Any], models: dict[LanguageModel, Any]
) -> Iterator[FinishedPasses]:
    """The finished passes of a plan, locked: for one process at a time. A folder without any is deleted at the end."""
    folder.mkdir(exist_ok=True)
    with exclusive_lock(folder):
        done = FinishedPasses(folder, plan, inputs, models)
        try:
            yield done
        finally:
            if not done.nats:
                done.delete()


def run(
    plan: Plan,
    done: FinishedPasses,
    store: TokenStore,
    streams: Streams,
    batch_size: int,
    device: torch.device,
    precision: str,
    progress: ProgressBar,
) -> Nats:
    """Run all passes of the plan that are not finished."""
    if done.nats:
        progress.say(f"{len(done.nats)} of {sum(map(len, plan.values()))} passes are finished already")
    for one in (one for passes in plan.values() for one in passes if one.name not in done.nats):
        started, model, share = time.monotonic(), one.model, one.cost / one.tokens
        with changed_past(model, **one.change), arithmetic(model, device, precision):
            nats = score(
                model, store, model.window, model.history, batch_size, streams, device, one.tokens,
                progress=partial(_show, progress, one.name, done.cost, share), stride=one.stride,
                recall=model.config.recall_form, shape=one.shape,
            )[: one.tokens]  # fmt: skip
        if not nats.mean() < MAX_LOSS:
            raise UserError(f"{one.name}: the loss is {nats.mean():.4g}: the training diverged; use another checkpoint")
        done.save(one, nats, time.monotonic() - started)
    return {kind: {one.name: done.nats[one.name] for one in passes} for kind, passes in plan.items()}


def _show(progress: ProgressBar, name: str, done: float, share: float, tokens: int) -> None:
    progress.update(int(done + share * tokens), name)


def probed_lags(history: int) -> list[int]:
    """The lags beyond which the past is changed: 0, powers of two, and the whole history."""
    return sorted({0, *powers_of_two(history), history})


def halved_strides(window: int, finest: int) -> list[int]:
    """Strides from the window downwards, each half of the one before; none costs more than `finest` times as much."""
    strides = [window]
    while (half := strides[-1] // 2) and window / half <= finest:
        strides.append(half)
    return strides
