"""What we measured beside what the paper prints: a table of a row an L and system."""

from __future__ import annotations

import math
from pathlib import Path

from logpast.evaluation.vocabulary import UNSEEN
from logpast.ledger.documents import difference, spread
from logpast.paper import printed
from logpast.paper.measured import Measure, Series, abouts, mark, measured
from logpast.reporting.tables import Table

HEADS = ("L", "τ*max", "system", "printed", "printed − delta",
         "ours", "ours − delta", "ours, familiar", "ours − delta, familiar", "tokens seen", "state KiB")  # fmt: skip


def ours(name: str, results: Path) -> Table | None:
    """What we measured beside Table A1 or A2: a row an L and system; None where there is nothing."""
    table = printed.sweep(name)
    series = measured(table, results)
    return of_ours(beside(table, series)) if series else None


def of_ours(table: Table) -> Table:
    """Its rows that have a figure of ours."""
    place = table.heads.index("ours")
    return table._replace(rows=[row for row in table.rows if row[place]])


def beside(table: printed.Sweep, series: list[Series]) -> Table:
    """A row an L and system that is printed, or that we measured: the paper's figures, and ours."""
    lines = []
    for row in table.rows:
        cells = {"delta": row.delta} | {printed.k_equals(k): cell for k, cell in row.filters.items()}
        measured_here = [one for one in series if row.slots in one.points]
        for kind in dict.fromkeys([*cells, *(one.kind for one in measured_here)]):
            runs: list[Series | None] = [one for one in measured_here if one.kind == kind]
            for one in runs or [None]:
                line = {"L": str(row.slots), "τ*max": f"{row.window:,}", "system": kind, **_as_printed(cells, kind)}
                lines.append(line | (_as_measured(one, series, row.slots) if one else {}))
    heads = [head for head in HEADS if any(line.get(head) for line in lines)]
    notes = _notes(series, heads)
    return Table(heads, [[line.get(head, "") for head in heads] for line in lines], table.title, notes)


def _as_printed(cells: dict[str, printed.Cell], name: str) -> dict[str, str]:
    if name not in cells:
        return {}
    gain = "" if name == "delta" else f"{math.log(cells[name].raw / cells['delta'].raw):+.3f}"
    return {"printed": str(cells[name]), "printed − delta": gain}


def _as_measured(one: Series, series: list[Series], slots: int) -> dict[str, str]:
    seeds = len(one.points[slots])
    means = f"{_means(one, slots, 'ppl_token')}/{_means(one, slots, 'ppl_word')}"
    found = {
        "system": f"{one.name}{mark(one, series)}",
        "ours": means + (f" ({seeds} seeds)" if seeds > 1 else ""),
        "tokens seen": "–".join(dict.fromkeys(f"{each / 1e6:,.1f}M" for each in _extremes(one, slots))),
    }
    if one.documents.tell_apart:
        found["ours, familiar"] = _means(one, slots, "ppl_familiar")
    if slots in one.states:
        found["state KiB"] = f"{one.states[slots] / 2**10:,.0f}"
    for control in series:
        if control.is_control_of(one) and slots in control.points:
            both = one.points[slots], control.points[slots], one.documents
            found["ours − delta"] = difference(*both)
            if one.documents.tell_apart:
                found["ours − delta, familiar"] = difference(*both, familiar=True)
    return found


def _extremes(one: Series, slots: int) -> tuple[int, int]:
    """The fewest and the most tokens that a seed's weights have seen."""
    seen = [scores["seen"] for scores in one.points[slots].values()]
    return min(seen), max(seen)


def _notes(series: list[Series], heads: list[str]) -> list[str]:
    notes = [
        *abouts(series),
        f"{'printed, ours' if series else 'printed'}: perplexity per token/per word; − delta: nats per token against "
        "the control of the same L, below 0 where the memory is better",
    ]
    if any(len(seeds) > 1 for one in series for seeds in one.points.values()):
        notes.append("±: standard deviation over seeds")
    if "ours − delta" in heads:
        notes.append(
            "ours − delta: between runs of the same seed; in brackets, 95 % over documents: of these runs, it says "
            "nothing of other seeds"
        )
    if any(one.documents.tell_apart for one in series):
        notes.append(
            "familiar: per token, over the documents with at most "
            f"{100 * UNSEEN:g} % of tokens that the training text never has ("
            + ", ".join(dict.fromkeys(one.familiar + mark(one, series) for one in series if one.documents.tell_apart))
            + ")"
        )
    if series:
        notes.append(
            "tokens seen: by the weights that were scored, those of the training that did best on validation text"
        )
    if any(one.states for one in series):
        notes.append("state: what must be kept of a stream to go on with it, in float32")
    return notes


def _means(series: Series, slots: int, measure: Measure) -> str:
    """Over seeds, if all rows tell it."""
    found = series.values(slots, measure)
    return spread(found, 2) if len(found) == len(series.points[slots]) else "?"
