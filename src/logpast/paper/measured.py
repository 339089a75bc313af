"""Our ledger rows for the cells of the paper's Tables A1 and A2, grouped into series of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from logpast.filters import PAPER_SPACING
from logpast.ledger.documents import Documents, detail, documents, in_vocabulary_perplexity, values
from logpast.ledger.query import NOTHING_FOUND, Entry, find_files, is_run, parse_condition, read, select
from logpast.ledger.row import RESULTS, hash_recipe
from logpast.paper import printed
from logpast.util.errors import UserError
from logpast.util.serialization import flatten

PAPER_BANK = {"spacing": PAPER_SPACING, "first_peak": 1.0, "reach": 1.0}
PAPER_FILTERS = {"model.kernel": "paper", "model.normalize": "none"}
Measure = Literal["ppl_token", "ppl_word", "ppl_in_vocabulary"]


class Series(NamedTuple):
    """Runs of ours that differ only in L and seed."""

    system: str
    """as in the paper's tables: delta, k = 100, …"""
    description: str
    """training text, size and test text, in words"""
    recipe: dict[str, Any]
    texts: tuple[dict[str, Any], dict[str, Any]]
    """identity of training and test text"""
    scores: dict[int, dict[int, dict[str, Any]]]
    """L -> seed -> scores of the row, and `seen`: tokens seen by the scored checkpoint"""
    state_bytes: dict[int, int]
    """L -> size of the state per stream at inference, for rows that have it"""
    settings: tuple[str, ...] = ()
    """settings that distinguish it from the paper's filters and from our other series of this system"""

    @property
    def name(self) -> str:
        return ", ".join([self.system, *self.settings])

    def values(self, slots: int, measure: Measure) -> list[float]:
        """One value per seed that has it."""
        if measure == "ppl_in_vocabulary":
            return list(in_vocabulary_perplexity(self.scores[slots], self.documents).values())
        return values(self.scores[slots], measure)

    @property
    def documents(self) -> Documents:
        return documents(*self.scores.values())

    @property
    def in_vocabulary_count(self) -> str:
        if not self.documents.counted:
            return "not recorded"
        return f"{self.documents.in_vocabulary.sum()} of {len(self.documents.tokens)}"

    def is_control_of(self, other: Series) -> bool:
        """Whether this is the control of a memory series: all settings that both systems have are equal."""
        ours, theirs = self.recipe, other.recipe
        own = {name for name in ours.keys() ^ theirs.keys() if name.startswith("model.")} | {"model.system"}
        return (
            (ours["model.system"], theirs["model.system"]) == ("recent", "log_memory")
            and self.texts == other.texts
            and all(ours.get(name) == theirs.get(name) for name in (ours.keys() | theirs.keys()) - own)
        )


def measured(sweep: printed.Sweep, results: Path | None, where: list[str] | None = None) -> list[Series]:
    """Our runs of a table's two systems with its filter bank, scored on its test set.

    Runs of a comparison (`logpast compare`) are left out: there each system has its own learning rate.

    Args:
        sweep: Table A1 or A2.
        results: folder of the ledger; None is results/, or, where there is none, what `logpast results` finds.
        where: NAME=VALUE conditions, as for `logpast results`.
    """
    if results is None and RESULTS.is_dir():
        results = RESULTS  # a sweep that was repeated here would contradict the rows of the checkout
    conditions = [parse_condition(word) for word in where or []]
    files = find_files(results, "--results")
    if conditions and not files:
        raise UserError(f"{NOTHING_FOUND}; leave out the conditions, or give --results")
    found: dict[str, Series] = {}
    for entry in select(read(files), conditions):
        if is_run(entry.row) and _matches(entry, sweep):
            _add(found, entry, sweep)
    named = [series._replace(settings=_settings(series, list(found.values()))) for series in found.values()]
    return sorted(named, key=lambda series: (series.system != "delta", series.description, series.name))


