"""benchmarks/streaming.py: its rows; tools/streaming.py: their plot."""

import json
from pathlib import Path

import pytest
from benchmarks import streaming
from tools.streaming import draw, lines


def test_rows_of_all_systems_with_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a stream is constant once it is full; that of a KV cache grows with the text."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(streaming, "VOCABULARY", 300)
    sizes = ["--layers", "1", "--width", "64", "--window", "16", "--recall", "500", "--repeats", "2", "--steps", "2"]
    systems = ["--systems", "log_memory", "attached", "dynamic_cache"]
    streaming.main(["--tokens", "10000", *sizes, *systems, "--out", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["system"], row["what"], row["past"]) for row in rows] == [
        *(("log_memory", what, past) for what in ("generate", "read") for past in (1000, 10000)),
        *(("attached", what, past) for what in ("generate", "read") for past in (1000, 10000)),
        *(("dynamic_cache", "generate", past) for past in (1000, 10000)),
    ]
    assert all(row["ratio"] == 1 for row in rows if row["past"] == 1000)
    attached, cache = ([row["state_bytes"] for row in rows if row["system"] == name and row["what"] == "generate"]
                       for name in ("attached", "dynamic_cache"))  # fmt: skip
    assert attached[0] == attached[1] < 4 * 600
    assert cache[1] == 10 * cache[0]


def test_plot_shows_lengths_that_were_measured(tmp_path: Path) -> None:
    rows = [
        {"system": "dynamic_cache", "what": "generate", "past": past, "milliseconds": time, "state_bytes": 10 * past}
        for past, time in ((1000, 5.0), (10_000, None))
    ]
    report = {"rows": rows, "hardware": {"device": "cpu"}}
    assert lines(report, "state_bytes") == {"dynamic_cache": [(1000, 10_000)]}
    draw([report, report], tmp_path / "plot.svg")
    assert "<!-- the same, with a KV cache -->" in (tmp_path / "plot.svg").read_text()
