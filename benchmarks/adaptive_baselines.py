"""Ways to adapt a finished model to the text at hand: recall's gates, and two others to compare them with.

    python benchmarks/adaptive_baselines.py --checkpoint runs/delta --validation wikitext103:validation \\
        --test wikitext103:test wiki22k:test --out results/adaptive_baselines.json

**Continuous cache** (Grave, Joulin, Usunier 2017). The hidden state h_t that predicts a token is compared with those
that predicted the last 8,192 tokens:

    p(w) = (1 − λ) p_model(w) + λ p_cache(w)          p_cache(w) ∝ Σ_i exp(θ h_t · h_i) [x_(i+1) = w]

Also with h / |h| in place of h (`normalised`).

**Dynamic evaluation** (Krause, Kahembwe, Murray, Renals 2018). After each window is scored, all weights θ take a
gradient step on its mean loss and are pulled back to the trained weights θ0:

    SGD    θ ← θ − η g + λ (θ0 − θ)
    RMS    θ ← θ − η g / (√MS + ε) + min(1, λ √MS / mean √MS) (θ0 − θ)

MS is the mean of g² over windows of the training text. ε is given as a multiple of mean √MS.

**Recall**, gates only: fitted to the training text with the model frozen, once over the last 8,192 tokens and once
within what attention sees (the slots' tokens and those of the window): the difference is what the longer past gives.

Settings are selected on the validation text: those of the cache and the learning rate of the gates on all of it, those
of dynamic evaluation on its first tokens. Then each test text is scored once, as one stream. `plain` is the model
alone, as `logpast eval` scores it. Dynamic evaluation takes one window at a time, the others `batch_size`.
`state_bytes` is what a method keeps of a text in float32, in addition to what the model keeps; RMS also needs MS, as
large as the model, once for all texts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Batch, Batches, Windows
from logpast.evaluation.evaluate import arithmetic
from logpast.evaluation.metrics import paired_difference, per_document, perplexity
from logpast.evaluation.scoring import score
from logpast.kernels import dispatch
from logpast.kernels.cuda_graphs import Replay
from logpast.memory.naive import embed
from logpast.models import Transformer
from logpast.models.registry import config_to_dict
from logpast.recall import Recall, RecallForm, matching
from logpast.training.checkpoint import find_checkpoint
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable
from logpast.util.precision import accumulation_dtype
from logpast.util.progress import progress_bar
from logpast.util.serialization import to_json

Array = NDArray[np.float64]
Setting = dict[str, Any]


class Method(NamedTuple):
    losses: Callable[[TokenStore], Array]
    state_bytes: int


METHODS = ("cache", "recall", "dynamic")
PRECISION = {"cuda": "bfloat16"}  # float32 elsewhere
THETA = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # for h / |h|; for h these are divided by the usual |h|²
CACHE_WEIGHT = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5)  # λ of the cache
SETTINGS = ("past", "batch_size", "gate_steps", "selection", "statistics", "limit")  # options to record
GATE_RATES = (1e-3, 3e-3, 1e-2)
DECAY = (0.0, 1e-4, 1e-3, 1e-2, 0.1)  # λ of dynamic evaluation
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "SGD": {"rate": (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0), "decay": DECAY},
    "RMS": {"rate": (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3), "epsilon": (0.01, 0.1, 1.0, 10.0), "decay": DECAY},
}


def arithmetic_of(model: Transformer) -> AbstractContextManager[Any]:
    device = model.table.weight.device
    return arithmetic(model, device, PRECISION.get(device.type, "float32"))


def windows_of(
    model: Transformer, store: TokenStore, batch_size: int, limit: int | None = None, recall: RecallForm | None = None
) -> Iterator[Batch]:
    """The windows of a text in order, until at least `limit` tokens are targets."""
    device = model.table.weight.device
    windows = Windows(store, model.window, model.history, device=device, recall=recall)
    count = len(windows) if limit is None else min(len(windows), -(-limit // model.window))
    with progress_bar(f"windows of {store.name}", count) as progress:
        for first in range(0, count, batch_size):
            last = min(first + batch_size, count)
            yield windows.batch(np.arange(first, last)).to(device)
            progress.update(last)


@torch.no_grad()
def outputs_of(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states (B, m, d) and losses (B, m)."""
    with arithmetic_of(model):
        x = torch.cat([model.make_slots(batch.history), embed(model.table.weight, batch.tokens)], dim=1)
        hidden = model.hidden(x, skip=model.slots)
        return hidden, model.nats(hidden, batch.targets)


