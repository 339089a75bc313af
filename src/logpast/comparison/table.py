"""The table and the plot of a comparison, from its rows; `logpast results comparison`.

COLUMNS lists the columns of the table: to add one, add an entry there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from logpast.evaluation.vocabulary import UNSEEN
from logpast.ledger import row as ledger
from logpast.ledger.documents import (
    Documents,
    Estimate,
    Seeds,
    detail,
    documents,
    estimate_difference,
    in_vocabulary_perplexity,
    name_seeds,
)
from logpast.ledger.documents import values as scores_of
from logpast.ledger.row import RESULTS
from logpast.reporting import palette, tables
from logpast.reporting.differences import NEGATIVE_IS_LOWER, too_few
from logpast.reporting.plots import check_plot_path, remove_frame, write_plot
from logpast.util.errors import UserError
from logpast.util.validation import validate_arguments

Row = dict[str, Any]
Number = Estimate | float | None
DIFFERENCE = f"nats vs {{first}} ({NEGATIVE_IS_LOWER})"  # head of a column
COLOURS = {"all": palette.SERIES[0], "in-vocabulary": palette.SERIES[1]}


@dataclass(frozen=True)
class System:
    """What the columns are computed from: one system's rows, and what it is compared with."""

    rows: list[Row]
    """one per seed"""
    first: Seeds | None
    """scores of the first system of the table; None for that one itself"""
    documents: Documents

    @property
    def cell(self) -> dict[str, Any]:
        """What `logpast compare` noted, of the first seed."""
        cell: dict[str, Any] = self.rows[0]["comparison"]
        return cell

    @property
    def seeds(self) -> Seeds:
        return {row["seed"]: row["scores"] for row in self.rows}

    def score(self, name: str) -> Estimate:
        """A score of all seeds. The interval is that of the first seed, scaled to the mean."""
        found, intervals = scores_of(self.seeds, name), self.rows[0]["scores"].get("interval") or {}
        bounds = intervals.get(name, [None])
        if self.documents.too_few or None in bounds or not math.isfinite(sum(found)) or not found[0]:
            return Estimate(found)
        low, high = (statistics.mean(found) * bound / found[0] for bound in bounds)
        return Estimate(found, (low, high))

    def in_vocabulary_perplexity(self) -> Estimate | None:
        """Per token, if the test text has documents of both kinds."""
        found = in_vocabulary_perplexity(self.seeds, self.documents) if self.documents.has_both_kinds else {}
        return Estimate(list(found.values()), note=name_seeds(found, self.seeds)) if found else None

    def against_first(self, in_vocabulary: bool = False) -> Estimate | None:
        """Nats per token, this − the first system: negative if this loss is lower."""
        if self.first is None or (in_vocabulary and self.in_vocabulary_perplexity() is None):
            return None
        return estimate_difference(self.seeds, self.first, self.documents, in_vocabulary)

    @property
    def scored_on_training_text(self) -> bool:
        return any("training_overlap" in scores for scores in self.seeds.values())

    def training_seconds(self) -> float | None:
        """Only in comparisons of equal time."""
        return statistics.mean(map(_seconds, self.rows)) if self.cell["budget"] == "time" else None

    def fastest(self) -> float:
        """Tokens per second of the fastest seed: other work on the machine only slows training down."""
        return max(row["tokens_per_second"] for row in self.rows)

    def peak_bytes(self) -> int | None:
        return max(row["peak_bytes"] or 0 for row in self.rows) or None


class Column(NamedTuple):
    head: str
    """{first} stands for the name of the first system"""
    number: Callable[[System], Number]
    """None leaves the cell empty; a column without any number is left out"""
    form: str
    """format of the number"""


