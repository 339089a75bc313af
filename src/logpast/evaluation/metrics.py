"""Every metric that logpast reports, as a pure function of per-token losses and of the counts of a text.

The loss of a token is its negative log-likelihood in nats, −ln p(token | preceding tokens).

Of one model on a text (`summary`):

    nats              sum of the losses of the scored tokens, in float64
    tokens            number of scored tokens
    words             words of the text, separated by white space (Python's str.split)
    words_eos         words + lines: Transformer-XL's published numbers count one end-of-line token per line
    bytes             UTF-8 bytes of the text as tokenized, with LF as line end
    ppl_token         e^(nats / tokens)           perplexity; comparable between models with the same tokenizer and text
    ppl_word          e^(nats / words)            comparable between tokenizers
    ppl_word_eos      e^(nats / words_eos)
    bits_per_byte     nats / (bytes · ln 2)       comparable between tokenizers, and with care between languages
    unscored          tokens of the text that were not scored: 0, except with accounting `paper`

Of two models on the same text (`paired_difference`), ours compared with theirs:

    nats_per_token    (our nats − their nats) / tokens; negative: our loss is lower
    ppl_ratio         e^nats_per_token = our ppl_token / their ppl_token
    documents         number of documents with scored tokens
    documents_better  number of documents on which our loss is lower

**Intervals** are bootstrap percentile intervals over documents. Each of SAMPLES samples draws documents with
replacement, as many as the text has, and computes the metric from their summed nats and counts. The interval holds the
middle LEVEL of these values. With fewer than MIN_DOCUMENTS documents it is None; of two it would be their range.

**Accounting `paper`.** In the paper's tables the ratio ln(ppl_word) / ln(ppl_token) should be constant per corpus, but
it differs from row to row. The differences fit a loss that is summed without the first τ tokens and the last partial
batch, but divided by all words. This is an inference from the printed tables; `paper_span` has the formula. The
accounting only selects which tokens are summed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.data.store import Counts, TokenStore
from logpast.util.errors import UserError

Array = NDArray[np.float64]

SAMPLES = 2000  # bootstrap samples
LEVEL = 0.95  # confidence level of all intervals
MIN_DOCUMENTS = 10  # with fewer there is no interval
MAX_DOCUMENTS = 2000  # texts with more documents have no loss per document in their metrics


def perplexity(nats: float, units: float) -> float:
    """e^(nats / units): infinity if that overflows, NaN without units."""
    if units == 0:
        return math.nan
    return math.inf if nats / units > 709 else math.exp(nats / units)


def summary(nats: float, scored: int, counts: Counts) -> dict[str, Any]:
    """The metrics of one model on a text: `nats` is the summed loss of `scored` of its tokens."""
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
    """The tokens that the paper's per-word perplexities appear to sum, of a text of N `tokens`.

    With τ = `horizon` and m = `window`, these are tokens τ + 1 … τ + m·⌊W/B⌋·B, counted from 1. Here
    W = ⌈(N − 1 − m − τ)/m⌉ is the number of windows after the first τ tokens, and
    B = ⌈16384/(m + τ)⌉ · max(1, ⌊(m + τ)/m⌋) the number of windows in a batch. On WikiText-103's test set with
    τ = 8192, 5.5 % of the tokens are left out.
    """
    windows = -(-(tokens - 1 - window - horizon) // window)
    batch = -(-16384 // (window + horizon)) * max(1, (window + horizon) // window)
    scored = window * (windows // batch) * batch
    if scored <= 0:
        raise UserError(
            f"accounting 'paper' scores no token of a text of {tokens} tokens (horizon {horizon}, full batches of "
            f"{batch} windows of {window} tokens); use a longer text or accounting 'all'"
        )
    return slice(horizon, horizon + scored)


def _resampled_sums(columns: Array) -> Array:
    """Bootstrap sums (SAMPLES, columns) of an array (documents, columns) over documents drawn with replacement."""
    random, documents = np.random.default_rng(0), len(columns)
    equal = np.full(documents, 1 / documents)
    # 100 samples at a time, to bound the memory for tens of thousands of documents
    sums = [random.multinomial(documents, equal, size=100) @ columns for _ in range(SAMPLES // 100)]
    return np.concatenate(sums)


def _interval(values: Array) -> tuple[float, float]:
    """The bounds of the middle LEVEL of the values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap(nats: Array, units: dict[str, NDArray[np.int64]]) -> dict[str, tuple[float, float]] | None:
    """The interval of nats per unit, for each kind of unit; None with fewer than MIN_DOCUMENTS documents.

    Args:
        nats: (documents,) the summed loss of each document.
        units: name -> (documents,) number of units in each document.
    """
    if len(nats) < MIN_DOCUMENTS:
        return None
    total, *counts = _resampled_sums(np.column_stack([nats, *units.values()])).T
    return {name: _interval(total / np.maximum(count, 1e-9)) for name, count in zip(units, counts, strict=True)}


