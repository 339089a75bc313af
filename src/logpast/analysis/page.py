"""The page of `logpast analyze`: what `templates/analysis.html` shows, computed from analysis.json alone."""

from __future__ import annotations

from logpast.analysis import plots
from logpast.analysis.labels import difference, span, spans
from logpast.analysis.plots import CHANGES, LINEAR, RARE, Part
from logpast.reporting.differences import NEGATIVE_IS_LOWER, in_words, signed
from logpast.reporting.html import data_uri, render_page

#: keys of analysis.json -> what the page calls these documents
DOCUMENTS = {"familiar": "in-vocabulary", "others": "others"}
STUCK = 0.99  # share of the tokens at which a gate that is closed, or open, is worth a warning


def draw(result: Part) -> str:
    """The whole page."""
    model, control = result["model"], result["control"]
    histories = {"model": model["history"]}
    if control and control["window"] == model["window"]:  # otherwise its history begins somewhere else
        histories["control"] = control["history"]
    slots, lags, stride = (None if "absent" in result[name] else result[name] for name in ("slots", "lags", "stride"))
    recall = result.get("recall")  # only models with recall have this part
    sides = {name: stride[name] for name in ("model", "control") if name in stride} if stride else {}
    figures = {
        "position": plots.position_plot(result["position"]),
        "frequency": plots.frequency_plot(result["frequency"]),
        "last_seen": plots.last_seen_plot(result["last_seen"], histories),
        "recall_gain": recall and plots.recall_gain_plot(recall["gain"]),
        "recall": recall and plots.recall_plot(recall),
        "slots": slots and plots.slots_plot(slots),
        "lags": lags and plots.lags_plot(lags),
        "stride": stride and plots.stride_plot(sides),
    }
    gain = result["scores"]["all"].get("gain")
    return render_page(
        "analysis.html",
        result=result,
        plots={name: data_uri(figure) for name, figure in figures.items() if figure},
        signed=signed,
        in_words=in_words,
        negative_is_lower=NEGATIVE_IS_LOWER,
        difference=difference,
        compared=difference(gain) if gain else None,
        rare=RARE,
        linear=LINEAR,
        documents=_documents(result.get("documents", {})),  # older analyses do not have this part
        by_token=_by_token(result.get("by_token", {}), result["scores"]["all"]),  # nor this
        last_seen=_last_seen(result["last_seen"]["where"]),
        recall=recall and _recall(recall),
        slots=slots and _slots(slots),
        lags=lags and _lags(lags, model, result["data"]["tokens"]),
        sides=sides,
    )


def _documents(part: Part) -> Part | None:
    """In-vocabulary documents and others: their losses, and what each change of the past costs them."""
    kinds = {label: part[name] for name, label in DOCUMENTS.items() if name in part}
    changes = {}
    for way, (label, *_) in CHANGES.items():
        changed = {name: kind[way] for name, kind in kinds.items() if way in kind}
        if changed:
            changes[label] = {"lag": next(iter(changed.values()))["lag"], "kinds": changed}
    return {"kinds": kinds, "changes": changes} if kinds else None


def _by_token(part: Part, everything: Part) -> Part:
    """Tokens whose loss is lower than the control's by most, or higher, with their share of the whole difference."""
    total = everything["gain"]["nats"][0] * everything["tokens"][0] if part else 0.0
    return {
        kind: [
            each
            | {"text": _visible(each["token"]), "difference": 0 - each["gain"]}
            | {"share": each["gain"] / total if total > 0 else None}
            for each in tokens
        ]
        for kind, tokens in part.items()
    }


def _visible(token: str, space: str = "␣") -> str:
    """A token with its white space and control characters made visible."""
    shown = token.replace(" ", space).replace("\n", "⏎")
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown)


def _last_seen(where: Part) -> list[Part]:
    """For each kind of last occurrence: its share of the tokens and of the whole difference from the control."""
    gains: list[float] = []
    if "gain" in where:
        gains = [n * (gain or 0.0) for n, gain in zip(where["tokens"], where["gain"]["nats"], strict=True)]
    return [
        {"kind": kind, "tokens": share, "difference": gains[i] / sum(gains) if sum(gains) > 0 else None}
        for i, (kind, share) in enumerate(zip(where["kinds"], plots.shares(where), strict=True))
    ]


def describe_gate(gate: Part) -> str:
    """How often recall's gate is closed or open, with a warning where it is practically always the same."""
    text = f"{gate['weight']:.1%} on average; below 1 % at {gate['closed']:.1%} of the tokens, "
    text += f"above {99 * gate['limit']:.3g} % at {gate['open']:.1%}"
    for name, warning in (("closed", "practically never opens"), ("open", "is practically always open")):
        if gate[name] >= STUCK:
            text += f". Warning: the gate {warning}"
    return text


def _recall(part: Part) -> Part:
    """Kinds of tokens with their losses; components by order and lag; the tokens with the text before them."""
    gain, components = part["gain"], part["components"]
    lags = [span(*edges) for edges in spans(components["by_lag"])]
    tables = [
        {"kinds": ["all tokens"]} | gain["all"],
        gain["equals"],
        *([gain["documents"]] if "documents" in gain else []),
    ]
    kinds = [
        {"kind": kind, "tokens": table["tokens"][i], "with": table["model"]["nats"][i],
         "without": table["control"]["nats"][i], "difference": own["nats"][i], "interval": own["interval"][i]}
        for table in tables for own in [difference(table["gain"])] for i, kind in enumerate(table["kinds"])
    ]  # fmt: skip
    passages = {
        name: [
            each | {"text": _visible(each["token"]), "before": _visible(each["before"], space=" "),
                    "difference": 0 - each["gain"], "lag": lags[each["lag_bin"]]}
            for each in part["passages"][name]
        ]
        for name in ("gained", "lost")
    }  # fmt: skip
    used = {
        "length of the match": (components["by_order"]["order"], components["by_order"]),
        "lag of the match": (lags, components["by_lag"]),
    }
    return {"kinds": kinds, "used": used, "gate": describe_gate(part["gate"]), "passages": passages}


def _slots(part: Part) -> Part:
    """The slot that matters most, and how many raise or lower the loss by more than chance."""
    increases = part["increase"]
    intervals = [interval for interval in part["interval"] if interval is not None]
    return {
        "number": len(increases),
        "most": max(range(len(increases)), key=increases.__getitem__),
        "raise_loss": sum(low > 0 for low, _ in intervals),
        "lower_loss": sum(high < 0 for _, high in intervals),
        "by_chance": 0.05 * len(increases),
    }


def _lags(part: Part, model: Part, tokens: int) -> Part:
    """How far back each change of the past raises the loss by more than chance."""
    return {
        "replaced": "replaced" in part,  # older analyses do not have it
        # replacement pasts start anywhere in the text, each position equally likely
        "overlap": min(1, (model["history"] + model["window"] - 1) / tokens),
        "detected": {way: _detected(part[way]["interval"]) for way in CHANGES if way in part},
    }


def _detected(intervals: list[list[float] | None]) -> int:
    """At how many lags, from the first on, the increase is above chance; without an interval it counts as such."""
    above = [interval is None or interval[0] > 0 for interval in intervals]
    return above.index(False) if False in above else len(above)
