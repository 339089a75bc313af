"""The demo's page: one HTML file with its pictures inside, to be read by someone who has never heard of us."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from logpast.filters import FilterBank
from logpast.reporting.html import COLOURS, html_image, html_page, html_table
from logpast.reporting.plots import remove_frame
from logpast.training.log import read_log
from logpast.util.files import atomic_write

BODY = """<h1>Does a log-compressed past help?</h1>
<p>Two small transformers are trained side by side, with the same size, text, steps and seed. Each sees a short window
of tokens and a few <em>slots</em> before it. In the <b style="color:{memory}">memory</b> model the slots hold the
past, compressed: fine for what is recent, coarse for what is distant. In the <b style="color:{control}">control</b>
they hold the tokens just before the window, as they are. Both pay the same price for attention.</p>
{sections}
<p class="note">One seed ({seed}); other seeds differ. A table over several seeds is in the project's
<code>results/</code> folder. All figures of this page are in <code>report.json</code> beside it.</p>
"""


def write_report(out: Path, results: dict[str, Any]) -> None:
    """Write report.html into the demo's folder."""
    sections = []
    if "text" in results:
        sections += _text_section(out, results["text"])
    if "topics" in results:
        sections += _topics_section(out, results["topics"])
    body = BODY.format(sections="\n".join(sections), seed=results["seed"], **COLOURS)
    atomic_write(out / "report.html", html_page("logpast demo", body))


def _text_section(out: Path, text: dict[str, Any]) -> list[str]:
    difference = text["memory"]["against"]
    low, high = difference["interval"]
    if high < 0:
        verdict = "The memory model predicts the unseen chapters better than the control"
    elif low > 0:
        verdict = "The memory model predicts the unseen chapters worse than the control"
    else:
        verdict = "The two models cannot be told apart on the unseen chapters"
    chapters = text["chapters"]
    return [
        "<h2>Real text: the King James Bible</h2>",
        f"<p>{chapters['train']:,} chapters to learn from, {chapters['validation']} to choose the best moment of the "
        f"training by, {chapters['test']} unseen ones to be scored on, all drawn at random.</p>",
        _table(text),
        f"<p>{verdict}: the difference is {difference['nats_per_token']:+.4f} nats per token, between {low:+.4f} and "
        f"{high:+.4f} at 95 % over chapters; the memory model is the better one on {difference['documents_better']} of "
        f"{difference['documents']} chapters.</p>",
        "<p class='note'>Perplexity says among how many equally likely tokens (or words) the model hesitates on "
        "average; bits per byte how well it would compress the text. Lower is better in all.</p>",
        _loss_curves(out / "text"),
        "<h3>The filters behind the slots</h3>",
        _filters(),
        "<h3>What the memory model writes</h3>",
        f"<pre>{html.escape(text['sample'])}</pre>",
    ]


def _topics_section(out: Path, topics: dict[str, Any]) -> list[str]:
    given_all, given_recent = topics["optimum_given_all"], topics["optimum_given_recent"]
    memory, control = (math.log(topics[name]["ppl_token"]) for name in ("memory", "control"))
    verdict = (
        "The memory model is below it: it knows something that lies before its window."
        if memory < given_recent
        else "The memory model has not got below it here."
    )
    rows = [
        ("best possible, knowing the whole past", given_all),
        ("<b>memory</b>", memory),
        ("best possible, seeing what the control sees", given_recent),
        ("<b>control</b>", control),
    ]
    return [
        "<h2>A source whose truth is known: drifting topics</h2>",
        "<p>Tokens are drawn from a topic, a distribution over eight symbols, which lasts for a while, a hundred "
        "tokens or thousands, and then gives way to a new one. For this source the best possible loss can be "
        "computed, with the whole past or with the few tokens that the control sees: no model that sees only those "
        "can be better than the second, however large.</p>",
        html_table(["unseen stream", "nats per token"], [[name, f"{value:.4f}"] for name, value in rows]),
        f"<p>The control is {control - given_recent:+.4f} nats from the best that it could be. {verdict}</p>",
        _loss_curves(out / "topics", {"whole past": given_all, "control's view": given_recent}),
    ]


def _table(part: dict[str, Any]) -> str:
    columns = ["ppl_token", "ppl_word", "bits_per_byte"]
    rows = [[name, *(f"{part[name][column]:.3f}" for column in columns)] for name in ("memory", "control")]
    return html_table(["unseen text", *columns], rows)


def _loss_curves(home: Path, levels: dict[str, float] | None = None) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    ends = []
    for name, colour in COLOURS.items():
        records = read_log(home / name)
        losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
        checks = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
        axis.plot(*zip(*losses, strict=True), color=colour, alpha=0.35, linewidth=1)
        axis.plot(*zip(*checks, strict=True), color=colour, marker="o", label=f"{name}, validation")
        ends += [value for _, value in checks]
    for label, level in (levels or {}).items():
        axis.axhline(level, color="0.3", linestyle=":", linewidth=1)
        axis.annotate(
            f"best, {label}", (0.995, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
        ends.append(level)
    spread = max(ends) - min(ends)
    axis.set(xlabel="step", ylabel="nats per token", ylim=(min(ends) - 0.3 * spread, max(ends) + 0.6 * spread))
    axis.legend(frameon=False)
    remove_frame(axis)
    return html_image(figure, "loss over steps")


def _filters() -> str:
    from matplotlib.figure import Figure

    bank = FilterBank(slots=33, normalize="peak")
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axis = figure.subplots()
    for row in bank.weights[::4]:
        axis.plot(range(1, bank.horizon + 1), row, linewidth=1.4)
    axis.set(xscale="log", xlabel="tokens ago", ylabel="weight", xlim=(1, bank.horizon))
    remove_frame(axis)
    return html_image(figure, "every fourth filter")
