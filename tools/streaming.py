"""The plot of benchmarks/streaming.py: time per new token and state, against the length of the text.

python -m tools.streaming results/streaming_{cpu-long,gpu}.json --plot docs/streaming.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from logpast.reporting.palette import CONTROL, MEMORY, RECALL
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.util.errors import UserError
from tools import gap

LINES = {
    "log_memory": ("our model with recall", MEMORY, "s-"),
    "attached": ("a Llama with recall", RECALL, "o-"),
    "dynamic_cache": ("the same, with a KV cache", CONTROL, "D-"),
}


def lines(report: dict[str, Any], value: str) -> dict[str, list[tuple[int, float]]]:
    """By system: (length of the text, value), as far as the memory went."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in report["rows"]:
        if row["what"] == "generate" and row["milliseconds"] is not None:
            found.setdefault(row["system"], []).append((row["past"], row[value]))
    return found


def draw(reports: list[dict[str, Any]], out: Path) -> None:
    """A panel of times per report, and the state in the last one."""
    from matplotlib.figure import Figure

    check_plot_path(out)
    figure = Figure(figsize=(3.6 * (len(reports) + 1), 3.2), layout="constrained")
    *timed, state = figure.subplots(1, len(reports) + 1)
    panels = [(axis, report, "milliseconds") for axis, report in zip(timed, reports, strict=True)]
    for axis, report, value in [*panels, (state, reports[-1], "state_bytes")]:
        for system, line in lines(report, value).items():
            label, colour, form = LINES[system]
            axis.plot([past for past, _ in line], [y for _, y in line], form, color=colour, label=label)
        axis.set(xscale="log", xlabel="length of the text, tokens")
        remove_frame(axis)
    for axis, report in zip(timed, reports, strict=True):
        hardware = report["hardware"]
        device = hardware["name"] if hardware["device"] == "cuda" else "CPU"
        axis.set(title=f"milliseconds per new token, {device}", ylim=(0, 1.05 * axis.get_ylim()[1]))
    state.set(title="state of one text, bytes", yscale="log")
    state.legend(frameon=False, fontsize=8)
    write_plot(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.streaming", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what benchmarks/streaming.py wrote; the last: its state")
    parser.add_argument("--plot", type=Path, required=True, help="image file")
    args = parser.parse_args()
    draw([gap.read(path) for path in args.reports], args.plot)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"streaming: {error}")