COLUMNS = (
    Column("ppl_token", lambda system: system.score("ppl_token"), ".2f"),
    Column("ppl_word", lambda system: system.score("ppl_word"), ".1f"),
    Column("bits/byte", lambda system: system.score("bits_per_byte"), ".4f"),
    Column(DIFFERENCE, lambda system: system.against_first(), "+.4f"),
    Column("in-vocabulary ppl_token", lambda system: system.in_vocabulary_perplexity(), ".2f"),
    Column(f"in-vocabulary {DIFFERENCE}", lambda system: system.against_first(in_vocabulary=True), "+.4f"),
    Column("parameters", lambda system: system.rows[0]["parameters"], ","),
    Column("attention", lambda system: system.cell["attention_length"], ","),
    Column("training tokens", lambda system: system.rows[0]["train_tokens"], ","),
    Column("training s", lambda system: system.training_seconds(), ",.1f"),
    Column("tokens/s", lambda system: system.fastest(), ",.0f"),
    Column("peak MiB", lambda system: peak / 2**20 if (peak := system.peak_bytes()) else None, ",.0f"),
    Column("state KiB", lambda system: system.rows[0]["state_bytes"] / 2**10, ",.0f"),
    Column("learning rate", lambda system: system.cell["learning_rate"], "g"),
)
SHORT = ("ppl_token", "training s", "tokens/s", "state KiB")  # columns that `short` always has


def values(rows: list[Row]) -> dict[str, dict[str, float]]:
    """system -> head of a column -> its number, the mean over seeds. Empty cells are left out."""
    systems = _systems(rows)
    first, found = next(iter(systems)), dict[str, dict[str, float]]()
    for name, cells in _numbers(systems).items():
        found[name] = {
            column.head.format(first=first): number.mean if isinstance(number, Estimate) else number
            for column, number in cells.items()
            if number is not None
        }
    return found


def table(rows: list[Row]) -> tables.Table:
    """One line per system: means over seeds, and differences from the first system."""
    systems = _systems(rows)
    numbers, first = _numbers(systems), next(iter(systems))
    heads = [column.head.format(first=first) for column in numbers[first]]
    lines = []
    for name, line in numbers.items():
        seeds = ", ".join(map(str, systems[name].seeds))
        lines.append((name, seeds, *(_text(number, column.form) for column, number in line.items())))
    return tables.Table(("system", "seeds", *heads), lines, _title(rows), _notes(heads, systems))


def short(rows: list[Row]) -> tables.Table:
    """The most important columns, for a terminal: differences on in-vocabulary documents if there are others too."""
    heads, lines, title, notes = table(rows)
    split = any("in-vocabulary" in head for head in heads)
    kept = [
        index
        for index, head in enumerate(heads)
        if head in ("system", "seeds", *SHORT) or "in-vocabulary" in head or (not split and "nats vs" in head)
    ]
    return tables.Table(
        [heads[index] for index in kept], [[line[index] for index in kept] for line in lines], title, notes
    )


@validate_arguments
def show(
    rows: Path,
    plot: Path = Path("comparison.png"),
    out: Path | None = None,
    budget: Literal["tokens", "time"] | None = None,
) -> None:
    """Print the table of a finished comparison, and draw its plot.

    Examples:
        logpast results comparison runs/rivals-small
        logpast results comparison runs/rivals-small --budget time --plot time.png
        logpast results comparison results/rivals-pg19.jsonl --plot pg19.png --out pg19.md

    Args:
        rows: folder of a comparison, or its rows.jsonl under any name, one row per system and seed. The table has the
            order of the rows and compares the other systems with the first.
        plot: file for the plot: .png, .svg or .pdf. Replaces an existing file.
        out: write the table with all its columns to this file: .md, .csv or .json. Replaces an existing file.
        budget: only rows of equal tokens or of equal time, if there are both.
    """
    rows = rows / "rows.jsonl" if rows.is_dir() else rows
    tables.check_table_path(out, RESULTS)
    if out and out.resolve() == rows.resolve():
        raise UserError(f"--out {out} is the file to read; give another --out")
    check_plot_path(plot)
    if not rows.exists():
        raise UserError(f"{rows} does not exist; give a comparison's folder, or its rows.jsonl under any name")
    found = _comparable(rows, budget)
    draw(found, plot)
    print(tables.as_text(short(found)))
    if out:
        tables.write(table(found), out)
    print(f"wrote {plot}")


