"""Two other ways to adapt a trained model to the text at hand, for comparison with recall; no weights are trained for them.

    python benchmarks/adaptive_baselines.py --checkpoint runs/delta --validation wikitext103:validation \\
        --test wikitext103:test wiki22k:test --out results/adaptive_baselines.json

**Continuous cache** (Grave, Joulin, Usunier 2017). The hidden state h_t that predicts a token is compared with those that
predicted the last 8,192 tokens:

    p(w) = (1 − λ) p_model(w) + λ p_cache(w)          p_cache(w) ∝ Σ_i exp(θ h_t · h_i) [x_(i+1) = w]

Also with h / |h| in place of h. θ is c / mean |h|² for h, and c for h / |h|, with the same values of c.

**Dynamic evaluation** (Krause, Kahembwe, Murray, Renals 2018). After each window is scored, a gradient step on its mean loss,
and a pull to the trained weights θ0:

    SGD    θ ← θ − η g + λ (θ0 − θ)
    RMS    θ ← θ − η g / (√MS + ε) + min(1, λ √MS / mean √MS) (θ0 − θ)

MS is the mean of g² over windows of the training text. ε is given as a multiple of mean √MS.

All settings are selected on the validation text: those of the cache on all of it, those of dynamic evaluation on its first
tokens, by a search from the middle of the grids. Test texts are scored once, each as one stream. `plain` is the model
itself, as `logpast eval` scores it. Times are those of scoring, with `batch_size` windows at a time for the model and the
cache; dynamic evaluation needs one window at a time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Batch, Batches, Windows
from logpast.evaluation.evaluate import arithmetic
from logpast.evaluation.metrics import paired_difference, per_document
from logpast.evaluation.scoring import score
from logpast.kernels import dispatch
from logpast.kernels.cuda_graphs import Replay
from logpast.memory.naive import embed
from logpast.models import Transformer
from logpast.models.registry import config_to_dict
from logpast.training.checkpoint import find_checkpoint
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable
from logpast.util.precision import accumulation_dtype
from logpast.util.progress import progress_bar
from logpast.util.serialization import to_json

SHARPNESS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # c; 0 weights all of the past equally
CACHE_WEIGHT = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4)  # λ of the cache
GRIDS = {  # of dynamic evaluation
    "SGD": {"rate": (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0), "decay": (0.0, 1e-4, 1e-3, 1e-2, 0.1)},
    "RMS": {
        "rate": (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
        "epsilon": (0.01, 0.1, 1.0, 10.0),
        "decay": (0.0, 1e-4, 1e-3, 1e-2, 0.1),
    },
}
Array = NDArray[np.float64]
Setting = dict[str, Any]


def precision_of(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def arithmetic_of(model: Transformer) -> AbstractContextManager[Any]:
    device = model.table.weight.device
    return arithmetic(device, precision_of(device))


def windows_of(model: Transformer, store: TokenStore, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
    """The windows of a text in order, until at least `limit` tokens are scored. Only the last one may have padding."""
    device = model.table.weight.device
    windows = Windows(store, model.window, model.history, device=device)
    count = len(windows) if limit is None else min(len(windows), -(-limit // model.window))
    with progress_bar(f"windows of {store.name}", count) as progress:
        for first in range(0, count, batch_size):
            yield windows.batch(np.arange(first, min(first + batch_size, count))).to(device)
            progress.update(min(first + batch_size, count))


def hidden_states(model: Transformer, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each batch: the hidden states (n, d) that predict its targets, their losses (n,) and the targets (n,)."""
    for batch in batches:
        with torch.no_grad(), arithmetic_of(model):
            slots, window = model.make_slots(batch.history), embed(model.table.weight, batch.tokens)
            hidden = model.hidden(torch.cat([slots, window], dim=1), skip=model.slots)
            nats = model.nats(hidden, batch.targets)
        there = batch.targets >= 0
        yield hidden[there].to(accumulation_dtype(hidden.dtype)), nats[there], batch.targets[there]


