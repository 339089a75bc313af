"""Figures in prose are those of the ledger."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from logpast.experiments import comparison, ledger

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


def table(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{40}", found["revision"])
    return found


def test_training_on_a_gpu() -> None:
    found = table("train_gpu")
    assert f"Revision `{found['revision'][:7]}`" in PAGE
    for row in found["rows"]:
        assert (
            f"| {row['windows']} × {row['positions']:,} | {row['ms']:.1f} [{row['ms_10']:.1f}, {row['ms_90']:.1f}] | "
            f"{row['loss_tokens_per_s']:,} | {row['share']:.1%} | {row['peak_gib']:.1f} |"
        ) in PAGE
    ratios = found["step_time_ratios"]
    for ratio in ratios.values():
        assert f"{ratio:.3f}" in PAGE
    front = (ROOT / "README.md").read_text()
    assert f"the memory costs {ratios['memory / delta'] - 1:.1%} of a".replace("%", " %") in front
    price = {row["case"]: row["ms"] / row["loss_tokens"] for row in found["rows"]}
    longer, long = (price[case] / price["memory"] for case in ("full-8448", "full-4096"))
    assert f"over 8,448 tokens {longer:.1f} times, over 4,096 {long:.1f} times" in front


def test_the_memory_on_a_gpu() -> None:
    for row in table("memory_gpu")["rows"]:
        both = f"{row['both_ms']:.3f}" if "both_ms" in row else ""
        assert (
            f"({row['distinct_per_history']:,}) | {row['forward_ms']:.3f} | {both} | {row.get('extra_gib', '')} |"
            in PAGE
        )


def test_scoring_on_a_gpu() -> None:
    found = table("score_gpu")
    assert f"all {found['data']['tokens']:,} tokens" in PAGE
    rows = {row["precision"]: row["seconds"] for row in found["rows"] if row["batch_size"] == 64}
    assert f"{rows['bfloat16']:.2f} s in bf16" in PAGE
    assert f"{rows['float32']:.2f} s in float32" in PAGE


def test_the_fast_step_learns_the_same() -> None:
    folder = ROOT / "results" / "logs" / "fast-step"
    losses = {
        name: [json.loads(line)["loss"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("fast0", "plain0", "plain1")
    }

    def apart(one: str, other: str) -> list[float]:
        return [abs(a - b) for a, b in zip(losses[one], losses[other], strict=True)]

    ours, seeds = apart("fast0", "plain0"), apart("plain0", "plain1")
    assert f"{statistics.mean(ours):.4f} nats in the mean and {max(ours):.4f} at most" in PAGE
    assert f"{statistics.mean(seeds):.4f} and {max(seeds):.4f}" in PAGE


def test_the_rivals_at_toy_size(tmp_path: Path) -> None:
    rows = ledger.read(ROOT / "results" / "rivals-toy.jsonl")
    comparison._write_table(rows, tmp_path, lambda table: None)
    assert (tmp_path / "table.md").read_text() in PAGE + "\n"
    assert len({row["trained_at_revision"] for row in rows}) == 1