def _comparable(file: Path, budget: str | None) -> list[Row]:
    """The rows of a file, if one table can hold them all."""
    found = [row for row in ledger.read(file, "comparison") if budget in (None, row["comparison"]["budget"])]
    if not found:
        fix = "leave out --budget" if budget else "wait until the first system is trained and scored"
        raise UserError(f"{file} has no {'such ' if budget else ''}rows; {fix}")
    for what, different in {
        "budgets": {row["comparison"]["budget"] for row in found},
        "training texts": {row["train_data"]["sha256"] for row in found},
        "test texts": {row["test_data"]["sha256"] for row in found},
        "sets of documents": {
            tuple(row["scores"]["by_document"]["tokens"]) for row in found if "by_document" in row["scores"]
        },
    }.items():
        if len(different) > 1:
            fix = "choose one with --budget" if what == "budgets" else "put the rows of each into its own file"
            raise UserError(f"{file} has rows of {len(different)} {what}; {fix}")
    for name, system in _systems(found).items():
        if len({ledger.hash_recipe(row["recipe"] | {"seed": None}) for row in system.rows}) > 1:
            raise UserError(
                f"{file}: rows of {name} differ in more than the seed; put the rows of each recipe into its own file"
            )
    return found


def _systems(rows: list[Row]) -> dict[str, System]:
    """By name. A run that was scored twice counts once, by the row with more detail."""
    groups: dict[str, dict[int, Row]] = {}
    for row in rows:
        name, seed = row["comparison"]["system"], row["seed"]
        before = groups.setdefault(name, {}).setdefault(seed, row)
        if before["scores"]["ppl_token"] != row["scores"]["ppl_token"]:
            raise UserError(f"there are two rows of {name}, seed {seed}, with different scores; remove one")
        groups[name][seed] = max(before, row, key=lambda row: detail(row["scores"]))
    seeds = {name: {seed: row["scores"] for seed, row in group.items()} for name, group in groups.items()}
    of, first = documents(*seeds.values()), next(iter(seeds))
    return {
        name: System(list(group.values()), None if name == first else seeds[first], of)
        for name, group in groups.items()
    }


def _numbers(systems: dict[str, System]) -> dict[str, dict[Column, Number]]:
    """The cells of the table, by system and column, without columns that are empty for all systems."""
    found = {name: {column: column.number(system) for column in COLUMNS} for name, system in systems.items()}
    kept = [column for column in COLUMNS if any(line[column] is not None for line in found.values())]
    return {name: {column: line[column] for column in kept} for name, line in found.items()}


def _text(number: Number, form: str) -> str:
    if number is None:
        return ""
    return number.text(form) if isinstance(number, Estimate) else format(number, form)