@torch.no_grad()
def counts_within_attention(model: Transformer, batch: Batch, form: RecallForm) -> Tensor:
    """Recall's counts, in the slots' tokens and the window only."""
    history = batch.history[:, batch.history.shape[1] - model.slots :]
    ids = torch.cat([history.long(), batch.tokens], dim=1)
    orders, bins = form.orders, len(form.edges)
    candidates, component = matching.compare(ids, model.window, orders, form.edges)
    missed = candidates.unsqueeze(1) != batch.targets.unsqueeze(2)
    both = component, component.masked_fill(missed, (orders + 1) * bins)
    return torch.stack([matching.count(each, orders, bins) for each in both], dim=2)


def recall_losses(model: Transformer, recall: Recall, batch: Batch, within_attention: bool) -> Tensor:
    counts = counts_within_attention(model, batch, recall.form) if within_attention else batch.counts
    assert counts is not None
    return recall(*outputs_of(model, batch), counts)[batch.targets >= 0]


def fit_gates(model: Transformer, train: TokenStore, form: RecallForm, within: bool, rate: float, steps: int) -> Recall:
    device = model.table.weight.device
    recall = Recall(model.config.width, form, pretrained=False).to(device)
    optimizer = torch.optim.AdamW(recall.parameters(), weight_decay=0)
    batches = Batches(train, model.window, model.history, 64, 0, device=device, recall=form)
    with progress_bar("fitting gates", steps) as progress:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            optimizer.zero_grad()
            recall_losses(model, recall, batches.at(step).to(device), within).mean().backward()
            optimizer.step()
            progress.update(step + 1)
    return recall


def select_gates(
    model: Transformer, train: TokenStore, validation: TokenStore, args: argparse.Namespace, within: bool
) -> tuple[dict[str, Any], Callable[[TokenStore], Array]]:
    """The trials by learning rate, and the losses of a text with the gates that are best on the validation text."""
    form = RecallForm(args.past)

    def losses(recall: Recall, limit: int | None, store: TokenStore) -> Array:
        batches = windows_of(model, store, args.batch_size, limit, form)
        with torch.no_grad():
            return torch.cat([recall_losses(model, recall, b, within) for b in batches]).double().cpu().numpy()

    fitted = [fit_gates(model, train, form, within, rate, args.gate_steps) for rate in GATE_RATES]
    trials = [
        {"rate": rate, "nats": float(losses(recall, None, validation).mean())}
        for rate, recall in zip(GATE_RATES, fitted, strict=True)
    ]
    best = min(range(len(trials)), key=lambda number: trials[number]["nats"])
    return {"trials": trials, "chosen": trials[best]}, partial(losses, fitted[best], args.limit)


@torch.no_grad()
def cache_scores(
    model: Transformer, batches: Iterable[Batch], settings: Sequence[Setting], past: int
) -> tuple[Array, Array]:
    """The model's own loss of each token (T,), and p_cache of it under each setting (settings, T)."""
    losses, found = list[Tensor](), list[Tensor]()
    weight = model.table.weight
    states, ids = weight.new_empty(0, weight.shape[1]), torch.empty(0, dtype=torch.int64, device=weight.device)
    for batch in batches:
        hidden, nats = outputs_of(model, batch)
        exists = batch.targets >= 0
        states = torch.cat([states[-past:], hidden[exists].to(accumulation_dtype(hidden.dtype))])
        ids = torch.cat([ids[-past:], batch.targets[exists]])
        losses.append(nats[exists])
        found.append(cache_probabilities(states, ids, len(losses[-1]), settings, past))
    return torch.cat(losses).double().cpu().numpy(), torch.cat(found, dim=1).double().cpu().numpy()


