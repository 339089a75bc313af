"""The parts of analysis.json, computed from the nats of every token: numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.analysis.passes import Array, Control, Nats, halved_strides, probed_lags
from logpast.analysis.probes import (
    NEVER,
    PERMUTATIONS,
    Kinds,
    document_of_token,
    last_seen,
    positions_in_stream,
    powers_of_two,
)
from logpast.analysis.saved import SavedControl
from logpast.analysis.schema import WAYS
from logpast.data import TokenStore
from logpast.data.batching import Streams
from logpast.evaluation import metrics
from logpast.evaluation.vocabulary import UNSEEN, occurrences, unseen
from logpast.models import LanguageModel, LogMemoryTransformer, Transformer
from logpast.reporting.differences import too_few

NAMED = 12  # tokens with the highest gain, and with the lowest
#: where bins of token counts begin
COUNTS = sorted({0} | {step * 10**power for power in range(12) for step in (1, 3)})


@dataclass(frozen=True)
class Text:
    """The text that is scored, and the text in which tokens are counted."""

    store: TokenStore
    streams: Streams
    counted: TokenStore
    train_sha256: str
    """of the training text"""


def break_down(
    nats: Nats, text: Text, model: LanguageModel, control: Control | None, probed: int, finest: int
) -> dict[str, Any]:
    """All parts by name; `probed` tokens were scored many times."""
    return (
        _by_token_property(nats, text, model, control)
        | _by_change_of_past(nats, text.store, model, probed)
        | {
            "documents": _by_vocabulary(nats, text, model, control, probed),
            "stride": _by_stride(nats, text.store, model, control, probed, finest),
        }
    )


@dataclass(frozen=True)
class Losses:
    """The nats of tokens under the model, and under the control if there is one."""

    model: Array
    control: Array | None
    document: Kinds
    """of each token; intervals are over documents"""

    def by_kind(self, kinds: Kinds, number: int) -> dict[str, Any]:
        """Mean nats of both by kind of token, and the gain: control − model, positive if the model's loss is lower.

        Everything that is shown has the opposite sign (`labels.difference`); the gain is the format of analysis.json.
        """
        values = {"model": self.model}
        if self.control is not None:
            values |= {"control": self.control, "gain": self.control - self.model}
        tables = {name: metrics.by_kind(value, kinds, number, self.document) for name, value in values.items()}
        tokens = [table.pop("tokens") for table in tables.values()]
        return {"tokens": tokens[0]} | tables

    def by_bin(self, values: Kinds, begins: list[int]) -> dict[str, Any]:
        """The same by bins of a value that each token has; bins without tokens are left out."""
        bins = np.searchsorted(begins, values, side="right") - 1
        present = np.unique(bins)
        last = [end - 1 for end in begins[1:]] + [None]
        table = self.by_kind(np.searchsorted(present, bins), len(present))
        return {"from": [begins[i] for i in present], "to": [last[i] for i in present]} | table


def _losses_of_text(nats: Nats, store: TokenStore, control: Control | None) -> Losses:
    return Losses(nats["model"]["model"], nats["control"]["control"] if control else None, document_of_token(store))


def _by_token_property(nats: Nats, text: Text, model: LanguageModel, control: Control | None) -> dict[str, Any]:
    """Loss and gain over the whole text: by position in the window, frequency and last occurrence."""
    store, counted = text.store, text.counted
    losses = _losses_of_text(nats, store, control)
    in_stream = positions_in_stream(store, text.streams)
    in_window = in_stream % model.window
    seen = last_seen(np.asarray(store.tokens), in_stream, model.window)
    where, names = _last_occurrence(seen, model, control)
    gain = None if losses.control is None else losses.control - losses.model
    return {
        "intervals": intervals_over(store, len(store)),
        "scores": {
            "model": metrics.compute_metrics(losses.model, store),
            "control": None if losses.control is None else metrics.compute_metrics(losses.control, store),
            "all": losses.by_kind(np.zeros_like(in_stream), 1),
        },
        "position": {
            "each": losses.by_kind(in_window, model.window),
            "binned": losses.by_bin(in_window, position_bins(model.window)),
        },
        "frequency": {"counted_in": counted.name, "counted_tokens": len(counted)}
        | losses.by_bin(occurrences(counted)[store.tokens], COUNTS),
        "last_seen": {
            "where": {"kinds": names} | losses.by_kind(where, len(names)),
            "by_lag": losses.by_bin(seen, lag_bins(store)),
        },
        "by_token": {} if gain is None else _by_token(store, gain),
    }


def _by_token(store: TokenStore, gain: Array) -> dict[str, Any]:
    """The tokens with the highest and the lowest gain, summed over their occurrences."""
    ids, tokenizer = np.asarray(store.tokens, np.int64), store.load_tokenizer()
    document = document_of_token(store)
    sums = np.bincount(ids, gain)
    order = np.argsort(sums, kind="stable")

    def about(i: int) -> dict[str, Any]:
        where = document[ids == i]
        text = tokenizer.decode_bytes([i]).decode("utf-8", "backslashreplace")
        return {"token": text, "id": i, "places": len(where), "documents": len(np.unique(where)), "gain": sums[i]}

    return {
        "gained": [about(int(i)) for i in order[: -NAMED - 1 : -1] if sums[i] > 0],
        "lost": [about(int(i)) for i in order[:NAMED] if sums[i] < 0],
    }


def _by_vocabulary(
    nats: Nats, text: Text, model: LanguageModel, control: Control | None, probed: int
) -> dict[str, Any]:
    """In-vocabulary documents, and the others: those with many tokens that the training text never has."""
    store, counted = text.store, text.counted
    known = in_vocabulary(text)
    if isinstance(known, str):
        return {"absent": known}
    losses = _losses_of_text(nats, store, control)
    position = positions_in_stream(store, text.streams) % model.window
    in_known = np.repeat(known, store.documents.tokens)
    result: dict[str, Any] = {"counted_in": counted.name, "most_unseen": UNSEEN}
    for name, chosen, number in (("familiar", in_known, known.sum()), ("others", ~in_known, (~known).sum())):
        theirs = None if losses.control is None else losses.control[chosen]
        part = Losses(losses.model[chosen], theirs, losses.document[chosen])
        result[name] = {
            "documents": int(number),
            "all": part.by_kind(np.zeros(chosen.sum(), np.int64), 1),
            "position": part.by_bin(position[chosen], position_bins(model.window)),
        }
        here = chosen[:probed]
        for way in WAYS if "cut" in nats and here.any() else ():
            whole = losses.model[:probed][here]
            increases = [_increase(each[here], whole, losses.document[:probed][here]) for each in nats[way].values()]
            lags = {"lag": probed_lags(model.history), "tokens": int(here.sum())}
            result[name][way] = lags | _columns(increases)
    return result


def in_vocabulary(text: Text) -> NDArray[np.bool_] | str:
    """For each document, whether it is in-vocabulary; or why there are no two kinds of documents."""
    if text.counted.sha256 != text.train_sha256:
        return "the training text is not available, or tokens are counted in another text"
    known: NDArray[np.bool_] = unseen(text.counted, text.store) <= UNSEEN * text.store.documents.tokens
    if known.all() or not known.any():
        return f"{'all' if known.all() else 'none'} of the documents are in-vocabulary"
    return known


def position_bins(window: int) -> list[int]:
    """Where bins of positions in a window begin."""
    return [0, *powers_of_two(window - 1), window]


def lag_bins(store: TokenStore) -> list[int]:
    """Where bins of `last_seen` begin."""
    return [NEVER, 0, *powers_of_two(2 * len(store))]


def _last_occurrence(seen: Kinds, model: LanguageModel, control: Control | None) -> tuple[Kinds, list[str]]:
    """For each token, whose history its last occurrence is in; and the names of these kinds."""
    edges, names = [0, 1], ["in the window"]
    near = control.history if control and control.window == model.window else 0
    if 0 < near < model.history:
        edges.append(near + 1)
        names.append(f"before the window, in both histories (up to lag {near:,})")
    if model.history:
        edges.append(model.history + 1)
        names.append(f"before the window, in the model's history (up to lag {model.history:,})")
    if near > model.history:
        edges.append(near + 1)
        only = " only" if isinstance(model, Transformer) else ""  # recurrent models have a state from before the window
        names.append(f"before the window, in the control's history{only} (up to lag {near:,})")
    names += ["farther back" if len(names) > 1 else "before the window", "never before"]
    kinds = np.searchsorted(edges, seen, side="right") - 1
    return np.where(seen == NEVER, len(names) - 1, kinds), names


def _by_change_of_past(nats: Nats, store: TokenStore, model: LanguageModel, probed: int) -> dict[str, Any]:
    """What each slot is worth, and each stretch of the history: only for models with slots."""
    if not isinstance(model, Transformer) or not model.slots:
        recall = " and what recall finds" if model.config.recall else ""
        why = (
            f"the model has no slots, so all it knows of the past is the window{recall}"
            if isinstance(model, Transformer)
            else "the model is recurrent, so there are no slots and no history before its window"
        )
        return {"slots": {"absent": why}, "lags": {"absent": why}}
    whole = nats["model"]["model"][:probed]
    document = document_of_token(store)[:probed]
    about = {"tokens": probed, "intervals": intervals_over(store, probed), "whole": float(whole.mean())}
    slots, all_slots, *changed = (
        _columns([_increase(each, whole, document) for each in nats[kind].values()])
        for kind in ("slots", "all slots", *WAYS)
    )
    together = {name: column[0] for name, column in all_slots.items()}
    return {
        "slots": about | {"lag": _slot_lags(model), "all": together} | slots,
        "lags": about
        | {"permutations": PERMUTATIONS, "lag": probed_lags(model.history)}
        | dict(zip(WAYS, changed, strict=True)),
    }


def _by_stride(
    nats: Nats, store: TokenStore, model: LanguageModel, control: Control | None, probed: int, finest: int
) -> dict[str, Any]:
    """The same tokens scored with more and more overlapping windows."""
    if not isinstance(model, Transformer):
        return {"absent": "the model is recurrent, so it reads each token once"}
    document = document_of_token(store)[:probed]
    result: dict[str, Any] = {"tokens": probed, "intervals": intervals_over(store, probed)}
    for name, each in (("model", model), ("control", control)):
        if isinstance(each, Transformer):
            strides, whole = halved_strides(each.window, finest), nats[name][name][:probed]
            passes = [whole, *nats.get(f"{name} by stride", {}).values()]
            result[name] = {"stride": strides, "cost": [each.window / s for s in strides]}
            result[name] |= _columns([_increase(one, whole, document) for one in passes])
            result[name]["ppl_token"] = [metrics.perplexity(mean, 1) for mean in result[name]["nats"]]
    if isinstance(control, SavedControl):
        result["control" if isinstance(control.stride, dict) else "control_absent"] = control.stride
    return result


def intervals_over(store: TokenStore, tokens: int) -> str:
    """What intervals over the first tokens are, or why there are none."""
    documents = int(((store.documents.start < tokens) & (store.documents.tokens > 0)).sum())
    if documents < metrics.MIN_DOCUMENTS:
        return f"none, {too_few(documents)}"
    few = f"none where fewer than {metrics.MIN_DOCUMENTS} of them have such tokens"
    return f"95 %, bootstrap over {documents:,} documents; {few}"


def _increase(nats: Array, whole: Array, document: Kinds) -> dict[str, Any]:
    """Mean nats, and their increase over the nats of the unchanged model."""
    above = metrics.by_kind(nats - whole, np.zeros_like(document), 1, document)
    return {"nats": float(nats.mean()), "increase": above["nats"][0], "interval": above["interval"][0]}


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _slot_lags(model: Transformer) -> list[float]:
    """The lag at which each slot peaks, nearest first."""
    if isinstance(model, LogMemoryTransformer) and model.memory:
        return model.memory.bank.peaks.tolist()
    return [float(lag) for lag in range(1, model.slots + 1)]
