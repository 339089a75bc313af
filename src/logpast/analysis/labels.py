"""Numbers of an analysis as they are shown: differences from the control, bins."""

from __future__ import annotations

from typing import Any


def difference(gain: dict[str, Any]) -> dict[str, Any]:
    """Model − control, from a stored gain, which is control − model: negative where the model's loss is lower."""
    return {
        "nats": [None if nats is None else 0 - nats for nats in gain["nats"]],
        "interval": [None if bounds is None else [0 - bounds[1], 0 - bounds[0]] for bounds in gain["interval"]],
    }


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
