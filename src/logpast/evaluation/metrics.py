"""Every figure we report, as a pure function of the nats of a text's tokens and of the text's counts.

    nats           Σ −ln p(token | what came before it), over every token of the text, each once; summed in float64
    tokens         how many tokens were scored
    words          whitespace-separated words of the text (Python's str.split)
    words_eos      words + lines: the basis of Transformer-XL's figures, which count one end-of-line per line
    bytes          UTF-8 bytes of the text as tokenised
    ppl_token      e^(nats / tokens)            comparable between models with the same tokenizer and text
    ppl_word       e^(nats / words)             comparable between tokenizers
    ppl_word_eos   e^(nats / words_eos)
    bits_per_byte  nats / (bytes · ln 2)        comparable between tokenizers, and between languages with care
    unscored       tokens of the text that were left out; 0 unless the accounting says otherwise

**Accounting `paper`.** The ratio ln(per-word) / ln(raw) of the paper's tables should be one constant per corpus but
differs from row to row, in a way that fits the first τ tokens and the last partial batch being left out of the
summed loss while all words are counted: an inference from the printed tables, see `paper_span`. It changes which
tokens are summed and nothing else, so it is read off the same nats.

**Intervals** are bootstraps over documents: documents are drawn with replacement, as many as there are, and the
figure is computed from the drawn ones' summed nats and counts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.data.store import Counts
from logpast.util.errors import UserError

Array = NDArray[np.float64]

SAMPLES, LEVEL = 2000, 0.95  # of a bootstrap


def perplexity(nats: float, units: float) -> float:
    """e^(nats per unit); infinite where that overflows."""
    if units == 0:
        return math.nan
    return math.inf if nats / units > 709 else math.exp(nats / units)


def summary(nats: float, scored: int, counts: Counts) -> dict[str, Any]:
    """All figures of the contract, for `scored` tokens that cost `nats` in a text of these counts."""
    return {
        "nats": nats,
        "tokens": scored,
        "words": counts.words,
        "words_eos": counts.words + counts.lines,
        "bytes": counts.bytes,
        "ppl_token": perplexity(nats, scored),
        "ppl_word": perplexity(nats, counts.words),
        "ppl_word_eos": perplexity(nats, counts.words + counts.lines),
        "bits_per_byte": nats / (counts.bytes * math.log(2)) if counts.bytes else math.nan,
        "unscored": counts.tokens - scored,
    }


def paper_span(tokens: int, window: int, horizon: int) -> slice:
    """The tokens that the paper's per-word figures appear to sum, of a text of N `tokens`.

    With τ = `horizon`, m = `window`: tokens τ + 1 … τ + m·⌊W/B⌋·B (counted from 1), where
    W = ⌈(N − 1 − m − τ)/m⌉ windows lie in the text after its first τ tokens and batches hold
    B = ⌈16384/(m + τ)⌉ · max(1, ⌊(m + τ)/m⌋) of them. On WikiText-103's test set and τ = 8192 that leaves out 5.5 %.
    """
    windows = -(-(tokens - 1 - window - horizon) // window)
    batch = -(-16384 // (window + horizon)) * max(1, (window + horizon) // window)
    scored = window * (windows // batch) * batch
    if scored <= 0:
        raise UserError(
            f"accounting 'paper' scores nothing of a text of {tokens} tokens (horizon {horizon}, whole batches of "
            f"{batch} windows of {window}); use a longer text or accounting 'all'"
        )
    return slice(horizon, horizon + scored)


def _resampled_sums(columns: Array) -> Array:
    """(SAMPLES, columns): sums of (documents, columns) over as many documents, drawn with replacement."""
    random, documents = np.random.default_rng(0), len(columns)
    chances = np.full(documents, 1 / documents)
    # a hundred draws at a time: all at once would not fit for tens of thousands of documents
    sums = [random.multinomial(documents, chances, size=100) @ columns for _ in range(SAMPLES // 100)]
    return np.concatenate(sums)


def _middle(drawn: Array) -> tuple[float, float]:
    """Between which bounds LEVEL of them lie."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap(nats: Array, units: dict[str, NDArray[np.int64]]) -> dict[str, tuple[float, float]]:
    """For each kind of unit the interval of nats per unit, from (documents,) nats and counts of each document."""
    total, *counts = _resampled_sums(np.column_stack([nats, *units.values()])).T
    return {name: _middle(total / np.maximum(count, 1e-9)) for name, count in zip(units, counts, strict=True)}


def by_kind(
    values: Array,
    kinds: NDArray[np.int64],
    number: int,
    groups: NDArray[np.int64],
) -> dict[str, Any]:
    """The mean of a value over the tokens of each kind, with its interval over groups of tokens.

    Args:
        values: of each token: its nats, or a difference of nats.
        kinds: of each token, from 0 to `number` − 1.
        number: how many kinds there are.
        groups: of each token, the document or block that is drawn as a whole.

    Returns:
        tokens, nats (the mean; NaN for a kind without tokens) and interval (None where fewer than two groups have the
        kind), a list each.
    """
    cells, size = groups * number + kinds, (int(groups.max()) + 1) * number
    sums, counts = (np.bincount(cells, each, size).reshape(-1, number) for each in (values, np.ones(len(values))))
    there = counts.any(axis=1)
    drawn = _resampled_sums(np.concatenate([sums[there], counts[there]], axis=1))
    total, count = drawn[:, :number], drawn[:, number:]
    intervals: list[list[float] | None] = []
    for kind in range(number):
        has = count[:, kind] > 0  # a rare kind is in no group of some draws
        enough = (counts[:, kind] > 0).sum() > 1
        intervals.append(list(_middle(total[has, kind] / count[has, kind])) if enough else None)
    with np.errstate(invalid="ignore"):
        means = sums.sum(axis=0) / counts.sum(axis=0)
    return {"tokens": counts.sum(axis=0).astype(int).tolist(), "nats": means.tolist(), "interval": intervals}


def paired_difference(ours: Array, theirs: Array, tokens: NDArray[np.int64]) -> dict[str, Any]:
    """Ours − theirs in nats per token on the same documents, and how sure its sign is.

    Both models are resampled together, document by document, so what makes a document hard for both cancels.
    """
    scored = tokens > 0  # an accounting may leave whole documents out
    difference, tokens = (ours - theirs)[scored], tokens[scored]
    mean = float(difference.sum() / tokens.sum())
    result: dict[str, Any] = {
        "nats_per_token": mean,
        "ppl_ratio": perplexity(mean, 1),
        "documents_better": int((difference < 0).sum()),
        "documents": len(tokens),
    }
    if len(tokens) > 1:
        result["interval"] = list(bootstrap(difference, {"token": tokens})["token"])
        result["level"] = LEVEL
    return result
