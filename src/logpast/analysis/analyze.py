"""`logpast analyze`: where a model's loss lies, and how much of its past it really uses.

The text is scored once by the model, and once by a control if there is one; each token's nats are then told apart by
its position in the window, by how frequent it is, and by where it last occurred. For the rest the text, or the first
`limit` tokens of it, is scored again and again: with each slot silent, with the past cut off, replaced by another or
shuffled beyond some lag, and by windows that overlap. Every figure is a mean over tokens; every interval is a bootstrap
over documents, or over blocks where documents are few, and all differences are between the nats of the same tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from logpast.analysis.breakdowns import Text, findings
from logpast.analysis.page import draw
from logpast.analysis.passes import Array, Rival, kept_passes, plan_of, run
from logpast.analysis.saved import (
    FORMAT,
    JSON,
    NATS,
    PAGE,
    WAYS,
    Kept,
    folder_of,
    is_analysis,
    kept_of,
    read_analysis,
)
from logpast.data import TokenStore, is_store, open_tokens
from logpast.data.batching import Streams
from logpast.data.prepare import is_prepared
from logpast.evaluation.evaluate import Precision, device_for, find_other, load
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, system_of
from logpast.training.checkpoint import Checkpoint, find_checkpoint
from logpast.util.environment import code_sha256, describe, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder, atomic_write, ensure_writable, sha256_of, temporary_path
from logpast.util.progress import ProgressBar, progress_bar
from logpast.util.serialization import json_safe, to_json
from logpast.util.validation import validate_arguments
from logpast.version import __version__

DECIMALS = 8  # of a nat: more than any interval is worth, and can be read


@validate_arguments
def analyze(
    checkpoint: Path,
    data: str | None = None,
    control: Path | None = None,
    out: Path | None = None,
    limit: int = 300_000,
    finest: int = 16,
    counts: str | None = None,
    streams: Streams | None = None,
    batch_size: int = 16,
    seed: int = 0,
    device: str = "auto",
    precision: Precision = "float32",
    cache: Path | None = None,
) -> dict[str, Any]:
    """Show on one page where a model's loss lies, and how much of its past it really uses.

    Loss by position in the window, by frequency and by where a token last occurred, and the gain over a control;
    which tokens gain and lose most; what each slot is worth; how far back the past matters; what overlapping windows
    bring.

    Examples:
        logpast analyze runs/memory --data wikitext103:test --control runs/control
        logpast analyze runs/memory --data pg19:test --control runs/control-analysis --precision bfloat16
        logpast analyze runs/memory-analysis        # draw the page again from its analysis.json, without the model

    Args:
        checkpoint: a run folder (its best checkpoint is taken), one checkpoints/step-… folder, or a finished analysis,
            whose page is drawn again.
        data: the text: a file, folder or glob, a prepared token store, or NAME:SPLIT such as wikitext103:test.
        control: a second model of the same tokenizer, to measure the gain over: a checkpoint, or the folder of its own
            finished analysis on the same text, if the model is not at hand.
        out: folder to make, for report.html, analysis.json and nats.safetensors (the nats of every token in every
            pass); by default runs/ and the run's name and -analysis. If it is interrupted, the same command goes on.
        limit: the parts that score the text many times over (slots, lags, strides) take only about the first so many
            tokens of it; the whole of it is scored once in any case.
        finest: the stride of overlapping windows is halved until scoring takes so many times as long.
        counts: the text in which to count how frequent tokens are; by default the training text where its tokens are
            at hand, else the text itself.
        streams: corpus reads the text as one stream, as the paper does; document starts anew at every document; the
            default is what the model was trained with.
        batch_size: windows at a time; changes speed and memory, not the result.
        seed: of the orders in which the past is shuffled, and of the places of pasts that replace it.
        device: auto, cpu, cuda or mps.
        precision: arithmetic of the model; sums are float64 always.
        cache: where text is kept once tokenised (default: $LOGPAST_CACHE or ~/.cache/logpast).

    Returns:
        What stands in analysis.json.
    """
    given, (_, *options) = locals(), inspect.signature(analyze).parameters.values()
    if is_analysis(checkpoint):
        return _draw_again(checkpoint, [each.name for each in options if given[each.name] != each.default])
    _check(batch_size, limit, finest, seed)
    found = find_checkpoint(checkpoint)
    if data is None:
        raise UserError("give the text to score with --data, such as --data wikitext103:test")
    out = out or Path("runs") / f"{found.config.run.name}-analysis"
    if os.path.lexists(out):
        again = f"draw its page again with `logpast analyze {out}`, delete it, or " if is_analysis(out) else ""
        raise UserError(f"{out} exists already; {again}give another folder with --out")
    ensure_writable(out)
    place = device_for(device, precision)
    store = open_tokens(data, found.load_tokenizer(), cache)
    window = found.config.model.window
    if len(store) <= window:
        raise UserError(f"{store.name} has {len(store)} tokens, no more than one window of {window}; use more text")
    streams = streams or found.config.data.streams
    settings = {"streams": streams, "precision": precision, "batch_size": batch_size, "limit": limit,
                "finest": finest, "seed": seed}  # fmt: skip
    some = min(limit, len(store))
    rival, about_rival = _control(control, store, settings, some, place) if control else (None, None)
    model = load(found, place, precision)
    about_model = _identity(found, model, store)
    plan = plan_of(model, rival, store, some, finest, seed, place)
    both = ((model, about_model), (rival, about_rival))
    models = {each: about for each, about in both if isinstance(each, LanguageModel) and about}
    code = {"logpast": __version__, "revision": revision()}  # now: the checkout may be another when all is done
    decisive = {
        "code": code_sha256(), "text": store.identity, "streams": streams, "precision": precision, "seed": seed,
        "documents": hashlib.sha256(store.documents.tokens.tobytes()).hexdigest(), "device": place.type,
    }  # fmt: skip
    total = int(sum(one.cost for kind in plan.values() for one in kind))
    with kept_passes(temporary_path(out, "passes"), plan, decisive, models) as done:
        with progress_bar("analyzing", total, int(done.cost)) as progress:
            frequent = _counted(found, store, counts, cache, progress)
            try:
                nats = run(plan, done, store, streams, batch_size, place, precision, progress)
            except KeyboardInterrupt:
                progress.say(f"stopped; the same command goes on with what lies in {done.folder}")
                raise
        if isinstance(rival, Kept):
            nats["control"] = {"control": rival.nats}
        text = Text(store, streams, frequent, about_model["train_data"]["sha256"])
        parts = findings(nats, text, model, rival, some, finest)
        about = {
            "format": FORMAT,
            "recorded": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **code,
            "hardware": describe(place),
            "seconds": round(done.seconds, 1),
            "data": store.identity | {"documents": len(store.documents)},
            "settings": settings,
            "model": about_model,
            "control": about_rival,
        }
        result = json_safe(about) | json_safe(parts, DECIMALS)
        _write(out, result, {name: each for kind in nats.values() for name, each in kind.items()}, precision)
        done.clear()
    atomic_write(out / PAGE, draw(result))  # last: a page that cannot be drawn takes no figures away
    _report(result, out)
    return result


def _check(batch_size: int, limit: int, finest: int, seed: int) -> None:
    for name, value in (("batch_size", batch_size), ("limit", limit), ("finest", finest)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed must be from 0 to 2^63 − 1, got {seed}")


def _control(
    path: Path, store: TokenStore, settings: dict[str, Any], some: int, device: torch.device
) -> tuple[Rival, dict[str, Any]]:
    """A second model, or what its own analysis has kept of it, and which it is."""
    if is_analysis(path):
        kept = kept_of(path, store, settings, some)
        return kept, kept.about
    found = find_other(path, store)
    model = load(found, device, settings["precision"])
    return model, _identity(found, model, store)


def _counted(
    found: Checkpoint, store: TokenStore, counts: str | None, cache: Path | None, progress: ProgressBar
) -> TokenStore:
    """The text that says how frequent a token is."""
    if counts is not None:
        return open_tokens(counts, found.load_tokenizer(), cache)
    data, train = found.config.data, None
    if is_prepared(data.train, data.tokenizer, cache):
        progress.say(f"counting tokens of {data.train}")
        train = open_tokens(data.train, None if is_store(data.train) else data.tokenizer, cache)
    # under the same name there may by now be another text
    return train if train and train.sha256 == found.state["data"]["sha256"] else store


def _identity(found: Checkpoint, model: LanguageModel, store: TokenStore) -> dict[str, Any]:
    """Which weights these are, to be known again when they are gone."""
    row = ledger.row(found, store, {})
    kept = ("run", "step", "seed", "parameters", "train_tokens", "train_data", "trained_at_revision", "recipe_hash")
    sizes = {"window": model.window, "slots": getattr(model, "slots", 0), "history": model.history}
    return (
        {"system": system_of(found.config.model)} | sizes | {name: row[name] for name in kept}
        | {"weights_sha256": sha256_of(found.path / "model.safetensors"), "recipe": row["recipe"]}
    )  # fmt: skip


def _write(out: Path, result: dict[str, Any], nats: dict[str, Array], precision: str) -> None:
    kind = np.float64 if precision == "float64" else np.float32
    try:
        with atomic_folder(out) as folder:
            (folder / JSON).write_text(to_json(result) + "\n", encoding="utf-8")
            save_file({name: each.astype(kind) for name, each in nats.items()}, folder / NATS)
    except FileExistsError:
        raise UserError(f"{out} has come to exist meanwhile; give another folder with --out") from None


def _draw_again(finished: Path, asked: list[str]) -> dict[str, Any]:
    if asked:
        options = " and ".join(f"--{name}" for name in asked)
        raise UserError(f"{finished} is a finished analysis, whose page is drawn again; give a model, or no {options}")
    result = read_analysis(finished)
    with ledger.reading(f"{finished} is not an analysis that can be drawn", "analyze the model anew"):
        page = draw(result)
    place = folder_of(finished) / PAGE
    atomic_write(place, page)
    print(f"open {place}")
    return result


def _report(result: dict[str, Any], out: Path) -> None:
    data, scores, lines = result["data"], result["scores"], list[tuple[str, float, list[float] | None]]()
    if "gain" in scores["all"]:
        gain = scores["all"]["gain"]
        lines.append(("gain over the control", gain["nats"][0], gain["interval"][0]))
        for name in ("familiar", "others"):
            if part := result["documents"].get(name):
                gain = part["all"]["gain"]
                lines.append((f"  {part['documents']:,} {name}", gain["nats"][0], gain["interval"][0]))
    if "absent" not in result["slots"]:
        none, lags = result["slots"]["all"], result["lags"]
        lines.append(("all slots silent", none["increase"], none["interval"]))
        for way in WAYS:
            lines.append((f"all of the past {way}", lags[way]["increase"][0], lags[way]["interval"][0]))
    if "absent" not in result["stride"]:
        own = result["stride"]["model"]
        lines.append((f"stride {own['stride'][-1]} of {own['stride'][0]}", own["increase"][-1], own["interval"][-1]))
    print(f"{data['name']}: {data['tokens']:,} tokens, ppl_token {scores['model']['ppl_token']:.4f}; nats per token:")
    for name, value, interval in lines:
        print(f"  {name:26} {value:+.4f}" + (" [{:+.4f}, {:+.4f}]".format(*interval) if interval else ""))
    print(f"open {out / PAGE}")