def _matches(entry: Entry, sweep: printed.Sweep) -> bool:
    """Whether a row belongs to a cell of the table."""
    model = entry.row["recipe"]["model"]
    return (
        entry.get("test_data.name") == f"{sweep.corpus}:test"
        and "comparison" not in entry.row
        and entry.get("scores.accounting") == "all"
        and entry.get("scores.stride") is None  # the paper's windows do not overlap
        and not model.get("recall")
        and model.get("window") == printed.WINDOW
        and model.get("slots") in [row.slots for row in sweep.rows]
        and (
            model["system"] == "recent"
            or (model["system"] == "log_memory" and all(model.get(name) == value for name, value in PAPER_BANK.items()))
        )
    )


def _add(found: dict[str, Series], entry: Entry, sweep: printed.Sweep) -> None:
    """Add a row to the series with its recipe, texts and way of scoring. A repeated row counts once."""
    row, recipe = entry.row, flatten(entry.row["recipe"])
    slots, seed = recipe.pop("model.slots"), recipe.pop("seed")
    recipe |= {f"scores.{name}": row["scores"].get(name) for name in ("streams", "precision")}
    system = "delta" if recipe["model.system"] == "recent" else printed.filter_name(recipe["model.sharpness"])
    texts = row["train_data"], row["test_data"]
    new = Series(system, _description(row, sweep), recipe, texts, {}, {})
    series = found.setdefault(hash_recipe([recipe, *texts]), new)
    if "state_bytes" in row:
        series.state_bytes[slots] = row["state_bytes"]
    scores = row["scores"] | {"seen": row["train_tokens"]}
    at = f"{entry.file}.jsonl, run {entry.get('run')!r}"
    tokens, known = scores.get("by_document", {}).get("tokens"), series.documents.tokens.tolist()
    if tokens and known and tokens != known:
        raise UserError(f"{at}: scores.by_document has other documents than rows of the same text; remove the row")
    seeds = series.scores.setdefault(slots, {})
    before = seeds.get(seed, scores)
    if any(before[name] != scores[name] for name in ("ppl_token", "ppl_word")):
        raise UserError(
            f"{at}: another row has other scores for the same recipe (L = {slots}, {system}, seed {seed}) and text; "
            "remove one of the two"
        )
    seeds[seed] = max(before, scores, key=detail)


def _settings(series: Series, all_series: list[Series]) -> tuple[str, ...]:
    """Settings in which a series differs from the paper's filters or from others of its system and description."""
    group = series.system, series.description
    others = [other.recipe for other in all_series if (other.system, other.description) == group]
    others.append(series.recipe | PAPER_FILTERS)
    differing = [key for key, value in series.recipe.items() if any(other.get(key) != value for other in others)]
    return tuple(f"{key} = {series.recipe[key]}" for key in differing)


def _description(row: dict[str, Any], sweep: printed.Sweep) -> str:
    train, test, recipe = row["train_data"], row["test_data"], row["recipe"]
    # tokens of the whole training, which all runs share; the best checkpoint may come before its end
    by_steps = recipe["steps"] and recipe["steps"] * recipe["batch_size"] * recipe["model"]["window"]
    millions = (by_steps or recipe["epochs"] * train["tokens"]) / 1e6
    official = sweep.tokens[0] <= test["tokens"] <= sweep.tokens[1]
    part = "" if official else f" ({test['tokens']:,} tokens: not the official set)"
    size = f"{row['parameters'] / 1e6:.3g}M parameters"
    return f"trained on {millions:,.1f}M tokens of {train['name']}, {size}, scored on {test['name']}{part}"


def footnotes(all_series: list[Series]) -> dict[str, str]:
    """description -> footnote mark: ¹, ², …"""
    superscript = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    descriptions = dict.fromkeys(series.description for series in all_series)
    return {description: str(number).translate(superscript) for number, description in enumerate(descriptions, 1)}
