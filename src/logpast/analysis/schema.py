"""What analysis.json holds: all that the page, the tables and a later comparison read from it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

FORMAT = "logpast analysis 1"
#: how the past is changed beyond a lag
WAYS = ("cut", "replaced", "shuffled")


def validate(result: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError if the content of an analysis.json is not complete."""
    if result["format"] != FORMAT:
        raise ValueError(f"its format is {result['format']!r}, not {FORMAT!r}")
    schema = _schema(control=result["control"] is not None)
    for name in ("slots", "lags", "stride", "documents?"):
        if "absent" in result.get(name.rstrip("?"), ()):  # the part does not apply, and says why
            schema[name] = {"absent": text}
    _check(result, schema, "")


def text(value: Any) -> bool:
    return isinstance(value, str)


def text_or_null(value: Any) -> bool:
    return value is None or text(value)


def integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def count(value: Any) -> bool:
    return integer(value) and value >= 0


def positive_integer(value: Any) -> bool:
    return integer(value) and value > 0


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_or_null(value: Any) -> bool:
    return value is None or number(value)


def interval_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(number, value)))


class Columns(dict[str, Any]):
    """An object in which all lists have the same length."""


def _schema(control: bool) -> dict[str, Any]:
    """Each key with the kind of its value: [kind] is a list, a key with ? may be missing."""
    sides = ("model", "control", "gain") if control else ("model",)
    about = {"system": text, "run": text, "window": positive_integer}
    about |= dict.fromkeys(("step", "seed", "parameters", "slots", "history"), count)
    scores = {"ppl_token": number, "bits_per_byte": number_or_null}
    means = {side: {"nats": [number], "interval": [interval_or_null]} for side in sides}
    by_kind = Columns({"tokens": [count]} | means)
    by_bin = Columns({"from": [integer], "to": [integer]} | by_kind)
    # a kind or a position may have no token
    with_gaps = {side: {"nats": [number_or_null], "interval": [interval_or_null]} for side in sides}
    increases = {"increase": [number], "interval": [interval_or_null]}
    whole = {"increase": number, "interval": interval_or_null}
    changed = Columns({"tokens": count, "lag": [count]} | increases)
    documents = {"documents": count, "all": by_kind} | {f"{way}?": changed for way in WAYS}
    strides = Columns({"stride": [positive_integer], "cost": [number], "ppl_token": [number]} | increases)
    token = {"token": text, "places": count, "documents": count, "gain": number}
    schema = {
        "recorded": text,
        "revision": text,
        "seconds": number,
        "intervals": text,
        "hardware": {"name": text},
        "settings": {"streams": text, "precision": text},
        "data": {"name": text, "sha256": text, "tokenizer": text, "tokens": positive_integer, "documents": count,
                 "training_overlap?": text_or_null},
        "model": about,
        "scores": {"model": scores, "all": by_kind},
        "position": {"each": Columns({"tokens": [count]} | with_gaps), "binned": by_bin},
        "frequency": Columns({"counted_in": text, "counted_tokens": count} | by_bin),
        "last_seen": {"where": Columns({"kinds": [text], "tokens": [count]} | with_gaps), "by_lag": by_bin},
        "slots": Columns({"tokens": count, "intervals": text, "lag": [number], "all": whole} | increases),
        "lags": Columns({"tokens": count, "intervals": text, "permutations": count, "lag": [count],
                         "cut": increases, "replaced?": increases, "shuffled": increases}),
        "stride": {"tokens": count, "intervals": text, "model": strides, "control?": strides, "control_absent?": text},
        "documents?": {"counted_in": text, "most_unseen": number, "familiar": documents, "others": documents},
        "by_token?": {"gained": [token], "lost": [token]} if control else {},
        "recall?": _recall_schema(),
    }  # fmt: skip
    if control:
        schema |= {"control": about, "scores": {"model": scores, "control": scores, "all": by_kind}}
    return schema


def _recall_schema() -> dict[str, Any]:
    """The part of a model with recall; there `control` is the same model without it."""
    sides = ("model", "control", "gain")
    means = {side: {"nats": [number], "interval": [interval_or_null]} for side in sides}
    with_gaps = {side: {"nats": [number_or_null], "interval": [interval_or_null]} for side in sides}
    by_bin = Columns({"from": [integer], "to": [integer], "tokens": [count]} | means)
    kinds = Columns({"kinds": [text], "tokens": [count]} | with_gaps)
    used = {"matched": [number], "weight": [number], "share": [number], "increase": [number],
            "interval": [interval_or_null]}  # fmt: skip
    passage = {"before": text, "token": text, "gain": number, "weight": number, "largest": number, "order": count,
               "lag_bin": count}  # fmt: skip
    gate = dict.fromkeys(("limit", "weight", "share", "closed", "open"), number)
    return {
        "reach": positive_integer, "tokens": positive_integer, "intervals": text,
        "gain": {"all": Columns({"tokens": [count]} | means), "equals": kinds, "documents?": kinds, "position": by_bin,
                 "by_lag": by_bin},
        "components": {
            "own": {"weight": number, "share": number},
            "weight": [[number]],
            "share": [[number]],
            "by_order": Columns({"order": [count]} | used),
            "by_lag": Columns({"from": [positive_integer], "to": [positive_integer]} | used),
        },
        "gate": gate | {
            "quantiles": {"0.05": number, "0.5": number, "0.95": number},
            "calibration": Columns({"from": [number], "to": [number], "tokens": [count], "weight": [number],
                                    "share": [number], "interval": [interval_or_null], "held": [number]}),
        },
        "passages": {"gained": [passage], "lost": [passage]},
    }  # fmt: skip


def _check(value: Any, wanted: Any, at: str) -> None:
    """Raise ValueError where a value is not as the schema says."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{at} should be an object, not {reprlib.repr(value)}")
        for name, each in wanted.items():
            key = name.rstrip("?")
            inside = f"{at}.{key}".lstrip(".")
            if key in value:
                _check(value[key], each, inside)
            elif key == name:
                raise ValueError(f"{inside} is missing")
        if isinstance(wanted, Columns):
            lengths = sorted({len(column) for column in _columns(value, wanted)})
            if lengths[0] == 0 or len(lengths) > 1:
                raise ValueError(f"the columns of {at} should be equally long, and have {lengths} values")
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            raise ValueError(f"{at} should be a list, not {reprlib.repr(value)}")
        for i, each in enumerate(value):
            _check(each, wanted[0], f"{at}[{i}]")
    elif not wanted(value):
        raise ValueError(f"{at} should be: {wanted.__name__.replace('_', ' ')}, not {reprlib.repr(value)}")


def _columns(value: Any, wanted: Any) -> Iterator[list[Any]]:
    if isinstance(wanted, list):
        yield value
    elif isinstance(wanted, dict):
        for name, each in wanted.items():
            if (key := name.rstrip("?")) in value:
                yield from _columns(value[key], each)
