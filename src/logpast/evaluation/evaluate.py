"""`logpast eval`: a checkpoint and a text -> figures, beside another model's if wanted, on record if wanted."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Streams
from logpast.evaluation import metrics
from logpast.evaluation.scoring import compute_metrics, per_document, score
from logpast.filters import paper_horizon
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, LogMemoryConfig, TransformerConfig
from logpast.training.checkpoint import Checkpoint, find_checkpoint
from logpast.util.environment import pick_device
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_all_writable
from logpast.util.progress import progress_bar
from logpast.util.serialization import to_json
from logpast.util.validation import validate_arguments

Precision = Literal["float32", "float64", "bfloat16"]
Accounting = Literal["all", "paper"]


@validate_arguments
def evaluate(
    checkpoint: Path,
    data: str,
    json: str | None = None,
    batch_size: int = 16,
    accounting: Accounting = "all",
    streams: Streams | None = None,
    against: Path | None = None,
    record: Path | None = None,
    save_nats: Path | None = None,
    device: str = "auto",
    precision: Precision = "float32",
    cache: Path | None = None,
) -> dict[str, Any]:
    """Score a trained model on a text: perplexity per token and per word, bits per byte, nothing left out.

    Examples:
        logpast eval --checkpoint runs/demo --data wiki.test.raw
        logpast eval --checkpoint runs/demo --data wikitext103:test --json scores.json
        logpast eval --checkpoint runs/memory --against runs/control --data pg19:test --record results/pg19.jsonl

    Args:
        checkpoint: a run folder (its best checkpoint is taken) or one checkpoints/step-… folder.
        data: the text: a file, folder or glob, a prepared token store, or NAME:SPLIT such as wikitext103:test.
        json: write the result as JSON to this file, or to standard output for "-". An existing one is replaced.
        batch_size: windows at a time; changes speed and memory, not the result.
        accounting: all counts every token; paper sums what the paper's tables appear to sum and divides by all words
            (the honest figures then stand under "all").
        streams: corpus reads the text as one stream, as the paper does; document starts anew at every document; the
            default is what the model was trained with.
        against: a second model (checkpoint), or nats saved by --save_nats, to compare with on the same text.
        record: append the result as a row to this ledger (results/NAME.jsonl).
        save_nats: write the nats of every token to this .npy file. An existing one is replaced.
        device: auto, cpu, cuda or mps.
        precision: arithmetic of the model; sums are float64 always.
        cache: where text is kept once tokenised (default: $LOGPAST_CACHE or ~/.cache/logpast).

    Returns:
        The figures defined in logpast.evaluation.metrics, with intervals over documents.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    if save_nats is not None and save_nats.suffix != ".npy":
        raise UserError(f"{save_nats} is no name for saved nats: give --save_nats one that ends in .npy")
    if record is not None and record.suffix != ".jsonl":
        raise UserError(f"{record} is no ledger: give --record a name that ends in .jsonl")
    if against is not None and save_nats is not None and against.resolve() == save_nats.resolve():
        raise UserError(f"--save_nats would replace what --against reads, {against}; give it another name")
    ensure_all_writable({"--save_nats": save_nats, "--record": record, "--json": json})
    found = find_checkpoint(checkpoint)
    store = open_tokens(data, found.load_tokenizer(), cache)
    streams = streams or found.config.data.streams
    place = device_for(device, precision)
    span = _span(found, store, accounting)
    other = _other(against, store) if against is not None else None
    started = time.monotonic()
    nats = _score_checkpoint(found, store, batch_size, streams, place, precision)
    seconds = time.monotonic() - started
    result: dict[str, Any] = {"checkpoint": str(found.path), "data": store.name, "accounting": accounting}
    result |= compute_metrics(nats, store, span)
    if accounting != "all":
        result["all"] = compute_metrics(nats, store)
    result |= {"streams": streams, "precision": precision, "device": str(place), "seconds": round(seconds, 3)}
    if other is not None:
        if isinstance(other, Checkpoint):
            other = _score_checkpoint(other, store, batch_size, streams, place, precision)
        ours, tokens = per_document(nats, store, span)
        theirs, _ = per_document(other, store, span)
        result["against"] = {"checkpoint": str(against)} | metrics.paired_difference(ours, theirs, tokens)
    try:
        if record is not None:  # first, for what reads our output may be gone
            ledger.append(record, ledger.row(found, store, result))
        if save_nats is not None:
            np.save(content := BytesIO(), nats)
            atomic_write(save_nats, content.getvalue())
    finally:  # a full disk takes no scores away
        _report(result, json)
    return result


