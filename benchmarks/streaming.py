"""Texts without an end: state and time per token after 1,000, 10,000, 100,000 and 1,000,000 tokens.

    python benchmarks/streaming.py --out results/streaming_cpu.json
    python benchmarks/streaming.py --device cuda --model path/to/model --dtype bfloat16 --out results/streaming_gpu.json

    log_memory       our model with recall, of --layers and --width
    attached         a pretrained decoder with a window, a sink and recall: --model, or a random Llama
    dynamic_cache    the same decoder with Hugging Face's own KV cache, which grows with the text

The text arrives --chunk tokens at a time, and the next token is predicted after each. At each length there are two
rows. "generate": milliseconds for one new token, the median and the mean of --steps. "read", after that: milliseconds
for 1,000 tokens more and the prediction after them, the median and the mean of --repeats. The lengths take turns, so
that other load on the machine affects them alike; the KV caches of all lengths do not fit into memory together. Ratios
are to the shortest text. State: bytes of the saved state; of the KV cache, its keys and values, which are random here:
they do not change the time. Parameters of our model are random, too; the text is --data, or random ids by Zipf's law.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import sdpa_kernel

from logpast.data import open_tokens
from logpast.data.tokenizers import Tokenizer
from logpast.models import LanguageModel, LogMemoryConfig, build
from logpast.models.stream import ATTENTION, Stream
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import is_out_of_memory
from logpast.util.files import atomic_write

CHUNK = 1000  # tokens that are read at a time
VOCABULARY = 50_304  # GPT-2's, rounded up
WARM_UP = 5  # steps that are not counted


def text(data: str | None, tokenizer: str | Tokenizer | None, tokens: int, vocabulary: int) -> NDArray[Any]:
    """Ids of a text, repeated if it is too short; or ids whose frequencies follow Zipf's law."""
    if data is None:
        weights = 1 / np.arange(1, vocabulary + 1)
        return np.random.default_rng(0).choice(vocabulary, tokens, p=weights / weights.sum())
    store = open_tokens(data, tokenizer)
    return np.resize(store.tokens, tokens)


def read(model: LanguageModel, ids: NDArray[Any], marks: list[int], chunk: int) -> dict[int, Stream]:
    """Stream the text, with a prediction after each chunk. Returns the stream at each mark."""
    stream, kept = model.stream(0), dict[int, Stream]()
    for first, last in pairwise(sorted({*range(0, marks[-1], chunk), *marks})):
        stream.push(ids[first:last])
        stream.logits().cpu()
        if last in marks:
            kept[last] = stream.select([0])
    return kept


def take_turns(steps: dict[int, Callable[[], Any]], number: int) -> dict[int, list[float]]:
    """Milliseconds of each step, by past."""
    times: dict[int, list[float]] = {past: [] for past in steps}
    for _ in range(WARM_UP + number):
        for past, step in steps.items():
            started = time.perf_counter()
            step()
            times[past].append((time.perf_counter() - started) * 1000)
    return {past: values[WARM_UP:] for past, values in times.items()}


def row(system: str, what: str, past: int, times: list[float], state: int) -> dict[str, Any]:
    median, mean = statistics.median(times), statistics.fmean(times)
    return {"system": system, "what": what, "past": past, "milliseconds": round(median, 4),
            "mean_milliseconds": round(mean, 4), "state_bytes": state}  # fmt: skip


def stream_rows(
    name: str, model: LanguageModel, ids: NDArray[Any], marks: list[int], chunk: int, repeats: int, steps: int
) -> list[dict[str, Any]]:
    started = time.perf_counter()
    streams = read(model, ids, marks, chunk)
    print(f"{name}: {marks[-1]:,} tokens in {time.perf_counter() - started:.1f} s", flush=True)

    state = {past: sum(value.nbytes for value in stream.state().values()) for past, stream in streams.items()}

    def add_token(stream: Stream) -> None:
        """A new token: of the text itself, which has as many matches as text has."""
        stream.logits().argmax(-1).cpu()
        stream.append(ids[stream.length - 1 :][:1])

    def read_more(stream: Stream) -> None:
        stream.push(ids[stream.length - 1 :][:CHUNK])
        stream.logits().cpu()

    steps_of = {"generate": (add_token, steps), "read": (read_more, repeats)}
    times = {
        what: take_turns({past: partial(step, stream) for past, stream in streams.items()}, number)
        for what, (step, number) in steps_of.items()
    }
    return [row(name, what, past, times[what][past], state[past]) for what in times for past in marks]


