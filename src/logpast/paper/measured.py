"""Runs of ours that belong beside the paper's Tables A1 and A2, found in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from logpast.filters import PAPER_SPACING
from logpast.ledger.documents import Documents, detail, documents, familiar_perplexity, validate_documents, values
from logpast.ledger.query import Entry, is_run, parse_condition, read, select
from logpast.ledger.row import RESULTS, hash_recipe, reading
from logpast.paper import printed
from logpast.util.errors import UserError
from logpast.util.serialization import flatten

AS_PRINTED = {"model.kernel": "paper", "model.normalize": "none"}
Measure = Literal["ppl_token", "ppl_word", "ppl_familiar"]


class Series(NamedTuple):
    """Runs of ours that differ in L and seed alone."""

    name: str
    about: str
    """what they were trained and scored on, and how large they are"""
    recipe: dict[str, Any]
    texts: tuple[dict[str, Any], dict[str, Any]]
    """what they were trained and scored on, to the byte"""
    points: dict[int, dict[int, dict[str, Any]]]
    """L -> seed -> scores, and how many tokens the scored weights have seen"""
    states: dict[int, int]
    """L -> bytes that must be kept of a stream to go on with it, where the rows say so"""

    @property
    def kind(self) -> str:
        """As the paper names it, whatever else is said of it."""
        return self.name.partition(",")[0]

    def values(self, slots: int, measure: Measure) -> list[float]:
        """A seed each, where it is known."""
        if measure == "ppl_familiar":
            return list(familiar_perplexity(self.points[slots], self.documents).values())
        return values(self.points[slots], measure)

    @property
    def documents(self) -> Documents:
        return documents(*self.points.values())

    @property
    def familiar(self) -> str:
        """How many of its documents are."""
        return f"{self.documents.familiar.sum()} of {len(self.documents.tokens)}"

    def is_control_of(self, other: Series) -> bool:
        """Whether this one is without memory, and the two are alike but for what only one kind of model has."""
        ours, theirs = self.recipe, other.recipe
        of_one = {name for name in ours.keys() ^ theirs.keys() if name.startswith("model.")} | {"model.system"}
        return (
            (ours["model.system"], theirs["model.system"]) == ("recent", "log_memory")
            and self.texts == other.texts
            and all(ours.get(name) == theirs.get(name) for name in (ours.keys() | theirs.keys()) - of_one)
        )


def measured(table: printed.Sweep, results: Path, where: list[str] | None = None) -> list[Series]:
    """Our runs that belong beside a table of the paper: its two systems and its bank, scored on its test set.

    where: as `logpast results` takes it.

    Cells of a comparison (`logpast compare`) do not: there each system has a learning rate of its own.
    """
    if results == RESULTS and not results.is_dir() and not where:  # an installed copy has none
        return []
    conditions = [parse_condition(word) for word in where or []]
    found: dict[str, Series] = {}
    for entry in select(read(results, "--results"), conditions):
        with reading(f"{entry.file}.jsonl, run {entry.get('run')!r} is not a row of a scored run"):
            if is_run(entry.row) and _belongs(entry, table):
                _add(found, entry, table)
    told = [_told_apart(series, list(found.values())) for series in found.values()]
    return sorted(told, key=lambda series: (not series.name.startswith("delta"), series.about, series.name))


def _add(found: dict[str, Series], entry: Entry, table: printed.Sweep) -> None:
    """To the series of its recipe, data and way of scoring. The same row twice counts once."""
    row, recipe = entry.row, flatten(entry.row["recipe"])
    slots, seed = recipe.pop("model.slots"), recipe.pop("seed")
    recipe |= {f"scores.{name}": row["scores"].get(name) for name in ("streams", "precision")}
    name = "delta" if recipe["model.system"] == "recent" else printed.k_equals(recipe["model.sharpness"])
    texts = row["train_data"], row["test_data"]
    series = found.setdefault(hash_recipe([recipe, *texts]), Series(name, _about(row, table), recipe, texts, {}, {}))
    seeds = series.points.setdefault(slots, {})
    if "state_bytes" in row:
        series.states[slots] = int(row["state_bytes"])
    kept = ("ppl_token", "ppl_word", "by_document")
    scores = {name: row["scores"][name] for name in kept if name in row["scores"]} | {"seen": int(row["train_tokens"])}
    validate_documents(scores, series.documents)
    before = seeds.get(seed, scores)
    if any(before[name] != scores[name] for name in ("ppl_token", "ppl_word")):
        raise UserError(
            f"{entry.file}.jsonl, run {entry.get('run')!r}: another row has other scores for the same recipe "
            f"(L = {slots}, {name}, seed {seed}) and text; remove one of the two"
        )
    seeds[seed] = max(before, scores, key=detail)


def _told_apart(series: Series, all_series: list[Series]) -> Series:
    """With what its recipe has that others of the same name and kind, or the paper's filters, do not."""
    alike = [series.recipe | AS_PRINTED, *(other.recipe for other in all_series if other[:2] == series[:2])]
    differing = [key for key, value in series.recipe.items() if any(other.get(key) != value for other in alike)]
    return series._replace(name=", ".join([series.name, *(f"{key} = {series.recipe[key]}" for key in differing)]))


def _belongs(entry: Entry, table: printed.Sweep) -> bool:
    model = entry.row["recipe"]["model"]
    bank = {"spacing": PAPER_SPACING, "first_peak": 1.0, "reach": 1.0}
    return (
        entry.get("test_data.name") == f"{table.corpus}:test"
        and "comparison" not in entry.row
        and entry.get("scores.accounting") == "all"
        and model.get("window") == printed.WINDOW
        and model.get("slots") in [row.slots for row in table.rows]
        and (
            model["system"] == "recent"
            or (model["system"] == "log_memory" and all(model.get(name) == value for name, value in bank.items()))
        )
    )


def _about(row: dict[str, Any], table: printed.Sweep) -> str:
    train, test, how = row["train_data"], row["test_data"], row["recipe"]
    # of the whole training, which runs share; the best weights may come before its end
    steps = how["steps"] and how["steps"] * how["batch_size"] * how["model"]["window"]
    millions = (steps or how["epochs"] * train["tokens"]) / 1e6
    whole = table.tokens[0] <= test["tokens"] <= table.tokens[1]
    part = "" if whole else f" ({test['tokens']:,} tokens: not the official set)"
    weights = f"{row['parameters'] / 1e6:.3g}M weights"
    return f"trained on {millions:,.1f}M tokens of {train['name']}, {weights}, scored on {test['name']}{part}"


def abouts(series: list[Series]) -> list[str]:
    """What each kind of runs was trained and scored on, as notes."""
    kinds = dict.fromkeys(one.about for one in series)
    raised = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    return [f"{str(number).translate(raised)} {about}" for number, about in enumerate(kinds, 1)]


def mark(one: Series, series: list[Series]) -> str:
    """The sign of the note that tells of it."""
    notes = (note.partition(" ") for note in abouts(series))
    return next(sign for sign, _, about in notes if about == one.about)
