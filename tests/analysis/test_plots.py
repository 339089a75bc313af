"""The plots of the analysis page: marks, bins, colours."""

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer

from logpast.analysis import plots
from logpast.reporting import palette


def last_seen(tokens: list[int]) -> dict[str, Any]:
    column = {"nats": [0.5, -0.25, 0.1], "interval": [None, [-0.5, 0.0], None]}
    return {"by_lag": {"from": [-1, 2, 4], "to": [-1, 3, 7], "tokens": tokens, "gain": column}}


def test_history_ends_within_the_bar_of_its_lag_on_its_logarithmic_scale() -> None:
    """Lag 6 of the bin 4 … 7 is log2(7/4) along the bar, which begins half a bar before its tick."""
    (axis,) = plots.last_seen_plot(last_seen([4, 4, 4]), {"model": 6, "control": 2}).axes
    ends = {text.get_text(): text.xy[0] for text in axis.texts if "history" in text.get_text()}
    assert ends == {
        "end of the model's history": pytest.approx(0.5 + math.log2(7 / 4)),
        "end of the control's history": pytest.approx(-0.5 + math.log2(3 / 2)),
    }


def test_history_that_ends_outside_all_bins_is_not_marked() -> None:
    (axis,) = plots.last_seen_plot(last_seen([4, 4, 4]), {"model": 100}).axes
    assert not [text for text in axis.texts if "history" in text.get_text()]


def test_bars_are_below_zero_where_the_loss_is_lower_than_the_controls() -> None:
    (axis,) = plots.last_seen_plot(last_seen([4, 4, 4]), {}).axes
    assert [bar.get_height() for bar in axis.patches] == [0.25, -0.1, -0.5]  # never comes last
    assert "below 0: lower loss" in axis.get_ylabel()


def test_bars_without_an_interval_have_no_marks_of_one() -> None:
    (axis,) = plots.last_seen_plot(last_seen([4, 4, 4]), {}).axes
    (bars,) = (each for each in axis.containers if isinstance(each, ErrorbarContainer))
    _, caps, _ = bars
    assert [np.isfinite(np.asarray(cap.get_ydata(), float)).tolist() for cap in caps] == [[True, False, False]] * 2


def test_never_is_the_last_bar_and_rare_bins_are_left_out() -> None:
    (axis,) = plots.last_seen_plot(last_seen([4, 4, 4]), {}).axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2–3", "4–7", "never"]
    (axis,) = plots.last_seen_plot(last_seen([4000, 4000, 1]), {}).axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["2–3", "never"]


def test_without_a_control_the_loss_is_drawn() -> None:
    part = last_seen([4, 4, 4])
    part["by_lag"]["model"] = part["by_lag"].pop("gain")
    (axis,) = plots.last_seen_plot(part, {}).axes
    assert axis.get_ylabel() == "nats per token"


def test_model_and_control_have_their_colours_in_every_plot(result: dict[str, Any]) -> None:
    for axis in (
        plots.position_plot(result["position"]).axes[0],
        plots.frequency_plot(result["frequency"]).axes[0],
        plots.stride_plot({name: result["stride"][name] for name in ("model", "control")}).axes[0],
    ):
        lines = {line.get_label(): to_hex(line.get_color()) for line in axis.lines}
        assert (lines["model"], lines["control"]) == (palette.MEMORY, palette.CONTROL)


def test_each_change_of_the_past_has_its_line(result: dict[str, Any]) -> None:
    (axis,) = plots.lags_plot(result["lags"]).axes
    lines = {line.get_label(): line for line in axis.lines}
    for way, (label, colour, _) in plots.CHANGES.items():
        assert list(lines[label].get_ydata()) == result["lags"][way]["increase"]
        assert to_hex(lines[label].get_color()) == colour
    del result["lags"]["replaced"]  # as in older analyses
    (axis,) = plots.lags_plot(result["lags"]).axes
    assert "replaced beyond lag d" not in [line.get_label() for line in axis.lines]


def test_slots_are_drawn_at_the_lag_of_their_peak(result: dict[str, Any]) -> None:
    (axis,) = plots.slots_plot(result["slots"]).axes
    points = axis.containers[0].lines[0]
    assert list(points.get_xdata()) == result["slots"]["lag"]
    assert list(points.get_ydata()) == result["slots"]["increase"]


def test_cells_of_recalls_heat_maps_are_orders_by_lags(result_recall: dict[str, Any]) -> None:
    part = result_recall["recall"]
    weight, share, calibration = plots.recall_plot(part).axes
    for axis, name in ((weight, "weight"), (share, "share")):
        cells = {text.xy: text.get_text() for text in axis.texts}
        assert cells == {(x, y): f"{part['components'][name][y][x]:.1%}" for x in range(2) for y in range(3)}
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1–8", "9–32"]
    line = calibration.lines[-1]
    gate = part["gate"]["calibration"]
    assert (list(line.get_xdata()), list(line.get_ydata())) == (gate["weight"], gate["share"])


def test_gain_of_recall_is_drawn_below_zero_where_the_loss_is_lower(result_recall: dict[str, Any]) -> None:
    gain = result_recall["recall"]["gain"]
    left, _ = plots.recall_gain_plot(gain).axes
    assert [bar.get_height() for bar in left.patches] == [-nats for nats in gain["position"]["gain"]["nats"]]
