"""Which scorings of a text an analysis is made of, and their nats.

The text is scored once by the model, and once by a control that is at hand; its first tokens again and again: with each
slot silent, with the past cut off, replaced or shuffled beyond some lag, and by windows that overlap.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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
    doubling,
    random_keys,
    random_pasts,
    replaced_beyond,
    shuffled_beyond,
    silent,
)
from logpast.analysis.saved import Kept
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
Nats = dict[str, dict[str, Array]]  # as the plan has them: kind -> the name of a pass -> of each token
Rival = LanguageModel | Kept
LARGEST = 700  # nats whose perplexity is still a number


class Pass(NamedTuple):
    """One scoring of the text's first tokens, or of all."""

    name: str
    model: LanguageModel
    tokens: int
    stride: int
    change: dict[str, Change] = {}  # noqa: RUF012 (nobody writes to it)
    """of its past, as `changed_past` takes it"""

    @property
    def cost(self) -> float:
        """How many tokens are read: where windows overlap, more than are scored."""
        return self.tokens * self.model.window / self.stride


def plan_of(
    model: LanguageModel,
    rival: Rival | None,
    store: TokenStore,
    some: int,
    finest: int,
    seed: int,
    device: torch.device,
) -> dict[str, list[Pass]]:
    """All passes, by what they are to tell of, in the order of their work."""
    tokens = len(store)
    plan = {"model": [Pass("model", model, tokens, model.window)]}
    if isinstance(rival, LanguageModel):
        plan["control"] = [Pass("control", rival, tokens, rival.window)]
    if isinstance(model, Transformer) and model.slots:
        places = list(range(model.slots))[::-1]  # the nearest slot stands last in the sequence
        lags, keys = lags_of(model.history), random_keys(model.history, seed, device)
        pasts = random_pasts(store, model.history, seed, device)
        changes: dict[str, dict[str, dict[str, Change]]] = {
            "slots": {f"slot {n} silent": {"slots": silent([place])} for n, place in enumerate(places, start=1)},
            "none": {"all slots silent": {"slots": silent(places)}},
            "cut": {f"cut beyond {lag}": {"ids": cut_beyond(lag)} for lag in lags},
            "replaced": {f"replaced beyond {lag}": {"ids": replaced_beyond(lag, pasts)} for lag in lags},
            "shuffled": {f"shuffled beyond {lag}": {"ids": shuffled_beyond(lag, keys)} for lag in lags},
        }
        for kind, some_changes in changes.items():
            plan[kind] = [Pass(name, model, some, model.window, change) for name, change in some_changes.items()]
    for name, each in (("model", model), ("control", rival)):
        if isinstance(each, Transformer):
            strides = halved(each.window, finest)[1:]
            plan[f"{name} by stride"] = [Pass(f"{name}, stride {s}", each, some, s) for s in strides]
    return plan


class Done:
    """Passes that are done, the nats of each in a file of its own: an interrupted analysis goes on with them."""

    def __init__(
        self, folder: Path, plan: dict[str, list[Pass]], about: dict[str, Any], models: dict[LanguageModel, Any]
    ) -> None:
        """Find those of a plan. Models: which they are, weights and recipe; about: what else decides the nats."""
        self.folder, self.about, self.models = folder, about, models
        self.nats: dict[str, Array] = {}
        self.cost = self.seconds = 0.0
        for one in (one for passes in plan.values() for one in passes):
            with suppress(OSError, KeyError, ValueError, SafetensorError), safe_open(self._file(one), "numpy") as file:
                told = file.metadata() or {}
                if told["of"] == self._of(one):
                    self._add(one, file.get_tensor("nats"), float(told["seconds"]))

    def keep(self, one: Pass, nats: Array, seconds: float) -> None:
        atomic_write(self._file(one), save({"nats": nats}, {"of": self._of(one), "seconds": f"{seconds:.3f}"}))
        self._add(one, nats, seconds)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _add(self, one: Pass, nats: Array, seconds: float) -> None:
        self.nats[one.name] = nats
        self.cost += one.cost
        self.seconds += seconds

    def _file(self, one: Pass) -> Path:
        return self.folder / f"{one.name}.safetensors"

    def _of(self, one: Pass) -> str:
        own = {"pass": one.name, "model": self.models[one.model], "tokens": one.tokens}  # the name says the rest
        return to_json(self.about | own)


@contextmanager
def kept_passes(
    folder: Path, plan: dict[str, list[Pass]], about: dict[str, Any], models: dict[LanguageModel, Any]
) -> Iterator[Done]:
    """Those that are done, for one process at a time; where none is, nothing stays."""
    folder.mkdir(exist_ok=True)
    with exclusive_lock(folder):
        done = Done(folder, plan, about, models)
        try:
            yield done
        finally:
            if not done.nats:
                done.clear()


def run(
    plan: dict[str, list[Pass]],
    done: Done,
    store: TokenStore,
    streams: Streams,
    batch_size: int,
    device: torch.device,
    precision: str,
    progress: ProgressBar,
) -> Nats:
    """Score the text again and again behind one progress bar, but for passes that are done."""
    if done.nats:
        progress.say(f"{len(done.nats)} of {sum(map(len, plan.values()))} passes are done already")
    for one in (one for passes in plan.values() for one in passes if one.name not in done.nats):
        started, model, share = time.monotonic(), one.model, one.cost / one.tokens
        past = changed_past(model, **one.change) if isinstance(model, Transformer) else nullcontext()
        with past, arithmetic(device, precision):
            nats = score(
                model, store, model.window, model.history, batch_size, streams, device, one.tokens,
                progress=partial(_show, progress, one.name, done.cost, share), stride=one.stride,
            )[: one.tokens]  # fmt: skip
        if not nats.mean() < LARGEST:
            raise UserError(
                f"{one.name}: its loss is {nats.mean():.4g}, for its training diverged; take another checkpoint"
            )
        done.keep(one, nats, time.monotonic() - started)
    return {kind: {one.name: done.nats[one.name] for one in passes} for kind, passes in plan.items()}


def _show(progress: ProgressBar, name: str, done: float, share: float, tokens: int) -> None:
    progress.update(int(done + share * tokens), name)


def lags_of(history: int) -> list[int]:
    return sorted({0, *doubling(history), history})


def halved(window: int, finest: int) -> list[int]:
    """Strides from the window downwards, none of which takes more than `finest` times as long."""
    strides = [window]
    while (half := strides[-1] // 2) and window / half <= finest:
        strides.append(half)
    return strides
