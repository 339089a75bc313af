"""Our results next to the paper's."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logpast.ledger.row import append
from logpast.paper import printed
from logpast.paper.measured import measured
from logpast.paper.ours import ours_table, printed_and_ours
from logpast.reporting.tables import Table
from paper_rows import row, with_documents

Save = Callable[..., Path]
LOSSES = [300.0, 400.0, 800.0]  # of three documents


def table_a1(folder: Path) -> Table:
    sweep = printed.sweep("A1")
    return printed_and_ours(sweep, measured(sweep, folder))


def lines(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.heads, line, strict=True)) for line in table.rows]


def column(table: Table, head: str) -> list[tuple[str, str, str]]:
    """(L, system, value), where there is a value."""
    return [(line["L"], line["system"], line[head]) for line in lines(table) if line[head]]


def test_every_series_has_a_row_next_to_its_printed_cell(ledger: Path) -> None:
    append(ledger / "other.jsonl", row(5, 100, 0, 35.0, model={"normalize": "area"}))
    append(ledger / "other.jsonl", row(5, 100, 0, 36.0, train_data={"name": "books"}))
    append(ledger / "other.jsonl", row(5, 50, 0, 37.0))
    table = ours_table("A1", ledger)
    assert table
    assert [(each["τ*max"], each["system"], each["printed"], each["ours"]) for each in lines(table)[:5]] == [
        ("2", "delta¹", "19.26/30.78", "40.50 ± 0.71/81.00 ± 1.41 (2 seeds)"),
        ("2", "k = 100²", "19.74/31.31", "36.00/72.00"),
        ("2", "k = 100, model.normalize = area¹", "19.74/31.31", "35.00/70.00"),
        ("2", "k = 100, model.normalize = none¹", "19.74/31.31", "38.00/76.00"),
        ("2", "k = 50¹", "", "37.00/74.00"),
    ]
    assert "±: standard deviation over seeds" in table.notes
    assert ours_table("A2", ledger) is None


def test_memory_is_compared_with_the_control_of_its_length_and_seed(save: Save) -> None:
    controls = [with_documents(row(slots, None, seed, 40.0), LOSSES) for seed in (0, 1) for slots in (5, 53)]
    table = table_a1(save(*controls, with_documents(row(53, 200, 1, 39.0), [700.0, 390.0, 788.0])))
    by_cell = {(line["L"], line["system"]): line for line in lines(table)}
    control, memory = by_cell["53", "delta¹"], by_cell["53", "k = 200¹"]
    assert control["ours"] == f"{math.exp(1500 / 400):.2f} ± 0.00/80.00 ± 0.00 (2 seeds)"
    assert control["ours, in-vocabulary"] == f"{math.exp(1200 / 300):.2f} ± 0.00"  # of the last two documents
    assert (memory["ours"], memory["ours, in-vocabulary"]) == ("109.40/78.00", "50.74")
    assert memory["ours − delta"] == "+0.9450"  # three documents are too few for an interval
    assert memory["ours − delta, in-vocabulary"] == "-0.0733"
    assert "too few documents (3) for an interval" in "".join(table.notes)
    assert [(slots, system) for slots, system, _ in column(table, "ours − delta")] == [("53", "k = 200¹")]
    assert "(2 of 3¹)" in "".join(table.notes)


def test_state_of_a_stream_is_shown_where_rows_have_it(save: Save) -> None:
    rows = [
        row(slots, k, 0, 40.0, state_bytes=1024 * kib)
        for slots, kib in ((5, 900), (53, 1032))
        for k in (None, 100, 200)
    ]
    table = table_a1(save(*rows, row(9, None, 0, 40.0)))
    systems = ("delta¹", "k = 100¹", "k = 200¹")
    expected = [("5", system, "900") for system in systems] + [("53", system, "1,032") for system in systems]
    assert column(table, "state KiB") == expected
    assert any(note.startswith("state: ") for note in table.notes)


def test_tokens_seen_are_a_range_if_seeds_differ(save: Save) -> None:
    seen = ((None, 0, 49_000_000), (None, 1, 30_000_000), (200, 0, 12_340_000))
    table = table_a1(save(*(row(53, k, seed, 40.0, train_tokens=tokens) for k, seed, tokens in seen)))
    assert column(table, "tokens seen") == [("53", "delta¹", "30.0M–49.0M"), ("53", "k = 200¹", "12.3M")]
    assert any(note.startswith("tokens seen: ") for note in table.notes)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("recipe", "batch_size"), 8),
        (("recipe", "model", "layers"), 9),
        (("train_data", "sha256"), "c" * 64),
        (("test_data", "sha256"), "c" * 64),
    ],
)
def test_control_with_other_settings_or_text_is_not_compared(save: Save, place: tuple[str, ...], value: object) -> None:
    control, memory = (with_documents(row(53, k, 0, 40.0, model={"layers": 2}), LOSSES) for k in (None, 200))
    assert "ours − delta" in table_a1(save(control, memory, folder="same")).heads
    other = copy.deepcopy(control)
    part: Any = other
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    assert "ours − delta" not in table_a1(save(other, memory, folder="other")).heads


def test_texts_with_the_same_name_are_two_series(save: Save) -> None:
    perplexities = {"c" * 64: 39.0, "d" * 64: 99.0}
    rows = [row(53, 200, 0, ppl, test_data={"sha256": sha256}) for sha256, ppl in perplexities.items()]
    table = table_a1(save(*rows))
    assert column(table, "ours") == [("53", "k = 200¹", "39.00/78.00"), ("53", "k = 200¹", "99.00/198.00")]


def test_of_two_rows_of_a_run_the_one_with_documents_counts(save: Save) -> None:
    newer = with_documents(row(53, 200, 0, 39.0), [700.0, 390.0, 788.0])
    older = newer | {"scores": {name: value for name, value in newer["scores"].items() if name != "by_document"}}
    table = table_a1(save(older, newer, older))
    assert column(table, "ours") == [("53", "k = 200¹", "109.40/78.00")]
    assert column(table, "ours, in-vocabulary") == [("53", "k = 200¹", "50.74")]


def test_note_counts_in_vocabulary_documents_of_each_training_text(save: Save) -> None:
    """They depend on the training text; rows of early versions do not say which they are."""
    small = with_documents(row(53, 200, 0, 39.0), LOSSES)
    large = with_documents(row(53, 200, 0, 39.0, train_data={"name": "large", "sha256": "c" * 64}), LOSSES)
    large["scores"]["by_document"]["unseen"] = [1, 0, 0]
    early = row(53, 200, 0, 39.0, train_data={"name": "early", "sha256": "d" * 64})
    (note,) = (note for note in table_a1(save(small, large, early)).notes if note.startswith("in-vocabulary"))
    assert note.endswith("(not recorded¹, 3 of 3², 2 of 3³)")


def test_infinite_loss_of_a_document_leaves_the_in_vocabulary_value_open(save: Save) -> None:
    control = with_documents(row(53, None, 0, 40.0), LOSSES)
    table = table_a1(save(control, with_documents(row(53, 200, 0, 39.0), [700.0, None, 788.0])))
    assert column(table, "ours, in-vocabulary")[-1] == ("53", "k = 200¹", "?")
    assert "ours − delta" not in table.heads
