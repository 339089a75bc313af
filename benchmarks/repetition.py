"""Whether a model with recall repeats itself: generated text compared with a control's and with real text.

    python benchmarks/repetition.py --checkpoint runs/recall --control runs/control --text wikitext103:test \\
        --limits 1 0.9 0.5 --out results/repetition.json

Prompts are taken from the text at equal distances. Each model continues all of them: with samples (of the most likely
tokens that add up to 95 %, and of all at a temperature of 0.8), and with the most likely token (`greedy`). The row
`text` is how the text itself continues. Of each continuation, given its prompt:

    rep_4      share of its 4-grams that occurred within the last 512 tokens before
    longest    tokens in its longest part that occurred before, in the prompt or in the continuation; a part may overlap
               its earlier occurrence, as in a loop

Intervals are bootstraps over prompts. `--limits` repeats the model's rows with other values of `model.recall_limit`,
the most that copies may contribute to a prediction; in one more row the model does not copy its own words.
`--checkpoint` may also be a folder that `logpast attach` wrote; without `--control` the control is then the model on
its own, with copies limited to a millionth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logpast.data import Tokenizer, open_tokens
from logpast.evaluation.evaluate import find_other
from logpast.evaluation.metrics import bootstrap
from logpast.models import LanguageModel
from logpast.models.sampling import Sampling, generators
from logpast.models.stream import Stream
from logpast.training.checkpoint import find_model
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable
from logpast.util.progress import progress_bar
from logpast.util.serialization import to_json
from logpast.util.validation import Share, validate_value

NGRAM, BACK = 4, 512
ALONE = 1e-6  # limit of copies at which the model is on its own
DECODING: dict[str, dict[str, float]] = {
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature 0.8": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
}


def copies(tokens: Sequence[int], start: int) -> tuple[int, int]:
    """How many 4-grams that end at `start` or later occurred within the last 512 tokens before; and the length of the
    longest part from `start` on that occurred before.
    """
    ids, repeated, longest = np.asarray(tokens), 0, 0
    lengths = np.zeros(
        len(ids) + 1, np.int64
    )  # lengths[j + 1]: tokens before and at j that equal those before and at i
    for i, token in enumerate(ids):
        lengths[1:] = np.where(ids == token, lengths[:-1] + 1, 0)
        if i >= start:
            before = lengths[1 : i + 1]
            repeated += bool((before[-BACK:] >= NGRAM).any())
            longest = max(longest, min(int(before.max(initial=0)), i + 1 - start))
    return repeated, longest


def row_of(texts: list[list[int]], start: int) -> dict[str, Any]:
    """Both numbers over all continuations."""
    repeated, longest = (np.array(column) for column in zip(*(copies(text, start) for text in texts), strict=True))
    each = np.full(len(texts), len(texts[0]) - start)
    intervals = bootstrap(repeated.astype(np.float64), {"token": each})
    return {
        "rep_4": float(repeated.sum() / each.sum()), "interval": intervals and list(intervals["token"]),
        "longest_mean": float(longest.mean()), "longest_max": int(longest.max()),
    }  # fmt: skip


def continued(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    tokens: int,
    decoding: dict[str, float],
    seed: int,
) -> list[list[int]]:
    """The prompts with their continuations."""
    stream = Stream(model, tokenizer.eot, len(prompts))
    stream.push(prompts)
    texts = prompts
    allowed = torch.ones(tokenizer.size, dtype=torch.bool)
    allowed[tokenizer.eot] = False
    steps = stream.sample(
        generators(seed, len(prompts)), Sampling(decoding["temperature"], top_p=decoding.get("top_p"), allowed=allowed)
    )
    with progress_bar("generating", tokens) as progress:
        for done, sampled in enumerate(islice(steps, tokens), 1):
            texts = [[*text, token] for text, token in zip(texts, sampled, strict=True)]
            progress.update(done)
    return texts


def variants(
    model: LanguageModel, control: LanguageModel | None, limits: list[float] | None
) -> Iterator[tuple[str, Any, Any]]:
    """(name, model, limit of copies) of each model to generate with."""
    if model.config.recall:
        for limit in limits or [model.config.recall_limit]:
            model.recall.limit = limit
            yield "model", model, limit
        model.recall.limit, model.recall.copy_own = model.config.recall_limit, False
        yield "model, own words not copied", model, model.config.recall_limit
        model.recall.copy_own = True
    else:
        yield "model", model, None
    if not control:
        model.recall.limit = ALONE
    yield "control", control or model, None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run, a checkpoint or an attached model")
    parser.add_argument("--control", type=Path, help="the same without recall; by default with next to no copies")
    parser.add_argument("--text", required=True, help="text that the prompts are taken from")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after each result")
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts")
    parser.add_argument("--prompt_tokens", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each continuation")
    parser.add_argument("--limits", type=float, nargs="+", help="values of model.recall_limit; by default the model's")
    parser.add_argument("--decoding", nargs="+", choices=DECODING, default=[*DECODING], help="by default all")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    ensure_writable(args.out)
    found, device = find_model(args.checkpoint), pick_device("auto")
    tokenizer = found.load_tokenizer()
    store = open_tokens(args.text, tokenizer)
    model = found.load_model().to(device).eval()
    control = find_other(args.control, store).load_model().to(device).eval() if args.control else None
    if not model.config.recall and (args.limits or not control):
        raise UserError(f"{found.path} has no recall; give --control, and leave out --limits")
    for limit in args.limits or []:
        validate_value("--limits", limit, Share)
    length = args.prompt_tokens + args.tokens
    if min(args.prompts, args.prompt_tokens, args.tokens) < 1 or args.prompts * length > len(store):
        raise UserError(f"{store.name} has {len(store):,} tokens, too few for {args.prompts} parts of {length:,}")
    starts = np.linspace(0, len(store) - length, args.prompts).astype(int)
    texts = [store.tokens[start : start + length].tolist() for start in starts]
    prompts = [text[: args.prompt_tokens] for text in texts]
    report: dict[str, Any] = {
        "what": "repetition in generated text", "checkpoint": str(found.path),
        "control": str(args.control) if args.control else f"copies at most {ALONE:g}",
        "text": store.identity, "revision": revision(), "hardware": describe(device),
        "settings": {name: getattr(args, name) for name in ("prompts", "prompt_tokens", "tokens", "seed")},
        "decoding": {name: DECODING[name] for name in args.decoding}, "rows": [],
    }  # fmt: skip

    def add(about: dict[str, Any], continuations: list[list[int]]) -> None:
        row = about | row_of(continuations, args.prompt_tokens)
        report["rows"].append(row)
        atomic_write(args.out, to_json(report) + "\n")
        print(" ".join(f"{value}" for value in about.values() if value is not None)
              + f": rep_4 {row['rep_4']:.1%}, longest copy {row['longest_mean']:.1f} tokens on average, "
              f"{row['longest_max']} at most", flush=True)  # fmt: skip

    add({"of": "text"}, texts)
    for decoding, how in report["decoding"].items():
        for name, each, limit in variants(model, control, args.limits):
            about = {"of": name, "decoding": decoding, "limit": limit}
            add(about, continued(each, tokenizer, prompts, args.tokens, how, args.seed))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"repetition: {error}") from None