def cache_probabilities(states: Tensor, ids: Tensor, new: int, settings: Sequence[Setting], past: int) -> Tensor:
    """(settings, new): p_cache of the last `new` of the ids (n,). The states (n, d) are those that predicted them."""
    position = torch.arange(len(ids), device=ids.device)
    lag = position[-new:].unsqueeze(1) - position
    outside, same = (lag < 1) | (lag > past), ids[-new:].unsqueeze(1) == ids
    products, found = dict[bool, Tensor](), list[Tensor]()
    for setting in settings:
        if (normalised := setting["normalised"]) not in products:
            each = normalize(states, dim=-1) if normalised else states
            products[normalised] = each[-new:] @ each.T
        share = (setting["theta"] * products[normalised]).masked_fill_(outside, -torch.inf).softmax(-1)
        found.append((share * same).sum(-1).nan_to_num(0))  # the first token of a text has no past
    return torch.stack(found)


def mix(nats: Array, cached: Array, weight: float) -> Array:
    """The loss under model and cache, from the model's loss and p_cache. For the first token there is no cache."""
    mixed = -np.logaddexp(math.log1p(-weight) - nats, np.log(np.maximum(weight * cached, 1e-300)))
    return np.concatenate([nats[:1], mixed[1:]])


def select_cache(model: Transformer, store: TokenStore, batch_size: int, past: int) -> dict[str, Any]:
    """The loss of a text under all settings of the cache, and the best setting."""
    square = float(sum(weight.detach().square().sum() for weight in model.norm.parameters()))  # the usual |h|²
    settings: list[Setting] = [
        {"normalised": normalised, "theta": theta / (1 if normalised else square)}
        for normalised, theta in product((True, False), THETA)
    ]
    nats, cached = cache_scores(model, windows_of(model, store, batch_size), settings, past)
    trials = [
        setting | {"weight": weight, "nats": float(mix(nats, row, weight).mean())}
        for (setting, row), weight in product(zip(settings, cached, strict=True), CACHE_WEIGHT)
    ]
    return {"trials": trials, "chosen": min(trials, key=lambda trial: trial["nats"]), "plain": float(nats.mean())}


def gradient_steps(model: Transformer, batches: Iterable[Batch], use: Callable[[Sequence[Tensor]], None]) -> Array:
    """The loss of each token. After each batch is scored, `use` takes the gradients of its mean loss."""
    weights = list(model.parameters())

    def step(batch: Batch) -> Tensor:
        with arithmetic_of(model):  # anew in each step: autocast keeps copies of the weights
            nats = model(*batch.inputs)
        gradients = torch.autograd.grad(nats.sum() / (batch.targets >= 0).sum(), weights)
        with torch.no_grad():
            use(gradients)
        return nats.detach()

    run = Replay(step) if weights[0].is_cuda else step
    with dispatch.disable("all"):  # the training kernels round differently from scoring
        parts = [(run(batch).clone(), batch.targets) for batch in batches]  # the next replay overwrites a result
    nats, targets = (torch.cat(part).flatten() for part in zip(*parts, strict=True))
    return nats[targets >= 0].double().cpu().numpy()


def mean_squares(model: Transformer, store: TokenStore, windows: int) -> list[Tensor]:
    """MS: the mean square of the gradient of each weight, over random windows of a text."""
    sums = [torch.zeros_like(weight) for weight in model.parameters()]

    def add(gradients: Sequence[Tensor]) -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            total.addcmul_(gradient, gradient, value=1 / windows)

    device = sums[0].device
    batches = Batches(store, model.window, model.history, batch_size=1, seed=0, device=device)
    gradient_steps(model, (batches.at(step).to(device) for step in range(windows)), add)
    return sums


