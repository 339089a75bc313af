"""Our results next to the paper's: one table with one row per L and system."""

from __future__ import annotations

import math
from pathlib import Path

from logpast.evaluation.vocabulary import UNSEEN
from logpast.ledger.documents import difference, spread
from logpast.paper import printed
from logpast.paper.measured import Measure, Series, footnotes, measured
from logpast.reporting.differences import too_few
from logpast.reporting.tables import Table

HEADS = (
    "L", "τ*max", "system", "printed", "printed − delta", "ours", "ours − delta", "ours, in-vocabulary",
    "ours − delta, in-vocabulary", "tokens seen", "state KiB",
)  # fmt: skip


def ours_table(name: str, results: Path) -> Table | None:
    """The cells of Table A1 or A2 that we measured, next to the printed ones; None if there are none."""
    sweep = printed.sweep(name)
    series = measured(sweep, results)
    return only_ours(printed_and_ours(sweep, series)) if series else None


def only_ours(table: Table) -> Table:
    """The rows of `printed_and_ours` that have a result of ours."""
    column = table.heads.index("ours")
    return table._replace(rows=[row for row in table.rows if row[column]])


def printed_and_ours(sweep: printed.Sweep, all_series: list[Series]) -> Table:
    """One row per L and system, printed or measured. Columns without any value are left out."""
    lines = []
    for row in sweep.rows:
        cells = {"delta": row.delta} | {printed.filter_name(k): cell for k, cell in row.filters.items()}
        runs = [series for series in all_series if row.slots in series.scores]
        for system in dict.fromkeys([*cells, *(series.system for series in runs)]):
            line = {"L": str(row.slots), "τ*max": f"{row.window:,}", "system": system, **_printed(cells, system)}
            of_system = [line | _measured(series, all_series, row.slots) for series in runs if series.system == system]
            lines += of_system or [line]
    heads = [head for head in HEADS if any(line.get(head) for line in lines)]
    rows = [[line.get(head, "") for head in heads] for line in lines]
    return Table(heads, rows, sweep.title, _notes(all_series, heads))


def _printed(cells: dict[str, printed.Cell], system: str) -> dict[str, str]:
    if system not in cells:
        return {}
    gain = "" if system == "delta" else f"{math.log(cells[system].raw / cells['delta'].raw):+.3f}"
    return {"printed": str(cells[system]), "printed − delta": gain}


def _measured(series: Series, all_series: list[Series], slots: int) -> dict[str, str]:
    runs = series.scores[slots]
    seen = [scores["seen"] for scores in runs.values()]
    means = f"{_mean(series, slots, 'ppl_token')}/{_mean(series, slots, 'ppl_word')}"
    cells = {
        "system": f"{series.name}{footnotes(all_series)[series.description]}",
        "ours": means + (f" ({len(runs)} seeds)" if len(runs) > 1 else ""),
        "tokens seen": "–".join(dict.fromkeys(f"{tokens / 1e6:,.1f}M" for tokens in (min(seen), max(seen)))),
    }
    if series.documents.has_both_kinds:
        cells["ours, in-vocabulary"] = _mean(series, slots, "ppl_in_vocabulary")
    if slots in series.state_bytes:
        cells["state KiB"] = f"{series.state_bytes[slots] / 2**10:,.0f}"
    for control in all_series:
        if control.is_control_of(series) and slots in control.scores:
            both = runs, control.scores[slots], series.documents
            cells["ours − delta"] = difference(*both)
            if series.documents.has_both_kinds:
                cells["ours − delta, in-vocabulary"] = difference(*both, in_vocabulary=True)
    return cells


def _mean(series: Series, slots: int, measure: Measure) -> str:
    """Mean and spread over seeds; ? if not all of them have the value."""
    values = series.values(slots, measure)
    return spread(values, 2) if len(values) == len(series.scores[slots]) else "?"


def _notes(all_series: list[Series], heads: list[str]) -> list[str]:
    marks = footnotes(all_series)
    notes = [
        *(f"{mark} {description}" for description, mark in marks.items()),
        f"{'printed, ours' if all_series else 'printed'}: perplexity per token/per word; − delta: difference to the "
        "control of the same L in nats per token, negative where the memory is better",
    ]
    if any(len(seeds) > 1 for series in all_series for seeds in series.scores.values()):
        notes.append("±: standard deviation over seeds")
    if "ours − delta" in heads:
        notes.append(
            "ours − delta: between runs of the same seed; in brackets: 95 % interval over documents, for these runs "
            "and not for other seeds"
        )
    if few := [len(series.documents.tokens) for series in all_series if series.documents.too_few]:
        notes.append(too_few(min(few)))
    if any(series.documents.has_both_kinds for series in all_series):
        counts = dict.fromkeys(series.in_vocabulary_count + marks[series.description] for series in all_series)
        notes.append(
            f"in-vocabulary: per token, over the documents in which at most {100 * UNSEEN:g} % of the tokens never "
            f"occur in the training text ({', '.join(counts)})"
        )
    if all_series:
        notes.append("tokens seen: by the scored checkpoint, the best one on validation text")
    if "state KiB" in heads:
        notes.append("state: what must be kept per stream to continue it, in float32")
    return notes
