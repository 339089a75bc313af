"""What a comparison came to: one table, one picture, from its rows."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, Literal

from logpast.evaluation.vocabulary import UNSEEN
from logpast.ledger import row as ledger
from logpast.ledger.documents import (
    Documents,
    Seeds,
    detail,
    difference,
    documents,
    familiar_perplexity,
    name_seeds,
    spread,
    validate_documents,
    values,
)
from logpast.ledger.row import RESULTS, reading
from logpast.reporting import tables
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments


def _by_system(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each, a seed each. A run that was scored twice counts once, by the row that tells more."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        system, seed = row["comparison"]["system"], row["seed"]
        before = groups.setdefault(system, {}).setdefault(seed, row)
        if before["scores"]["ppl_token"] != row["scores"]["ppl_token"]:
            raise UserError(f"there are two rows of {system}, seed {seed}, with other scores; remove one")
        groups[system][seed] = max(before, row, key=lambda row: detail(row["scores"]))
    return {system: list(seeds.values()) for system, seeds in groups.items()}


def _seeds(group: list[dict[str, Any]]) -> Seeds:
    return {row["seed"]: row["scores"] for row in group}


def table(rows: list[dict[str, Any]]) -> tables.Table:
    """Means over seeds, and how far the systems are from the first; of familiar documents too, where there are others.

    The notes say what is what. Columns of which nothing is known are left out.
    """
    groups = _by_system(rows)
    of = documents(*map(_seeds, groups.values()))
    base, timed = next(iter(groups)), rows[0]["comparison"]["budget"] == "time"
    first_seeds = _seeds(groups[base])
    lines = []
    for name, group in groups.items():
        cell, first = group[0]["comparison"], group[0]
        known = familiar_perplexity(_seeds(group), of) if of.tell_apart else {}
        peaks = [row["comparison"]["peak_bytes"] for row in group if row["comparison"]["peak_bytes"]]
        lines.append({
            "system": name,
            "seeds": ", ".join(str(row["seed"]) for row in group),
            "ppl_token": _figure(group, "ppl_token", 2),
            "ppl_word": _figure(group, "ppl_word", 1),
            "bits/byte": _figure(group, "bits_per_byte", 4),
            f"nats against {base}": "" if name == base else difference(_seeds(group), first_seeds, of),
            "familiar ppl_token": spread(list(known.values()), 2) + name_seeds(known, _seeds(group)) if known else "",
            f"familiar nats against {base}":
                difference(_seeds(group), first_seeds, of, familiar=True) if known and name != base else "",
            "weights": f"{first['parameters']:,}",
            "attention": f"{cell['attention_length']:,}",
            "training tokens": f"{first['train_tokens']:,}",
            "training s": f"{statistics.mean(map(_seconds, group)):,.1f}" if timed else "",
            # of the fastest, for whatever else a machine does only slows it
            "tokens/s": f"{max(row['comparison']['tokens_per_second'] for row in group):,.0f}",
            "peak MiB": f"{max(peaks) / 2**20:,.0f}" if peaks else "",
            "state KiB": f"{cell['state_bytes'] / 2**10:,.0f}",
            "learning rate": f"{cell['learning_rate']:g}",
        })  # fmt: skip
    heads = tuple(head for head in lines[0] if any(line[head] for line in lines))
    return tables.Table(heads, [tuple(line[head] for head in heads) for line in lines], _title(rows), _notes(heads, of))


def short(rows: list[dict[str, Any]]) -> tables.Table:
    """The columns that matter most, for a screen or a page; of all documents, or of familiar ones where others are."""
    heads, lines, title, notes = table(rows)
    apart = any("familiar" in head for head in heads)
    always = ("system", "seeds", "ppl_token", "training s", "tokens/s", "state KiB")
    kept = [
        place
        for place, head in enumerate(heads)
        if head in always or "familiar" in head or (not apart and "against" in head)
    ]
    return tables.Table(
        [heads[place] for place in kept], [[line[place] for place in kept] for line in lines], title, notes
    )


@validate_arguments
def show(
    rows: Path,
    plot: Path = Path("comparison.png"),
    out: Path | None = None,
    budget: Literal["tokens", "time"] | None = None,
) -> None:
    """Print the table of a comparison that was made before, and draw its picture.

    Examples:
        logpast results comparison runs/rivals-small
        logpast results comparison runs/rivals-small --budget time --plot time.png
        logpast results comparison results/rivals-pg19.jsonl --plot pg19.png --out pg19.md

    Args:
        rows: the folder of a comparison, or its rows.jsonl under any name, a row a system and seed. Their order is
            that of the table, and systems are set beside the first.
        plot: the picture; .png, .svg and .pdf are known. An existing one is replaced.
        out: write the table, with all its columns, to this file: .md, .csv or .json. An existing one is replaced.
        budget: only rows of equal tokens or of equal time, where there are both.
    """
    rows = rows / "rows.jsonl" if rows.is_dir() else rows
    tables.check_table_path(out, RESULTS)
    if out and out.resolve() == rows.resolve():
        raise UserError(f"{out} is what is read; give another --out")
    check_plot_path(plot)
    if not rows.exists():
        raise UserError(f"there is no {rows}; give a comparison's folder, or its rows.jsonl under any name")
    with reading(f"{rows} holds no comparison", "give the rows.jsonl that `logpast compare` wrote"):
        found = [row for row in ledger.read(rows) if budget in (None, row["comparison"]["budget"])]
        if not found:
            fix = "take away --budget" if budget else "wait for the first system to be trained and scored"
            raise UserError(f"{rows} has no {'such ' if budget else ''}rows; {fix}")
        for what, there in {
            "budgets": {row["comparison"]["budget"] for row in found},
            "training texts": {row["train_data"]["sha256"] for row in found},
            "test texts": {row["test_data"]["sha256"] for row in found},
        }.items():
            if len(there) > 1:
                fix = "choose by --budget" if what == "budgets" else "put those of each into a file of their own"
                raise UserError(f"{rows} has rows of {len(there)} {what}; {fix}")
        of = documents(dict(enumerate(row["scores"] for row in found)))
        for row in found:
            validate_documents(row["scores"], of)
        for system, group in _by_system(found).items():
            if len({ledger.hash_recipe(row["recipe"] | {"seed": None}) for row in group}) > 1:
                raise UserError(
                    f"{rows}: rows of {system} differ in more than their seeds; put those of each recipe into a file "
                    "of their own"
                )
        whole, fits = table(found), tables.as_text(short(found))
        draw(found, plot)
    print(fits)
    if out:
        tables.write(whole, out)
    print(f"wrote {plot}")


def _figure(group: list[dict[str, Any]], name: str, digits: int) -> str:
    text = spread(values(_seeds(group), name), digits)
    low, high = _interval(group, name)
    return text + (f" [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(high) else "")


def _interval(group: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """The first seed's, moved to the mean of all; infinite where there is none."""
    found, bounds = values(_seeds(group), name), group[0]["scores"].get("interval", {}).get(name) or [None]
    if None in bounds or not math.isfinite(sum(found)) or not found[0]:
        return math.inf, math.inf
    low, high = (statistics.mean(found) * bound / found[0] for bound in bounds)
    return low, high


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Left, the perplexity of each system, each seed a point; right, against what a stream's state takes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    groups = _by_system(rows)
    of = documents(*map(_seeds, groups.values()))
    figure = Figure(figsize=(12, 1.5 + 0.45 * max(6, len(groups))), layout="constrained")
    bars, states = figure.subplots(1, 2)
    spots = dict[str, tuple[float, float]]()
    for place, (name, group) in enumerate(reversed(groups.items())):
        finite = [value for value in values(_seeds(group), "ppl_token") if value < math.inf]
        known = list(familiar_perplexity(_seeds(group), of).values()) if of.tell_apart else []
        low, high = _interval(group, "ppl_token")
        if math.isfinite(high):
            bars.plot([low, high], [place, place], color="0.75", linewidth=6, solid_capstyle="butt", zorder=1)
        for some, colour in ((finite, "tab:blue"), (known, "tab:orange")):
            bars.plot(some, [place] * len(some), "o", color=colour, markersize=4, zorder=2)
        if some := known if of.tell_apart else finite:
            spots[name] = group[0]["comparison"]["state_bytes"] / 2**10, statistics.mean(some)
            states.plot(*spots[name], "o", color="tab:orange" if of.tell_apart else "tab:blue")
    bars.set_yticks(range(len(groups)), list(reversed(groups)))
    measure, orange = "perplexity per token", ""
    if of.tell_apart:
        measure += f", {of.familiar.sum()} familiar documents"
        orange = f"\norange: {of.familiar.sum()} familiar documents of {len(of.tokens)}"
    bars.set(xlabel=f"perplexity per token (a point a seed; grey: 95 % over documents){orange}")
    states.set(xlabel="state of a stream at inference, KiB", ylabel=measure, xscale="log")
    states.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    states.xaxis.set_major_formatter("{x:,g}")
    states.xaxis.set_minor_formatter(NullFormatter())
    _name_spots(states, spots)
    remove_frame(bars, states)
    figure.suptitle(_title(rows), fontsize=10)
    write_plot(figure, out)


