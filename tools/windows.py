"""The plot on README: what recall gains, against how many tokens attention sees.

python -m tools.windows docs/recall-windows.png
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from logpast.ledger import row as ledger
from logpast.reporting.palette import CONTROL, MEMORY, NEUTRAL, RECALL
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.util.errors import UserError
from tools import gap

TESTS = "sweep-controls", "sweep-recall", "sweep-recall-1024"
IN_DOMAIN = "controls-in-domain", "recall-in-domain", "recall-1024-in-domain"
Line = list[tuple[int, float]]  # tokens that attention sees -> nats per token by which recall lowers the loss


def pretrained(report: dict[str, object], text: str) -> Line:
    """SmolLM2 with a sliding KV cache, and with all of a piece."""
    return [
        (row["window"], -row["minus_without_recall"]["nats_per_token"])
        for row in gap.rows_of(report, text)
        if row["recall"] and row["attention"] in ("sliding", "full")
    ]


def trained(results: Path) -> Line:
    """30M parameters, with the learning rate that is best for each window, with and without recall."""
    best: dict[tuple[str, int], float] = {}
    for row in ledger.read(results / "sweep-recall-rates.jsonl"):
        choices = row["sweep"]["choices"]
        key = choices["recall"], int(choices["window"])
        best[key] = min(best.get(key, math.inf), math.log(row["scores"]["ppl_token"]))
    return [(window, best["control", window] - best["recall", window]) for window in (64, 256, 1024)]


def small(results: Path, tests: Sequence[str]) -> Line:
    """GPT-2 Small, mean over the seeds of each window."""
    losses = defaultdict(list)
    for row in (row for test in tests for row in ledger.read(results / f"{test}.jsonl")):
        model = row["recipe"]["model"]
        if row["train_data"]["name"] == "wiki22k:rest" and model["system"] == "recent":
            losses[model["window"], bool(model.get("recall"))].append(math.log(row["scores"]["ppl_token"]))
    mean = {key: statistics.mean(values) for key, values in losses.items()}
    return [(window, mean[window, False] - mean[window, True]) for window in (256, 1024)]


def draw(results: Path, out: Path) -> None:
    from matplotlib.figure import Figure

    check_plot_path(out)
    wiki, books = (gap.read(results / f"pretrained_gap-{name}.json") for name in ("wiki", "pg19"))
    lines = [
        ("30M parameters, 40M tokens, trained with it;\nWikiText-103 validation", trained(results), CONTROL, "s--"),
        ("GPT-2 Small, trained with it; WikiText-103 test", small(results, TESTS), RECALL, "s--"),
        ("…; wiki22k:test", small(results, IN_DOMAIN), MEMORY, "s--"),
        ("SmolLM2-135M, gates only; WikiText-103 test", pretrained(wiki, "wikitext103:test"), RECALL, "o-"),
        ("…; wiki22k:test", pretrained(wiki, "wiki22k:test"), MEMORY, "o-"),
        ("…; PG-19 test", pretrained(books, "pg19:test"), NEUTRAL, "o-"),
    ]
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axis = figure.subplots()
    for label, line, colour, form in lines:
        axis.plot(*zip(*line, strict=True), form, color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens that attention sees", ylabel="nats per token lower\nwith recall", ylim=(0, None))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xticks([64, 256, 512, 1024, 8192])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    remove_frame(axis)
    write_plot(figure, out)


if __name__ == "__main__":
    try:
        draw(Path("results"), Path(sys.argv[1]))
    except (UserError, IndexError) as error:
        sys.exit(f"windows: {error}")
