"""A synthetic source, a stream of drifting topics, for which the best possible loss is known.

The stream consists of segments. Each segment draws a topic (a distribution over the tokens) from a symmetric Dirichlet
distribution, and all its tokens from the topic. Durations follow a power law, P(n) ∝ n^−exponent from `shortest` to
`longest` tokens. Topics never recur, so only the current topic matters: how old it is and which tokens it has produced.
A model that sees more of the past knows it better.

There are two optima, in nats for every token, by exact Bayesian filtering over the start of the current segment:

    nats_given_all       given the whole past of the stream: no model is better in the long run
    nats_given_recent    given the window and the L tokens before it, which is all the control sees: no model that sees
                         only these is better in the long run

The stream is stationary, as if it had always been running. An observer who starts anywhere, also at the first token,
finds a segment in progress, more likely a long one than a short one. What is left of it follows the equilibrium
distribution P(n) ∝ P(duration ≥ n), so the start of the stream carries no information.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from logpast.util.errors import UserError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Seed = int | np.random.SeedSequence


class Draw(NamedTuple):
    """A stream and its hidden state: tokens (N,), the segment of each token (N,), the topic of each segment (S, V)."""

    tokens: Ints
    segments: Ints
    topics: Array

    @property
    def nats(self) -> Array:
        """(N,): the loss of each token given its topic; on average, both optima are above it."""
        return -np.log(self.topics[self.segments, self.tokens])


@dataclass(frozen=True)
class Topics:
    """The source; see the docstring of the module.

    Args:
        vocabulary: number of different tokens.
        concentration: of the Dirichlet distribution. Below 1 a topic has a few frequent tokens; far above 1 all tokens
            are about equally frequent.
        exponent: of the power law of durations. The smaller it is, the more of the stream is in long segments.
        shortest: minimal duration of a segment, in tokens.
        longest: maximal duration of a segment, in tokens.
    """

    vocabulary: int = 8
    concentration: float = 1.0
    exponent: float = 1.5
    shortest: int = 128
    longest: int = 4096

    def __post_init__(self) -> None:
        if self.vocabulary < 2:
            raise UserError(f"vocabulary must be at least 2, got {self.vocabulary}")
        if self.concentration <= 0:
            raise UserError(f"concentration must be above 0, got {self.concentration}")
        if not 1 <= self.shortest <= self.longest:
            raise UserError(f"it must be 1 ≤ shortest ≤ longest, got {self.shortest} and {self.longest}")

    @cached_property
    def durations(self) -> Array:
        """(longest,): the probability that a segment lasts 1, 2, … tokens."""
        n = np.arange(1, self.longest + 1)
        law = np.where(n < self.shortest, 0.0, (n / self.shortest) ** -self.exponent)
        return law / law.sum()

    @cached_property
    def remainders(self) -> Array:
        """(longest,): the probability that a segment in progress has 1, 2, … tokens left."""
        at_least = _tails(self.durations)
        return at_least / at_least.sum()

    def draw(self, tokens: int, seed: Seed) -> Draw:
        """A stationary stream of `tokens` tokens, at least 1."""
        random = np.random.default_rng(seed)
        enough = tokens // self.shortest  # segments after the first; nearly always enough
        first = random.choice(self.longest, 1, p=self.remainders)
        lengths = 1 + np.append(first, random.choice(self.longest, enough, p=self.durations))
        while lengths.sum() < tokens:  # the first may be shorter than `shortest`
            lengths = np.append(lengths, 1 + random.choice(self.longest, p=self.durations))
        segments = np.repeat(np.arange(len(lengths)), lengths)[:tokens]
        sizes = np.bincount(segments)
        topics = random.dirichlet(np.full(self.vocabulary, self.concentration), len(sizes))
        drawn = [random.choice(self.vocabulary, size, p=topic) for size, topic in zip(sizes, topics, strict=True)]
        return Draw(np.concatenate(drawn), segments, topics)

    def nats_given_all(self, tokens: ArrayLike) -> Array:
        """(N,): the best possible loss of each token, given the source and all tokens before it."""
        return self._filter(np.asarray(tokens)[None])[0]

    def nats_given_recent(self, tokens: ArrayLike, slots: int, window: int) -> Array:
        """(N,): the same, given only the window so far and the `slots` tokens before it.

        Windows are those of `logpast.data.batching`: position 0 holds end-of-text, so window i first predicts
        tokens[i · window], from the slots + 1 tokens before it.
        """
        tokens, before = np.asarray(tokens), slots + 1
        early = (before // window + 1) * window  # up to here, windows see the whole past
        starts = np.arange(early, len(tokens), window)
        views = np.pad(tokens, (0, window))[starts[:, None] + np.arange(-before, window)]
        late = self._filter(views)[:, before:].ravel()
        return np.append(self.nats_given_all(tokens[:early]), late)[: len(tokens)]

    def _filter(self, views: NDArray[Any]) -> Array:
        """(B, T): the best possible loss of tokens (B, T), given each row from its first column on.

        Column s of `belief` is the probability that the current segment began at s, given the tokens so far; s = 0 is
        the segment that was in progress. Columns run from the oldest segment to the newest, so arrays that depend on
        a segment's age, t − s, run from `longest` downwards.
        """
        ends = _hazards(self.durations)[::-1]  # ages longest … 1
        first_ends = _hazards(self.remainders)  # ages 1 … longest
        drawn = self.vocabulary * self.concentration + np.arange(self.longest, -1, -1)  # ages longest … 0
        belief, nats = np.zeros(views.shape), np.empty(views.shape)
        belief[:, 0] = 1
        for t in range(views.shape[1]):
            oldest = max(0, t - self.longest)
            known, live = slice(oldest, t), slice(oldest, t + 1)
            if t:  # did the segment end before token t?
                ending = ends[oldest - t :].copy()
                if oldest == 0:
                    ending[0] = first_ends[t - 1]
                belief[:, t] = belief[:, known] @ ending
                belief[:, known] *= 1 - ending
            same = views[:, live] == views[:, t, None]
            same[:, -1] = False  # token t is predicted, not given
            seen = same[:, ::-1].cumsum(axis=1)[:, ::-1]
            joint = belief[:, live] * (self.concentration + seen) / drawn[oldest - t - 1 :]
            likelihood = joint.sum(axis=1)
            belief[:, live] = joint / likelihood[:, None]
            nats[:, t] = -np.log(likelihood)
        return nats


def _tails(law: Array) -> Array:
    """P(duration ≥ n), summed from the small end for precision."""
    return law[::-1].cumsum()[::-1]


def _hazards(law: Array) -> Array:
    """P(duration = n | duration ≥ n), which is 1 for the last n."""
    return law / _tails(law)
