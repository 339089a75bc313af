"""The filter bank against its formulas and the paper's numbers."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logpast.filters import (
    IMPULSE_RESPONSES,
    PAPER_SPACING,
    FilterBank,
    ImpulseResponse,
    Kernel,
    impulse_response,
    paper_horizon,
)

KERNELS: tuple[Kernel, ...] = get_args(Kernel)

# ΣΦ/τ* per slot, paper kernel, L = 53
SUMS = {
    200: [5.640, 0.2780, 9.203e-5, 0.1389, 2.820, 0.1459, 1.400, 0.5450, 1.417, 0.9938],
    100: [3.986, 0.8116, 0.0164, 0.4824, 1.993],
}
LAST_SUMS = {200: [0.9934, 0.4815], 100: [0.9574, 0.4737]}


def test_horizons_are_the_papers_windows() -> None:
    horizons = [FilterBank(slots=slots).horizon for slots in range(5, 54, 4)]
    assert horizons == [2**n for n in range(1, 14)]
    assert horizons == [paper_horizon(slots) for slots in range(5, 54, 4)]
    assert paper_horizon(10_000) > 2**60


@pytest.mark.parametrize("k", [100, 200])
def test_sums_of_the_papers_filters(k: int) -> None:
    bank = FilterBank(sharpness=k)
    assert bank.peaks.shape == (53,)
    assert bank.weights.shape == (53, 8192)
    assert bank.weights.dtype == np.float64
    sums = bank.weights.sum(axis=1) / bank.peaks
    np.testing.assert_allclose(sums[: len(SUMS[k])], SUMS[k], rtol=5e-3)
    np.testing.assert_allclose(sums[-2:], LAST_SUMS[k], rtol=2e-4)
    np.testing.assert_allclose(sums[20:45], 1, atol=1e-3)


def test_weights_equal_the_printed_formula() -> None:
    bank = FilterBank(slots=9, sharpness=7, spacing=0.5, first_peak=1.5, reach=2)
    for peak, row in zip(bank.peaks, bank.weights, strict=True):
        for t in range(1, bank.horizon + 1):
            x = t / peak
            assert row[t - 1] == pytest.approx(7**8 / math.factorial(7) * x**7 * math.exp(-7 * x), rel=1e-12)


def test_isith_has_area_one_and_its_later_peak() -> None:
    bank = FilterBank(slots=45, sharpness=20, kernel="isith", reach=3)
    wide = bank.peaks > 20
    np.testing.assert_allclose(bank.weights.sum(axis=1)[wide], 1, atol=1e-6)
    np.testing.assert_allclose((bank.weights.argmax(axis=1) + 1)[wide], bank.peaks[wide] * 21 / 20, atol=1)


def test_binned_is_the_integral_of_the_density() -> None:
    bank = FilterBank(slots=12, sharpness=30, spacing=0.4, kernel="binned", reach=1.5)
    fine = np.linspace(0, 1, 20001)
    for lag in (1, 2, 5, 11, bank.horizon):
        edges = lag - 0.5 + fine
        density = impulse_response(edges, bank.peaks, 30) / bank.peaks[:, None]
        np.testing.assert_allclose(bank.weights[:, lag - 1], np.trapezoid(density, edges, axis=1), atol=1e-8)


def test_numpy_numbers_are_accepted() -> None:
    bank = FilterBank(slots=np.int64(5), sharpness=np.float32(25))  # type: ignore[arg-type]
    assert bank == FilterBank(slots=5, sharpness=25)
    assert type(bank.slots) is int
    np.testing.assert_array_equal(bank.weights, FilterBank(slots=5, sharpness=25).weights)


def test_binned_is_accurate_in_the_far_tail() -> None:
    """There the cumulative mass has rounded to 1."""
    bank = FilterBank(slots=53, sharpness=100, kernel="binned", reach=3)
    lags = np.arange(1, bank.horizon + 1)
    density = impulse_response(lags, bank.peaks[-1:], 100)[0] / bank.peaks[-1]
    far = (lags > bank.peaks[-1]) & (density > 2e-13 * density.max())
    np.testing.assert_allclose(bank.weights[-1, far], density[far], rtol=0.01)


def test_binned_matches_paper_where_filters_are_wide() -> None:
    binned, paper = (FilterBank(slots=53, kernel=kernel) for kernel in ("binned", "paper"))
    np.testing.assert_allclose(binned.weights[40], paper.weights[40] / paper.peaks[40], atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("k", [1, 10, 100, 2000])
def test_normalisations(kernel: Kernel, k: float) -> None:
    area = FilterBank(slots=33, sharpness=k, kernel=kernel, normalize="area")
    np.testing.assert_allclose(area.weights.sum(axis=1), 1, rtol=1e-12)
    peak = FilterBank(slots=33, sharpness=k, kernel=kernel, normalize="peak")
    assert (peak.weights.max(axis=1) == 1).all()
    assert np.isfinite(area.weights).all()
    ratio = area.weights[20] / area.weights[20].max()
    np.testing.assert_allclose(ratio, peak.weights[20], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("kernel", ["paper", "isith"])
def test_a_smooth_curve_equals_the_weights_at_whole_lags_and_is_zero_at_zero(kernel: Kernel) -> None:
    bank = FilterBank(slots=9, sharpness=10, kernel=kernel)
    curve = impulse_response([0, *range(1, bank.horizon + 1)], bank.peaks.tolist(), 10, kernel)
    np.testing.assert_array_equal(curve[:, 1:], bank.weights)
    assert not curve[:, 0].any()


@pytest.mark.parametrize("kernel", ["binned", "gauss"])
def test_kernels_without_a_smooth_curve_are_refused_by_name(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match=rf"'{kernel}'.*paper, isith"):
        impulse_response(np.ones(1), np.ones(1), 10, kernel)


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match=r"times.*-2"):
        impulse_response(np.array([1.0, -2.0]), np.ones(1), 10)


def test_an_unknown_kernel_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"kernel.*paper, isith, binned.*'gauss'"):
        FilterBank(slots=5, kernel="gauss")  # type: ignore[arg-type]


def test_a_kernel_is_added_by_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = ImpulseResponse(lambda times, peaks, k: np.zeros((len(peaks), len(times))))
    monkeypatch.setitem(IMPULSE_RESPONSES, "flat", flat)
    bank = FilterBank(slots=5, kernel="flat")  # type: ignore[arg-type]
    assert (bank.weights == 1).all()
    assert (impulse_response([0.5], bank.peaks, 1, "flat") == 1).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [500, 1000, 2000])
def test_large_sharpness_does_not_overflow(k: float) -> None:
    weights = FilterBank(sharpness=k).weights
    assert np.isfinite(weights).all()
    assert (weights.max(axis=1) > 0).all()


@given(
    slots=st.integers(1, 40),
    k=st.floats(1, 2000),
    tolerance=st.sampled_from([1e-3, 1e-7, 1e-13, 2.2e-16]),
    reach=st.floats(0.3, 3),
)
def test_support_is_tight_and_relative_to_each_filter(slots: int, k: float, tolerance: float, reach: float) -> None:
    bank = FilterBank(slots=slots, sharpness=k, reach=reach, normalize="area")
    for (start, stop), row in zip(bank.support(tolerance), bank.weights, strict=True):
        assert 0 <= start < stop <= bank.horizon
        large = np.flatnonzero(row > tolerance * row.max())
        assert (large[0], large[-1] + 1) == (start, stop)


def test_support_keeps_the_measured_share_of_the_weights() -> None:
    bank = FilterBank(sharpness=100)
    for tolerance, share in ((1e-7, 0.11), (1e-13, 0.14)):
        start, stop = bank.support(tolerance).T
        assert (stop - start).sum() / bank.weights.size == pytest.approx(share, abs=0.01)


def test_a_filter_with_small_weights_keeps_its_support() -> None:
    """The third slot's weights, about 1e−4, are below a threshold relative to the bank's largest weight."""
    bank = FilterBank(sharpness=200)
    start, stop = bank.support(1e-3)[2]
    assert (start, stop) == (0, 2)
    assert bank.weights[2].max() < 1e-3 * bank.weights.max()


@pytest.mark.parametrize("tolerance", [1.0, -0.1, math.nan])
def test_an_illegal_tolerance_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        FilterBank(slots=5).support(tolerance)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", 0), ("slots", -1), ("slots", 2.5), ("slots", True), ("sharpness", 0), ("sharpness", math.nan),
        ("sharpness", math.inf), ("spacing", 0), ("spacing", -0.1), ("first_peak", 0), ("reach", 0), ("reach", -1),
        ("sharpness", 2e6), ("normalize", "sum"),
    ],
)  # fmt: skip
def test_illegal_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        FilterBank(**{name: value})  # type: ignore[arg-type]


def test_a_bank_that_does_not_fit_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="slots=200"):
        FilterBank(slots=200)


def test_a_filter_without_weight_is_refused_unless_normalised() -> None:
    with pytest.raises(ValueError, match=r"peak at 0\.1"):
        FilterBank(slots=20, sharpness=2000, first_peak=0.1)
    alive = FilterBank(slots=20, sharpness=2000, first_peak=0.1, normalize="area")
    np.testing.assert_allclose(alive.weights.sum(axis=1), 1)


def test_weights_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        FilterBank(slots=3).weights[0, 0] = 1


def test_the_papers_spacing_differs_from_the_printed_one() -> None:
    assert PAPER_SPACING == pytest.approx(0.189207, abs=1e-6)
    assert round(1.19**52) == 8481
