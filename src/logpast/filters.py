"""The filter bank: impulse responses whose peaks are evenly spaced on a logarithmic time axis.

The response of filter i to an input t steps ago is

    Φ(t, τ*) = k^(k+1)/k! · (t/τ*)^k · e^(−kt/τ*),        τ*_i = first_peak · (1 + spacing)^(i−1).

It peaks at t = τ*, and its width is proportional to τ*: all filters have the same shape, stretched.
`sharpness` is k. Everything is computed in float64 and in log space, so that k! never overflows.

Kernels (impulse responses), each evaluated at whole lags t = 1 … horizon:

    paper     Φ as above. The area under it is τ*, not 1.
    isith     exponent k + 1, peak at τ*(k+1)/k, area 1: the SITH family's older form
              (except for the constant, which in that code gives an area of (k+1)/k).
    binned    the exact mass of the gamma density τ*⁻¹Φ between t − ½ and t + ½.

To add one, write a function and enter it in `IMPULSE_RESPONSES` and `Kernel`.

Normalisations, per filter: `none` (the paper), `area` (weights sum to 1), `peak` (largest weight is 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Kernel = Literal["paper", "isith", "binned"]
Normalize = Literal["none", "area", "peak"]
Array = NDArray[np.float64]

MOST_SHARP = 1e6  # above this, filters are narrower than one lag at any horizon that fits in memory
#: The paper prints c = 0.19; only 2^(1/4) − 1 gives its windows 2, 4, … 8192.
PAPER_SPACING = 2**0.25 - 1


@dataclass(frozen=True)
class FilterBank:
    """`slots` filters with geometrically spaced peaks; the module docstring has the formulas.

    Args:
        slots: L, the number of filters.
        sharpness: k. A larger k gives narrower filters; 100, 150 and 200 in the paper.
        spacing: c. Each peak is 1 + c times the one before.
        first_peak: τ* of the first filter, in tokens.
        kernel: the impulse response: `paper`, `isith` or `binned`.
        normalize: the scale of each filter: `none`, `area` or `peak`.
        reach: horizon / last peak. The paper truncates all filters at the last peak (1.0).
    """

    slots: int = 53
    sharpness: float = 100
    spacing: float = PAPER_SPACING
    first_peak: float = 1.0
    kernel: Kernel = "paper"
    normalize: Normalize = "none"
    reach: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.slots, bool) or not isinstance(self.slots, Integral) or self.slots < 1:
            raise ValueError(f"slots must be a whole number of at least 1, got {self.slots!r}")
        object.__setattr__(self, "slots", int(self.slots))  # from a NumPy integer, too
        for name in ("sharpness", "spacing", "first_peak", "reach"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.sharpness > MOST_SHARP:
            raise ValueError(f"sharpness must be at most {MOST_SHARP:g}, got {self.sharpness!r}")
        for name, allowed in (("kernel", list(IMPULSE_RESPONSES)), ("normalize", get_args(Normalize))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        log_horizon = math.log(self.first_peak * self.reach) + (self.slots - 1) * math.log1p(self.spacing)
        if log_horizon + math.log(self.slots) > math.log(2**30):
            raise ValueError(
                f"slots={self.slots} with spacing={self.spacing:.4g} and reach={self.reach:g} gives a bank of more "
                "than 2^30 weights; use fewer slots, a smaller spacing or a smaller reach"
            )
        largest = self._log_weights.max(axis=1)
        dead = np.flatnonzero(largest < -700 if self.normalize == "none" else np.isneginf(largest))
        if dead.size:
            raise ValueError(
                f"the filter with its peak at {self.peaks[dead[0]]:.4g} (sharpness={self.sharpness:g}) has no "
                "weight at any whole lag; use normalize='area', a smaller sharpness or a larger first_peak"
            )

    @cached_property
    def peaks(self) -> Array:
        """(L,): τ*, nearest first."""
        return _frozen(self.first_peak * (1 + self.spacing) ** np.arange(self.slots, dtype=np.float64))

    @cached_property
    def horizon(self) -> int:
        """M, the longest lag with a weight."""
        return max(1, round(self.reach * float(self.peaks[-1])))

    @cached_property
    def weights(self) -> Array:
        """(L, M): row i is filter i, column j is lag j + 1."""
        log = self._log_weights
        if self.normalize == "area":
            log = log - np.logaddexp.reduce(log, axis=1, keepdims=True)
        elif self.normalize == "peak":
            log = log - log.max(axis=1, keepdims=True)
        return _frozen(np.exp(log))

    def support(self, tolerance: float = 0.0) -> NDArray[np.int64]:
        """(L, 2): for each filter, the columns [start, stop) whose weight exceeds `tolerance` × its largest weight.

        An absolute threshold would drop a filter whose peak falls between two lags: all its weights can be small
        (k = 200, third slot: 9e−5).
        """
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance!r}")
        weights = self.weights
        keep = weights > tolerance * weights.max(axis=1, keepdims=True)
        return np.stack([keep.argmax(axis=1), self.horizon - keep[:, ::-1].argmax(axis=1)], axis=1)

    @cached_property
    def _log_weights(self) -> Array:
        """ln of the weights before normalisation."""
        lags = np.arange(1, self.horizon + 1, dtype=np.float64)
        return IMPULSE_RESPONSES[self.kernel].log(lags, self.peaks, self.sharpness)


def impulse_response(times: ArrayLike, peaks: ArrayLike, sharpness: float, kernel: Kernel = "paper") -> Array:
    """(filters, times): the impulse response as a smooth curve, at any times ≥ 0."""
    smooth = [name for name, response in IMPULSE_RESPONSES.items() if response.smooth]
    if kernel not in smooth:
        raise ValueError(f"kernel {kernel!r} has no smooth curve; use one of {', '.join(smooth)}")
    at, centres = np.atleast_1d(np.asarray(times, np.float64)), np.atleast_1d(np.asarray(peaks, np.float64))
    if not (at >= 0).all():
        raise ValueError(f"times must be 0 or above, got {at[~(at >= 0)][0]}")
    with np.errstate(divide="ignore"):  # the response at time 0 is 0, its logarithm −∞
        return np.exp(IMPULSE_RESPONSES[kernel].log(at, centres, sharpness))


def paper_horizon(slots: int) -> int:
    """τ*max of the paper's bank with this many filters: 2 for 5, … 8192 for 53."""
    return round(2 ** (max(0, min(slots, 249) - 1) / 4))  # with more slots it exceeds the length of any text