def by_kind(
    values: Array,
    kinds: NDArray[np.int64],
    number: int,
    document: NDArray[np.int64],
) -> dict[str, Any]:
    """The mean of a value over the tokens of each kind, with a bootstrap interval over documents.

    Args:
        values: (tokens,) the loss of each token, or a difference of losses.
        kinds: (tokens,) the kind of each token, from 0 to `number` − 1.
        number: the number of kinds.
        document: (tokens,) the number of each token's document.

    Returns:
        Three lists with one entry per kind: `tokens`, `nats` (the mean; NaN without tokens) and `interval` (None if
        fewer than MIN_DOCUMENTS documents have the kind).
    """
    cells, size = document * number + kinds, (int(document.max()) + 1) * number
    sums, counts = (np.bincount(cells, each, size).reshape(-1, number) for each in (values, np.ones(len(values))))
    present = counts.any(axis=1)
    drawn = _resampled_sums(np.concatenate([sums[present], counts[present]], axis=1))
    total, count = drawn[:, :number], drawn[:, number:]
    intervals: list[list[float] | None] = []
    for kind in range(number):
        drawn_with = count[:, kind] > 0  # samples may miss all documents with a rare kind
        enough = (counts[:, kind] > 0).sum() >= MIN_DOCUMENTS
        ratios = total[drawn_with, kind] / count[drawn_with, kind]
        intervals.append(list(_interval(ratios)) if enough else None)
    with np.errstate(invalid="ignore"):
        means = sums.sum(axis=0) / counts.sum(axis=0)
    return {"tokens": counts.sum(axis=0).astype(int).tolist(), "nats": means.tolist(), "interval": intervals}


def paired_difference(ours: Array, theirs: Array, tokens: NDArray[np.int64]) -> dict[str, Any]:
    """Our loss minus theirs on the same documents, with a bootstrap interval, or None if there are too few.

    Each sample uses the same documents for both models, so what makes a document hard for both cancels.

    Args:
        ours: (documents,) our summed loss of each document.
        theirs: (documents,) the same for the other model.
        tokens: (documents,) number of scored tokens of each document.
    """
    scored = tokens > 0  # accounting `paper` may leave whole documents out
    difference, tokens = (ours - theirs)[scored], tokens[scored]
    mean = float(difference.sum() / tokens.sum())
    intervals = bootstrap(difference, {"token": tokens})
    return {
        "nats_per_token": mean,
        "ppl_ratio": perplexity(mean, 1),
        "documents_better": int((difference < 0).sum()),
        "documents": len(tokens),
        "interval": list(intervals["token"]) if intervals else None,
        "level": LEVEL,
    }


def compute_metrics(nats: Array, store: TokenStore, span: slice = slice(None)) -> dict[str, Any]:
    """All metrics of `summary` for the tokens in `span`, the number of documents, and the intervals over them.

    `interval` has the bounds of the perplexities and of bits_per_byte; it is None if there are too few documents. Texts
    of 2 to MAX_DOCUMENTS documents also have `by_document`: the summed loss and the number of tokens of each document,
    with which other models can be compared later.
    """
    chosen, documents = nats[span], store.documents
    summed, tokens = per_document(nats, store, span)
    words_eos = documents.words + documents.lines
    units = {"token": tokens, "word": documents.words, "word_eos": words_eos, "byte": documents.bytes}
    result = summary(math.fsum(chosen), len(chosen), store.counts)
    result |= {"documents": len(documents), "interval": None, "level": LEVEL, "bootstrap_samples": SAMPLES}
    if intervals := bootstrap(summed, units):
        in_bits = [bound / math.log(2) for bound in intervals.pop("byte")]
        in_ppl = {f"ppl_{unit}": [perplexity(bound, 1) for bound in both] for unit, both in intervals.items()}
        result["interval"] = in_ppl | {"bits_per_byte": in_bits}
    if 1 < len(documents) <= MAX_DOCUMENTS:
        result["by_document"] = {"nats": [round(float(n), 3) for n in summed], "tokens": tokens.tolist()}
    return result


def per_document(nats: Array, store: TokenStore, span: slice = slice(None)) -> tuple[Array, NDArray[np.int64]]:
    """For each document, the summed loss and the number of its tokens that lie in the span."""
    start, stop, _ = span.indices(len(store))
    first = np.clip(store.documents.start, start, stop)
    last = np.clip(store.documents.start + store.documents.tokens, start, stop)
    return np.array([nats[a:b].sum() for a, b in zip(first, last, strict=True)]), last - first
