"""What an analysis finds: from the nats of every token to the parts of its analysis.json, each in figures alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from logpast.analysis.passes import Array, Nats, Rival, halved, lags_of
from logpast.analysis.probes import (
    NEVER,
    PERMUTATIONS,
    Kinds,
    documents_of,
    doubling,
    groups_of,
    last_seen,
    places_in_stream,
)
from logpast.analysis.saved import WAYS, Kept
from logpast.data import TokenStore
from logpast.data.batching import Streams
from logpast.evaluation import metrics
from logpast.evaluation.scoring import compute_metrics
from logpast.evaluation.vocabulary import UNSEEN, occurrences, unseen
from logpast.models import LanguageModel, LogMemoryTransformer, Transformer

NAMED = 12  # tokens that gain most, and that lose most
#: where bins of frequent and rare tokens begin
COUNTS = sorted({0} | {step * 10**power for power in range(12) for step in (1, 3)})


@dataclass(frozen=True)
class Text:
    """What was scored, and what says how frequent its tokens are."""

    store: TokenStore
    streams: Streams
    frequent: TokenStore
    trained_on: str
    """the sha256 of the training text"""


def findings(
    nats: Nats, text: Text, model: LanguageModel, rival: Rival | None, some: int, finest: int
) -> dict[str, Any]:  # fmt: skip
    """All parts, by their names; `some`: how many tokens were scored again and again."""
    return (
        _of_tokens(nats, text, model, rival)
        | _of_the_past(nats, text.store, model, some)
        | {
            "documents": _of_documents(nats, text, model, rival, some),
            "stride": _strides(nats, text.store, model, rival, some, finest),
        }
    )


@dataclass(frozen=True)
class Sides:
    """The nats of a text's tokens by the model, and by the control if there is one."""

    ours: Array
    theirs: Array | None
    groups: Kinds

    def by_kind(self, kinds: Kinds, number: int) -> dict[str, Any]:
        """Nats of both, and the gain (control − model, above 0 where the model is better), by kind of token."""
        values = {"model": self.ours}
        if self.theirs is not None:
            values |= {"control": self.theirs, "gain": self.theirs - self.ours}
        tables = {name: metrics.by_kind(value, kinds, number, self.groups) for name, value in values.items()}
        tokens = [table.pop("tokens") for table in tables.values()]
        return {"tokens": tokens[0]} | tables

    def by_bin(self, values: Kinds, begins: list[int]) -> dict[str, Any]:
        """The same by bins of a number that each token has; bins without tokens are left out."""
        bins = np.searchsorted(begins, values, side="right") - 1
        present = np.unique(bins)
        last = [end - 1 for end in begins[1:]] + [None]
        table = self.by_kind(np.searchsorted(present, bins), len(present))
        return {"from": [begins[i] for i in present], "to": [last[i] for i in present]} | table


def _of_tokens(nats: Nats, text: Text, model: LanguageModel, rival: Rival | None) -> dict[str, Any]:
    """What the nats of the whole text tell, scored once by each."""
    store, frequent = text.store, text.frequent
    ours, theirs = nats["model"]["model"], nats["control"]["control"] if rival else None
    groups, what = groups_of(store, len(store), model.window)
    sides = Sides(ours, theirs, groups)
    place = places_in_stream(store, text.streams)
    position = place % model.window
    seen = last_seen(np.asarray(store.tokens), place, model.window)
    where, names = _whereabouts(seen, model, rival)
    return {
        "intervals": f"95 %, bootstrap over {what}",
        "scores": {
            "model": compute_metrics(ours, store),
            "control": compute_metrics(theirs, store) if theirs is not None else None,
            "all": sides.by_kind(np.zeros_like(place), 1),
        },
        "position": {
            "each": sides.by_kind(position, model.window),
            "binned": sides.by_bin(position, _positions(model.window)),
        },
        "frequency": {"counted_in": frequent.name, "counted_tokens": len(frequent)}
        | sides.by_bin(occurrences(frequent)[store.tokens], COUNTS),
        "last_seen": {
            "where": {"kinds": names} | sides.by_kind(where, len(names)),
            "by_lag": sides.by_bin(seen, [NEVER, 0, *doubling(2 * len(store))]),
        },
        "by_token": _by_token(store, theirs - ours) if theirs is not None else {},
    }


def _by_token(store: TokenStore, gain: Array) -> dict[str, Any]:
    """Tokens on which most is gained, and lost, over all places where they stand."""
    ids, tokenizer = np.asarray(store.tokens, np.int64), store.load_tokenizer()
    document = documents_of(store)
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


