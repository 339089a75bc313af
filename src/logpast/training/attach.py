"""`logpast attach`: give a pretrained Hugging Face model a memory, fit it on a text, and save it."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from logpast.data import Tokenizer, TokenStore, open_tokens
from logpast.data.batching import Streams, Windows
from logpast.evaluation.metrics import perplexity
from logpast.evaluation.scoring import score
from logpast.models.hf import require
from logpast.models.hf.attach import (
    Attached,
    attach_memory,
    load_attached,
    load_model,
    load_model_tokenizer,
    read_settings,
    save_model_tokenizer,
)
from logpast.training.checkpoint import Checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.optimizer import freeze, learning_rate
from logpast.util.checksums import verify_folder, write_sums
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import Diverged, UserError
from logpast.util.files import atomic_folder, ensure_writable
from logpast.util.progress import progress_bar
from logpast.util.schema import parse_json, reading, schema, validate
from logpast.util.validation import Count, NonNegativeFloat, PositiveInt, Seed, from_saved, validate_arguments

Train = Literal["gates", "slots", "lora", "all"]
TRAINED = {"gates": ["recall"], "slots": ["recall", "memory"]}  # and the slots' scale; lora and all train these, too
MODEL_RATE = {"lora": 3e-4, "all": 3e-5}
GATES_TOKENS = 131_072  # their hidden states are kept in memory
HELD_OUT = 0.1  # of a text without a validation text
UNKNOWN = "unknown"
BATCH = 8  # windows to score at a time
TRAINING = "training.json"  # what the memory was fitted on, for scores and their rows
DATA = {"name": str, "sha256": str}
SAVED: TypeAdapter[dict[str, Any]] = TypeAdapter(  # in that file
    schema({"settings": dict, "state": {"data": DATA, "validation_data?": Optional[schema(DATA)]}, "fit?": dict})  # noqa: UP045
)
LORA_MODULES = r".*\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|query_key_value|c_attn|attn\.c_proj)"  # of attention

Indices = NDArray[np.int64]
Losses = Callable[[Indices], tuple[Tensor, Tensor]]  # of these windows: losses in nats, and which of them count


@validate_arguments
def attach(
    model: str,
    data: str,
    out: Path,
    validation: str | None = None,
    window: int = 256,
    recall: int = 8192,
    slots: int = 0,
    sharpness: float = 100,
    sink: bool = True,
    recall_orders: int = 8,
    train: Train = "gates",
    steps: Count = 300,
    batch_size: PositiveInt = 8,
    tokens: PositiveInt | None = None,
    learning_rate: NonNegativeFloat = 3e-3,
    model_learning_rate: NonNegativeFloat | None = None,
    lora_rank: PositiveInt = 8,
    validation_tokens: PositiveInt = 65_536,
    streams: Streams = "document",
    save_model: bool | None = None,
    seed: Seed = 0,
    device: str = "auto",
    cache: Path | None = None,
) -> dict[str, Any]:
    """Give a pretrained Hugging Face model a long past: attach recall and slots, fit them on a text, and save them.

    The model attends to a short window. Recall looks up what followed the same tokens before, up to --recall tokens
    back, and mixes it into the predictions. By default only its gates are fitted and the model stays as it is, which
    takes minutes on a CPU. Needs the extra hf: pip install 'logpast[hf]'.

    Examples:
        logpast attach --model path/to/SmolLM2-135M --data mybooks/ --validation other.txt --out attached/mine
        logpast attach --model model.gguf --data mybooks/ --out attached/mine --window 512
        logpast attach --model path/to/model --data mybooks/ --out attached/unfitted --steps 0
        logpast attach --model path/to/model --data mybooks/ --out attached/tuned --train lora --slots 53 --steps 500

    Args:
        model: a folder with a causal language model and its tokenizer, a .gguf file, or a name on the hub.
        data: the text to fit on: a file, folder or glob, or a split of a corpus such as pg19:validation.
        out: the folder to create. It must not exist, and it appears only when it is complete.
        validation: the text to score; by default the last tenth of the text, which is then not used for fitting.
        window: m, the number of most recent tokens that the model attends to.
        recall: how many tokens back to look up what followed the last tokens before; 0: no recall.
        slots: L, positions before the window. Each holds one token and, once trained, a part of the compressed past.
        sharpness: k of the memory's filters.
        sink: keep the first token of a text in front of every window.
        recall_orders: the longest match that the gates distinguish, in tokens.
        train: gates fits recall only. slots also fits the norm and the scale of the slots. lora also trains adapters of
            the attention, with peft. all also trains the whole model.
        steps: number of training steps. With 0 the gates stay as they start: a smaller gain, but facts
            that were told once are kept.
        batch_size: windows in each step.
        tokens: fit on at most this many tokens, in windows from all over the text; by default 131,072 for gates, whose
            hidden states are computed once and kept in memory, else all.
        learning_rate: of gates and slots; it decays to 0 along a cosine.
        model_learning_rate: of the model; by default 3e-4 for lora and 3e-5 for all.
        lora_rank: rank of the adapters.
        validation_tokens: score about this many tokens from the start of the validation text.
        streams: document keeps the past within a document; corpus treats the text as one document.
        save_model: also write the model's own files into the folder; by default only with --train all.
        seed: of the order of the windows and of the adapters.
        device: auto, cpu, cuda or mps.
        cache: folder for tokenized texts; by default $LOGPAST_CACHE, else ~/.cache/logpast.

    Returns:
        nats per token and perplexity of the model before, with memory, and of the control.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise UserError(f"{out} already exists: choose another --out, or delete it first")
    ensure_writable(out)
    if not recall and (train == "gates" or not slots):
        raise UserError("without recall there are no gates to fit; leave out --recall 0, or add --slots and --train")
    on = pick_device(device)
    full = train == "all" or on.type == "cpu"  # small updates are lost in half precision, which is slow on CPUs
    base = load_model(model, dtype=torch.float32 if full else "auto").to(on)
    attached = attach_memory(base, window, slots, recall, sharpness, sink, recall_orders, frozen=False)
    text, held_out_text = _open_texts(model, attached, data, validation, cache)
    store, held_out = (text, held_out_text) if held_out_text else _split(text)
    for name, part in ((data, store), (validation or data, held_out)):
        if len(part) < window:
            raise UserError(f"{name} is too short: {len(part)} tokens, less than a window; use more text")
    measure = partial(_score, store=held_out, streams=streams, device=on, limit=validation_tokens)
    if tokens is None:
        tokens = GATES_TOKENS if train == "gates" else len(store)
    if model_learning_rate is None:
        model_learning_rate = MODEL_RATE.get(train, 0.0)
    fit = Fit(store, streams, on, steps, batch_size, tokens, learning_rate, model_learning_rate, seed)
    scores, started = {}, time.monotonic()
    if train != "gates":
        scores["model"] = measure(attached, "scoring the model")[1]
    if train in MODEL_RATE:
        # the same fine-tuning, with the slots as plain tokens and without recall
        control = attach_memory(copy.deepcopy(attached.model), window, slots, 0, sharpness, sink, frozen=False)
        choose_trained(control, train, lora_rank, seed, memory=False)
        fit(control, "fitting the control")
        scores["control"] = measure(control, "scoring the control")[1]
        del control
    choose_trained(attached, train, lora_rank, seed)
    fit(attached, "fitting")
    scores["memory"], scores["own"] = measure(attached, "scoring with memory")
    scores = {"model": scores["own"]} | scores
    if not all(map(math.isfinite, scores.values())):
        raise Diverged(f"the loss is {scores['memory']} after {steps} steps; lower the learning rates")
    result = {name: {"nats_per_token": nats, "ppl_token": perplexity(nats, 1)} for name, nats in scores.items()}
    try:
        with atomic_folder(out) as folder:
            attached.save_pretrained(folder, train == "all" if save_model is None else save_model)
            save_model_tokenizer(model, folder)
            (folder / "scores.json").write_text(json.dumps(result, indent=2) + "\n")
            about = {
                "settings": {"train": data, "validation": validation, "streams": streams, "steps": steps,
                             "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed},
                "fit": {"train": train, "tokens": min(tokens, len(store)), "model_learning_rate": model_learning_rate}
                       | ({"lora_rank": lora_rank} if train == "lora" else {}),
                "state": {"step": steps, "total_steps": steps, "tokens": steps * batch_size * window, "best": None,
                          "seconds": round(time.monotonic() - started, 3), "parameters": attached.parameter_count(),
                          "data": text.identity, "validation_data": held_out_text and held_out_text.identity,
                          "init_from": {"path": model}, "revision": revision(), "hardware": describe(on)},
            }  # fmt: skip
            if steps:
                (folder / TRAINING).write_text(json.dumps(about, indent=2) + "\n")
            write_sums(folder)
    except FileExistsError:
        raise UserError(f"{out} was created by another process in the meantime; it was not changed") from None
    _print(result, attached, out)
    return result


def _open_texts(
    model: str, attached: Attached, data: str, validation: str | None, cache: Path | None
) -> tuple[TokenStore, TokenStore | None]:
    """The text to fit on and the text to score, if it is another."""
    tokenizer = load_model_tokenizer(model, attached.config.first_token)
    if tokenizer.size > attached.table.num_embeddings:
        raise UserError(
            f"the tokenizer of {model} has {tokenizer.size} tokens, but the model has {attached.table.num_embeddings} "
            "embeddings; give the model with its own tokenizer"
        )
    return open_tokens(data, tokenizer, cache), open_tokens(validation, tokenizer, cache) if validation else None


def _split(store: TokenStore) -> tuple[TokenStore, TokenStore]:
    """The text without its last tenth, and its last tenth."""
    cut, starts = round((1 - HELD_OUT) * len(store)), store.documents.start
    ends = starts + store.documents.tokens
    first = [store.tokens[start : min(end, cut)] for start, end in zip(starts, ends, strict=True) if start < cut]
    last = [store.tokens[max(start, cut) : end] for start, end in zip(starts, ends, strict=True) if end > cut]
    size, eot = store.tokenizer.size, store.tokenizer.eot
    return TokenStore.in_memory(first, size, eot), TokenStore.in_memory(last or [store.tokens[:0]], size, eot)


def choose_trained(attached: Attached, train: Train, rank: int, seed: int, memory: bool = True) -> None:
    """Turn on the gradients of what is trained; of a control without those of the memories."""
    if train == "lora":
        torch.manual_seed(seed)
        peft = require("peft")
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_MODULES, task_type="CAUSAL_LM")
        try:
            attached.model = peft.get_peft_model(attached.model, config)
        except ValueError:  # no module has such a name
            kind = type(attached.model).__name__
            raise UserError(
                f"train=lora does not know the names of the attention of {kind}; use another --train"
            ) from None
    elif train in TRAINED:
        own = [name for name, _ in attached.named_children() if name in TRAINED[train]]
        freeze(attached, [f"!{name}" for name in own] + (["!scale"] if "memory" in own else []))
    if not memory and attached.config.slots:
        freeze(attached, ["memory", "scale"])