def draw(rows: list[Row], out: Path) -> None:
    """Left, the perplexity of each system, one point per seed; right, perplexity against the size of the state."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    systems = _systems(rows)
    of = next(iter(systems.values())).documents
    split = of.has_both_kinds
    figure = Figure(figsize=(12, 1.5 + 0.45 * max(6, len(systems))), layout="constrained")
    bars, states = figure.subplots(1, 2)
    spots = dict[str, tuple[float, float]]()
    for height, (name, system) in enumerate(reversed(systems.items())):
        score = system.score("ppl_token")
        finite = [value for value in score.seeds if value < math.inf]
        known = system.in_vocabulary_perplexity()
        in_vocabulary = known.seeds if known else []
        if score.interval:
            bars.plot(score.interval, [height] * 2, color=palette.FAINT, linewidth=6, solid_capstyle="butt", zorder=1)
        for some, kind in ((finite, "all"), (in_vocabulary, "in-vocabulary")):
            bars.plot(some, [height] * len(some), "o", color=COLOURS[kind], markersize=4, zorder=2)
        if some := in_vocabulary if split else finite:
            spots[name] = system.rows[0]["state_bytes"] / 2**10, statistics.mean(some)
            states.plot(*spots[name], "o", color=COLOURS["in-vocabulary" if split else "all"])
    bars.set_yticks(range(len(systems)), list(reversed(systems)))
    intervals = too_few(len(of.tokens)) if of.too_few else "bar: 95 % over documents"
    bars.set(xlabel=f"perplexity per token (one point per seed; {intervals})")
    measure = "perplexity per token"
    if split:
        measure += ", in-vocabulary documents"
        _add_legend(bars, of)
    states.set(xlabel="state per stream at inference, KiB", ylabel=measure, xscale="log")
    states.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    states.xaxis.set_major_formatter("{x:,g}")
    states.xaxis.set_minor_formatter(NullFormatter())
    _label_spots(states, spots)
    remove_frame(bars, states)
    figure.suptitle(_title(rows), fontsize=10)
    write_plot(figure, out)


def _add_legend(axis: Any, of: Documents) -> None:
    """Names the two kinds of points."""
    numbers = {"all": len(of.tokens), "in-vocabulary": of.in_vocabulary.sum()}
    for kind, number in numbers.items():
        axis.plot([], [], "o", color=COLOURS[kind], markersize=4, label=f"{kind} documents ({number})")
    axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def _label_spots(axis: Any, spots: dict[str, tuple[float, float]]) -> None:
    """Names in a column on the right, each with a line to its spot: spots may lie close together, names must not."""
    low, high = axis.get_ylim()
    gap, height = 0.045, -math.inf
    for name, spot in sorted(spots.items(), key=lambda item: item[1][1]):
        height = max((spot[1] - low) / (high - low), height + gap)
        axis.annotate(
            name, spot, (1.02, height), textcoords="axes fraction", fontsize=8, verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": palette.FAINT, "linewidth": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _seconds(row: Row) -> float:
    """Training time of a row; its train_seconds include validation, which is slow in some systems."""
    return float(row["train_tokens"] / row["tokens_per_second"])


def _title(rows: list[Row]) -> str:
    first, timed = rows[0], rows[0]["comparison"]["budget"] == "time"
    spent = [_seconds(row) if timed else row["train_tokens"] / 1e6 for row in rows]
    ends = [max(spent)] if max(spent) <= 1.01 * min(spent) else [min(spent), max(spent)]
    amount = " to ".join(f"{each:,.3g}" if each < 100 else f"{each:,.0f}" for each in ends)
    unit = " seconds of training" if timed else "M training tokens"
    texts = f"{first['train_data']['name']} → {first['test_data']['name']}"
    return f"{texts}; {first['parameters'] / 1e6:.3g}M parameters, {amount}{unit}"


def _notes(heads: list[str], systems: dict[str, System]) -> list[str]:
    """What the columns mean."""
    first, of = next(iter(systems)), systems[next(iter(systems))].documents
    which = f"{len(of.tokens)} documents" if len(of.tokens) else "documents"
    notes = [f"±: standard deviation over seeds; [ ]: 95 % over {which}, from the first seed, scaled to the mean"]
    if of.too_few:
        notes = ["±: standard deviation over seeds", too_few(len(of.tokens))]
    if any("nats vs" in head for head in heads):
        notes.append(
            f"nats vs {first}: difference of the loss in nats per token, same seeds and documents; 0.01 is 1 % of "
            "perplexity; [ ]: 95 % over documents, which says nothing about other seeds"
        )
    if of.has_both_kinds:
        notes.append(
            f"in-vocabulary: {of.in_vocabulary.sum()} of {which}, those where at most {100 * UNSEEN:g} % of the tokens "
            "never occur in the training text"
        )
        if lacking := [name for name, system in systems.items() if system.in_vocabulary_perplexity() is None]:
            notes.append(f"in-vocabulary: not recorded in the rows of {', '.join(lacking)}")
    elif len(of.tokens) and not of.counted:
        notes.append("in-vocabulary: the rows do not say which documents are")
    if known := [name for name, system in systems.items() if system.scored_on_training_text]:
        notes.append(f"scored on text that they were trained on: {', '.join(known)}")
    return [*notes, "tokens/s: training speed of the fastest seed"]
