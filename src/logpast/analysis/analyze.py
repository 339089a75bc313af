"""`logpast analyze`: where a model's loss lies, and how much of its past it uses.

The text is scored once by the model, and once by the control if there is one. The loss of each token is then broken
down by its position in the window, its frequency and its last occurrence. For the rest, the first `limit` tokens are
scored many times: with each slot set to zero, with the past cut off, replaced or shuffled beyond a lag, and with
overlapping windows. A model with recall is also scored without it, and the weights of its components are recorded. All
numbers are means over tokens. Intervals are bootstraps over documents; there are none with fewer than ten. Differences
are between the losses of the same tokens.
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

from logpast.analysis.breakdowns import Text, break_down
from logpast.analysis.labels import difference
from logpast.analysis.page import DOCUMENTS, describe_gate, draw
from logpast.analysis.passes import Array, Control, FinishedPasses, Nats, Plan, finished_passes, plan_passes, run
from logpast.analysis.recall import break_down_recall
from logpast.analysis.saved import JSON, NATS, PAGE, SavedControl, folder_of, is_analysis, read_analysis, read_control
from logpast.analysis.schema import FORMAT, WAYS
from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Streams
from logpast.evaluation.evaluate import Precision, device_for, find_other, load, open_text, open_training_text
from logpast.evaluation.overlap import training_overlap, warn
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, system_of
from logpast.reporting.differences import in_words
from logpast.training.checkpoint import Checkpoint, find_checkpoint
from logpast.training.memory_check import check_scoring
from logpast.util.checksums import write_sums
from logpast.util.environment import code_sha256, describe, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder, atomic_write, ensure_writable, sha256_of, temporary_path
from logpast.util.progress import ProgressBar, progress_bar
from logpast.util.serialization import json_safe, to_json
from logpast.util.validation import LongSeed, PositiveInt, validate_arguments
from logpast.version import __version__

DECIMALS = 8  # of the nats in analysis.json: readable, and far more precise than any interval


@validate_arguments
def analyze(
    checkpoint: Path,
    data: str | None = None,
    control: Path | None = None,
    out: Path | None = None,
    limit: PositiveInt = 300_000,
    finest: PositiveInt = 16,
    counts: str | None = None,
    streams: Streams | None = None,
    batch_size: PositiveInt = 16,
    seed: LongSeed = 0,
    device: str = "auto",
    precision: Precision = "float32",
    cache: Path | None = None,
) -> dict[str, Any]:
    """Show on one page where a model's loss lies, and how much of its past it uses.

    The page breaks the loss, and its difference from a control's, down by position in the window, by token frequency
    and by where a token last occurred. It lists the tokens where the two differ most, and shows what each slot is
    worth, how far back the past matters, and what overlapping windows bring. Of a model with recall it also shows what
    recall gains and where, which lengths and lags of matches it uses, whether its gate opens, and the passages that it
    helped and hurt most.

    Examples:
        logpast analyze runs/memory --data wikitext103:test --control runs/control
        logpast analyze runs/memory --data pg19:test --control runs/control-analysis --precision bfloat16
        logpast analyze runs/memory-analysis        # draw the page again from its analysis.json, without the model

    Args:
        checkpoint: a run folder (its best checkpoint is used), one checkpoints/step-… folder, or a finished analysis,
            whose page is drawn again.
        data: the text: a file, folder or glob, a prepared token store, or NAME:SPLIT such as wikitext103:test.
        control: a second model with the same tokenizer, to compare with: a checkpoint, or the folder of its own
            finished analysis on the same text if the model is not available.
        out: the folder to create, for report.html, analysis.json and nats.safetensors (the loss of every token in
            every pass); by default runs/ and the name of the run and -analysis. If the command is interrupted, the
            same command continues.
        limit: number of tokens for the parts that score the text many times (slots, lags, strides) or need much memory
            (weights of recall): the first ones. The whole text is scored once in any case.
        finest: the stride of overlapping windows is halved until scoring costs this many times as much.
        counts: the text in which tokens are counted for their frequency; by default the training text if it is
            available, else the text itself.
        streams: corpus reads the text as one stream, as the paper does; document starts again at every document; by
            default as the model was trained.
        batch_size: windows per batch; changes speed and memory, not the result.
        seed: seed of the random orders and of the replacement pasts.
        device: auto, cpu, cuda or mps.
        precision: arithmetic of the model; sums are always float64.
        cache: where tokenised text is cached (default: $LOGPAST_CACHE or ~/.cache/logpast).

    Returns:
        The content of analysis.json.
    """
    given, (_, *options) = locals(), inspect.signature(analyze).parameters.values()
    if is_analysis(checkpoint):
        return _draw_again(checkpoint, [each.name for each in options if given[each.name] != each.default])
    found = find_checkpoint(checkpoint)
    if data is None:
        raise UserError("give the text to score with --data, such as --data wikitext103:test")
    out = out or Path("runs") / f"{found.config.run.name}-analysis"
    _require_new(out)
    target = device_for(device, precision)
    store = open_text(data, found, cache)
    streams = streams or found.config.data.streams
    settings = {"streams": streams, "precision": precision, "batch_size": batch_size, "limit": limit,
                "finest": finest, "seed": seed}  # fmt: skip
    probed = min(limit, len(store))
    other, about_other = _load_control(control, store, settings, probed, target) if control else (None, None)
    model = load(found, target, precision)
    about_model = _describe_model(found, model, store)
    code = {"logpast": __version__, "revision": revision()}  # now: the checkout may have changed by the end
    inputs = {
        "code": code_sha256(), "text": store.identity, "streams": streams, "precision": precision, "seed": seed,
        "documents": hashlib.sha256(store.documents.tokens.tobytes()).hexdigest(), "device": target.type,
    }  # fmt: skip
    plan = plan_passes(model, other, store, probed, finest, seed, target)
    both = ((model, about_model), (other, about_other))
    models = {each: described for each, described in both if isinstance(each, LanguageModel)}
    for each in models:
        check_scoring(each, store, batch_size, streams, target, precision)
    with finished_passes(temporary_path(out, "passes"), plan, inputs, models) as done:
        counted, nats = _score(plan, done, store, found, counts, cache, settings, target)
        if isinstance(other, SavedControl):
            nats["control"] = {"control": other.nats}
        train_data = about_model["train_data"]
        overlap = training_overlap(store, train_data, counted if counted.sha256 == train_data["sha256"] else None)
        text = Text(store, streams, counted, train_data["sha256"])
        parts = break_down(nats, text, model, other, probed, finest)
        if model.config.recall:
            parts["recall"] = break_down_recall(nats, text, model, probed)
            del nats["recall"]  # weights, not losses
        about = {
            "format": FORMAT,
            "recorded": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **code,
            "hardware": describe(target),
            "seconds": round(done.seconds, 1),
            "data": store.identity | {"documents": len(store.documents), "training_overlap": overlap},
            "settings": settings,
            "model": about_model,
            "control": about_other,
        }
        result = json_safe(about) | json_safe(parts, DECIMALS)
        _write(out, result, {name: each for kind in nats.values() for name, each in kind.items()}, precision)
        done.delete()
    atomic_write(out / PAGE, draw(result))  # last: if drawing fails, the numbers are safe
    if overlap:
        warn(store, overlap, "the analysis does not show how the model predicts other text")
    _print_summary(result, out)
    return result


def _require_new(out: Path) -> None:
    if os.path.lexists(out):
        again = f"draw its page again with `logpast analyze {out}`, delete it, or " if is_analysis(out) else ""
        raise UserError(f"{out} exists already; {again}give another folder with --out")
    ensure_writable(out)


def _load_control(
    path: Path, store: TokenStore, settings: dict[str, Any], probed: int, device: torch.device
) -> tuple[Control, dict[str, Any]]:
    """The control, from its checkpoint or from its own analysis, and its description."""
    if is_analysis(path):
        saved = read_control(path, store, settings, probed)
        return saved, saved.about
    found = find_other(path, store)
    model = load(found, device, settings["precision"])
    return model, _describe_model(found, model, store)


def _describe_model(found: Checkpoint, model: LanguageModel, store: TokenStore) -> dict[str, Any]:
    """Which model this is: enough to recognise it when the checkpoint is gone."""
    row = ledger.row(found, store, {})
    names = ("run", "step", "seed", "parameters", "train_tokens", "train_data", "trained_at_revision", "recipe_hash")
    sizes = {"window": model.window, "slots": getattr(model, "slots", 0), "history": model.history}
    sizes |= {"recall": model.config.recall} if model.config.recall else {}
    return (
        {"system": system_of(found.config.model)} | sizes | {name: row[name] for name in names}
        | {"weights_sha256": sha256_of(found.path / "model.safetensors"), "recipe": row["recipe"]}
    )  # fmt: skip


def _score(
    plan: Plan,
    done: FinishedPasses,
    store: TokenStore,
    found: Checkpoint,
    counts: str | None,
    cache: Path | None,
    settings: dict[str, Any],
    device: torch.device,
) -> tuple[TokenStore, Nats]:
    """Run all passes behind one progress bar; also open the text in which tokens are counted."""
    total = int(sum(one.cost for kind in plan.values() for one in kind))
    with progress_bar("analyzing", total, int(done.cost)) as progress:
        counted = _open_counted(found, store, counts, cache, progress)
        try:
            streams, batch_size, precision = settings["streams"], settings["batch_size"], settings["precision"]
            return counted, run(plan, done, store, streams, batch_size, device, precision, progress)
        except KeyboardInterrupt:
            progress.say(f"stopped; the same command continues from the finished passes in {done.folder}")
            raise


def _open_counted(
    found: Checkpoint, store: TokenStore, counts: str | None, cache: Path | None, progress: ProgressBar
) -> TokenStore:
    """The text in which tokens are counted."""
    if counts is not None:
        return open_tokens(counts, found.load_tokenizer(), cache)
    train = open_training_text(found, cache)
    if train:
        progress.say(f"counting the tokens of {train.name}")
    return train or store


def _write(out: Path, result: dict[str, Any], nats: dict[str, Array], precision: str) -> None:
    kind = np.float64 if precision == "float64" else np.float32
    try:
        with atomic_folder(out) as folder:
            (folder / JSON).write_text(to_json(result) + "\n", encoding="utf-8")
            save_file({name: each.astype(kind) for name, each in nats.items()}, folder / NATS)
            write_sums(folder)
    except FileExistsError:
        raise UserError(f"{out} was created by another command meanwhile; give another folder with --out") from None


def _draw_again(finished: Path, given: list[str]) -> dict[str, Any]:
    if given:
        options = " and ".join(f"--{name}" for name in given)
        raise UserError(f"{finished} is a finished analysis, whose page is drawn again; give a model, or no {options}")
    result = read_analysis(finished)
    page = folder_of(finished) / PAGE
    atomic_write(page, draw(result))
    print(f"open {page}")
    return result


def _print_summary(result: dict[str, Any], out: Path) -> None:
    """The main numbers; the page has the others."""
    data, scores, lines = result["data"], result["scores"], list[tuple[str, str]]()
    if "gain" in scores["all"]:
        lines.append(("loss against the control", _compared(scores["all"])))
        for key, name in DOCUMENTS.items():
            if part := result["documents"].get(key):
                lines.append((f"  {part['documents']:,} {name}", _compared(part["all"])))
    if recall := result.get("recall"):
        lines.append(("loss against own, no recall", _compared(recall["gain"]["all"])))
        lines.append(("weight of recall's copies", describe_gate(recall["gate"])))
    if "absent" not in result["slots"]:
        whole, lags = result["slots"]["all"], result["lags"]
        lines.append(("loss, all slots zero", in_words(whole["increase"], whole["interval"])))
        for way in WAYS:
            lines.append((f"loss, whole past {way}", in_words(lags[way]["increase"][0], lags[way]["interval"][0])))
    if "absent" not in result["stride"]:
        own = result["stride"]["model"]
        name = f"loss, stride {own['stride'][-1]} instead of {own['stride'][0]}"
        lines.append((name, in_words(own["increase"][-1], own["interval"][-1])))
    print(f"{data['name']}: {data['tokens']:,} tokens, ppl_token {scores['model']['ppl_token']:.4f}")
    for name, value in lines:
        print(f"  {name:30} {value}")
    print(f"intervals: {result['intervals']}\nopen {out / PAGE}")


def _compared(part: dict[str, Any]) -> str:
    """The model's loss compared with the control's, over some of the documents, or with its own without recall."""
    own = difference(part["gain"])
    return in_words(own["nats"][0], own["interval"][0])