def cache_scores(
    model: Transformer, batches: Iterable[Batch], settings: Sequence[Setting], past: int
) -> tuple[Array, Array]:
    """The model's loss of each token (T,), and p_cache of it under each setting of the cache (settings, T)."""
    losses, found = list[Tensor](), list[Tensor]()
    keys = ids = None
    for hidden, nats, targets in hidden_states(model, batches):
        keys = hidden if keys is None else torch.cat([keys[-past:], hidden])
        ids = targets if ids is None else torch.cat([ids[-past:], targets])
        losses.append(nats)
        found.append(cache_probabilities(keys, ids, len(targets), settings, past))
    return torch.cat(losses).double().cpu().numpy(), torch.cat(found, dim=1).double().cpu().numpy()


def cache_probabilities(hidden: Tensor, ids: Tensor, new: int, settings: Sequence[Setting], past: int) -> Tensor:
    """(settings, new): p_cache of the last `new` ids (n,); hidden (n, d) has the states that predicted them."""
    lag = torch.arange(len(ids) - new, len(ids), device=ids.device).unsqueeze(1) - torch.arange(
        len(ids), device=ids.device
    )
    outside, same = (lag < 1) | (lag > past), ids[-new:].unsqueeze(1) == ids
    products, rows = dict[bool, Tensor](), []
    for setting in settings:
        if (normalised := setting["normalised"]) not in products:
            states = torch.nn.functional.normalize(hidden, dim=-1) if normalised else hidden
            products[normalised] = states[-new:] @ states.T
        weights = (setting["theta"] * products[normalised]).masked_fill_(outside, -torch.inf).softmax(-1)
        rows.append((weights * same).sum(-1).nan_to_num(0))  # the first token of a text has no past
    return torch.stack(rows)


def mix(nats: Array, copied: Array, weight: float) -> Array:
    """The loss under the model with a cache. The first token has no cache: its loss is the model's."""
    mixed = -np.logaddexp(math.log1p(-weight) - nats, np.log(np.maximum(weight * copied, 1e-300)))
    mixed[0] = nats[0]
    return mixed


def select_cache(model: Transformer, store: TokenStore, batch_size: int, past: int) -> dict[str, Any]:
    """The best setting of the cache on a text, and the loss of all settings."""
    first, _, _ = next(hidden_states(model, windows_of(model, store, batch_size, limit=1)))
    square = float(first.square().sum(-1).mean())
    settings: list[Setting] = [
        {"normalised": normalised, "theta": c if normalised else c / square}
        for normalised, c in product((False, True), SHARPNESS)
    ]
    nats, copied = cache_scores(model, windows_of(model, store, batch_size), settings, past)
    trials = [
        setting | {"weight": weight, "nats": float(mix(nats, row, weight).mean())}
        for setting, row in zip(settings, copied, strict=True)
        for weight in CACHE_WEIGHT
    ]
    best = min(trials, key=lambda trial: trial["nats"])
    edge = (
        best["weight"] == CACHE_WEIGHT[-1] or best["theta"] == (1 if best["normalised"] else 1 / square) * SHARPNESS[-1]
    )
    return {"trials": trials, "chosen": best, "at_edge_of_grid": edge, "plain_nats": float(nats.mean())}


def gradient_steps(model: Transformer, batches: Iterable[Batch], use: Callable[[Sequence[Tensor]], None]) -> Array:
    """The loss of each token of a text. `use` gets the gradient of each batch's mean loss after it is scored."""
    weights = list(model.parameters())

    def step(batch: Batch) -> Tensor:
        with arithmetic_of(model):  # anew in each step: autocast keeps copies of the weights
            nats = model(*batch.inputs)
        gradients = torch.autograd.grad(nats.sum() / (batch.targets >= 0).sum(), weights)
        with torch.no_grad():
            use(gradients)
        return nats.detach()

    run = Replay(step) if weights[0].is_cuda else step
    with dispatch.disable("all"), torch.enable_grad():  # training kernels round differently from scoring
        parts = [(run(batch).clone(), batch.targets) for batch in batches]  # the next step of a graph overwrites them
    nats, targets = (torch.cat(part).flatten() for part in zip(*parts, strict=True))
    return nats[targets >= 0].double().cpu().numpy()


def mean_squares(model: Transformer, store: TokenStore, windows: int) -> list[Tensor]:
    """MS: the mean square of the gradient of each weight, over random windows of a text."""
    sums = [torch.zeros_like(weight) for weight in model.parameters()]

    def add(gradients: Sequence[Tensor]) -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            total.addcmul_(gradient, gradient, value=1 / windows)

    batches = Batches(store, model.window, model.history, batch_size=1, seed=0, device=sums[0].device)
    gradient_steps(model, (batches.at(step).to(sums[0].device) for step in range(windows)), add)
    return sums


