"""The part of analysis.json about recall: what it gains, which matches it uses, and how far its gate opens.

The gain is over the same model without recall at its output. With weights a and each component's probability P of the
target, the mixture is p = Σ a P. A component's share of the target's probability is a P / p. If weights are calibrated,
they are on average equal to these shares: a weight that is larger promises more than the component holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.analysis.breakdowns import Losses, Text, in_vocabulary, intervals_over, lag_bins, position_bins
from logpast.analysis.passes import Array, Nats
from logpast.analysis.probes import Kinds, document_of_token, last_seen, positions_in_stream
from logpast.data import TokenStore
from logpast.evaluation import metrics
from logpast.models import LanguageModel
from logpast.recall import RecallForm

#: where bins of the weight of all copies begin. Below the second the gate is closed; above the last, as a share of the
#: most that the model allows, it is open
GATE = [0.0, 0.01, *(tenth / 10 for tenth in range(1, 10)), 0.99]
NAMED = 10  # tokens with the highest gain, and with the lowest
CONTEXT = 24  # tokens of text before each of them


def break_down_recall(nats: Nats, text: Text, model: LanguageModel, probed: int) -> dict[str, Any]:
    """All of the part, for a model with recall. The first `probed` tokens have the weights of each component."""
    form = model.config.recall_form
    assert form is not None
    weights, probabilities = nats["recall"]["recall"].transpose(1, 0, 2)  # (tokens, 1 + components), the model first
    mixed, document = Mixture(weights, probabilities), document_of_token(text.store)[:probed]
    gain = (nats["without recall"]["without recall"] - nats["model"]["model"])[:probed]
    return {
        "reach": form.reach,
        "tokens": probed,
        "intervals": intervals_over(text.store, probed),
        "gain": _gain(nats, text, model),
        "components": _components(mixed, form, document),
        "gate": _gate(mixed, form, document, model.config.recall_limit),
        "passages": _passages(mixed, form, gain, text.store),
    }


class Mixture:
    """What each component adds to the probability of each target.

    Args:
        weights: (tokens, 1 + components), the model's first.
        probabilities: (tokens, 1 + components), of the target.
    """

    def __init__(self, weights: Array, probabilities: Array) -> None:
        self.weights, self.probabilities = weights, probabilities
        self.joint = weights * probabilities
        self.total = np.maximum(self.joint.sum(axis=1), np.finfo(np.float64).tiny)
        self.shares = self.joint / self.total[:, None]

    def increase_without(self, dropped: list[int]) -> Array:
        """How much the loss of each token rises if these components get no weight, and the others all of it."""
        # the model's part always stays, even if the difference rounds to less
        rest = np.maximum(self.total - self.joint[:, dropped].sum(axis=1), self.joint[:, 0])
        mass = np.maximum(1 - self.weights[:, dropped].sum(axis=1), self.weights[:, 0])
        increase: Array = np.log(self.total) + np.log(mass) - np.log(np.maximum(rest, np.finfo(np.float64).tiny))
        return increase


def _gain(nats: Nats, text: Text, model: LanguageModel) -> dict[str, Any]:
    """Loss with recall (`model`), without it at the output (`control`), and the gain, over the whole text."""
    store = text.store
    losses = Losses(nats["model"]["model"], nats["without recall"]["without recall"], document_of_token(store))
    in_stream = positions_in_stream(store, text.streams)
    seen = last_seen(np.asarray(store.tokens), in_stream, model.window)
    tokenizer = store.load_tokenizer()
    has_equals = np.array([b"=" in tokenizer.decode_bytes([i]) for i in range(tokenizer.size)])[store.tokens]
    result = {
        "all": losses.by_kind(np.zeros_like(in_stream), 1),
        "equals": {"kinds": ["without `=`", "with `=`"]} | losses.by_kind(has_equals.astype(np.int64), 2),
        "position": losses.by_bin(in_stream % model.window, position_bins(model.window)),
        "by_lag": losses.by_bin(seen, lag_bins(store)),
    }
    if not isinstance(known := in_vocabulary(text), str):
        other = np.repeat(~known, store.documents.tokens).astype(np.int64)
        result["documents"] = {"kinds": ["in-vocabulary", "others"]} | losses.by_kind(other, 2)
    return result


def _components(mixed: Mixture, form: RecallForm, document: Kinds) -> dict[str, Any]:
    """Mean weight of each component, its mean share of the target's probability, and both by order and by lag."""
    orders, bins = form.orders + 1, len(form.edges)
    numbers = np.arange(1, 1 + orders * bins).reshape(orders, bins)
    weight, share = mixed.weights.mean(axis=0), mixed.shares.mean(axis=0)

    def together(several: NDArray[np.int64]) -> dict[str, Any]:
        chosen = several.tolist()
        above = metrics.by_kind(mixed.increase_without(chosen), np.zeros_like(document), 1, document)
        found = float((mixed.weights[:, chosen] > 0).any(axis=1).mean())
        return {"matched": found, "weight": weight[chosen].sum(), "share": share[chosen].sum(),
                "increase": above["nats"][0], "interval": above["interval"][0]}  # fmt: skip

    def table(rows: NDArray[np.int64]) -> dict[str, list[Any]]:
        found = [together(row) for row in rows]
        return {name: [row[name] for row in found] for name in found[0]}

    return {
        "own": {"weight": weight[0], "share": share[0]},
        "weight": weight[numbers].tolist(),
        "share": share[numbers].tolist(),
        "by_order": {"order": list(range(orders))} | table(numbers),
        "by_lag": {"from": [1, *(edge + 1 for edge in form.edges[:-1])], "to": form.edges} | table(numbers.T),
    }


