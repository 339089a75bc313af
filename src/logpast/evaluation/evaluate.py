"""`logpast eval`: score a checkpoint on a text; compare it with another model; record the result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from logpast.data import TokenStore, is_store, open_tokens
from logpast.data.batching import Streams
from logpast.data.prepare import is_prepared
from logpast.evaluation import metrics
from logpast.evaluation.overlap import training_overlap, warn
from logpast.evaluation.scoring import score
from logpast.evaluation.vocabulary import unseen
from logpast.filters import paper_horizon
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, LogMemoryConfig, TransformerConfig, system_of
from logpast.reporting.differences import in_words, too_few
from logpast.training.checkpoint import Checkpoint, find_model
from logpast.training.memory_check import check_scoring
from logpast.util.environment import cpu_threads, pick_device, thread_count
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_all_writable
from logpast.util.progress import hidden_progress, progress_bar
from logpast.util.serialization import to_json
from logpast.util.validation import PositiveInt, validate_arguments

Precision = Literal["float32", "float64", "bfloat16"]
Accounting = Literal["all", "paper"]


@validate_arguments
def evaluate(
    checkpoint: Path,
    data: str,
    json: str | None = None,
    batch_size: PositiveInt = 16,
    accounting: Accounting = "all",
    streams: Streams | None = None,
    against: Path | None = None,
    record: Path | None = None,
    save_nats: Path | None = None,
    device: str = "auto",
    precision: Precision = "float32",
    cache: Path | None = None,
    stride: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Score a trained model on a text: perplexity per token and per word, bits per byte, over every token.

    A warning is printed, and recorded in the row, if the text is known to be part of the training text.

    Examples:
        logpast eval --checkpoint runs/mine --data unseen.txt
        logpast eval --checkpoint runs/mine --data wikitext103:test --json scores.json
        logpast eval --checkpoint runs/mine --against runs/control --data pg19:test --record results/mine.jsonl
        logpast eval --checkpoint runs/mine --data unseen.txt --stride 64

    Args:
        checkpoint: a run folder (its best checkpoint is used), one checkpoints/step-… folder, or a folder that
            `logpast attach` wrote.
        data: the text: a file, folder or glob, a token store, or a split of a corpus such as wikitext103:test.
        json: write the result as JSON to this file, or to standard output for "-". An existing file is replaced.
        batch_size: windows at a time; changes speed and memory, not the result.
        accounting: all scores every token; paper scores the tokens that the paper's tables appear to sum, divides by
            all words, and also reports the metrics over all tokens.
        streams: corpus reads the text as one stream, as in the paper; document starts anew at every document. By
            default as the model was trained.
        against: a second checkpoint, or losses saved with --save_nats, to compare with on the same text: whose loss is
            lower, by how many nats per token, and by how much of the perplexity (in %).
        record: append the result as one row to this ledger (.jsonl).
        save_nats: write the loss of every token in nats to this .npy file. An existing file is replaced.
        device: auto, cpu, cuda or mps.
        precision: arithmetic of the model; losses are always summed in float64.
        cache: folder for tokenized texts; by default $LOGPAST_CACHE, else ~/.cache/logpast.
        stride: score with overlapping windows that start this many tokens apart, so that each token is predicted from
            at least window − stride tokens of its window (fewer at the start of a stream). Takes window / stride times
            as long, and the loss is usually lower: compare it only with scores of the same stride. By default windows
            do not overlap. Not for recurrent systems.
        quiet: show no progress, only the result.

    Returns:
        The metrics defined in logpast.evaluation.metrics, with intervals over documents if there are at least 10.
    """
    _check_options(save_nats, record, against, json, data)
    found = find_model(checkpoint)
    with hidden_progress(quiet):
        store = open_tokens(data, found.load_tokenizer(), cache)
        streams = streams or found.config.data.streams
        on = device_for(device, precision)
        span = _scored_span(found, store, accounting)
        other = _find_other_losses(against, store) if against is not None else None
        _check_stride(stride, found, other)
        train = _training_text_if_readable(found, cache)
        overlap = training_overlap(store, found.state["data"], train)
        if overlap:
            warn(store, overlap, "the scores do not show how the model predicts other text")
        how = partial(_score_checkpoint, store=store, batch_size=batch_size, streams=streams, device=on,
                      precision=precision, stride=stride)  # fmt: skip
        started = time.monotonic()
        nats = how(found)
        seconds = time.monotonic() - started
        theirs = how(other) if isinstance(other, Checkpoint) else other
    result: dict[str, Any] = {"checkpoint": str(found.path), "data": store.name, "accounting": accounting}
    result |= metrics.compute_metrics(nats, store, span)
    if accounting != "all":
        result["all"] = metrics.compute_metrics(nats, store)
    over_all = result.get("all", result)
    if train and "by_document" in over_all:
        over_all["by_document"]["unseen"] = unseen(train, store).tolist()
    result |= {"streams": streams, "precision": precision, "device": str(on), "seconds": round(seconds, 3)}
    windows = [each.config.model.window for each in (found, other) if isinstance(each, Checkpoint)]
    if stride is not None and stride < max(windows):
        result["stride"] = stride
    if overlap:
        result["training_overlap"] = overlap
    if theirs is not None:
        (our_sums, tokens), (their_sums, _) = (metrics.per_document(each, store, span) for each in (nats, theirs))
        result["against"] = {"checkpoint": str(against)} | metrics.paired_difference(our_sums, their_sums, tokens)
    try:
        if record is not None:  # before printing, which may fail with a broken pipe
            ledger.append(record, ledger.row(found, store, result))
        if save_nats is not None:
            np.save(content := BytesIO(), nats)
            atomic_write(save_nats, content.getvalue())
    finally:  # print the result even if the disk is full
        _print_and_write(result, json)
    return result