def _span(checkpoint: Checkpoint, store: TokenStore, accounting: Accounting) -> slice:
    if accounting == "all":
        return slice(None)
    model = checkpoint.config.model
    if not isinstance(model, TransformerConfig) or not model.slots:
        raise UserError("accounting 'paper' needs a model with slots: the paper's tables have none without")
    bank = replace(model.bank, reach=1.0) if isinstance(model, LogMemoryConfig) else None
    last_peak = bank.horizon if bank else paper_horizon(model.slots)
    return metrics.paper_span(len(store), model.window, last_peak)


def _score_checkpoint(
    checkpoint: Checkpoint,
    store: TokenStore,
    batch_size: int,
    streams: Streams,
    device: torch.device,
    precision: str,
) -> NDArray[np.float64]:
    model = load(checkpoint, device, precision)
    with arithmetic(device, precision), progress_bar("scoring", len(store)) as progress:
        nats = score(model, store, model.window, model.history, batch_size, streams, device, progress=progress.update)
    if np.isnan(nats).any():
        raise UserError(f"{checkpoint.path} gives no numbers: its training diverged; take an earlier checkpoint")
    return nats


def device_for(name: str, precision: str) -> torch.device:
    place = pick_device(name)
    if place.type == "mps" and precision == "float64":
        raise UserError("precision float64 needs a CPU or CUDA device; give --device cpu")
    return place


def load(checkpoint: Checkpoint, device: torch.device, precision: str) -> LanguageModel:
    """The model where it is to be scored, in the type of its weights there."""
    return checkpoint.load_model().to(device, torch.float64 if precision == "float64" else torch.float32)


def arithmetic(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def find_other(path: Path, store: TokenStore) -> Checkpoint:
    """A second model to set beside the first; it must read the same tokens."""
    other = find_checkpoint(path)
    if other.load_tokenizer().fingerprint != store.tokenizer.fingerprint:
        raise UserError(f"{path} was trained with another tokenizer than {store.name} has; compare like with like")
    return other


def _other(path: Path, store: TokenStore) -> Checkpoint | NDArray[np.float64]:
    return _saved_nats(path, store) if path.suffix == ".npy" else find_other(path, store)


def _saved_nats(path: Path, store: TokenStore) -> NDArray[np.float64]:
    try:
        nats = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read saved nats from {path}: {error}") from None
    whole = isinstance(nats, np.ndarray) and nats.dtype.kind == "f" and nats.shape == (len(store),)
    if not whole or not np.isfinite(nats).all():
        raise UserError(f"{path} does not hold the nats of {store.name}'s {len(store)} tokens; save them anew")
    return nats


def _report(result: dict[str, Any], json: str | None) -> None:
    text = to_json(result)
    if json == "-":
        print(text)
        return
    for part in (result, result.get("all")):
        if part:
            _print_figures(part, result["data"])
    if "against" in result:
        other = result["against"]
        print(
            f"  against {other['checkpoint']}: {other['nats_per_token']:+.4f} nats per token"
            + (" [{:+.4f}, {:+.4f}]".format(*other["interval"]) if "interval" in other else "")
            + f", better on {other['documents_better']} of {other['documents']} documents"
        )
    if json is not None:  # last: a full disk takes no figures away
        atomic_write(Path(json), text + "\n")


def _print_figures(found: dict[str, Any], data: str) -> None:
    interval = found.get("interval", {})
    print(f"{data}: {found['tokens']:,} tokens scored, {found['unscored']:,} left out")
    for name in ("ppl_token", "ppl_word", "ppl_word_eos", "bits_per_byte"):
        between = " [{}, {}] (95 %, over documents)".format(*map(_figure, interval[name])) if name in interval else ""
        print(f"  {name:14} {_figure(found[name]):>10}{between}")


def _figure(value: float) -> str:
    """Of a text with hardly a space in it, the perplexity per word may have hundreds of digits."""
    return f"{value:.4f}" if value < 1e9 else f"{value:.4g}"
