"""Refuses, before anything is allocated, what cannot fit in memory.

The estimates are lower bounds, so nothing is refused that would fit. They count only large tensors that exist at the
same time whatever the kernels are: parameters with gradients and moments, token ids, and of the activations the
results of the large matrix products, which are needed for the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from logpast.data import TokenStore
from logpast.data.batching import Streams
from logpast.models import LanguageModel, ModelConfig, Recurrent, build
from logpast.training.config import TrainConfig
from logpast.util.environment import memory_of
from logpast.util.errors import UserError, is_out_of_memory

SIZES = "the model's sizes (model.width, model.layers, model.mlp, model.window, model.vocabulary)"


class Part(NamedTuple):
    """Memory for one purpose: its size, the rows of a batch that it grows with, and what to lower."""

    purpose: str
    bytes: int
    rows: int = 1
    lower: str = SIZES


def check_training(config: TrainConfig, tokens: int, device: torch.device, compiled: bool, processes: int) -> None:
    """A UserError if one process of a training cannot fit; `tokens` is the size of the tokenizer."""
    _check("training", min_training_memory(config, tokens, device, compiled, processes), device)


def check_scoring(
    model: LanguageModel, store: TokenStore, batch_size: int, streams: Streams, device: torch.device, precision: str
) -> None:
    """A UserError if scoring a text in batches of this size cannot fit."""
    _check("scoring", min_scoring_memory(model, store, batch_size, streams, precision), device)


def min_training_memory(
    config: TrainConfig, tokens: int, device: torch.device, compiled: bool, processes: int
) -> list[Part]:
    """The largest tensors of a training that exist at the same time: of a forward pass, or of an optimizer step."""
    model, parameters, state = measure(config.model, tokens)
    stored, computed = {"64-true": (8, 8), "32-true": (4, 4), "bf16-mixed": (4, 2)}[config.precision]  # bytes
    rows = config.batch_size // processes
    micro = min(rows, config.micro_batch_size or rows)
    segments = model.config.segments if isinstance(model, Recurrent) else 1
    positions, width = segments * model.window, model.config.width
    vocabulary, mlp = model.table.num_embeddings, model.config.mlp or 4 * width
    batch_size = f"batch_size ({config.batch_size:,})"
    smaller = f"micro_batch_size ({micro:,})" if config.micro_batch_size else f"{batch_size}, or set micro_batch_size"
    batch = Part("the token ids of a batch", rows * (4 * model.history + 16 * positions), rows, batch_size)
    carried = Part("the state of a batch", (rows + micro) * state, rows, batch_size)
    eager = not compiled and device.type != "cuda"  # without kernels, some results are kept twice: before and after
    # queries and MLP; keys and values
    layer = positions * (width + (1 + eager) * mlp) + segments * model.attention_length * 2 * width
    inside = Part("the activations of a micro-batch", micro * config.model.layers * layer * computed, micro, smaller)
    each = (segments + 1) * stored if eager else segments * computed  # log-probabilities, and the logits of a segment
    logits = Part("the logits of a micro-batch", micro * model.window * vocabulary * each, micro, smaller)
    weights = Part("the parameters", parameters * stored)
    held = 4 * parameters * stored // (processes if config.strategy == "fsdp" else 1)
    trained = Part("the parameters with their gradients and AdamW's moments", held)
    forward, step = [weights, batch, carried, inside, logits], [trained, batch, carried]
    return max(forward, step, key=lambda parts: sum(part.bytes for part in parts))


def min_scoring_memory(
    model: LanguageModel, store: TokenStore, batch_size: int, streams: Streams, precision: str
) -> list[Part]:
    """The largest tensors of a scoring that exist at the same time: in the MLP of a layer."""
    stored, computed = {"float64": (8, 8), "float32": (4, 4), "bfloat16": (4, 2)}[precision]  # bytes
    count, config = -(-len(store) // model.window), model.config
    if isinstance(model, Recurrent):  # one row per stream
        count = int(np.count_nonzero(store.documents.tokens)) if streams == "document" else 1
    rows, mlp = min(batch_size, count), config.mlp or 4 * config.width
    row = 4 * model.history + 16 * model.window + _state_bytes(model) + 2 * computed * model.window * mlp
    return [
        Part("the parameters", model.parameter_count() * stored, lower="the size of the model"),
        Part("a batch", rows * row, rows, f"batch_size ({batch_size:,})"),
    ]


def measure(config: ModelConfig, tokens: int) -> tuple[LanguageModel, int, int]:
    """The model with one layer, without data; of the whole model, the parameters and the bytes of its state.

    A UserError if a size of a tensor overflows.
    """
    try:
        with torch.device("meta"):
            one, two = (build(replace(config, layers=layers), tokens) for layers in (1, 2))
            first, second = ((each.parameter_count(), _state_bytes(each)) for each in (one, two))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"no memory is large enough for the model; lower {SIZES}") from None
    # all layers are alike; there may be too many of them to build even without data
    parameters, state = (a + (config.layers - 1) * (b - a) for a, b in zip(first, second, strict=True))
    return one, parameters, state


def _state_bytes(model: LanguageModel) -> int:
    return model.carried_bytes if isinstance(model, Recurrent) else 0


def _check(what: str, parts: list[Part], device: torch.device) -> None:
    needed, there = sum(part.bytes for part in parts), memory_of(device)
    if needed > there:
        most = max(parts, key=lambda part: part.bytes)
        has = f"the GPU has {format_bytes(there)}" if device.type == "cuda" else f"{format_bytes(there)} are available"
        raise UserError(
            f"{what} needs at least {format_bytes(needed)} of memory, {format_bytes(most.bytes)} of it for "
            f"{most.purpose}, but {has}; lower {most.lower if most.bytes / most.rows < there else SIZES}"
        )


def format_bytes(number: float) -> str:
    """As in 1.5 GB."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(number, 1)) / 3), len(units) - 1)
    return f"{number / 1000**power:,.1f} {units[power]}"