def dynamic_evaluation(
    model: Transformer, batches: Iterable[Batch], squares: Sequence[Tensor] | None, setting: Setting
) -> Array:
    """The loss of each token with dynamic evaluation: RMS if `squares` (MS) are given, else SGD. Restores the model."""
    weights = [weight.detach() for weight in model.parameters()]
    trained = [weight.clone() for weight in weights]
    if squares is None:
        rates, pulls = ([weight.new_tensor(setting[name]) for weight in weights] for name in ("rate", "decay"))
    else:
        roots = [square.sqrt() for square in squares]
        mean = sum(float(root.sum()) for root in roots) / sum(root.numel() for root in roots)
        rates = [setting["rate"] / (root + setting["epsilon"] * mean) for root in roots]
        pulls = [(setting["decay"] / mean * root).clamp(max=1) for root in roots]

    def update(gradients: Sequence[Tensor]) -> None:
        for weight, start, gradient, rate, pull in zip(weights, trained, gradients, rates, pulls, strict=True):
            weight.lerp_(start, pull).addcmul_(rate, gradient, value=-1)

    try:
        return gradient_steps(model, batches, update)
    finally:
        for weight, start in zip(weights, trained, strict=True):
            weight.copy_(start)


def search(loss: Callable[[Setting], float], grids: dict[str, Sequence[float]]) -> dict[str, Any]:
    """Descend from the middle of the grids, moving one value or two values together, until no neighbour is better."""
    names, known = list(grids), dict[tuple[int, ...], Setting]()

    def trial(place: tuple[int, ...]) -> Setting:
        if place not in known:
            setting = {name: grids[name][i] for name, i in zip(names, place, strict=True)}
            value = float(loss(setting))
            known[place] = setting | {"nats": value if math.isfinite(value) else math.inf}
            print(f"  {known[place]}", flush=True)
        return known[place]

    best = tuple(len(grid) // 2 for grid in grids.values())
    moves = [moved for number in (1, 2) for moved in combinations(names, number)]
    before = None
    while before != best:
        before = best
        for moved, by in product(moves, (1, -1)):
            place = tuple(i + by * (name in moved) for name, i in zip(names, best, strict=True))
            inside = all(0 <= i < len(grids[name]) for name, i in zip(names, place, strict=True))
            if inside and trial(place)["nats"] < trial(best)["nats"]:
                best = place
    return {"trials": list(known.values()), "chosen": trial(best)}


def row_of(nats: Array, plain: Array, store: TokenStore, with_equals: NDArray[np.bool_]) -> dict[str, Any]:
    """Losses over all tokens and over those without `=`, and their differences from the model alone."""
    kept = ~with_equals[store.tokens[: len(nats)]]
    (ours, tokens), (theirs, _) = (per_document(each, store, slice(0, len(nats))) for each in (nats, plain))
    return {
        "tokens": len(nats), "nats_per_token": float(nats.mean()), "ppl_token": perplexity(nats.sum(), len(nats)),
        "tokens_without_equals": int(kept.sum()), "nats_per_token_without_equals": float(nats[kept].mean()),
        "minus_plain": paired_difference(ours, theirs, tokens),
        "minus_plain_without_equals": float((nats - plain)[kept].mean()),
    }  # fmt: skip


def methods_of(
    model: Transformer, validation: TokenStore, train: TokenStore, args: argparse.Namespace, note: Callable[..., None]
) -> Iterator[tuple[str, Method]]:
    """The methods one by one, with settings selected on the validation text. `note` takes what each selection found."""

    def plain(limit: int | None, store: TokenStore) -> Array:
        device = model.table.weight.device
        with arithmetic_of(model):
            return score(model, store, model.window, model.history, args.batch_size, device=device, limit=limit)

    def cached(setting: Setting, store: TokenStore) -> Array:
        batches = windows_of(model, store, args.batch_size, args.limit)
        nats, (probability,) = cache_scores(model, batches, [setting], args.past)
        return mix(nats, probability, setting["weight"])

    def adapted(squares: list[Tensor] | None, limit: int | None, store: TokenStore, setting: Setting) -> Array:
        return dynamic_evaluation(model, windows_of(model, store, 1, limit), squares, setting)

    yield "plain", Method(partial(plain, args.limit), 0)
    if "cache" in args.methods:
        found = select_cache(model, validation, args.batch_size, args.past)
        note("cache", found)
        yield "cache", Method(partial(cached, found["chosen"]), args.past * 4 * (model.config.width + 1))
    whole = float(plain(None, validation).mean())
    for within in (False, True) if "recall" in args.methods else ():
        found, losses = select_gates(model, train, validation, args, within)
        name = "recall within attention" if within else "recall"
        note(name, found | {"plain": whole})
        yield name, Method(losses, 0 if within else 4 * args.past)
    if "dynamic" not in args.methods:
        return
    alone = float(plain(args.selection, validation).mean())
    for rule, squares in {"SGD": None, "RMS": mean_squares(model, train, args.statistics)}.items():
        loss = partial(adapted, squares, args.selection, validation)
        found = search(lambda setting: loss(setting).mean(), GRIDS[rule])  # noqa: B023
        name = f"dynamic evaluation, {rule}"
        note(name, found | {"plain": alone})
        yield name, Method(partial(adapted, squares, args.limit, setting=found["chosen"]), 4 * model.parameter_count())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run of the delta control, or one checkpoint")
    parser.add_argument("--validation", required=True, help="text to select settings on")
    parser.add_argument("--test", nargs="+", required=True, help="texts to score")
    parser.add_argument("--train", help="text for MS and gates; by default the run's training text")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after each result")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--past", type=int, default=8192, help="tokens in the cache")
    parser.add_argument("--batch_size", type=int, default=16, help="windows at a time, except in dynamic evaluation")
    parser.add_argument("--gate_steps", type=int, default=300, help="steps of 64 windows to fit recall's gates")
    parser.add_argument("--selection", type=int, default=65536, help="validation tokens for dynamic evaluation")
    parser.add_argument("--statistics", type=int, default=256, help="training windows for MS")
    parser.add_argument("--limit", type=int, help="score only the first tokens of each test text")
    return parser.parse_args()


