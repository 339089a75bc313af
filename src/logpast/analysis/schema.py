"""What analysis.json holds: all that the page, the tables and a later comparison read from it."""

from __future__ import annotations

from typing import Annotated, Any, Optional

from pydantic import Field, PositiveInt, TypeAdapter
from pydantic import NonNegativeInt as Count

from logpast.util import schema
from logpast.util.schema import Columns

FORMAT = "logpast analysis 1"
#: how the past is changed beyond a lag
WAYS = ("cut", "replaced", "shuffled")
BOUNDS = Optional[Annotated[list[float], Field(min_length=2, max_length=2)]]  # of an interval  # noqa: UP045


def validate(result: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError if the content of an analysis.json is not complete."""
    if result["format"] != FORMAT:
        raise ValueError(f"its format is {result['format']!r}, not {FORMAT!r}")
    wanted = _schema(control=result["control"] is not None)
    for name in ("slots", "lags", "stride", "documents?"):
        if "absent" in result.get(name.rstrip("?"), ()):  # the part does not apply, and says why
            wanted[name] = {"absent": str}
    schema.validate(TypeAdapter(schema.schema(wanted)), result)


def _schema(control: bool) -> dict[str, Any]:
    """Each key with the kind of its value: [kind] is a list, a key with ? may be missing."""
    sides = ("model", "control", "gain") if control else ("model",)
    about = {"system": str, "run": str, "window": PositiveInt}
    about |= dict.fromkeys(("step", "seed", "parameters", "slots", "history"), Count)
    scores = {"ppl_token": float, "bits_per_byte": float | None}
    means = {side: {"nats": [float], "interval": [BOUNDS]} for side in sides}
    by_kind = Columns({"tokens": [Count]} | means)
    by_bin = Columns({"from": [int], "to": [int]} | by_kind)
    # a kind or a position may have no token
    with_gaps = {side: {"nats": [float | None], "interval": [BOUNDS]} for side in sides}
    increases = {"increase": [float], "interval": [BOUNDS]}
    whole = {"increase": float, "interval": BOUNDS}
    changed = Columns({"tokens": Count, "lag": [Count]} | increases)
    documents = {"documents": Count, "all": by_kind} | {f"{way}?": changed for way in WAYS}
    strides = Columns({"stride": [PositiveInt], "cost": [float], "ppl_token": [float]} | increases)
    token = {"token": str, "places": Count, "documents": Count, "gain": float}
    found = {
        "recorded": str,
        "revision": str,
        "seconds": float,
        "intervals": str,
        "hardware": {"name": str},
        "settings": {"streams": str, "precision": str},
        "data": {"name": str, "sha256": str, "tokenizer": str, "tokens": PositiveInt, "documents": Count,
                 "training_overlap?": str | None},
        "model": about,
        "scores": {"model": scores, "all": by_kind},
        "position": {"each": Columns({"tokens": [Count]} | with_gaps), "binned": by_bin},
        "frequency": Columns({"counted_in": str, "counted_tokens": Count} | by_bin),
        "last_seen": {"where": Columns({"kinds": [str], "tokens": [Count]} | with_gaps), "by_lag": by_bin},
        "slots": Columns({"tokens": Count, "intervals": str, "lag": [float], "all": whole} | increases),
        "lags": Columns({"tokens": Count, "intervals": str, "permutations": Count, "lag": [Count],
                         "cut": increases, "replaced?": increases, "shuffled": increases}),
        "stride": {"tokens": Count, "intervals": str, "model": strides, "control?": strides, "control_absent?": str},
        "documents?": {"counted_in": str, "most_unseen": float, "familiar": documents, "others": documents},
        "by_token?": {"gained": [token], "lost": [token]} if control else {},
        "recall?": _recall_schema(),
    }  # fmt: skip
    if control:
        found |= {"control": about, "scores": {"model": scores, "control": scores, "all": by_kind}}
    return found


def _recall_schema() -> dict[str, Any]:
    """The part of a model with recall; there `control` is the same model without it."""
    sides = ("model", "control", "gain")
    means = {side: {"nats": [float], "interval": [BOUNDS]} for side in sides}
    with_gaps = {side: {"nats": [float | None], "interval": [BOUNDS]} for side in sides}
    by_bin = Columns({"from": [int], "to": [int], "tokens": [Count]} | means)
    kinds = Columns({"kinds": [str], "tokens": [Count]} | with_gaps)
    used = {"matched": [float], "weight": [float], "share": [float], "increase": [float],
            "interval": [BOUNDS]}  # fmt: skip
    passage = {"before": str, "token": str, "gain": float, "weight": float, "largest": float, "order": Count,
               "lag_bin": Count}  # fmt: skip
    gate = dict.fromkeys(("limit", "weight", "share", "closed", "open"), float)
    return {
        "reach": PositiveInt, "tokens": PositiveInt, "intervals": str,
        "gain": {"all": Columns({"tokens": [Count]} | means), "equals": kinds, "documents?": kinds, "position": by_bin,
                 "by_lag": by_bin},
        "components": {
            "own": {"weight": float, "share": float},
            "weight": [[float]],
            "share": [[float]],
            "by_order": Columns({"order": [Count]} | used),
            "by_lag": Columns({"from": [PositiveInt], "to": [PositiveInt]} | used),
        },
        "gate": gate | {
            "quantiles": {"0.05": float, "0.5": float, "0.95": float},
            "calibration": Columns({"from": [float], "to": [float], "tokens": [Count], "weight": [float],
                                    "share": [float], "interval": [BOUNDS], "held": [float]}),
        },
        "passages": {"gained": [passage], "lost": [passage]},
    }  # fmt: skip
