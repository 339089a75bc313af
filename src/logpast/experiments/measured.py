"""Runs of ours that belong beside the paper's Tables A1 and A2, found in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from logpast.experiments import printed
from logpast.experiments.ledger import hash_of
from logpast.experiments.results import Entry, flat, read
from logpast.filters import PAPER_SPACING

RESULTS = Path("results")


class Series(NamedTuple):
    """Runs of ours that differ in L and seed alone."""

    name: str
    about: str
    """what they were trained and scored on, and how large they are"""
    recipe: dict[str, Any]
    points: dict[int, dict[int, dict[str, Any]]]
    """L -> seed -> scores"""

    def values(self, slots: int, measure: str) -> list[float]:
        return [scores[measure] for scores in self.points[slots].values()]


def measured(table: printed.Sweep, results: Path) -> list[Series]:
    """Our runs that belong beside a table of the paper: its two systems and its bank, scored on its test set."""
    if results == RESULTS and not results.is_dir():  # an installed copy has none
        return []
    found: dict[str, Series] = {}
    for entry in read(results):
        if _belongs(entry, table):
            row, recipe = entry.row, flat(entry.row["recipe"])
            slots, seed = recipe.pop("model.slots"), recipe.pop("seed")
            name = "delta" if recipe["model.system"] == "recent" else k_equals(recipe["model.sharpness"])
            key = hash_of([recipe, row["train_data"], row["test_data"]])
            series = found.setdefault(key, Series(name, _about(row, table), recipe, {}))
            series.points.setdefault(slots, {})[seed] = row["scores"]
    told = [_told_apart(series, list(found.values())) for series in found.values()]
    return sorted(told, key=lambda series: (series.name != "delta", series.about, series.name))


def _told_apart(series: Series, all_series: list[Series]) -> Series:
    """With what its recipe has that others of the same name and kind do not."""
    alike = [other.recipe for other in all_series if other[:2] == series[:2]]
    differing = [key for key, value in series.recipe.items() if any(other.get(key) != value for other in alike)]
    return series._replace(name=", ".join([series.name, *(f"{key} = {series.recipe[key]}" for key in differing)]))


def _belongs(entry: Entry, table: printed.Sweep) -> bool:
    model = entry.row.get("recipe", {}).get("model", {})
    bank = {"spacing": PAPER_SPACING, "first_peak": 1.0, "reach": 1.0}
    return (
        str(entry.get("test_data.name")).startswith(f"{table.corpus}:test")
        and entry.get("scores.accounting") == "all"
        and model["window"] == printed.WINDOW
        and model.get("slots") in {row.slots for row in table.rows}
        and (
            model["system"] == "recent"
            or (model["system"] == "log_memory" and all(model[name] == value for name, value in bank.items()))
        )
    )


def _about(row: dict[str, Any], table: printed.Sweep) -> str:
    train, test, millions = row["train_data"]["name"], row["test_data"], row["train_tokens"] / 1e6
    whole = table.tokens[0] <= test["tokens"] <= table.tokens[1]
    part = "" if whole else f" ({test['tokens']:,} tokens: not the whole official set)"
    weights = f"{row['parameters'] / 1e6:.3g}M weights"
    return f"trained on {millions:,.1f}M tokens of {train}, {weights}, scored on {test['name']}{part}"


def k_equals(sharpness: float) -> str:
    return f"k = {sharpness:g}"
