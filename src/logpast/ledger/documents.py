"""Scores of several seeds, and what rows tell of single documents; those of earlier versions tell nothing of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from logpast.evaluation.metrics import paired_difference, perplexity
from logpast.evaluation.vocabulary import UNSEEN

Seeds = Mapping[int, Mapping[str, Any]]  # seed -> the scores of a row


class Documents(NamedTuple):
    tokens: NDArray[np.int64]
    familiar: NDArray[np.bool_]
    """those with next to no tokens that the training text never has. How a model reads on after what it has never seen
    is much a matter of chance, and in a few documents can outweigh what it has learned. None where rows do not tell."""

    @property
    def tell_apart(self) -> bool:
        """Whether there are others beside the familiar ones, and of these enough to say something of them."""
        return bool(1 < self.familiar.sum() < len(self.tokens))


def validate_documents(scores: Mapping[str, Any], of: Documents | None = None) -> None:
    """For an error, such as `sound` tells, where what a row has of documents is damaged, or is of other ones."""
    if "by_document" in scores:
        columns = {name: np.array(column, dtype=np.float64) for name, column in scores["by_document"].items()}
        whole = all(np.isfinite(column).all() for name, column in columns.items() if name != "nats")
        if (
            not whole
            or {column.shape for column in columns.values()} != {(len(columns["nats"]),)}
            or "tokens" not in columns
        ):
            raise ValueError("its scores.by_document should have lists of numbers, one of each for each document")
        if of is not None and len(of.tokens) and not np.array_equal(columns["tokens"], of.tokens):
            raise ValueError("its scores.by_document has other documents than rows of the same text")
        summed = perplexity(columns["nats"].sum(), columns["tokens"].sum())
        (told,) = values({0: scores}, "ppl_token")
        if not math.isnan(summed) and not math.isclose(summed, told, rel_tol=1e-3):
            raise ValueError("its scores.by_document add up to another perplexity than its ppl_token")


def detail(scores: Mapping[str, Any]) -> int:
    """How much a row tells of single documents: of two rows of a run, the later version's tells more."""
    return len(scores.get("by_document", {}))


def values(seeds: Seeds, name: str) -> list[float]:
    """A seed each; infinity, for which a ledger has no word, is itself again."""
    return [math.inf if scores[name] is None else scores[name] for scores in seeds.values()]


def spread(values: list[float], digits: int, sign: str = "") -> str:
    """The mean, and where there are several, ± their standard deviation."""
    text = f"{statistics.mean(values):{sign}.{digits}f}"
    several = len(values) > 1 and math.isfinite(sum(values))
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if several else "")


def documents(*systems: Seeds) -> Documents:
    """Of one test text, scored by any of these."""
    told = [scores["by_document"] for seeds in systems for scores in seeds.values() if "by_document" in scores]
    tokens = np.array(told[0]["tokens"] if told else [], dtype=np.int64)
    unseen = next((np.array(each["unseen"]) for each in told if "unseen" in each), None)
    return Documents(tokens, np.zeros_like(tokens, bool) if unseen is None else unseen <= UNSEEN * tokens)


def familiar_perplexity(seeds: Seeds, of: Documents) -> dict[int, float]:
    """seed -> perplexity per token over the familiar documents, where rows tell which these are."""
    total = of.tokens[of.familiar].sum()
    if not total:
        return {}
    return {seed: perplexity(nats[of.familiar].sum(), total) for seed, nats in _nats(seeds).items()}


def difference(ours: Seeds, theirs: Seeds, of: Documents, familiar: bool = False) -> str:
    """Ours − theirs in nats per token: mean and spread over seeds that both have, named if these are not all of ours.

    The interval is 95 % over documents: of these runs on other texts of the kind, not of other seeds.
    """
    both = _nats(ours), _nats(theirs)
    seeds = [seed for seed in both[0] if seed in both[1]]
    if not seeds:
        return ""
    chosen = of.familiar if familiar else np.ones_like(of.familiar)
    one, other = (np.array([nats[seed][chosen] for seed in seeds]) for nats in both)
    apart = (one - other).sum(axis=1) / of.tokens[chosen].sum()
    found = paired_difference(one.mean(axis=0), other.mean(axis=0), of.tokens[chosen])
    interval = " [{:+.4f}, {:+.4f}]".format(*found["interval"]) if "interval" in found else ""
    return f"{spread(apart.tolist(), 4, '+')}{interval}{name_seeds(seeds, ours)}"


def name_seeds(seeds: Iterable[int], all_seeds: Seeds) -> str:
    """Names the seeds that something is of, if it is not of all."""
    seeds = list(seeds)
    return "" if len(seeds) == len(all_seeds) else f" (seed {', '.join(map(str, seeds))})"


def _nats(seeds: Seeds) -> dict[int, NDArray[np.float64]]:
    """seed -> of each document; not of a model that gave something no chance at all."""
    told = {seed: scores["by_document"]["nats"] for seed, scores in seeds.items() if "by_document" in scores}
    found = {seed: np.array(nats, dtype=np.float64) for seed, nats in told.items()}  # None, the ledger's ∞, to NaN
    return {seed: nats for seed, nats in found.items() if np.isfinite(nats).all()}
