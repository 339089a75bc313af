"""The filter bank: a few impulse responses whose peaks lie evenly on a logarithmic time axis.

Filter i answers to an input t steps ago with

    Φ(t, τ*) = k^(k+1)/k! · (t/τ*)^k · e^(−kt/τ*),        τ*_i = first_peak · (1 + spacing)^(i−1),

a bump with its peak at t = τ* and a width in proportion to τ*: all filters are one shape, stretched.
`sharpness` is k. Everything is built in float64 and in log space, so that k! never overflows.

Kernels, each for whole lags t = 1 … horizon:

    paper     Φ as above. The area under it is τ*, not 1.
    isith     exponent k + 1, peak at τ*(k+1)/k, area 1: the SITH family's older form
              (up to its constant, which in that code leaves an area of (k+1)/k).
    binned    the exact mass of the gamma density τ*⁻¹Φ between t − ½ and t + ½.

Normalisations, per filter: `none` (the paper), `area` (weights sum to 1), `peak` (largest weight is 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Kernel = Literal["paper", "isith", "binned"]
Normalize = Literal["none", "area", "peak"]
Array = NDArray[np.float64]

MOST_SHARP = 1e6  # beyond, filters are narrower than a lag over any horizon that can be held
#: The paper prints c = 0.19; only 2^(1/4) − 1 gives its windows 2, 4, … 8192.
PAPER_SPACING = 2**0.25 - 1


@dataclass(frozen=True)
class FilterBank:
    """`slots` filters with geometrically spaced peaks; see the module's text for the formulas.

    Args:
        slots: L, the number of filters.
        sharpness: k. A larger k gives narrower filters; 100, 150 and 200 in the paper.
        spacing: c. Each peak is 1 + c times the one before.
        first_peak: τ* of the first filter, in tokens.
        kernel: the impulse response: `paper`, `isith` or `binned`.
        normalize: the scale of each filter: `none`, `area` or `peak`.
        reach: horizon / last peak. The paper cuts all filters off at the last peak (1.0).
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
        object.__setattr__(self, "slots", int(self.slots))  # NumPy's numbers, too, as Python's
        for name in ("sharpness", "spacing", "first_peak", "reach"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.sharpness > MOST_SHARP:
            raise ValueError(f"sharpness must be at most {MOST_SHARP:g}, got {self.sharpness!r}")
        for name, allowed in (("kernel", get_args(Kernel)), ("normalize", get_args(Normalize))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        log_horizon = math.log(self.first_peak * self.reach) + (self.slots - 1) * math.log1p(self.spacing)
        if log_horizon + math.log(self.slots) > math.log(2**30):
            raise ValueError(
                f"slots={self.slots} with spacing={self.spacing:.4g} and reach={self.reach:g} makes a bank of more "
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
        """M, the longest lag that any filter sees."""
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
        """(L, 2): for each filter the columns [start, stop) whose weight exceeds `tolerance` × its own largest.

        Relative to the filter's own largest weight, because a filter whose peak falls between two lags can be
        small everywhere (k = 200, third slot: 9e−5) and would vanish under an absolute threshold.
        """
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance!r}")
        weights = self.weights
        keep = weights > tolerance * weights.max(axis=1, keepdims=True)
        return np.stack([keep.argmax(axis=1), self.horizon - keep[:, ::-1].argmax(axis=1)], axis=1)

    @cached_property
    def _log_weights(self) -> Array:
        """ln of the weights before normalisation."""
        if self.kernel == "binned":
            return _log_gamma_mass(self.sharpness, self.peaks, self.horizon)
        lags = np.arange(1, self.horizon + 1, dtype=np.float64)
        return _log_impulse_response(lags, self.peaks, self.sharpness, self.kernel)


def impulse_response(times: ArrayLike, peaks: ArrayLike, sharpness: float, kernel: Kernel = "paper") -> Array:
    """(filters, times): Φ at any times from 0 on, for drawing it as the smooth curve that it is."""
    if kernel not in ("paper", "isith"):
        raise ValueError(f"kernel must be paper or isith, got {kernel!r}; binned has a mass at each lag and no curve")
    at, centres = np.atleast_1d(np.asarray(times, np.float64)), np.atleast_1d(np.asarray(peaks, np.float64))
    if not (at >= 0).all():
        raise ValueError(f"times must be 0 or above, got {at[~(at >= 0)][0]}: nothing is known of the future")
    with np.errstate(divide="ignore"):  # at 0 it is 0
        return np.exp(_log_impulse_response(at, centres, sharpness, kernel))


def paper_horizon(slots: int) -> int:
    """τ*max of the paper's bank with this many filters: 2 for 5, … 8192 for 53."""
    return round(2 ** (max(0, min(slots, 249) - 1) / 4))  # beyond 249 slots it is past any text


def _log_impulse_response(times: Array, peaks: Array, k: float, kernel: Kernel) -> Array:
    t = times[None, :] / peaks[:, None]
    log_shape = k * (np.log(t) - t)
    if kernel == "paper":
        return (k + 1) * math.log(k) - math.lgamma(k + 1) + log_shape
    log_scale = (k + 2) * math.log(k) - math.lgamma(k + 2) - np.log(peaks)[:, None]
    return log_scale + log_shape + np.log(t)


def _log_gamma_mass(k: float, peaks: Array, horizon: int) -> Array:
    """ln of the gamma distribution's mass (shape k + 1, scale τ*/k) over [t − ½, t + ½], t = 1 … horizon."""
    import torch  # its incomplete gamma functions are the only need for torch here, and this kernel is rare

    edges = np.arange(horizon + 1, dtype=np.float64) + 0.5
    x = torch.from_numpy(k * edges[None, :] / peaks[:, None])
    shape = torch.full_like(x, k + 1)
    below, above = torch.special.gammainc(shape, x).numpy(), torch.special.gammaincc(shape, x).numpy()
    # differences of whichever tail is the smaller: the other one has rounded to 1
    mass = np.where(below[:, 1:] < 0.5, np.diff(below, axis=1), -np.diff(above, axis=1))
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(mass, 0.0))


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
