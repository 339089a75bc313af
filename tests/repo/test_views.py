"""tools/views.py: tables and phrases computed from results/."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools.pages import fill
from tools.views import COMPARISONS, VIEWS, read_table

from logpast.comparison import table as comparison_table
from logpast.ledger.row import append, read
from logpast.util.errors import UserError
from markdown_pages import ROOT
from paper_rows import row

RESULTS = ROOT / "results"


def cell(slots: int, sharpness: int | None, seed: int, loss: float, width: int = 96, **changes: Any) -> dict[str, Any]:
    """A row of a sweep, with a loss in nats per token."""
    return row(
        slots, sharpness, seed, math.exp(loss), model={"width": width}, parameters=400_000,
        train_data={"tokens": 5_000_000},
        sweep={"cell": f"{slots}-{sharpness}-{seed}-{width}", "key": "0"}, **changes,
    )  # fmt: skip


def documents(loss: float) -> dict[str, Any]:
    """Scores whose third document is not in-vocabulary: there the loss is more than twice as high as in the others."""
    return {"by_document": {"nats": [5 * loss, 15 * loss, 110 * loss], "tokens": [10, 30, 90], "unseen": [0, 0, 9]}}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A sweep of four pairs, with rows in any order, and two memories whose control is missing."""
    rows = [
        cell(53, 100, 1, 2.0),
        cell(53, None, 1, 1.0),
        cell(5, 100, 0, 4.0, scores=documents(4.0)),
        cell(53, 200, 1, 1.5),
        cell(5, None, 0, 4.5, scores=documents(4.5)),
        cell(21, 100, 0, 3.0),
        cell(53, 100, 1, 9.0, width=97),
        cell(53, None, 1, 8.0, width=97),
        cell(53, 100, 2, 9.0, width=97),
    ]
    for each in rows:
        append(tmp_path / "sweep-small.jsonl", each)
        loss = math.log(each["scores"]["ppl_token"])
        records: list[dict[str, Any]] = [
            {"step": step, "loss": 10 - step * loss, "tokens": 1_000_000 * step} for step in range(1, 9)
        ]
        if each["recipe"]["model"]["slots"] == 53 and each["recipe"]["model"]["width"] == 96:
            records += [{"step": step, "validation_loss": step * loss} for step in (4, 8)]
        log = tmp_path / "logs" / "sweep-small" / f"{each['sweep']['cell']}.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_differences_over_training_are_by_quarter(results: Path) -> None:
    assert VIEWS["sweep-small-training"](results).splitlines() == [
        "| trained on | epochs | parameters | k | L | seed | 0–2M tokens | 2–4M tokens | 4–6M tokens | 6–8M tokens "
        "| validation | test | test, in-vocabulary |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        "| wiki22k:train | 1.6 | 0.4M | 100 | 5 | 0 | +0.7500 | +1.7500 | +2.7500 | +3.7500 |  | -0.5000 | -0.2500 |",
        "| wiki22k:train | 1.6 | 0.4M | 100 | 53 | 1 | -1.5000 | -3.5000 | -5.5000 | -7.5000 | +8.0000 | +1.0000 |  |",
        "| wiki22k:train | 1.6 | 0.4M | 200 | 53 | 1 | -0.7500 | -1.7500 | -2.7500 | -3.7500 | +4.0000 | +0.5000 |  |",
        "| wiki22k:train | 1.6 | 0.4M | 100 | 53 | 1 | -1.5000 | -3.5000 | -5.5000 | -7.5000 |  | +1.0000 |  |",
    ]


def test_gains_are_the_mean_over_the_pairs_of_a_length(results: Path) -> None:
    assert VIEWS["sweep-small-gains"](results) == "−0.500 at L = 5, +1.000 at L = 53"


def test_gains_on_pg19_are_of_in_vocabulary_documents(results: Path) -> None:
    ledger = results / "sweep-small.jsonl"
    ledger.write_text(re.sub(r', "crc32": "\w+"', "", ledger.read_text().replace("wiki22k", "pg19")))
    assert VIEWS["sweep-small-gains-pg19"](results) == "−0.250 at L = 5"


def test_repeated_row_counts_once(results: Path) -> None:
    before = VIEWS["sweep-small-gains"](results)
    append(results / "sweep-small.jsonl", cell(53, 100, 1, 2.0))
    assert VIEWS["sweep-small-gains"](results) == before


def test_two_rows_of_a_cell_with_other_scores_are_an_error(results: Path) -> None:
    append(results / "sweep-small.jsonl", cell(53, 100, 1, 2.5))
    with pytest.raises(UserError, match=r"sweep-small\.jsonl .*53-100-1-96"):
        VIEWS["sweep-small-gains"](results)


def test_missing_log_is_named(results: Path) -> None:
    (results / "logs" / "sweep-small" / "5-100-0-96.jsonl").unlink()
    with pytest.raises(UserError, match=r"page, line 1: .*5-100-0-96\.jsonl"):
        fill("a <!-- results: sweep-small-training -->?<!-- end -->", results, "page")


@pytest.mark.parametrize("view", ["pairs-wiki22k-where", "pairs-wiki22k-past"])
def test_analysis_of_a_model_without_control_is_named(view: str, tmp_path: Path) -> None:
    folder = tmp_path / "analyses" / "wiki22k-k200-seed0"
    shutil.copytree(RESULTS / "analyses" / "wiki22k-delta-seed0", folder)
    with pytest.raises(UserError, match="wiki22k-k200-seed0"):
        VIEWS[view](tmp_path)


@pytest.mark.parametrize("seeds", [[0, 2], [0, 1, 1], [1, 2]])
def test_demo_needs_the_same_seeds_for_each_system(seeds: list[int], tmp_path: Path) -> None:
    for sharpness in (None, 100):
        for seed in seeds if sharpness else (0, 1):
            append(tmp_path / "demo-text.jsonl", row(5, sharpness, seed, 10.0))
    with pytest.raises(UserError, match=r"demo-text\.jsonl .*seeds"):
        VIEWS["demo-text"](tmp_path)


def test_values_of_a_comparison_are_numbers_at_full_precision() -> None:
    values = read_table(RESULTS, "rivals-pg19")
    scores = [row["scores"]["ppl_token"] for row in read(RESULTS / "rivals-pg19.jsonl") if _system(row) == "delta"]
    assert values["delta"]["ppl_token"] == pytest.approx(sum(scores) / len(scores), rel=1e-12)


@pytest.mark.parametrize("file", COMPARISONS)
def test_values_of_a_comparison_are_those_of_its_table(file: str) -> None:
    table = comparison_table.table(read(RESULTS / f"{file}.jsonl"))
    values = read_table(RESULTS, file)
    assert list(values) == [line[0] for line in table.rows]
    assert {head for columns in values.values() for head in columns} == set(table.heads) - {"system", "seeds"}


def _system(row: dict[str, Any]) -> str:
    return str(row["comparison"]["system"])
