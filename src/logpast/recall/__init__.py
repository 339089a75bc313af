"""`Recall`: an exact memory of wording, mixed into a model's predictions.

Where the log-compressed memory keeps the gist of a long past, recall keeps its wording: it looks up what followed the
last tokens wherever they occurred before, and mixes that into the prediction. `naive` defines a match.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.memory.naive import embed
from logpast.recall.past import Matches, Past
from logpast.util.precision import accumulation_dtype, full_precision

__all__ = ["Matches", "Past", "Recall", "RecallForm"]

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

    reach: int
    orders: int = 4
    bins: int = 4
    input: bool = False

    @property
    def edges(self) -> list[int]:
        """The largest lag of each bin."""
        near = max(1.0, min(NEAR, self.reach / 4 ** (self.bins - 1))) if self.bins > 1 else self.reach
        return sorted({round(edge) for edge in np.geomspace(near, self.reach, self.bins)})

    def state_bytes(self, vocabulary: int) -> int:
        """Bytes of a `Past` that is as long as the reach."""
        return 8 * self.reach + 8 * len(self.edges) * vocabulary


class Recall(nn.Module):
    """Mixes what followed the last tokens before into a model's predictions, and may also show it to the model.

        p(w) = a_0 p_model(w) + Σ a_(n,r) P_(n,r)(w)

    P_(n,r) is how often each token followed the last n tokens, at lags of bin r. The weights a are a softmax of gates
    that are linear in the model's last hidden state, plus κ ln(1 + number of matches); components without a match have
    weight 0. It starts close to the model's own predictions.

    Args:
        width: size of the model's last hidden state.
        form: which matches are distinguished.
    """

    def __init__(self, width: int, form: RecallForm) -> None:
        super().__init__()
        self.form = form
        components = (form.orders + 1) * len(form.edges)
        # no random numbers: the other weights of a model are the same with and without recall
        self.weight = nn.Parameter(torch.zeros(components + 1, width))
        self.bias = nn.Parameter(torch.cat([torch.zeros(1), torch.full((components,), -3.0)]))
        self.confidence = nn.Parameter(torch.full((components,), 0.5))
        if form.input:
            self.input = nn.utils.skip_init(nn.Linear, form.orders * width, width, bias=False)
            nn.init.zeros_(self.input.weight)

    def embed(self, table: Tensor, followers: Tensor) -> Tensor:
        """(…, d), to add to the embedding of each token: a linear map of its followers' (…, orders) embeddings."""
        embedded: Tensor = self.input(embed(table, followers).flatten(-2))
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
            return torch.cat([gates[..., :1], copied], dim=-1).log_softmax(-1)

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
        tiny = torch.finfo(weights.dtype).tiny
        return -torch.logaddexp(weights[..., 0] - nats, copied.clamp(min=tiny).log())

    @torch.no_grad()
    def mix(self, hidden: Tensor, logits: Tensor, matches: Matches) -> Tensor:
        """(V,) the logarithm of the whole mixture, from the logits of one position."""
        weights = self.log_weights(hidden, torch.from_numpy(matches.counts).to(hidden.device)).double().exp().cpu()
        copied: NDArray[np.float64] = weights[1:].view(self.form.orders + 1, -1).numpy()
        mixture = weights[0] * logits.double().cpu().softmax(-1)
        mixture[: matches.unigrams.shape[1]] += torch.from_numpy(matches.distribution(copied))
        return mixture.log()