def optimizer_of(rate: float) -> OptimizerConfig:
    """AdamW with a linear warm-up and a cosine decay to 0; its weight decay is of all parameters."""
    return OptimizerConfig(rate, final_learning_rate=0, warmup_steps=10, weight_decay=0.01, beta2=0.999)


@dataclass(frozen=True)
class Fit:
    """Trains the chosen parameters of a model, as `optimizer_of` says."""

    store: TokenStore
    streams: Streams
    device: torch.device
    steps: int
    batch_size: int
    tokens: int
    rate: float
    model_rate: float
    seed: int

    def __call__(self, attached: Attached, title: str) -> None:
        if not self.steps:
            return
        form = attached.config.recall_form
        windows = Windows(self.store, attached.window, attached.history, self.streams, device=self.device, recall=form)
        random = np.random.default_rng(self.seed)
        chosen = random.permutation(len(windows))[: max(1, self.tokens // attached.window)]
        trained = [(name, p) for name, p in attached.named_parameters() if p.requires_grad]
        how = optimizer_of(1.0)
        of_model = [p for name, p in trained if name.startswith("model.")]
        of_memory = [p for name, p in trained if not name.startswith("model.")]
        groups = [{"params": of_memory, "lr": self.rate}, {"params": of_model, "lr": self.model_rate}]
        optimizer = torch.optim.AdamW(groups, betas=(how.beta1, how.beta2), weight_decay=how.weight_decay)
        schedule = LambdaLR(optimizer, partial(learning_rate, how, total=self.steps))
        gates_only = all(name.startswith("recall.") for name, _ in trained)
        attached.train(bool(of_model))
        losses = (
            self._from_states(attached, windows, chosen)
            if gates_only
            else self._from_batches(attached, windows, chosen)
        )
        order = chain.from_iterable(random.permutation(len(chosen)) for _ in repeat(None))
        with progress_bar(title, self.steps) as progress:
            for step in range(self.steps):
                nats, scored = losses(np.fromiter(islice(order, self.batch_size), np.int64))
                loss = nats.sum() / scored.sum().clamp(min=1)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_([p for _, p in trained], how.clip)
                optimizer.step()
                schedule.step()
                if not math.isfinite(value := float(loss.detach())):
                    raise Diverged(f"the loss is {value} after {step + 1} steps; lower the learning rates")
                progress.update(step + 1, f"ppl {perplexity(value, 1):.2f}")
        attached.eval()

    def _from_batches(self, attached: Attached, windows: Windows, chosen: Indices) -> Losses:
        def losses(rows: Indices) -> tuple[Tensor, Tensor]:
            batch = windows.batch(chosen[rows]).to(self.device)
            return attached(*batch.inputs), batch.targets >= 0

        return losses

    def _from_states(self, attached: Attached, windows: Windows, chosen: Indices) -> Losses:
        """Only gates are trained: hidden states and losses of the model are computed once."""
        kept = list[tuple[Tensor, ...]]()
        with progress_bar("reading", len(chosen)) as progress, torch.no_grad():
            for first in range(0, len(chosen), self.batch_size):
                batch = windows.batch(chosen[first : first + self.batch_size]).to(self.device)
                hidden = attached.encode(batch.history, batch.tokens)
                own = attached.own_nats(hidden, batch.targets)
                kept.append((hidden, own, batch.targets, batch.inputs[3]))
                progress.update(first + len(hidden))
        hidden, own, targets, counts = (torch.cat(parts) for parts in zip(*kept, strict=True))

        def losses(rows: Indices) -> tuple[Tensor, Tensor]:
            index = torch.from_numpy(rows).to(self.device)
            scored = targets[index] >= 0
            return attached.recall(hidden[index], own[index], counts[index]) * scored, scored

        return losses


@dataclass
class AttachedCheckpoint(Checkpoint):
    """A folder that `attach` wrote, for `eval` and `generate`."""

    fit: dict[str, Any]
    """how it was fitted, in addition to the config"""

    @property
    def recipe(self) -> dict[str, Any]:
        return super().recipe | {"fit": self.fit}

    def load_model(self) -> Attached:
        return load_attached(self.path)

    def load_tokenizer(self) -> Tokenizer:
        config, source = read_settings(self.path)
        there = source is None or (self.path / "tokenizer.json").is_file()
        return load_model_tokenizer(self.path if there else str(source), config.first_token)


def open_attached(folder: Path) -> AttachedCheckpoint:
    """What `eval` and `generate` need to know of a folder that `attach`, or `Attached.save_pretrained`, wrote."""
    verify_folder(folder, "attach the memory again")
    config, _ = read_settings(folder)
    settings: dict[str, Any] = {"train": UNKNOWN, "validation": None, "streams": "document", "steps": 1}
    state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "parameters": 0, "revision": UNKNOWN,
                             "data": {"name": UNKNOWN, "sha256": UNKNOWN}, "hardware": {}}  # fmt: skip
    fit = dict[str, Any]()
    if (folder / TRAINING).is_file():
        with reading(f"{folder / TRAINING} is damaged", "delete it"):
            saved = validate(SAVED, parse_json((folder / TRAINING).read_text(encoding="utf-8")))
            settings, state, fit = settings | saved["settings"], state | saved["state"], saved.get("fit", fit)
    data = DataConfig(**{name: settings.pop(name) for name in ("train", "validation", "streams")})
    optimizer = optimizer_of(settings.pop("learning_rate", 0.0))
    settings |= {"run": folder, "data": data, "model": config, "optimizer": optimizer}
    return AttachedCheckpoint(folder, state, from_saved(TrainConfig, settings), fit)


class WithAndWithoutRecall(nn.Module):
    """A model for `score`: the loss of each target with recall and without."""

    def __init__(self, attached: Attached) -> None:
        super().__init__()
        self.attached = attached

    def forward(self, history: Tensor, tokens: Tensor, targets: Tensor, counts: Tensor | None = None) -> Tensor:
        hidden = self.attached.encode(history, tokens)
        own = self.attached.own_nats(hidden, targets)
        return torch.stack([own if counts is None else self.attached.recall(hidden, own, counts), own], dim=-1)


def _score(
    attached: Attached, title: str, store: TokenStore, streams: Streams, device: torch.device, limit: int
) -> tuple[float, float]:
    """Nats per token with recall and without."""
    with progress_bar(title, min(limit, len(store))) as progress:
        nats = score(
            WithAndWithoutRecall(attached), store, attached.window, attached.history, BATCH, streams, device, limit,
            progress=progress.update, recall=attached.config.recall_form, shape=(2,),
        )  # fmt: skip
    with_recall, own = nats.mean(axis=0)
    return float(with_recall), float(own)


def _print(result: dict[str, dict[str, float]], attached: Attached, out: Path) -> None:
    names = {
        "model": f"model, windows of {attached.window}",
        "control": "control: tuned without memory",
        "own": "after tuning, without recall",
        "memory": "with memory",
    }
    table = Table("", *(Column(head, justify="right") for head in ("ppl_token", "nats/token", "vs model")))
    before = result["model"]["nats_per_token"]
    for name, text in names.items():
        if name in result and (name != "own" or result["own"] != result["model"]):
            nats, ppl = result[name]["nats_per_token"], result[name]["ppl_token"]
            table.add_row(text, f"{ppl:.2f}", f"{nats:.4f}", "" if name == "model" else f"{nats - before:+.4f}")
    console = Console(emoji=False, markup=False)
    console.print(table)
    if "control" not in result:
        console.print("The control is the model itself, which is not changed.", soft_wrap=True)
    text = f"saved in {out}, for --checkpoint of eval and generate, and for logpast.load_attached"
    console.print(text, soft_wrap=True, highlight=False)