def _name_spots(axis: Any, spots: dict[str, tuple[float, float]]) -> None:
    """A line from each spot to its name, in a column at the right: spots may lie close together, names may not."""
    low, high = axis.get_ylim()
    gap, below = 0.045, -math.inf
    for name, spot in sorted(spots.items(), key=lambda item: item[1][1]):
        below = max((spot[1] - low) / (high - low), below + gap)
        axis.annotate(
            name, spot, (1.02, below), textcoords="axes fraction", fontsize=8, verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _seconds(row: dict[str, Any]) -> float:
    """Of training alone: a row's own count has the validation in it, and that some systems do slowly."""
    return float(row["train_tokens"] / row["comparison"]["tokens_per_second"])


def _title(rows: list[dict[str, Any]]) -> str:
    first, timed = rows[0], rows[0]["comparison"]["budget"] == "time"
    spent = [_seconds(row) if timed else row["train_tokens"] / 1e6 for row in rows]
    ends = [max(spent)] if max(spent) <= 1.01 * min(spent) else [min(spent), max(spent)]
    amount = " to ".join(f"{each:,.3g}" if each < 100 else f"{each:,.0f}" for each in ends)
    unit = " seconds of training" if timed else "M training tokens"
    texts = f"{first['train_data']['name']} → {first['test_data']['name']}"
    return f"{texts}; {first['parameters'] / 1e6:.3g}M weights, {amount}{unit}"


def _notes(heads: tuple[str, ...], of: Documents) -> list[str]:
    """What stands in the columns."""
    those = f"{len(of.tokens)} documents" if len(of.tokens) else "documents"
    notes = [f"±: standard deviation over seeds; in brackets: 95 % over {those}, as of the first seed, about the mean"]
    if any("nats against" in head for head in heads):
        notes.append(
            "against: nats per token above the first system's, from the same seeds on the same documents; in "
            "brackets: 95 % over documents, which says nothing of other seeds"
        )
    if of.tell_apart:
        notes.append(
            f"familiar: {of.familiar.sum()} of {those}, those with at most {100 * UNSEEN:g} % of tokens that the "
            "training text never has"
        )
    return [*notes, "tokens/s: in training, of the fastest seed"]
