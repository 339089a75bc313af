"""Rivals side by side: the same tokens, the same number of weights, the same budget, the same scorer.

    logpast compare rivals-small

A recipe names a corpus, a budget and the systems. Systems get equal numbers of weights (the width of the MLP makes up
for what each needs besides), their learning rate by the same small search on validation text, and then the same number
of training tokens, or of seconds. Each finished cell is a row of OUT/rows.jsonl: a comparison that was interrupted
goes on where it stopped. Of finished runs, weights are kept and optimizer states are not.
"""

from __future__ import annotations

import io
import json
import math
import re
import statistics
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from logpast.comparison.table import draw, short, table
from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Lanes, Streams, Windows
from logpast.ledger import row as ledger
from logpast.ledger.documents import validate_documents
from logpast.ledger.row import reading
from logpast.models import SYSTEMS, LanguageModel, ModelConfig, RecurrentConfig, build, known_system
from logpast.reporting.tables import as_markdown_page as markdown_page
from logpast.reporting.tables import as_text
from logpast.sweeps.cell import free_memory, run_cell, tokens_per_second
from logpast.training.checkpoint import drop_optimizer_state
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from logpast.training.recipes import find_recipe, read_yaml, validate_section
from logpast.util.errors import Diverged, UserError
from logpast.util.files import atomic_write, ensure_writable, exclusive_lock, remove_folder
from logpast.util.validation import validate_arguments, validate_fields

Budget = Literal["tokens", "time"]
TOLERANCE = 0.02  # how far numbers of weights may be apart
LEEWAY = 0.1  # and seconds of training from those that were asked for, without a word


