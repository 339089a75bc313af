"""What a comparison came to: one table, one picture, from its rows."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from logpast.experiments import tables
from logpast.metrics import paired_difference


def _by_system(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["comparison"]["system"], []).append(row)
    return groups


def table(rows: list[dict[str, Any]]) -> tables.Table:
    """Means over seeds; after ±, their standard deviation; in brackets, 95 % over documents, of the first seed.

    Against the first system: nats per token from the same seeds on the same documents, in brackets 95 % over these.
    Columns of which nothing is known are left out.
    """
    groups = _by_system(rows)
    base = next(iter(groups), "")
    lines = []
    for name, group in groups.items():
        cell, first = group[0]["comparison"], group[0]
        peaks = [row["comparison"]["peak_bytes"] for row in group if row["comparison"]["peak_bytes"]]
        speed = statistics.median(row["comparison"]["tokens_per_second"] for row in group)
        lines.append({
            "system": name,
            "seeds": str(len(group)),
            "ppl_token": _figure(group, "ppl_token", 2),
            "ppl_word": _figure(group, "ppl_word", 1),
            "bits/byte": _figure(group, "bits_per_byte", 4),
            f"nats against {base}": "" if name == base else _against(group, groups[base]),
            "weights": f"{first['parameters']:,}",
            "attention": f"{cell['attention_length']:,}",
            "training tokens": f"{first['train_tokens']:,}",
            "tokens/s": f"{speed:,.0f}",
            "peak MiB": f"{max(peaks) / 2**20:,.0f}" if peaks else "",
            "state KiB": f"{cell['state_bytes'] / 2**10:,.0f}",
            "learning rate": f"{cell['learning_rate']:g}",
        })  # fmt: skip
    heads = tuple(head for head in (lines[0] if lines else ()) if any(line[head] for line in lines))
    return tables.Table(heads, [tuple(line[head] for head in heads) for line in lines])


def _against(group: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """Empty where rows have no documents' nats, as those of earlier versions."""
    documents = {row["seed"]: row["scores"]["by_document"] for row in base if "by_document" in row["scores"]}
    paired = [row for row in group if row["seed"] in documents and "by_document" in row["scores"]]
    if not paired:
        return ""
    ours = np.mean([row["scores"]["by_document"]["nats"] for row in paired], axis=0)
    theirs = np.mean([documents[row["seed"]]["nats"] for row in paired], axis=0)
    found = paired_difference(ours, theirs, np.array(paired[0]["scores"]["by_document"]["tokens"]))
    seeds = "" if len(paired) == len(group) else f" (seed {', '.join(str(row['seed']) for row in paired)})"
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(found["nats_per_token"], *found["interval"]) + seeds


def write_table(rows: list[dict[str, Any]], out: Path, say: Any) -> None:
    heads, lines, *_ = table(rows)
    (out / "table.md").write_text(tables.markdown(table(rows)) + "\n", encoding="utf-8")
    short = [heads.index(name) for name in ("system", "ppl_token", "bits/byte", "tokens/s", "state KiB")]
    shown = Table(*(heads[column] for column in short))
    for line in lines:
        shown.add_row(*(line[column] for column in short))
    say(shown)


def _figure(group: list[dict[str, Any]], name: str, digits: int) -> str:
    values = [row["scores"][name] for row in group]
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    interval = group[0]["scores"].get("interval", {}).get(name)
    return text + (f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else "")


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Left, the perplexity of each system, each seed a point; right, against what a stream's state takes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    groups = _by_system(rows)
    figure = Figure(figsize=(12, 1.5 + 0.45 * max(6, len(groups))), layout="constrained")
    bars, states = figure.subplots(1, 2)
    for place, (name, group) in enumerate(reversed(groups.items())):
        values = [row["scores"]["ppl_token"] for row in group]
        middle = statistics.mean(values)
        interval = group[0]["scores"].get("interval", {}).get("ppl_token")
        if interval:
            low, high = (middle * bound / values[0] for bound in interval)
            bars.plot([low, high], [place, place], color="0.75", linewidth=6, solid_capstyle="butt", zorder=1)
        bars.plot(values, [place] * len(values), "o", color="tab:blue", markersize=4, zorder=2)
        kept = group[0]["comparison"]["state_bytes"] / 2**10
        states.plot(kept, middle, "o", color="tab:blue")
        states.annotate(name, (kept, middle), textcoords="offset points", xytext=(5, 4), fontsize=8)
    bars.set_yticks(range(len(groups)), list(reversed(groups)))
    bars.set(xlabel="perplexity per token (a point a seed; grey: 95 % over documents)")
    states.set(xlabel="state of a stream at inference, KiB", ylabel="perplexity per token", xscale="log")
    states.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    states.xaxis.set_major_formatter("{x:,g}")
    states.xaxis.set_minor_formatter(NullFormatter())
    for axis in (bars, states):
        axis.spines[["top", "right"]].set_visible(False)
    what = rows[0] if rows else {}
    if what:
        trained = {row["train_tokens"] for row in rows}
        tokens = f"{min(trained):,}" + (f" to {max(trained):,}" if max(trained) > 1.01 * min(trained) else "")
        figure.suptitle(
            f"{what['train_data']['name']} → {what['test_data']['name']}; {what['parameters'] / 1e6:.3g}M weights, "
            f"{tokens} training tokens", fontsize=10,
        )  # fmt: skip
    figure.savefig(out, dpi=130)