def dynamic_evaluation(
    model: Transformer,
    batches: Iterable[Batch],
    rate: float,
    decay: float,
    epsilon: float = 0,
    squares: Sequence[Tensor] | None = None,
) -> Array:
    """The loss of each token with dynamic evaluation, RMS with `squares` (MS), else SGD. The model is unchanged after."""
    weights = [weight.detach() for weight in model.parameters()]
    trained = [weight.clone() for weight in weights]
    if squares is None:
        rates, pulls = ([weight.new_tensor(value) for weight in weights] for value in (rate, decay))
    else:
        roots = [square.sqrt() for square in squares]
        mean = sum(float(root.sum()) for root in roots) / sum(root.numel() for root in roots)
        rates = [rate / (root + epsilon * mean) for root in roots]
        pulls = [(decay / mean * root).clamp(max=1) for root in roots]

    def update(gradients: Sequence[Tensor]) -> None:
        for weight, start, gradient, size, pull in zip(weights, trained, gradients, rates, pulls, strict=True):
            weight.lerp_(start, pull).addcmul_(size, gradient, value=-1)

    try:
        return gradient_steps(model, batches, update)
    finally:
        for weight, start in zip(weights, trained, strict=True):
            weight.copy_(start)


def search(loss: Callable[[Setting], float], grids: dict[str, Sequence[float]]) -> dict[str, Any]:
    """Minimise a loss from the middle of the grids, one setting at a time, until no neighbour is better."""
    at, known = {name: len(grid) // 2 for name, grid in grids.items()}, dict[tuple[int, ...], Setting]()

    def trial(position: dict[str, int]) -> Setting:
        key = tuple(position.values())
        if key not in known:
            setting = {name: grids[name][i] for name, i in position.items()}
            value = loss(setting)
            known[key] = setting | {"nats": value if math.isfinite(value) else math.inf}
            print(f"  {known[key]}", flush=True)
        return known[key]

    before = None
    while before != at:
        before = dict(at)
        for name, move in product(grids, (1, -1)):
            while 0 <= at[name] + move < len(grids[name]):
                neighbour = at | {name: at[name] + move}
                if trial(neighbour)["nats"] >= trial(at)["nats"]:
                    break
                at = neighbour
    edges = [name for name, grid in grids.items() if at[name] == len(grid) - 1 or (at[name] == 0 and grid[0] > 0)]
    return {"trials": list(known.values()), "chosen": trial(at), "at_edge_of_grid": edges}


def row_of(nats: Array, plain: Array, store: TokenStore, with_equals: NDArray[np.bool_]) -> dict[str, Any]:
    """Losses over all tokens and over those without `=`, and differences from the model alone."""
    kept = ~with_equals[store.tokens[: len(nats)]]
    (ours, tokens), (theirs, _) = (per_document(each, store, slice(0, len(nats))) for each in (nats, plain))
    return {
        "tokens": len(nats), "nats_per_token": float(nats.mean()), "ppl_token": math.exp(nats.mean()),
        "tokens_without_equals": int(kept.sum()), "nats_per_token_without_equals": float(nats[kept].mean()),
        "minus_plain": paired_difference(ours, theirs, tokens),
        "minus_plain_without_equals": float((nats - plain)[kept].mean()),
    }  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and its seconds."""
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def methods_of(
    model: Transformer, validation: TokenStore, train: TokenStore, args: argparse.Namespace, record: Callable[..., None]
) -> dict[str, tuple[Callable[[TokenStore], Array], int]]:
    """Method -> the losses of a text, with the settings selected on the validation text, and the bytes kept of a text."""

    def plain(store: TokenStore) -> Array:
        with arithmetic_of(model):
            device = model.table.weight.device
            return score(model, store, model.window, model.history, args.batch_size, device=device, limit=args.limit)

    def cached(store: TokenStore) -> Array:
        batches = windows_of(model, store, args.batch_size, args.limit)
        nats, (copied,) = cache_scores(model, batches, [cache["chosen"]], args.past)
        return mix(nats, copied, cache["chosen"]["weight"])

    def adapted(store: TokenStore, limit: int | None, squares: Sequence[Tensor] | None, setting: Setting) -> Array:
        setting = {name: setting[name] for name in setting if name != "nats"}
        return dynamic_evaluation(model, windows_of(model, store, 1, limit), squares=squares, **setting)

    cache, seconds = timed(lambda: select_cache(model, validation, args.batch_size, args.past))
    record("cache", cache, seconds)
    methods = {"plain": (plain, 0), "cache": (cached, args.past * 4 * (model.config.width + 1))}
    squares, seconds = timed(lambda: mean_squares(model, train, args.statistics))
    print(f"mean squares of gradients of {args.statistics} windows: {seconds:.1f} s", flush=True)
    for rule, needed in (("SGD", None), ("RMS", squares)):
        name, score_with = f"dynamic evaluation, {rule}", partial(adapted, squares=needed)
        loss = partial(score_with, validation, args.selection)
        found, seconds = timed(lambda: search(lambda setting: loss(setting=setting).mean(), GRIDS[rule]))  # noqa: B023
        record(name, found, seconds)
        methods[name] = partial(score_with, limit=args.limit, setting=found["chosen"]), 4 * model.parameter_count()
    return methods


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run of the delta control, or one checkpoint")
    parser.add_argument("--validation", required=True, help="text to select settings on")
    parser.add_argument("--test", nargs="+", required=True, help="texts to score")
    parser.add_argument("--train", help="text for the mean squares of gradients; by default the run's training text")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after each result")
    parser.add_argument("--past", type=int, default=8192, help="tokens in the cache")
    parser.add_argument("--batch_size", type=int, default=16, help="windows at a time, except in dynamic evaluation")
    parser.add_argument(
        "--selection", type=int, default=65536, help="validation tokens to select dynamic evaluation on"
    )
    parser.add_argument(
        "--statistics", type=int, default=256, help="training windows for the mean squares of gradients"
    )
    parser.add_argument("--limit", type=int, help="score only the first tokens of each test text")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def main() -> None:
    args = parse()
    ensure_writable(args.out)
    checkpoint, device = find_checkpoint(args.checkpoint), pick_device(args.device)
    tokenizer, model = checkpoint.load_tokenizer(), checkpoint.load_model().to(device, torch.float32).eval()
    if not isinstance(model, Transformer) or model.config.recall:
        raise UserError(f"{checkpoint.path} must be a decoder without recall, such as the system `recent`")
    texts = (args.validation, args.train or checkpoint.config.data.train, *args.test)
    validation, train, *tests = (open_tokens(text, tokenizer) for text in texts)
    report: dict[str, Any] = {
        "what": "continuous cache and dynamic evaluation on a finished model", "checkpoint": str(checkpoint.path),
        "model": config_to_dict(model.config), "parameters": model.parameter_count(), "train": train.identity,
        "validation": validation.identity, "revision": revision(), "hardware": describe(device),
        "precision": precision_of(device), "streams": "corpus",
        "settings": {name: getattr(args, name) for name in ("past", "batch_size", "selection", "statistics", "limit")},
        "selected": {}, "rows": [],
    }  # fmt: skip

    def record(method: str, found: dict[str, Any], seconds: float) -> None:
        report["selected"][method] = found | {"seconds": round(seconds, 2)}
        atomic_write(args.out, to_json(report) + "\n")
        print(f"{method}: selected {found['chosen']} in {seconds:.1f} s", flush=True)

    methods = methods_of(model, validation, train, args, record)
    with_equals = np.array([b"=" in token for token in tokenizer.vocabulary])
    for store in tests:
        for method, (losses, state) in methods.items():
            nats, seconds = timed(lambda: losses(store))  # noqa: B023
            if method == "plain":
                plain, plain_seconds = nats, seconds
            row = {"text": store.identity, "method": method} | row_of(nats, plain, store, with_equals)
            row |= {"seconds": round(seconds, 3), "ms_per_token": 1000 * seconds / len(nats),
                    "seconds_to_plain": round(seconds / plain_seconds, 2), "state_bytes": state}  # fmt: skip
            report["rows"].append(row)
            atomic_write(args.out, to_json(report) + "\n")
            print(f"{store.name}, {method}: {row['nats_per_token']:.4f} nats/token "
                  f"({row['minus_plain']['nats_per_token']:+.4f}; without `=` {row['minus_plain_without_equals']:+.4f}), "
                  f"{seconds:.1f} s, {row['seconds_to_plain']} times plain", flush=True)  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"adaptive_baselines: {error}") from None