@torch.inference_mode()
def cache_rows(base: Any, marks: list[int], steps: int) -> list[dict[str, Any]]:
    """A decoder with Hugging Face's KV cache: one length after the other, as far as the memory goes."""
    from transformers import DynamicCache

    weight, sizes, rows = base.get_input_embeddings().weight, base.config.get_text_config(), list[dict[str, Any]]()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    token = torch.ones(1, 1, dtype=torch.int64, device=weight.device)
    for past in marks:
        try:
            shape = 1, heads, past, width
            pairs = [tuple(weight.new_empty(shape).normal_() for _ in "kv") for _ in range(sizes.num_hidden_layers)]
            cache = DynamicCache(pairs)
            size = sum(part.nbytes for pair in pairs for part in pair)
            del pairs

            def step(cache: Any = cache) -> None:
                base(token, past_key_values=cache, use_cache=True).logits[0, -1].argmax().item()

            with sdpa_kernel(ATTENTION):  # as in a stream
                (times,) = take_turns({past: step}, steps).values()
            rows.append(row("dynamic_cache", "generate", past, times, size))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rows.append({"system": "dynamic_cache", "what": "generate", "past": past, "milliseconds": None})
            break
        finally:
            cache = step = None  # type: ignore[assignment]
    return rows


def load_base(model: str | None, layers: int, width: int, longest: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from logpast.models.hf.attach import load_model

    if model is not None:
        return load_model(model)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 64, num_key_value_heads=max(1, width // 192),
            max_position_embeddings=2 * longest, bos_token_id=0,
        )
    )  # fmt: skip


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Each time as a multiple of that of the shortest text."""
    first: dict[tuple[str, str], float] = {}
    for each in rows:
        start = first.setdefault((each["system"], each["what"]), each["milliseconds"])
        each["ratio"] = each["milliseconds"] and round(each["milliseconds"] / start, 3)
        print(each, flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="length of the longest text")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens that arrive together, up to each length")
    parser.add_argument("--repeats", type=int, default=20, help="times that 1,000 tokens are read at each length")
    parser.add_argument("--steps", type=int, default=512, help="tokens to generate at each length")
    parser.add_argument("--data", help="a text, a token store or a split of a corpus; by default random ids")
    parser.add_argument("--systems", nargs="+", default=["log_memory"], help="log_memory, attached, dynamic_cache")
    parser.add_argument(
        "--model", help="a pretrained decoder for attached and dynamic_cache; by default a random Llama"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--recall", type=int, default=8192)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="write the table as JSON, after each system")
    args = parser.parse_args(argv)
    device, dtype = pick_device(args.device), getattr(torch, args.dtype)
    marks = [mark for mark in (10**power for power in range(3, 10)) if mark <= args.tokens]
    base = None
    if {"attached", "dynamic_cache"} & {*args.systems}:
        base = load_base(args.model, args.layers, args.width, args.tokens).to(device, dtype).eval()
    about = {
        "what": "state and time per token of a text that grows", "dtype": args.dtype, "steps": args.steps,
        "sizes": {name: getattr(args, name) for name in ("layers", "width", "window", "recall")},
        "model": args.model and Path(args.model).name, "text": args.data or "random ids", "threads":
        torch.get_num_threads(), "revision": revision(), "hardware": describe(device),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for system in args.systems:
        if system == "dynamic_cache":
            found = cache_rows(base, marks, args.steps)
        else:
            model, ids = streaming_model(system, base, args)
            model = model.to(device, dtype).eval()
            found = stream_rows(system, model, ids, marks, args.chunk, args.repeats, args.steps)
        add_ratios(found)
        rows += found
        if args.out:  # after each system: an interrupted run has the others
            atomic_write(args.out, json.dumps(about | {"rows": rows}, indent=2) + "\n")


def streaming_model(system: str, base: Any, args: argparse.Namespace) -> tuple[LanguageModel, NDArray[Any]]:
    """A model, and a text with its ids."""
    length = args.tokens + args.steps + WARM_UP + (args.repeats + WARM_UP) * CHUNK
    if system == "log_memory":
        torch.manual_seed(0)
        sizes = {"window": args.window, "layers": args.layers, "heads": max(1, args.width // 64), "width": args.width}
        config = LogMemoryConfig(slots=53, normalize="area", recall=args.recall, **sizes)
        store = open_tokens(args.data) if args.data else None
        model = build(config, store.tokenizer.size if store else VOCABULARY)
        return model, text(args.data, None, length, VOCABULARY)
    from logpast.models.hf.attach import attach_memory, load_model_tokenizer

    tokenizer = load_model_tokenizer(args.model) if args.model and args.data else None
    attached = attach_memory(base, window=args.window, recall=args.recall)
    return attached, text(
        args.data,
        tokenizer,
        length,
        attached.table.num_embeddings,
    )


if __name__ == "__main__":
    main()