class ImpulseResponse(NamedTuple):
    """One kernel."""

    log: Callable[[Array, Array, float], Array]
    """(times (T,), peaks (L,), k) -> ln of the response (L, T)"""
    smooth: bool = True
    """whether it is defined between whole lags, too"""


def _log_paper(times: Array, peaks: Array, k: float) -> Array:
    t = times[None, :] / peaks[:, None]
    return (k + 1) * math.log(k) - math.lgamma(k + 1) + k * (np.log(t) - t)


def _log_isith(times: Array, peaks: Array, k: float) -> Array:
    t = times[None, :] / peaks[:, None]
    log_scale = (k + 2) * math.log(k) - math.lgamma(k + 2) - np.log(peaks)[:, None]
    return log_scale + k * (np.log(t) - t) + np.log(t)


def _log_binned(lags: Array, peaks: Array, k: float) -> Array:
    """ln of the gamma distribution's mass (shape k + 1, scale τ*/k) over [t − ½, t + ½], for lags t = 1, 2, …"""
    import torch  # only for its incomplete gamma functions; this kernel is rarely used

    edges = np.append(lags - 0.5, lags[-1] + 0.5)
    x = torch.from_numpy(k * edges[None, :] / peaks[:, None])
    shape = torch.full_like(x, k + 1)
    below, above = torch.special.gammainc(shape, x).numpy(), torch.special.gammaincc(shape, x).numpy()
    # take differences of the smaller tail: the larger one has rounded to 1
    mass = np.where(below[:, 1:] < 0.5, np.diff(below, axis=1), -np.diff(above, axis=1))
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(mass, 0.0))


IMPULSE_RESPONSES: dict[Kernel, ImpulseResponse] = {
    "paper": ImpulseResponse(_log_paper),
    "isith": ImpulseResponse(_log_isith),
    "binned": ImpulseResponse(_log_binned, smooth=False),
}
assert tuple(IMPULSE_RESPONSES) == get_args(Kernel), "Kernel and IMPULSE_RESPONSES must name the same kernels"


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
