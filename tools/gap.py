"""The table and the plot of benchmarks/pretrained_gap.py: loss against state and time, and the share of the gap closed.

    python -m tools.gap results/pretrained_gap-{pg19,wiki}.json --plot docs/pretrained-gap.png

The share of the gap closed is (window − ours) / (window − full attention). `window` is the same attention without
memory. Rows with lora are compared with rows with lora; there, `window` of a row with slots is the control with plain
tokens in their place.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logpast.reporting.differences import NEGATIVE_IS_LOWER, signed
from logpast.reporting.palette import CONTROL, INK, RECALL
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.reporting.tables import Table, as_markdown, as_text
from logpast.util.errors import UserError

Row = dict[str, Any]
COSTS: dict[str, Callable[[Row], float | None]] = {  # None: not measured
    "state": lambda row: float(row["state_bytes"]) / 2**20,
    "time": lambda row: list(row.get("ms_per_token", {"": None}).values())[-1],  # for the most texts at once
}
MARKERS = {"disjoint": "s", "sliding": "o", "full": "D"}


def rows_of(report: dict[str, Any], text: str) -> list[Row]:
    """The rows of a text, with `closed`, the share of the gap, and `front`: for which costs no other row is better."""
    rows = [row for row in report["rows"] if row["text"] == text]
    return [row | {"closed": share_closed(row, rows), "front": front(row, rows)} for row in rows]


def share_closed(row: Row, rows: list[Row]) -> float | None:
    """None of a row without memory, and where window or full attention was not measured."""
    lora = row["trained"] == "lora"
    plain = [other for other in rows if not other["recall"] and (other["trained"] == "lora") == lora]
    window = [o for o in plain if (o["attention"], o["window"]) == (row["attention"], row["window"])
              and (o["control"] if lora and row["slots"] else not o["slots"])]  # fmt: skip
    full = [other for other in plain if other["attention"] == "full"]
    if not window or not full or window[0] is row:
        return None
    before, goal = window[0]["nats_per_token"], full[0]["nats_per_token"]
    return float((before - row["nats_per_token"]) / (before - goal)) if before > goal else None


def front(row: Row, rows: list[Row]) -> list[str]:
    """The costs at which no other row that is at most as expensive has a lower loss. Rows with lora are apart."""
    rivals = [other for other in rows if (other["trained"] == "lora") == (row["trained"] == "lora")]
    lower = [other for other in rivals if other["nats_per_token"] < row["nats_per_token"]]
    found = []
    for name, cost in COSTS.items():
        own, others = cost(row), [cost(other) for other in lower]
        if own is not None and not any(other is not None and other <= own for other in others):
            found.append(name)
    return found


def table(report: dict[str, Any], text: str) -> Table:
    rows = rows_of(report, text)
    streams = list(next((row["ms_per_token"] for row in rows if "ms_per_token" in row), []))
    heads = ["system", "nats/token", f"recall − without ({NEGATIVE_IS_LOWER})", "gap closed", "state, MiB",
             *(f"ms/token, {count} at once" for count in streams), "on the front of"]  # fmt: skip
    lines = []
    for row in rows:
        difference = row.get("minus_without_recall")
        lines.append([
            name(row), f"{row['nats_per_token']:.4f}",
            signed(difference["nats_per_token"], difference["interval"]) if difference else "",
            "" if row["closed"] is None else f"{row['closed']:.0%}", f"{COSTS['state'](row):.2f}",
            *(f"{row['ms_per_token'][count]:.3f}" if "ms_per_token" in row else "" for count in streams),
            ", ".join(row["front"]),
        ])  # fmt: skip
    about = report["texts"][text]
    notes = [f"{about['scored']:,} scored tokens of {about['documents_scored']} documents"]
    return Table(heads, lines, f"{report['recipe']['model']} on {text}", notes)


def name(row: Row) -> str:
    return f"{row['system']}{' + recall' if row['recall'] else ''}"


def view(results: Path, file: str, text: str) -> str:
    """A region of a page."""
    return as_markdown(table(read(results / f"{file}.json"), text))


def short_view(results: Path, files: list[str]) -> str:
    """A region of a page: all texts of several files, with and without recall."""
    lines = []
    for report in (read(results / f"{file}.json") for file in files):
        for text in report["texts"]:
            rows = {name(row): row for row in rows_of(report, text)}
            for system, row in rows.items():
                if with_recall := rows.get(f"{system} + recall"):
                    closed = with_recall["closed"]
                    lines.append([
                        text, system, f"{row['nats_per_token']:.4f}", f"{with_recall['nats_per_token']:.4f}",
                        signed(with_recall["minus_without_recall"]["nats_per_token"], None),
                        "" if closed is None else f"{closed:.0%}",
                    ])  # fmt: skip
    heads = ["text", "system", "nats/token", "with recall", f"difference ({NEGATIVE_IS_LOWER})", "gap closed"]
    return as_markdown(Table(heads, lines))


def perplexities(results: Path) -> str:
    """A region of README: WikiText-103's test set with a sliding KV cache of 256 tokens."""
    rows = {name(row): row for row in rows_of(read(results / "pretrained_gap-wiki.json"), "wikitext103:test")}
    window, ours, full = (math.exp(rows[key]["nats_per_token"])
                          for key in ("sliding-256", "sliding-256 + recall", "full-8192"))  # fmt: skip
    return f"{ours:.2f} against {window:.2f}; full attention {full:.2f}"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def draw(reports: list[dict[str, Any]], out: Path) -> None:
    """A panel per text: loss against state, and one against time per token where that was measured."""
    from matplotlib.figure import Figure

    check_plot_path(out)
    panels = [
        (text, cost, rows)
        for report in reports
        for text in report["texts"]
        for cost in COSTS
        if (rows := [row for row in rows_of(report, text) if COSTS[cost](row) is not None])
    ]
    figure = Figure(figsize=(11, 4.2 * -(-len(panels) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
    for axis, (text, cost, rows) in zip(axes, panels, strict=False):
        _draw_rows(axis, rows, COSTS[cost])
        streams = list(rows[0].get("ms_per_token", [""]))[-1]
        label = {"state": "state per text, MiB", "time": f"ms per token, texts at once: {streams}"}[cost]
        axis.set(xlabel=label, ylabel="nats per token", title=text)
        remove_frame(axis)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    legend = [("without recall", CONTROL, CONTROL), ("with recall", RECALL, RECALL)]
    if any(row["trained"] == "lora" for _, _, rows in panels for row in rows):
        legend.append(("after LoRA", INK, "none"))
    for label, colour, filled in legend:
        axes[0].plot([], [], "s", color=colour, markerfacecolor=filled, label=label)
    axes[0].legend(frameon=False, fontsize=8)
    write_plot(figure, out)


def _draw_rows(axis: Any, rows: list[Row], cost: Callable[[Row], float | None]) -> None:
    """A mark per row; a line from each system to the same with recall."""
    from matplotlib.ticker import LogLocator, NullFormatter

    plain = {row["system"]: (cost(row), row["nats_per_token"]) for row in rows if not row["recall"]}
    for row in rows:
        x, y, colour = cost(row), row["nats_per_token"], RECALL if row["recall"] else CONTROL
        filled = "none" if row["trained"] == "lora" else colour
        axis.plot(x, y, MARKERS[row["attention"]], color=colour, markerfacecolor=filled, markersize=7)
        if not row["recall"]:
            left = row["attention"] == "sliding"
            place = {"xytext": (-5, -9) if left else (5, 4), "ha": "right" if left else "left"}
            axis.annotate(row["system"], (x, y), fontsize=6.5, color=INK, textcoords="offset points", **place)
        elif row["system"] in plain:
            axis.plot(*zip(plain[row["system"]], (x, y), strict=True), color=RECALL, linewidth=0.8)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gap", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what benchmarks/pretrained_gap.py wrote")
    parser.add_argument("--plot", type=Path, help="image file for the plot")
    args = parser.parse_args()
    reports = [read(path) for path in args.reports]
    print("\n\n".join(as_text(table(report, text)) for report in reports for text in report["texts"]))
    if args.plot:
        draw(reports, args.plot)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"gap: {error}")
