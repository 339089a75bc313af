"""Scores over seeds and over single documents, from rows of the ledger. Rows of early versions have no documents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from logpast.evaluation.metrics import MIN_DOCUMENTS, paired_difference, perplexity
from logpast.evaluation.vocabulary import UNSEEN

Seeds = Mapping[int, Mapping[str, Any]]  # seed -> scores of its row


class Documents(NamedTuple):
    """The documents of one test text."""

    tokens: NDArray[np.int64]
    in_vocabulary: NDArray[np.bool_]
    """which are in-vocabulary (see evaluation.vocabulary), for the training text of the rows"""
    counted: bool = True
    """whether the rows say which are in-vocabulary; if not, none is"""

    @property
    def has_both_kinds(self) -> bool:
        """Whether to report in-vocabulary documents on their own: at least two of them, and some others."""
        return bool(1 < self.in_vocabulary.sum() < len(self.tokens))

    @property
    def too_few(self) -> bool:
        """Whether they are too few for an interval; rows of earlier versions may have one."""
        return 0 < len(self.tokens) < MIN_DOCUMENTS


class Estimate(NamedTuple):
    """A number that was measured once per seed."""

    seeds: list[float]
    interval: tuple[float, float] | None = None
    """95 % over documents; None if there are too few"""
    note: str = ""
    """which seeds, if some are missing"""

    @property
    def mean(self) -> float:
        return statistics.mean(self.seeds)

    def text(self, form: str) -> str:
        """The mean, ± the standard deviation over several seeds, and the interval: 20.51 ± 0.03 [19.90, 21.12]."""
        text = f"{self.mean:{form}}"
        if len(self.seeds) > 1 and math.isfinite(sum(self.seeds)):
            text += f" ± {statistics.stdev(self.seeds):{form.lstrip('+')}}"
        if self.interval:
            text += f" [{self.interval[0]:{form}}, {self.interval[1]:{form}}]"
        return text + self.note


def validate_documents(scores: Mapping[str, Any], of: Documents | None = None) -> None:
    """A ValueError if scores.by_document contradicts itself or the perplexity, or lists other documents than `of`."""
    if "by_document" not in scores:
        return
    columns = scores["by_document"]
    nats, tokens = (np.array(columns[name], dtype=np.float64) for name in ("nats", "tokens"))
    if {len(tokens), len(columns.get("unseen", tokens))} != {len(nats)}:
        raise ValueError("the lists of scores.by_document differ in length")
    if of is not None and len(of.tokens) and not np.array_equal(tokens, of.tokens):
        raise ValueError("scores.by_document has other documents than other rows of the same text")
    summed = perplexity(nats.sum(), tokens.sum())  # null, which is infinity in the ledger, becomes NaN
    (expected,) = values({0: scores}, "ppl_token")
    if not math.isnan(summed) and not math.isclose(summed, expected, rel_tol=1e-3):
        raise ValueError(f"scores.by_document adds up to a perplexity of {summed:.4g}, not to scores.ppl_token")


def detail(scores: Mapping[str, Any]) -> int:
    """How much a row says about single documents: of two rows of a run, the one of the later version says more."""
    return len(scores.get("by_document", {}))


def values(seeds: Seeds, name: str) -> list[float]:
    """A score of each seed; null in the ledger is infinity."""
    return [math.inf if scores[name] is None else scores[name] for scores in seeds.values()]


def spread(values: list[float], digits: int, sign: str = "") -> str:
    """The mean, and ± the standard deviation where there are several values."""
    return Estimate(values).text(f"{sign}.{digits}f")


def documents(*systems: Seeds) -> Documents:
    """The documents of the test text that all these systems were scored on."""
    known = [scores["by_document"] for seeds in systems for scores in seeds.values() if "by_document" in scores]
    tokens = np.array(known[0]["tokens"] if known else [], dtype=np.int64)
    unseen = next((np.array(each["unseen"]) for each in known if "unseen" in each), None)
    if unseen is None:
        return Documents(tokens, np.zeros_like(tokens, bool), counted=False)
    return Documents(tokens, unseen <= UNSEEN * tokens)


def in_vocabulary_perplexity(seeds: Seeds, of: Documents) -> dict[int, float]:
    """seed -> perplexity per token over the in-vocabulary documents; empty where the rows do not say which they are."""
    total = of.tokens[of.in_vocabulary].sum()
    if not total:
        return {}
    return {seed: perplexity(nats[of.in_vocabulary].sum(), total) for seed, nats in _nats(seeds).items()}


def estimate_difference(ours: Seeds, theirs: Seeds, of: Documents, in_vocabulary: bool = False) -> Estimate | None:
    """Ours − theirs in nats per token over the seeds that both have, negative: our loss is lower; None without seeds.

    The interval is over documents: it describes these runs on other texts of this kind, not other seeds.
    """
    both = _nats(ours), _nats(theirs)
    seeds = [seed for seed in both[0] if seed in both[1]]
    if not seeds:
        return None
    chosen = of.in_vocabulary if in_vocabulary else np.ones_like(of.in_vocabulary)
    one, other = (np.array([nats[seed][chosen] for seed in seeds]) for nats in both)
    per_seed = (one - other).sum(axis=1) / of.tokens[chosen].sum()
    found = paired_difference(one.mean(axis=0), other.mean(axis=0), of.tokens[chosen])
    interval = tuple(found["interval"]) if found["interval"] else None
    return Estimate(per_seed.tolist(), interval, name_seeds(seeds, ours))


def difference(ours: Seeds, theirs: Seeds, of: Documents, in_vocabulary: bool = False) -> str:
    """`estimate_difference` as text, with the seeds if they are not all of ours; empty if there are none."""
    found = estimate_difference(ours, theirs, of, in_vocabulary)
    return found.text("+.4f") if found else ""


def name_seeds(seeds: Iterable[int], all_seeds: Seeds) -> str:
    """The seeds that something was computed from, if some are missing."""
    seeds = list(seeds)
    return "" if len(seeds) == len(all_seeds) else f" (seed {', '.join(map(str, seeds))})"


def _nats(seeds: Seeds) -> dict[int, NDArray[np.float64]]:
    """seed -> nats of each document, without seeds that have an infinite one."""
    known = {seed: scores["by_document"]["nats"] for seed, scores in seeds.items() if "by_document" in scores}
    found = {seed: np.array(nats, dtype=np.float64) for seed, nats in known.items()}  # null, infinity, becomes NaN
    return {seed: nats for seed, nats in found.items() if np.isfinite(nats).all()}