def _gate(mixed: Mixture, form: RecallForm, document: Kinds, limit: float) -> dict[str, Any]:
    """How much weight all copies together have, at most `limit`, and what they are worth at that weight."""
    copied, returned = mixed.weights[:, 1:].sum(axis=1), mixed.shares[:, 1:].sum(axis=1)
    held = np.any(mixed.probabilities[:, 1 + len(form.edges) :] > 0, axis=1)  # by a match of one token or more
    bins = np.searchsorted(GATE, copied, side="right") - 1
    present, kinds = np.unique(bins, return_inverse=True)
    weight, share, holds = (
        metrics.by_kind(each, kinds, len(present), document) for each in (copied, returned, held.astype(np.float64))
    )
    return {
        "limit": limit,
        "weight": float(copied.mean()),
        "share": float(returned.mean()),
        "closed": float((copied < GATE[1]).mean()),
        "open": float((copied > GATE[-1] * limit).mean()),
        "quantiles": {f"{level:g}": float(np.quantile(copied, level)) for level in (0.05, 0.5, 0.95)},
        "calibration": {
            "from": [GATE[i] for i in present],
            "to": [[*GATE[1:], 1.0][i] for i in present],
            "tokens": weight["tokens"],
            "weight": weight["nats"],
            "share": share["nats"],
            "interval": share["interval"],
            "held": holds["nats"],
        },
    }


def _passages(mixed: Mixture, form: RecallForm, gain: Array, store: TokenStore) -> dict[str, Any]:
    """The tokens whose loss recall lowers and raises most, each with the text before it."""
    tokenizer, order = store.load_tokenizer(), np.argsort(gain, kind="stable")
    starts = np.repeat(store.documents.start, store.documents.tokens)

    def decoded(first: int, last: int) -> str:
        return tokenizer.decode_bytes(store.tokens[first:last].tolist()).decode("utf-8", "backslashreplace")

    def about(i: int) -> dict[str, Any]:
        copied = mixed.weights[i, 1:]
        order, lag_bin = divmod(int(copied.argmax()), len(form.edges))
        return {
            "before": decoded(max(int(starts[i]), i - CONTEXT), i), "token": decoded(i, i + 1), "at": i,
            "gain": gain[i], "weight": copied.sum(), "largest": copied.max(), "order": order, "lag_bin": lag_bin,
        }  # fmt: skip

    return {
        "gained": [about(int(i)) for i in order[: -NAMED - 1 : -1] if gain[i] > 0],
        "lost": [about(int(i)) for i in order[:NAMED] if gain[i] < 0],
    }
