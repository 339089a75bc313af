"""`Recall`: an exact memory of wording, mixed into a model's predictions.

Where the log-compressed memory keeps the gist of a long past, recall keeps its wording: it looks up what followed the
last tokens wherever they occurred before, and mixes that into the prediction. `naive` defines a match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.recall import index, matching
from logpast.recall.matching import OWN
from logpast.recall.past import Past
from logpast.util.precision import accumulation_dtype, full_precision
from logpast.util.validation import Count, PositiveInt, validate_fields

__all__ = ["OWN", "Recall", "RecallForm"]

NEAR = 64  # the first lag bin ends here; the others are log-spaced


@dataclass(frozen=True)
class RecallForm:
    """Which matches are distinguished: by their length n = 0 … orders, and by their lag in log-spaced bins.

    Args:
        reach: the largest lag.
        orders: the longest match in tokens. n = 0 matches everywhere, and gives the frequency of each token.
        bins: number of lag bins.
        input: whether the model's input also has the embeddings of the tokens that followed the latest matches.
    """

    reach: PositiveInt
    orders: Count = 4
    bins: PositiveInt = 4
    input: bool = False

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def edges(self) -> list[int]:
        """The largest lag of each bin."""
        near = max(1.0, min(NEAR, self.reach / 4 ** (self.bins - 1))) if self.bins > 1 else self.reach
        return sorted({round(edge) for edge in np.geomspace(near, self.reach, self.bins)})


class Recall(nn.Module):
    """Mixes what followed the last tokens before into a model's predictions, and may also show it to the model.

        p(w) = a_0 p_model(w) + Σ a_(n,r) P_(n,r)(w)

    P_(n,r) is how often each token followed the last n tokens, at lags of bin r. The weights a are a softmax of gates
    that are linear in the model's last hidden state, plus κ ln(1 + number of matches); components without a match have
    weight 0.

    Args:
        width: size of the model's last hidden state.
        form: which matches are distinguished.
        limit: the weights of all components but the model's add up to at most this, so that a text that repeats itself
            cannot take over. It may be changed at any time.
        pretrained: whether the model is trained already. Then the gates start open for long matches, so that recall
            gains before they are fitted, and keeps facts afterwards; otherwise they start alike.

    Attributes:
        copy_own: whether a `Stream` also copies what the model itself has written there. Without it, generated text
            hardly repeats itself, and its probabilities are no longer those of scoring. Set it before a stream begins.
    """

    def __init__(self, width: int, form: RecallForm, limit: float = 1.0, pretrained: bool = True) -> None:
        super().__init__()
        self.form, self.limit, self.pretrained, self.copy_own = form, limit, pretrained, True
        lengths = torch.arange(form.orders + 1.0).repeat_interleave(len(form.edges))
        components = len(lengths)
        if pretrained:  # fitted to SmolLM2-135M and books: docs/results/pretrained.md
            bias, confidence = torch.where(lengths > 0, 0.5 * lengths - 4.5, -6.0), 0.15
        else:
            bias, confidence = torch.full((components,), -3.0), 0.5
        # no random numbers: the other weights of a model are the same with and without recall
        self.weight = nn.Parameter(torch.zeros(components + 1, width))
        self.bias = nn.Parameter(torch.cat([torch.zeros(1), bias]))
        self.confidence = nn.Parameter(torch.full((components,), confidence))
        if form.input:
            self.input = nn.utils.skip_init(nn.Linear, form.orders * width, width, bias=False)
            nn.init.zeros_(self.input.weight)

    def embed(self, followers: Tensor) -> Tensor:
        """(…, d), to add to the embedding of each token: a linear map of its followers' embeddings (…, orders, d)."""
        embedded: Tensor = self.input(followers.to(self.input.weight.dtype).flatten(-2))
        return embedded

    def log_weights(self, hidden: Tensor, matches: Tensor) -> Tensor:
        """(…, 1 + components): the logarithm of the weights a, the model's first.

        Args:
            hidden: (…, d) last hidden states.
            matches: (…, orders + 1, bins) number of matches.
        """
        dtype = accumulation_dtype(hidden.dtype)
        found = matches.flatten(-2).to(dtype)
        with full_precision(hidden.device):
            gates = F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
            copied = gates[..., 1:] + self.confidence * torch.log1p(found)
            copied = copied.masked_fill(found == 0, -torch.inf)
            weights = torch.cat([gates[..., :1], copied], dim=-1).log_softmax(-1)
        if self.limit == 1:
            return weights
        own, copied = weights[..., :1], weights[..., 1:]
        excess = (copied.logsumexp(-1, keepdim=True) - math.log(self.limit)).clamp(min=0)
        return torch.cat([torch.where(excess > 0, math.log1p(-self.limit), own), copied - excess], dim=-1)

    def forward(self, hidden: Tensor, nats: Tensor, counts: Tensor) -> Tensor:
        """The loss of each target under the mixture.

        Args:
            hidden: (…, d) last hidden states.
            nats: (…) the model's own loss.
            counts: (…, 2, orders + 1, bins) number of matches, and of those that the target followed.
        """
        matches, hits = counts.unbind(-3)
        weights = self.log_weights(hidden, matches)
        share = hits.to(weights.dtype) / matches.clamp(min=1)
        copied = (weights[..., 1:].exp() * share.flatten(-2)).sum(-1)
        return -_log_mixture(weights[..., 0] - nats, copied)

    def count(self, ids: Tensor) -> Tensor:
        """(B, T, 2, orders + 1, bins), the counts that `forward` needs, with each of the ids (B, T) as the target.

        Negative ids are padding, at the start or the end of a row.
        """
        rows, length = ids.shape
        stream = torch.arange(rows, device=ids.device).repeat_interleave(length)
        table = index.occurrences(ids.flatten(), stream, self.form.orders + 1, self.form.edges).counts
        before = (ids >= 0).cumsum(1) - (ids >= 0).long()
        target = torch.arange(ids.numel(), device=ids.device).view(rows, length)
        return index.counts_of_targets(table, target, before, self.form.edges)

    def log_probs(self, hidden: Tensor, log_probs: Tensor, ids: Tensor) -> Tensor:
        """(B, Q, V): the logarithm of the whole mixture, for the token after each of the last Q tokens.

        Args:
            hidden: (B, Q, d) last hidden states of the last Q tokens.
            log_probs: (B, Q, V) the model's own log-probabilities there.
            ids: (B, T) all tokens so far, oldest first, T ≥ Q. A negative id is a missing token. One with `OWN` added
                is not copied.
        """
        found = []
        for numbers, known in matching.parts(ids, hidden.shape[1], self.form.reach):
            part = slice(numbers.start, numbers.stop)
            found.append(self._mixture(hidden[:, part], log_probs[:, part], known))
        return torch.cat(found, dim=1)

    def mix(self, hidden: Tensor, log_probs: Tensor, pasts: Sequence[Past]) -> Tensor:
        """(B, V): `log_probs` of the next token of B texts, from their indexes: hidden is (B, d), log_probs (B, V)."""
        counts = torch.from_numpy(np.stack([past.counts() for past in pasts])).to(hidden.device)
        weights = self.log_weights(hidden, counts)
        shares = (weights[:, 1:].exp().view(counts.shape) / counts.clamp(min=1)).cpu().numpy()
        copied = np.empty(log_probs.shape, shares.dtype)  # on the CPU, where the indexes are
        for row, share, past in zip(copied, shares, pasts, strict=True):
            candidates, lengths, lag_bins = past.found
            np.matmul(share[0], past.everywhere, out=row)
            np.add.at(row, candidates, share[1:].cumsum(0)[lengths - 1, lag_bins])
        return _log_mixture(weights[:, :1] + log_probs, torch.from_numpy(copied).to(hidden.device))

    def _mixture(self, hidden: Tensor, log_probs: Tensor, ids: Tensor) -> Tensor:
        """`log_probs`, with all comparisons at once."""
        orders, bins = self.form.orders, len(self.form.edges)
        candidates, component = matching.compare(ids, hidden.shape[1], orders, self.form.edges)
        counts = matching.count(component, orders, bins)
        weights = self.log_weights(hidden, counts)
        share = weights[..., 1:].exp().unflatten(-1, (orders + 1, bins)) / counts.clamp(min=1)
        share = F.pad(share.cumsum(-2).flatten(-2), (0, 1))  # a match of n tokens is also one of fewer
        candidates = candidates.clamp(min=0).long().unsqueeze(1).expand_as(component)
        copied = torch.zeros_like(log_probs, dtype=share.dtype)
        copied = copied.scatter_add(2, candidates, share.gather(2, component.long()))
        return _log_mixture(weights[..., :1] + log_probs, copied)


def _log_mixture(own: Tensor, copied: Tensor) -> Tensor:
    """ln(exp(own) + copied), with finite gradients where nothing is copied."""
    return torch.logaddexp(own, copied.clamp(min=torch.finfo(copied.dtype).tiny).log())
