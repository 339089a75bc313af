"""Figures in prose are those of the ledger."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from logpast.experiments import ledger

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "results" / "README.md").read_text()


def scores(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    rows = ledger.read(ROOT / "results" / f"{name}.jsonl")
    found = {(row["recipe"]["model"]["system"], row["seed"]): row["scores"] for row in rows}
    assert len(found) == len(rows)
    return found


def test_rows_are_whole() -> None:
    for file in (ROOT / "results").glob("*.jsonl"):
        for row in ledger.read(file):
            assert re.fullmatch(r"[0-9a-f]{40}", row["trained_at_revision"])
            assert row["scores"]["unscored"] == 0
            assert row["recipe_hash"] == ledger.hash_of(row["recipe"])


def test_demo_on_text() -> None:
    found, differences = scores("demo-text"), []
    for seed in range(5):
        memory, control = found["log_memory", seed], found["recent", seed]
        other = memory["against"]
        differences.append(other["nats_per_token"])
        assert (
            f"| {seed} | {memory['ppl_token']:.2f} | {control['ppl_token']:.2f} | {memory['bits_per_byte']:.4f} | "
            f"{control['bits_per_byte']:.4f} | {other['nats_per_token']:+.4f} [{other['interval'][0]:+.4f}, "
            f"{other['interval'][1]:+.4f}] | {other['documents_better']} of 118 |"
        ) in PAGE
    for system in ("log_memory", "recent"):
        values = [found[system, seed]["ppl_token"] for seed in range(5)]
        summary = f"{statistics.mean(values):.2f} ({statistics.stdev(values):.2f})"
        assert summary in PAGE
        assert summary in (ROOT / "README.md").read_text()
    assert f"{statistics.mean(differences):+.4f} ({statistics.stdev(differences):.4f})" in PAGE


def test_demo_on_topics() -> None:
    found = scores("demo-topics")
    optima = json.loads((ROOT / "results" / "demo-topics-optima.json").read_text())
    best, view = optima["optimum_given_all"], optima["optimum_given_recent"]
    assert f"| {best:.4f} |" in PAGE
    assert f"| {view:.4f} |" in PAGE
    for name, system in (("memory", "log_memory"), ("control", "recent")):
        nats = [math.log(found[system, seed]["ppl_token"]) for seed in range(3)]
        cells = " | ".join(f"{value:.4f}" for value in nats)
        error = statistics.stdev(nats) / 3**0.5
        assert f"| {name} | {cells} | {statistics.mean(nats) - view:+.4f} ({error:.4f}) |" in PAGE
        if name == "control":
            assert all(0 < value - view < 0.01 for value in nats)
        else:
            assert all(best < value < view - 2 * error for value in nats)