def _print_and_write(result: dict[str, Any], json: str | None) -> None:
    if json == "-":
        print(to_json(result))
        return
    print(result_text(result))
    if json is not None:  # after printing: the disk may be full
        atomic_write(Path(json), to_json(result) + "\n")


def result_text(result: dict[str, Any]) -> str:
    """The text that `eval` prints, from the result of `evaluate`."""
    lines = []
    windows = f" in overlapping windows (stride {result['stride']}, not the default)" if "stride" in result else ""
    for part in (result, result.get("all")):
        if part is None:
            continue
        lines.append(f"{result['data']}: {part['tokens']:,} tokens scored{windows}, {part['unscored']:,} left out")
        intervals = part["interval"] or {}
        for name in ("ppl_token", "ppl_word", "ppl_word_eos", "bits_per_byte"):
            line = f"  {name:14} {_format(part[name]):>10}"
            if bounds := intervals.get(name):
                low, high = map(_format, bounds)
                line += f" [{low}, {high}] ({100 * metrics.LEVEL:g} %, over documents)"
            lines.append(line)
        if not intervals:
            lines.append(f"  {too_few(part['documents'])}")
    if other := result.get("against"):
        difference = in_words(other["nats_per_token"], other["interval"])
        better = f"lower on {other['documents_better']} of {other['documents']} documents"
        few = "" if other["interval"] else ", too few for an interval"
        lines.append(f"  against {other['checkpoint']}: loss {difference}; {better}{few}")
    return "\n".join(lines)


def _format(value: float) -> str:
    """Four decimals, or four digits if large: the perplexity per word of a text without spaces may be 1e200."""
    return f"{value:.4f}" if value < 1e9 else f"{value:.4g}"


def _check_options(
    save_nats: Path | None, record: Path | None, against: Path | None, json: str | None, data: str
) -> None:
    if save_nats is not None and save_nats.suffix != ".npy":
        raise UserError(f"--save_nats must name a file that ends in .npy, got {save_nats}")
    if record is not None and record.suffix != ".jsonl":
        raise UserError(f"--record must name a ledger, a file that ends in .jsonl, got {record}")
    ensure_all_writable({"--save_nats": save_nats, "--record": record, "--json": json}, against, data)


def _scored_span(checkpoint: Checkpoint, store: TokenStore, accounting: Accounting) -> slice:
    """The tokens that an accounting sums."""
    if accounting == "all":
        return slice(None)
    model = checkpoint.config.model
    if not isinstance(model, TransformerConfig) or not model.slots:
        raise UserError("accounting 'paper' needs a model with slots: the paper's tables have no other; use 'all'")
    bank = replace(model.bank, reach=1.0) if isinstance(model, LogMemoryConfig) else None
    last_peak = bank.horizon if bank else paper_horizon(model.slots)
    return metrics.paper_span(len(store), model.window, last_peak)


