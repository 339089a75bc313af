"""A source whose past has a known worth: a stream of drifting topics, and the least loss that can be had on it.

The stream is cut into segments. Each segment draws a topic, that is, a distribution over the tokens, from a
symmetric Dirichlet, and every token of the segment is drawn from it. Durations follow a power law,
P(n) ∝ n^−exponent from `shortest` to `longest` tokens. Topics never come back, so all there is to know is how old the
present topic is and which tokens it has given; the longer a past one sees, the better one knows it.

Two optima, in nats for every token, by exact Bayesian filtering over where the present segment began:

    nats_given_all       from the whole past of the stream: no model does better in the long run;
    nats_given_recent    from the window and the L tokens before it, all that the delta control sees: no model that
                         sees only these does better in the long run.

The stream is stationary, as if it had been running for ever before its first token. So whoever begins to look, at its
start or in its midst, finds a segment under way, more likely a long one than a short one: what is left of it follows
the equilibrium law P(n) ∝ P(duration ≥ n), and to see the stream's start is to learn nothing.
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
    """A stream and how it came about: tokens (N,), the segment that each is of (N,), each segment's topic (S, V)."""

    tokens: Ints
    segments: Ints
    topics: Array

    @property
    def nats(self) -> Array:
        """(N,): what each token costs those who know its topic; no optimum is below this in the mean."""
        return -np.log(self.topics[self.segments, self.tokens])


@dataclass(frozen=True)
class Topics:
    """The source; see the module's text.

    Args:
        vocabulary: how many tokens there are.
        concentration: of the Dirichlet. Below 1 a topic has a few frequent tokens; far above 1 all are much alike.
        exponent: of the power law of durations. The smaller, the more of the stream lies in long segments.
        shortest: the least duration of a segment, in tokens.
        longest: the greatest.
    """

    vocabulary: int = 8
    concentration: float = 1.0
    exponent: float = 1.5
    shortest: int = 128
    longest: int = 4096

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.concentration <= 0:
            raise UserError(f"topics need 2 tokens or more and a concentration above 0, got {self}")
        if not 1 <= self.shortest <= self.longest:
            raise UserError(f"durations must have 1 ≤ shortest ≤ longest, got {self.shortest} and {self.longest}")

    @cached_property
    def durations(self) -> Array:
        """(longest,): the probability that a segment lasts 1, 2, … tokens."""
        n = np.arange(1, self.longest + 1)
        law = np.where(n < self.shortest, 0.0, (n / self.shortest) ** -self.exponent)
        return law / law.sum()

    @cached_property
    def remainders(self) -> Array:
        """(longest,): the probability that a segment found under way has 1, 2, … tokens to go."""
        at_least = _tails(self.durations)
        return at_least / at_least.sum()

    def draw(self, tokens: int, seed: Seed) -> Draw:
        """A stationary stream of so many tokens, 1 or more."""
        random = np.random.default_rng(seed)
        enough = tokens // self.shortest  # segments after the first: nearly always
        under_way = random.choice(self.longest, 1, p=self.remainders)
        lasting = 1 + np.append(under_way, random.choice(self.longest, enough, p=self.durations))
        while lasting.sum() < tokens:  # the first may be shorter than `shortest`
            lasting = np.append(lasting, 1 + random.choice(self.longest, p=self.durations))
        segments = np.repeat(np.arange(len(lasting)), lasting)[:tokens]
        sizes = np.bincount(segments)
        topics = random.dirichlet(np.full(self.vocabulary, self.concentration), len(sizes))
        drawn = [random.choice(self.vocabulary, size, p=topic) for size, topic in zip(sizes, topics, strict=True)]
        return Draw(np.concatenate(drawn), segments, topics)

    def nats_given_all(self, tokens: ArrayLike) -> Array:
        """(N,): the least loss of each token for those who know the source and have seen all tokens before it."""
        return self._filter(np.asarray(tokens)[None])[0]

    def nats_given_recent(self, tokens: ArrayLike, slots: int, window: int) -> Array:
        """(N,): the same for those who see only the window so far and the `slots` places before it.

        Windows lie as in `logpast.data.batching`: place 0 holds end-of-text, so that window i first predicts
        tokens[i · window], from the slots + 1 tokens before it.
        """
        tokens, before = np.asarray(tokens), slots + 1
        early = (before // window + 1) * window  # up to here windows see back to the start: all there is
        starts = np.arange(early, len(tokens), window)
        views = np.pad(tokens, (0, window))[starts[:, None] + np.arange(-before, window)]
        late = self._filter(views)[:, before:].ravel()
        return np.append(self.nats_given_all(tokens[:early]), late)[: len(tokens)]

    def _filter(self, views: NDArray[Any]) -> Array:
        """(B, T): the nats of tokens (B, T) for those who see each row from its first column on.

        Column s of `belief` is the probability that the present segment began at s, given what was seen so far;
        s = 0 is the segment that was under way. Columns run from the oldest segment to the newest, so all that
        depends on a segment's age, t − s, is laid out from `longest` down.
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
            same[:, -1] = False  # token t is not seen, but predicted
            seen = same[:, ::-1].cumsum(axis=1)[:, ::-1]
            joint = belief[:, live] * (self.concentration + seen) / drawn[oldest - t - 1 :]
            likelihood = joint.sum(axis=1)
            belief[:, live] = joint / likelihood[:, None]
            nats[:, t] = -np.log(likelihood)
        return nats


def _tails(law: Array) -> Array:
    """P(n or more), summed from the small end."""
    return law[::-1].cumsum()[::-1]


def _hazards(law: Array) -> Array:
    """P(n, given n or more): 1 at the last."""
    return law / _tails(law)
