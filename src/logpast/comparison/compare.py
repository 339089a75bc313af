"""`logpast compare`: several systems with the same tokens, parameters, budget and scoring.

    logpast compare rivals-small

A recipe names a corpus, a budget and the systems. All systems get the same number of parameters (by the width of the
MLP), a learning rate from the same small search on validation text, and then the same number of training tokens or of
seconds. Each finished cell, a system and a seed, is a row of OUT/rows.jsonl; an interrupted comparison resumes where
it stopped. Finished runs keep their model but not their optimizer state.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from logpast.comparison.recipe import Recipe, ensure_same_recipe, read_recipe
from logpast.comparison.systems import System, equal_systems
from logpast.comparison.table import draw, short, table
from logpast.data import open_tokens
from logpast.ledger import row as ledger
from logpast.reporting.tables import as_markdown_page, as_text
from logpast.sweeps.cell import free_memory, run_cell, tokens_per_second
from logpast.training.checkpoint import drop_optimizer_state
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from logpast.training.recipes import find_recipe
from logpast.util.errors import Diverged, UserError
from logpast.util.files import atomic_write, ensure_writable, exclusive_lock, remove_folder
from logpast.util.schema import parse_json
from logpast.util.validation import validate_arguments

Budget = Literal["tokens", "time"]
TIME_TOLERANCE = 0.1  # relative difference in training time above which a warning is printed


@validate_arguments
def compare(
    recipe: Path,
    out: Path | None = None,
    budget: Budget = "tokens",
    systems: list[str] | None = None,
    seeds: list[int] | None = None,
    train: str | None = None,
    validation: str | None = None,
    test: str | None = None,
) -> list[dict[str, Any]]:
    """Train and score several systems under equal conditions, and write a table and a plot.

    Examples:
        logpast compare rivals-toy
        logpast compare rivals-small --budget time --out runs/rivals-time
        logpast compare rivals-small --systems "[memory, delta]" --seeds "[0, 1, 2]"
        logpast compare rivals-small --train my/train --validation my/valid --test my/test --out runs/my

    Args:
        recipe: YAML file that names corpus, budget and systems, or a shipped recipe such as rivals-small.
        out: folder for runs, rows.jsonl, table.md and plot.png (table-time.md and plot-time.png for equal time); by
            default runs/ and the recipe's name. What is finished there is not done again.
        budget: tokens gives every system the same number of training tokens, time the same seconds of training.
        systems: only these systems of the recipe.
        seeds: replaces the recipe's seeds.
        train: training text; replaces the recipe's.
        validation: text for choosing learning rates; replaces the recipe's.
        test: text to score on; replaces the recipe's.

    Returns:
        The rows, one per system and seed.
    """
    file = find_recipe(recipe)
    plan = read_recipe(file)
    plan = replace(
        plan,
        seeds=plan.seeds if seeds is None else tuple(seeds),
        train=plan.train if train is None else train,
        validation=plan.validation if validation is None else validation,
        test=plan.test if test is None else test,
    )
    out = out or Path("runs") / file.stem
    if systems == []:
        raise UserError(f"--systems is empty; leave it out for all, or name some of {', '.join(plan.systems)}")
    if unknown := set(systems or ()) - set(plan.systems):
        raise UserError(f"unknown systems {', '.join(sorted(unknown))}; {file} has {', '.join(plan.systems)}")
    store = open_tokens(plan.train, plan.tokenizer)
    # open all texts now: a misspelt name must not show only after a training
    texts = {"train": store} | {name: open_tokens(getattr(plan, name), store.path) for name in ("validation", "test")}
    sized = equal_systems(plan, store)
    ensure_writable(out / "rows.jsonl")
    with exclusive_lock(out):
        hashes = {name: text.sha256 for name, text in texts.items()}
        ensure_same_recipe(plan, hashes, out)
        try:
            return _compare(plan, hashes, sized, out, budget, systems or list(plan.systems))
        except KeyboardInterrupt:
            print("stopped; run the same command again to resume")
            raise


def _compare(
    recipe: Recipe, texts: dict[str, str], systems: list[System], out: Path, budget: Budget, chosen: list[str]
) -> list[dict[str, Any]]:  # fmt: skip
    say = Console(emoji=False, highlight=False, markup=False).print
    done = {(row["comparison"]["system"], row["seed"]) for row in _finished(recipe, texts, out, budget)}
    settings: dict[str, tuple[float, float] | None] = {}
    diverged: list[str] = []
    for seed in dict.fromkeys(recipe.seeds):  # all systems with one seed before any with the next
        for system in systems:
            if system.name not in chosen or (system.name, seed) in done:
                continue
            if system.name not in settings:
                settings[system.name] = _search(recipe, system, out, say)
            try:
                if not (found := settings[system.name]):
                    raise Diverged("diverged with each of learning_rates")
                _run_cell(recipe, system, out, budget, seed, *found, say)
            except Diverged as error:  # the other systems can still be compared
                say(f"{system.name}, seed {seed}: {error}")
                diverged.append(f"{system.name}, seed {seed}")
    rows = _finished(recipe, texts, out, budget)
    if rows:
        order = [system.name for system in systems]
        rows.sort(key=lambda row: (order.index(row["comparison"]["system"]), row["seed"]))
        suffix = "" if budget == "tokens" else f"-{budget}"
        markdown, plot = out / f"table{suffix}.md", out / f"plot{suffix}.png"
        atomic_write(markdown, as_markdown_page(table(rows)))
        print(as_text(short(rows)))
        draw(rows, plot)
        print(f"{markdown}, {plot}, rows in {out / 'rows.jsonl'}")
    if diverged:
        raise UserError(f"diverged: {'; '.join(diverged)}; add smaller learning_rates, and give another --out")
    return rows


def _finished(recipe: Recipe, texts: dict[str, str], out: Path, budget: Budget) -> list[dict[str, Any]]:
    """The rows of a budget; a UserError if any row is of another system or text than the recipe's."""
    file = out / "rows.jsonl"
    rows = ledger.read(file, "comparison") if file.exists() else []
    for row in rows:
        if (system := row["comparison"]["system"]) not in recipe.systems:
            raise UserError(f"{file} has a row of system {system!r}, which the recipe lacks; give another --out")
        for name, sha256 in texts.items():
            if (row.get(f"{name}_data") or {}).get("sha256", sha256) != sha256:
                raise UserError(f"{file} has rows of a {name} text that has changed since; give another --out")
    return [row for row in rows if row["comparison"]["budget"] == budget]