def main() -> None:
    args, began = parse(), time.perf_counter()
    ensure_writable(args.out)
    checkpoint, device = find_checkpoint(args.checkpoint), pick_device("auto")
    tokenizer, model = checkpoint.load_tokenizer(), checkpoint.load_model().to(device, torch.float32).eval()
    if not isinstance(model, Transformer) or model.config.recall:
        raise UserError(f"{checkpoint.path} must be a decoder without recall, such as the system `recent`")
    texts = (args.validation, args.train or checkpoint.config.data.train, *args.test)
    validation, train, *tests = (open_tokens(text, tokenizer) for text in texts)
    report: dict[str, Any] = {
        "what": "recall's gates, continuous cache and dynamic evaluation on a finished model",
        "checkpoint": str(checkpoint.path),
        "model": config_to_dict(model.config), "parameters": model.parameter_count(), "train": train.identity,
        "validation": validation.identity, "revision": revision(), "hardware": describe(device), "streams": "corpus",
        "precision": PRECISION.get(device.type, "float32"),
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "selected": {}, "rows": [],
    }  # fmt: skip

    def write(line: str) -> None:
        atomic_write(args.out, to_json(report) + "\n")
        print(f"{time.perf_counter() - began:.1f} s: {line}", flush=True)

    def note(method: str, found: dict[str, Any]) -> None:
        report["selected"][method] = found
        write(f"{method}: selected {found['chosen']}, the model alone {found['plain']:.4f}")

    with_equals = np.array([b"=" in token for token in tokenizer.vocabulary])
    alone = dict[str, tuple[Array, float]]()  # by text
    for name, method in methods_of(model, validation, train, args, note):
        for store in tests:
            started = time.perf_counter()
            nats = method.losses(store)
            seconds = time.perf_counter() - started
            plain, plain_seconds = alone.setdefault(store.name, (nats, seconds))
            row = {"text": store.identity, "method": name} | row_of(nats, plain, store, with_equals)
            row |= {"seconds": round(seconds, 3), "ms_per_token": round(1000 * seconds / len(nats), 6),
                    "times_plain": round(seconds / plain_seconds, 2), "state_bytes": method.state_bytes}  # fmt: skip
            report["rows"].append(row)
            write(f"{store.name}, {name}: {row['nats_per_token']:.4f} nats/token, minus plain "
                  f"{row['minus_plain']['nats_per_token']:.4f}, without `=` {row['minus_plain_without_equals']:.4f}, "
                  f"{seconds:.2f} s, {row['times_plain']} times plain")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"adaptive_baselines: {error}") from None