@dataclass(frozen=True)
class Recipe:
    """What is compared, on what, with how much of it: the keys of a recipe for `logpast compare`."""

    train: str
    validation: str
    test: str
    systems: dict[str, dict[str, Any]]
    """name in the table -> settings of a model, as in a recipe for `train`; the first sets the number of weights"""
    tokenizer: str | None = None
    streams: Streams = "document"
    model: dict[str, Any] = field(default_factory=dict)
    """settings that all systems share"""
    tokens: int = 1_000_000
    """training tokens of each"""
    seconds: float = 60
    """training time of each, with --budget time"""
    tokens_per_step: int = 4096
    learning_rates: tuple[float, ...] = (1e-3,)
    """what the search tries for each system"""
    search_tokens: int = 100_000
    """training tokens of each try"""
    validation_tokens: int | None = None
    seeds: tuple[int, ...] = (0,)
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    batch_size_when_scoring: int = 16

    def __post_init__(self) -> None:
        validate_fields(self)
        for name in ("systems", "learning_rates", "seeds"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one")
        for name in ("tokens", "seconds", "tokens_per_step", "search_tokens", "batch_size_when_scoring"):
            _above_0(name, getattr(self, name))
        if self.validation_tokens is not None:
            _above_0("validation_tokens", self.validation_tokens)
        for rate in self.learning_rates:
            _above_0("each of learning_rates", rate)
        for seed in self.seeds:
            if not 0 <= seed < 2**32:
                raise UserError(f"each of seeds must be from 0 to 2^32 − 1, got {seed}")


def _above_0(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UserError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class Contestant:
    """A system as it takes part."""

    name: str
    model: ModelConfig
    parameters: int
    attention_length: int
    batch_size: int
    tokens_per_step: float
    """in the mean: a document's last window has fewer tokens than places"""

    @property
    def file_name(self) -> str:
        return _file_name(self.name)


def _file_name(system: str) -> str:
    """A system's name as names of files and folders begin with it; a slash would lead elsewhere."""
    return re.sub(r"[^\w.+ -]+", "_", system)


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
    """Train and score several systems side by side, and write one table and one plot.

    Examples:
        logpast compare rivals-toy
        logpast compare rivals-small --budget time --out runs/rivals-time
        logpast compare rivals-small --systems "[memory, delta]" --seeds "[0, 1, 2]"
        logpast compare rivals-small --train my/train --validation my/valid --test my/test --out runs/my

    Args:
        recipe: a page that names corpus, budget and systems; see rivals-small.
        out: folder for runs, rows.jsonl, table.md and plot.png (of equal time, table-time.md and plot-time.png); by
            default runs/ and the recipe's name. What is finished there is not done again.
        budget: tokens gives every system the same training tokens, time the same seconds of training.
        systems: only these of the recipe's.
        seeds: in place of the recipe's.
        train: a text to train on, in place of the recipe's.
        validation: a text to choose learning rates on, in place of the recipe's.
        test: a text to score on, in place of the recipe's.

    Returns:
        The rows, one for each system and seed.
    """
    recipe = find_recipe(recipe)
    plan = _read(recipe)
    plan = replace(
        plan,
        seeds=plan.seeds if seeds is None else tuple(seeds),
        train=plan.train if train is None else train,
        validation=plan.validation if validation is None else validation,
        test=plan.test if test is None else test,
    )
    out = out or Path("runs") / recipe.stem
    if systems == []:
        raise UserError(f"--systems is empty; leave it out for all, or name some of {', '.join(plan.systems)}")
    if unknown := set(systems or ()) - set(plan.systems):
        raise UserError(f"unknown systems {', '.join(sorted(unknown))}; {recipe} has {', '.join(plan.systems)}")
    store = open_tokens(plan.train, plan.tokenizer)
    # all now, for a mistake in a name should not cost a training
    texts = {"train": store} | {name: open_tokens(getattr(plan, name), store.path) for name in ("validation", "test")}
    contestants = _contestants(plan, store)
    ensure_writable(out / "rows.jsonl")
    with exclusive_lock(out):
        hashes = {name: text.sha256 for name, text in texts.items()}
        _same_plan(plan, hashes, out)
        try:
            return _compare(plan, hashes, contestants, out, budget, systems or list(plan.systems))
        except KeyboardInterrupt:
            print("stopped; the same command goes on")
            raise


def _compare(
    plan: Recipe, texts: dict[str, str], contestants: list[Contestant], out: Path, budget: Budget, systems: list[str]
) -> list[dict[str, Any]]:  # fmt: skip
    say = Console(emoji=False, highlight=False, markup=False).print
    done = {(row["comparison"]["system"], row["seed"]) for row in _rows(plan, texts, out, budget)}
    settings: dict[str, tuple[float, float] | None] = {}
    diverged: list[str] = []
    for seed in dict.fromkeys(plan.seeds):  # so that one of each is there before a second of any
        for each in contestants:
            if each.name not in systems or (each.name, seed) in done:
                continue
            if each.name not in settings:
                settings[each.name] = _search(plan, each, out, say)
            try:
                if not (found := settings[each.name]):
                    raise Diverged("diverged with each of learning_rates")
                _run_cell(plan, each, out, budget, seed, *found, say)
            except Diverged as error:  # no reason not to go on with the others
                say(f"{each.name}, seed {seed}: {error}")
                diverged.append(f"{each.name}, seed {seed}")
    rows = _rows(plan, texts, out, budget)
    if rows:
        order = [each.name for each in contestants]
        rows.sort(key=lambda row: (order.index(row["comparison"]["system"]), row["seed"]))
        of_budget = "" if budget == "tokens" else f"-{budget}"
        page, plot = out / f"table{of_budget}.md", out / f"plot{of_budget}.png"
        with reading(f"{out / 'rows.jsonl'} is damaged", "remove the row, or give another --out"):
            atomic_write(page, markdown_page(table(rows)))
            print(as_text(short(rows)))
            draw(rows, plot)
        print(f"{page}, {plot}, rows in {out / 'rows.jsonl'}")
    if diverged:
        raise UserError(f"diverged: {'; '.join(diverged)}. Of learning_rates, add smaller ones, and give another --out")
    return rows


def _read(path: Path) -> Recipe:
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("systems"), dict):
        raise UserError(f"{path} is not a comparison: it needs train, validation, test and systems")
    if missing := [name for name in ("train", "validation", "test") if values.get(name) is None]:
        raise UserError(f"{path} lacks {', '.join(missing)}")
    places = dict[str, str]()
    for name in values["systems"]:
        if not isinstance(name, str):
            raise UserError(f"{path}: the system {name} should have a name; put it in quotes")
        if (other := places.setdefault(_file_name(name), name)) != name:
            raise UserError(f"{path}: files of {other} and {name} would have the same names; rename one")
    return validate_section(Recipe, values, str(path))


def _same_plan(plan: Recipe, texts: dict[str, str], out: Path) -> None:
    """Rows of one folder are of one recipe and one set of texts, or the table would compare what was not made alike."""
    place = out / "recipe.json"
    told = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "seeds"} | {"texts": texts}
    rows = out / "rows.jsonl"
    if rows.exists() and not place.exists():
        raise UserError(f"{rows} is there, but no recipe.json that tells of what; give another --out")
    if place.exists() and any(path.exists() for path in (rows, out / "runs", *out.glob("search/*"))):
        try:
            kept = dict(_in_order(place.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise UserError(f"{place} is damaged; bring it back, or give another --out") from None
        ours = dict(_in_order(json.dumps(told)))
        kept.setdefault("texts", ours["texts"])  # those of earlier versions do not tell
        if other := [name for name in {**ours, **kept} if kept.get(name) != ours.get(name)]:
            raise UserError(f"{out} holds a comparison by another recipe ({', '.join(other)}); give another --out")
    atomic_write(place, json.dumps(told, indent=2) + "\n")


def _in_order(text: str) -> Any:
    """JSON to be compared: 20 is 20.0, but the order of systems counts."""
    return json.loads(text, object_pairs_hook=list)


def _contestants(plan: Recipe, store: TokenStore) -> list[Contestant]:
    """All systems with numbers of weights within 2 % of the first."""
    found: list[Contestant] = []
    for name, own in plan.systems.items():
        settings = {"system": "log_memory"} | plan.model | own
        kind = SYSTEMS[known_system(str(settings.pop("system")))].Config
        config = validate_section(kind, settings, f"system {name}")
        with torch.device("meta"):
            model = build(config, store.tokenizer.size)
            if found and config.mlp is None:
                config = replace(config, mlp=_fitting_mlp(model, found[0].parameters))
                model = build(config, store.tokenizer.size)
        count = model.parameter_count()
        if found and abs(count / found[0].parameters - 1) > TOLERANCE:
            raise UserError(
                f"{name} has {count:,} weights, {found[0].name} {found[0].parameters:,}: set its sizes alike"
            )
        pace = _pace(plan, model.config, store)
        found.append(Contestant(name, model.config, count, model.eval().attention_length, *pace))
    return found


def _pace(plan: Recipe, model: ModelConfig, store: TokenStore) -> tuple[int, float]:
    """Rows of a batch that come closest to the tokens wanted of a step, and how many tokens those are in the mean."""
    windows = len(Windows(store, model.window, 0, plan.streams))
    if isinstance(model, RecurrentConfig):
        rows = max(1, round(plan.tokens_per_step * windows / len(store) / model.segments))
        lanes = Lanes(store, model.window, rows, model.segments, 0, plan.streams)
        return rows, len(store) / lanes.steps_per_epoch
    rows = max(1, round(plan.tokens_per_step * windows / len(store)))
    return rows, rows * len(store) / windows


def _fitting_mlp(model: LanguageModel, wanted: int) -> int:
    """The width of the MLP, a multiple of 8, that brings the number of weights closest to the one wanted."""
    config = model.config
    width = config.mlp or 4 * config.width
    per_unit = config.layers * (2 * config.width + 1)
    return max(8, 8 * round((width + (wanted - model.parameter_count()) / per_unit) / 8))


def _train_config(plan: Recipe, each: Contestant, run: Path, steps: int, rate: float, seed: int) -> TrainConfig:
    return TrainConfig(
        run=run,
        data=DataConfig(
            plan.train, plan.validation, plan.tokenizer, plan.streams, validation_tokens=plan.validation_tokens
        ),
        model=each.model,
        optimizer=OptimizerConfig(rate, rate / 10, warmup_steps=max(1, steps // 20)),
        steps=steps,
        batch_size=each.batch_size,
        seed=seed,
        precision=plan.precision,
        validate_every=steps,  # a system that reads on validates slowly, and each improvement is saved
        checkpoint_every=min(steps, 5000),
        keep=1,
        log_every=max(1, steps // 50),
        tensorboard=False,
        resume="auto",
    )


def _search(plan: Recipe, each: Contestant, out: Path, say: Any) -> tuple[float, float] | None:
    """The learning rate with the best validation loss after a short training, and tokens trained on in a second.

    None if it diverged with each.
    """
    place = out / "search" / f"{each.file_name}.json"
    if known := _searched(place):
        return known
    tried, speeds = dict[float, float](), list[float]()
    steps = max(4, round(plan.search_tokens / each.tokens_per_step))
    runs = {rate: out / "search" / f"{each.file_name}-{rate:g}" for rate in plan.learning_rates}
    for rate, run in runs.items():
        say(f"{each.name}: learning rate {rate:g}")
        free_memory()
        try:
            with redirect_stdout(io.StringIO()):  # it would name commands for a run that is not kept
                best = train(_train_config(plan, each, run, steps, rate, seed=0))["best"]
            say(f"{each.name}: validation ppl {best['ppl_token']:.3f}")
            if math.isfinite(best["ppl_token"]):
                tried[rate] = best["nats_per_token"]
                speeds.append(tokens_per_second(run))
        except Diverged as error:
            say(f"{each.name}: {error}")
    if not tried:
        _forget(runs.values())
        return None
    rate, speed = min(tried, key=lambda rate: tried[rate]), statistics.median(speeds)
    if len(plan.learning_rates) > 1 and rate in (edge := (min(plan.learning_rates), max(plan.learning_rates))):
        end = ("lowest", "highest")[edge.index(rate)]
        say(f"{each.name}: best with the {end} rate tried; one beyond {rate:g} in learning_rates might do better")
    found = {"learning_rate": rate, "tokens_per_second": speed, "tried": tried}
    atomic_write(place, json.dumps(found, indent=2) + "\n")
    _forget(runs.values())
    return rate, speed


def _forget(runs: Iterable[Path]) -> None:
    """The runs of a search, which until its end are what an interrupted one goes on with."""
    for run in runs:
        if run.exists():
            remove_folder(run)


def _searched(place: Path) -> tuple[float, float] | None:
    """What an earlier search found; None if there was none, or its file is damaged."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        return float(found["learning_rate"]), float(found["tokens_per_second"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _run_cell(
    plan: Recipe, each: Contestant, out: Path, budget: Budget, seed: int, rate: float, speed: float, say: Any
) -> None:  # fmt: skip
    tokens = plan.tokens if budget == "tokens" else speed * plan.seconds
    steps = max(4, round(tokens / each.tokens_per_step))
    run = out / "runs" / f"{each.file_name}-{budget}-{seed}"
    say(f"{each.name}, seed {seed}: {steps:,} steps, learning rate {rate:g}")
    config = _train_config(plan, each, run, steps, rate, seed)
    # the state of each stream follows from its beginning, so documents are scored side by side
    entry = run_cell(config, plan.test, plan.batch_size_when_scoring)
    entry["comparison"] = {
        "system": each.name,
        "budget": budget,
        "learning_rate": rate,
        "attention_length": each.attention_length,
        "state_bytes": entry.pop("state_bytes"),
        "tokens_per_second": entry.pop("tokens_per_second"),
        "peak_bytes": entry.pop("peak_bytes"),
    }
    took = steps * each.tokens_per_step / entry["comparison"]["tokens_per_second"]
    if budget == "time" and abs(took / plan.seconds - 1) > LEEWAY:
        say(
            f"{each.name}, seed {seed}: trained for {took:.3g} s in place of {plan.seconds:g}: its speed was another "
            "in the search; for equal times give another --out, and keep the machine to it alone"
        )
    drop_optimizer_state(run)  # before the row, for a cell that has one is not looked at again
    ledger.append(out / "rows.jsonl", entry)


def _rows(plan: Recipe, texts: dict[str, str], out: Path, budget: Budget) -> list[dict[str, Any]]:
    """All that is finished of a budget; an error if any row is not of this recipe's systems and texts."""
    place = out / "rows.jsonl"
    rows = ledger.read(place) if place.exists() else []
    with reading(f"{place} has a row that is no comparison's", "remove it, or give another --out"):
        for row in rows:
            row["comparison"]["budget"], row["seed"], row["scores"]["ppl_token"]
            validate_documents(row["scores"])
            if row["comparison"]["system"] not in plan.systems:
                raise ValueError(f"the recipe has no {row['comparison']['system']!r}")
            for name, sha256 in texts.items():
                if (row.get(f"{name}_data") or {}).get("sha256", sha256) != sha256:
                    raise UserError(f"{place} has rows of another {name} text than there is now; give another --out")
    return [row for row in rows if row["comparison"]["budget"] == budget]