def _train_config(recipe: Recipe, system: System, run: Path, steps: int, rate: float, seed: int) -> TrainConfig:
    return TrainConfig(
        run=run,
        data=DataConfig(
            recipe.train,
            recipe.validation,
            recipe.tokenizer,
            recipe.streams,
            validation_tokens=recipe.validation_tokens,
        ),
        model=system.model,
        optimizer=OptimizerConfig(rate, rate / 10, warmup_steps=max(1, steps // 20)),
        steps=steps,
        batch_size=system.batch_size,
        seed=seed,
        precision=recipe.precision,
        validate_every=steps,  # recurrent systems validate slowly, and each improvement is saved
        checkpoint_every=min(steps, 5000),
        keep=1,
        log_every=max(1, steps // 50),
        tensorboard=False,
        resume="auto",
    )


def _search(recipe: Recipe, system: System, out: Path, say: Callable[[str], None]) -> tuple[float, float] | None:
    """The learning rate with the lowest validation loss after a short training, and training tokens per second.

    None if training diverged with all rates. The result is kept in OUT/search; the runs are removed.
    """
    file = out / "search" / f"{system.file_name}.json"
    if saved := _saved_search(file):
        return saved
    losses, speeds = dict[float, float](), list[float]()
    steps = max(4, round(recipe.search_tokens / system.tokens_per_step))
    runs = {rate: out / "search" / f"{system.file_name}-{rate:g}" for rate in recipe.learning_rates}
    for rate, run in runs.items():
        say(f"{system.name}: learning rate {rate:g}")
        free_memory()
        try:
            with redirect_stdout(io.StringIO()):  # train suggests commands for a run that is removed here
                best = train(_train_config(recipe, system, run, steps, rate, seed=0))["best"]
            say(f"{system.name}: validation ppl {best['ppl_token']:.3f}")
            if math.isfinite(best["ppl_token"]):
                losses[rate] = best["nats_per_token"]
                speeds.append(tokens_per_second(run))
        except Diverged as error:
            say(f"{system.name}: {error}")
    found = None
    if losses:
        found = rate, speed = min(losses, key=lambda rate: losses[rate]), statistics.median(speeds)
        lowest, highest = min(recipe.learning_rates), max(recipe.learning_rates)
        if lowest < highest and rate in (lowest, highest):
            end = "lowest" if rate == lowest else "highest"
            say(f"{system.name}: {rate:g} is the {end} rate tried; one beyond it in learning_rates might be better")
        result = {"learning_rate": rate, "tokens_per_second": speed, "tried": losses}
        atomic_write(file, json.dumps(result, indent=2) + "\n")
    for run in runs.values():  # kept until here so that an interrupted search can resume
        if run.exists():
            remove_folder(run)
    return found


def _saved_search(file: Path) -> tuple[float, float] | None:
    """What an earlier search found; None if there is none, or its file is damaged."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"), finite=False)
        return float(found["learning_rate"]), float(found["tokens_per_second"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _run_cell(
    recipe: Recipe, system: System, out: Path, budget: Budget, seed: int, rate: float, speed: float,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Train and score one system with one seed, and append its row."""
    tokens = recipe.tokens if budget == "tokens" else speed * recipe.seconds
    steps = max(4, round(tokens / system.tokens_per_step))
    run = out / "runs" / f"{system.file_name}-{budget}-{seed}"
    say(f"{system.name}, seed {seed}: {steps:,} steps, learning rate {rate:g}")
    config = _train_config(recipe, system, run, steps, rate, seed)
    # a stream's state depends on its own past only, so documents are scored in batches
    entry = run_cell(config, recipe.test, recipe.batch_size_when_scoring)
    entry["comparison"] = {
        "system": system.name,
        "budget": budget,
        "learning_rate": rate,
        "attention_length": system.attention_length,
    }
    seconds = steps * system.tokens_per_step / entry["tokens_per_second"]
    if budget == "time" and abs(seconds / recipe.seconds - 1) > TIME_TOLERANCE:
        say(
            f"{system.name}, seed {seed}: trained for {seconds:.3g} s instead of {recipe.seconds:g} s, because its "
            "speed differed in the search; for equal times give another --out, and run nothing else on the machine"
        )
    drop_optimizer_state(run)  # before the row: a cell that has a row is finished
    ledger.append(out / "rows.jsonl", entry)