def _check_stride(stride: int | None, *checkpoints: Checkpoint | NDArray[np.float64] | None) -> None:
    for checkpoint in checkpoints:
        if stride is None or not isinstance(checkpoint, Checkpoint):
            continue
        model = checkpoint.config.model
        if not isinstance(model, TransformerConfig):
            raise UserError(
                f"--stride does not apply to {checkpoint.path}: {system_of(model)} is recurrent, it reads each token "
                "once and its state replaces the overlap; leave out --stride"
            )
        if not 1 <= stride <= model.window:
            raise UserError(f"--stride must be from 1 to the window of {checkpoint.path}, {model.window}, got {stride}")


def _training_text_if_readable(checkpoint: Checkpoint, cache: Path | None) -> TokenStore | None:
    try:
        return open_training_text(checkpoint, cache)
    except UserError:  # a damaged training text must not prevent scoring
        return None


def open_text(data: str, checkpoint: Checkpoint, cache: Path | None) -> TokenStore:
    """The text that `data` names, which must have more than one window of tokens."""
    store, window = open_tokens(data, checkpoint.load_tokenizer(), cache), checkpoint.config.model.window
    if len(store) <= window:
        raise UserError(f"{store.name} has {len(store)} tokens, no more than one window of {window}; use more text")
    return store


def open_training_text(checkpoint: Checkpoint, cache: Path | None) -> TokenStore | None:
    """The text that a model was trained on, if its tokens are there: nothing is tokenized or downloaded."""
    data = checkpoint.config.data
    if not is_prepared(data.train, data.tokenizer, cache):
        return None
    train = open_tokens(data.train, None if is_store(data.train) else data.tokenizer, cache)
    # the name may mean another text now
    return train if train.sha256 == checkpoint.state["data"].get("sha256") else None


def _score_checkpoint(
    checkpoint: Checkpoint,
    store: TokenStore,
    batch_size: int,
    streams: Streams,
    device: torch.device,
    precision: str,
    stride: int | None,
) -> NDArray[np.float64]:
    model = load(checkpoint, device, precision)
    check_scoring(model, store, batch_size, streams, device, precision)
    with arithmetic(model, device, precision), progress_bar("scoring", len(store)) as progress:
        nats = score(
            model, store, model.window, model.history, batch_size, streams, device, progress=progress.update,
            stride=stride, recall=model.config.recall_form,
        )  # fmt: skip
    if np.isnan(nats).any():
        raise UserError(f"the loss of {checkpoint.path} is NaN: its training diverged; use an earlier checkpoint")
    return nats


def device_for(name: str, precision: str) -> torch.device:
    """The device with this name, which must support the precision."""
    device = pick_device(name)
    if device.type == "mps" and precision == "float64":
        raise UserError("precision float64 needs a CPU or CUDA device; give --device cpu")
    return device


def load(checkpoint: Checkpoint, device: torch.device, precision: str) -> LanguageModel:
    """The model on its device. Parameters are float64 for precision float64, else float32."""
    return checkpoint.load_model().to(device, torch.float64 if precision == "float64" else torch.float32)


@contextmanager
def arithmetic(model: LanguageModel, device: torch.device, precision: str) -> Iterator[None]:
    """Autocast for precision bfloat16, and as many CPU threads as suit the model."""
    autocast = torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
    with autocast, cpu_threads(thread_count(model.parameter_count())):
        yield


def find_other(path: Path, store: TokenStore) -> Checkpoint:
    """A second checkpoint to compare with. Its tokenizer must be that of the text."""
    other = find_model(path)
    if other.load_tokenizer().fingerprint != store.tokenizer.fingerprint:
        raise UserError(f"{path} has another tokenizer than {store.name}; give a model with the same tokenizer")
    return other


def _find_other_losses(path: Path, store: TokenStore) -> Checkpoint | NDArray[np.float64]:
    """What --against names: a checkpoint to score later, or losses saved with --save_nats."""
    if path.suffix != ".npy":
        return find_other(path, store)
    try:
        nats = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read saved losses from {path}: {error}") from None
    complete = isinstance(nats, np.ndarray) and nats.dtype.kind == "f" and nats.shape == (len(store),)
    if not complete or not np.isfinite(nats).all():
        raise UserError(
            f"{path} does not hold the losses of the {len(store)} tokens of {store.name}; save them again (--save_nats)"
        )
    return nats