def _of_documents(nats: Nats, text: Text, model: LanguageModel, rival: Rival | None, some: int) -> dict[str, Any]:
    """Familiar documents apart from those with much that the training text never has: chance weighs more there."""
    store, frequent = text.store, text.frequent
    if frequent.sha256 != text.trained_on:
        return {"absent": "the training text is not at hand, or another is counted"}
    familiar = unseen(frequent, store) <= UNSEEN * store.documents.tokens
    if familiar.all() or not familiar.any():
        return {"absent": f"no document stands out by tokens that {frequent.name} never has"}
    ours, theirs = nats["model"]["model"], nats["control"]["control"] if rival else None
    position = places_in_stream(store, text.streams) % model.window
    groups, few = groups_of(store, len(store), model.window)[0], groups_of(store, some, model.window)[0]
    whose = np.repeat(familiar, store.documents.tokens)
    found: dict[str, Any] = {"counted_in": frequent.name, "most_unseen": UNSEEN}
    for name, chosen, number in (("familiar", whose, familiar.sum()), ("others", ~whose, (~familiar).sum())):
        sides = Sides(ours[chosen], None if theirs is None else theirs[chosen], groups[chosen])
        found[name] = {
            "documents": int(number),
            "all": sides.by_kind(np.zeros(chosen.sum(), np.int64), 1),
            "position": sides.by_bin(position[chosen], _positions(model.window)),
        }
        here = chosen[:some]
        for way in WAYS if "cut" in nats and here.any() else ():
            passes = [_increase(each[here], ours[:some][here], few[here]) for each in nats[way].values()]
            found[name][way] = {"lag": lags_of(model.history), "tokens": int(here.sum())} | _columns(passes)
    return found


def _positions(window: int) -> list[int]:
    """Where bins of positions in a window begin."""
    return [0, *doubling(window - 1), window]


def _whereabouts(seen: Kinds, model: LanguageModel, rival: Rival | None) -> tuple[Kinds, list[str]]:
    """Of each token: in whose sight it last occurred."""
    edges, names = [0, 1], ["in the window"]
    near = rival.history if rival and rival.window == model.window else 0
    if 0 < near < model.history:
        edges.append(near + 1)
        names.append(f"before it, in the control's sight too (to lag {near:,})")
    if model.history:
        edges.append(model.history + 1)
        names.append(f"before it, in the model's history (to lag {model.history:,})")
    if near > model.history:
        edges.append(near + 1)
        alone = " alone" if isinstance(model, Transformer) else ""  # others carry a state from before the window
        names.append(f"before it, in the control's sight{alone} (to lag {near:,})")
    names += ["farther back" if len(names) > 1 else "before the window", "never before"]
    kinds = np.searchsorted(edges, seen, side="right") - 1
    return np.where(seen == NEVER, len(names) - 1, kinds), names


def _of_the_past(nats: Nats, store: TokenStore, model: LanguageModel, some: int) -> dict[str, Any]:
    """What each slot is worth, and each stretch of the history: parts that only a model with slots has."""
    if not isinstance(model, Transformer) or not model.slots:
        why = (
            "this model has no slots: what it knows of the past is the window alone"
            if isinstance(model, Transformer)
            else "this model carries a state from segment to segment: no slots or history stand before its window"
        )
        return {"slots": {"absent": why}, "lags": {"absent": why}}
    whole = nats["model"]["model"][:some]
    groups, what = groups_of(store, some, model.window)
    about = {"tokens": some, "intervals": f"95 %, bootstrap over {what}", "whole": float(whole.mean())}
    slots, none, *changed = (
        _columns([_increase(each, whole, groups) for each in nats[kind].values()]) for kind in ("slots", "none", *WAYS)
    )
    return {
        "slots": about | {"lag": _peaks(model), "all": {name: column[0] for name, column in none.items()}} | slots,
        "lags": about
        | {"permutations": PERMUTATIONS, "lag": lags_of(model.history)}
        | dict(zip(WAYS, changed, strict=True)),
    }


def _strides(
    nats: Nats, store: TokenStore, model: LanguageModel, rival: Rival | None, some: int, finest: int
) -> dict[str, Any]:
    """The same tokens by windows that overlap more and more."""
    if not isinstance(model, Transformer):
        return {"absent": "this model carries a state from segment to segment: it reads each token once"}
    groups, what = groups_of(store, some, model.window)
    result: dict[str, Any] = {"tokens": some, "intervals": f"95 %, bootstrap over {what}"}
    for name, each in (("model", model), ("control", rival)):
        if isinstance(each, Transformer):
            strides, whole = halved(each.window, finest), nats[name][name][:some]
            passes = [whole, *nats.get(f"{name} by stride", {}).values()]
            result[name] = {"stride": strides, "cost": [each.window / s for s in strides]}
            result[name] |= _columns([_increase(one, whole, groups) for one in passes])
            result[name]["ppl_token"] = [metrics.perplexity(mean, 1) for mean in result[name]["nats"]]
    if isinstance(rival, Kept):
        result["control" if isinstance(rival.stride, dict) else "control_absent"] = rival.stride
    return result


def _increase(nats: Array, whole: Array, groups: Kinds) -> dict[str, Any]:
    """Nats per token, and by how much they are above those of the model left alone."""
    above = metrics.by_kind(nats - whole, np.zeros_like(groups), 1, groups)
    return {"nats": float(nats.mean()), "increase": above["nats"][0], "interval": above["interval"][0]}


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _peaks(model: Transformer) -> list[float]:
    """How far back each slot looks, nearest first."""
    if isinstance(model, LogMemoryTransformer) and model.memory:
        return model.memory.bank.peaks.tolist()
    return [float(lag) for lag in range(1, model.slots + 1)]
