"""Numbers of an analysis as text: differences with their intervals, bins."""

from __future__ import annotations

from typing import Any


def signed(value: float | None, interval: list[float] | None) -> str:
    """A difference and its interval: +0.0586 [+0.0470, +0.0713]."""
    between = f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
    return "–" if value is None else f"{value:+.4f}{between}"


def spans(part: dict[str, Any]) -> list[tuple[int, int]]:
    """The first and last value of each bin."""
    return list(zip(part["from"], part["to"], strict=True))


def span(first: int, last: int) -> str:
    """A bin: 64–127, or 3 if it holds a single value."""
    return _short(first) if first == last else f"{_short(first)}–{_short(last)}"


def _short(number: int) -> str:
    """1023 is 1,023; 1048575 is 1.05M."""
    if number < 10_000:
        return f"{number:,}"
    return f"{number / 1e3:.3g}k" if number < 999_500 else f"{number / 1e6:.3g}M"
