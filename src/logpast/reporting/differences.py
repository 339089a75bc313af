"""Differences between two losses as text. A difference is always this − other: negative where this loss is lower."""

from __future__ import annotations

from collections.abc import Sequence

from logpast.evaluation.metrics import LEVEL, MIN_DOCUMENTS, perplexity

Interval = Sequence[float] | None

NEGATIVE_IS_LOWER = "negative: lower loss"  # for heads of columns


def in_words(nats: float, interval: Interval = None, digits: int = 4) -> str:
    """A difference in words: lower by 0.0256 nats/token (2.5 %), 95 % interval: 0.0203 to 0.0313 lower.

    Args:
        nats: nats per token, this − other.
        interval: its bounds, if there are any.
        digits: decimals of the nats.

    Returns:
        The text. The percentage is that of perplexity.
    """
    percent = abs(perplexity(nats, 1) - 1)
    text = f"{_direction(nats)} by {abs(nats):.{digits}f} nats/token ({100 * percent:.1f} %)"
    if interval is None:
        return text
    low, high = interval
    near, far = (f"{size:.{digits}f}" for size in sorted((abs(low), abs(high))))
    ends = f"{near} to {far} {_direction(low)}"
    if low < 0 < high:
        ends = f"{-low:.{digits}f} lower to {high:.{digits}f} higher"
    return f"{text}, {100 * LEVEL:g} % interval: {ends}"


def _direction(nats: float) -> str:
    return "lower" if nats < 0 else "higher"


def too_few(documents: int) -> str:
    """Why there is no interval."""
    return f"too few documents ({documents}) for an interval; at least {MIN_DOCUMENTS} are needed"


def signed(nats: float | None, interval: Interval = None) -> str:
    """A difference and its interval as numbers: -0.0586 [-0.0713, -0.0470]."""
    between = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
    return "–" if nats is None else f"{nats:+.4f}{between}"
