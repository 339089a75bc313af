"""Raw text that becomes a token store, and the states of streams."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load, save

from fuzz.folders import TEXT, edited_tensors, tensor_edits
from fuzz.harness import Target
from fuzz.mutations import damaged, damages
from logpast.data.prepare import prepare
from logpast.models import (
    CompressiveConfig,
    LanguageModel,
    LogMemoryConfig,
    RecurrentMemoryConfig,
    TimeLocalConfig,
    TransformerXLConfig,
    build,
)
from logpast.models.stream import HASH, Stream
from logpast.util.errors import UserError

ARTICLES = (
    " \n = A title = \n \n Some words here . \n = = Below = = \n More @-@ words . \n \n = B = \n \n And more . \n"
)
PIECES = [
    "\r\n", "\r", "\n", "\0", "\ufeff", "\uffff", "\u2028", "\x85", "<|endoftext|>", " = A = \n",
    "\n \n = = B = = \n", " " * 700, "x" * 700, "'s", "é", "e\u0301", "\U0001f600", "\U0010ffff", "١٢٣", "汉字",
    "\x1c\x1d", "\u3000", "\t", " \n \n", "a" * 3 + "\r",
]  # fmt: skip
NAMES = ("text.txt", "text.raw", "folder")
SIZES = {"window": 4, "layers": 1, "heads": 2, "width": 8, "vocabulary": 13}
SYSTEMS = [
    LogMemoryConfig(slots=5, sharpness=10, **SIZES),
    LogMemoryConfig(slots=5, sharpness=10, recall=9, recall_orders=2, **SIZES),
    TransformerXLConfig(memory=6, **SIZES),
    CompressiveConfig(memory=4, compressed=4, rate=2, **SIZES),
    RecurrentMemoryConfig(memory_tokens=2, recall=5, **SIZES),
    TimeLocalConfig(slots=5, **SIZES),
]


def texts(home: Path) -> Target:
    """`data prepare` of a file, of a file in WikiText's format or of a folder; decoding gives the text again."""
    pieces = st.one_of(st.sampled_from(PIECES), st.text(max_size=30), st.just(TEXT[:90]), st.just(ARTICLES))
    inputs = st.tuples(
        st.lists(pieces, max_size=6).map("".join),
        damages(),
        st.sampled_from(NAMES),
        st.sampled_from(("gpt2", "bpe-300")),
    )

    def place(value: Any) -> Callable[[], object]:
        text, damage, name, tokenizer = value
        return place_text(home, damaged(text.encode("utf-8", "surrogatepass"), damage), name, tokenizer)

    return Target(inputs, place, home, "text")


def place_text(home: Path, content: bytes, name: str, tokenizer: str) -> Callable[[], object]:
    source = home / "source" / ("text" if name == "folder" else name)
    shutil.rmtree(home / "source", ignore_errors=True)
    source.parent.mkdir()
    if name == "folder":
        source.mkdir()
        (source / "text.txt").write_bytes(content)
        (source / "b\nb.txt").write_bytes(TEXT.encode())
    else:
        source.write_bytes(content)
    return lambda: prepare_and_decode(source, content, home / "out", tokenizer)


def prepare_and_decode(source: Path, content: bytes, out: Path, tokenizer: str) -> None:
    (store,) = prepare([str(source)], out, tokenizer=tokenizer, workers=1)
    text = content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if source.is_dir():
        text = TEXT + text if text else TEXT
    decoded = store.load_tokenizer().decode(store.tokens.tolist())
    counts = store.counts
    shutil.rmtree(out)
    if decoded != text:
        raise AssertionError(f"the text {text[:80]!r} became {decoded[:80]!r}")
    if counts.words != len(text.split()) or counts.bytes != len(text.encode()):
        raise AssertionError(f"{counts} of {text[:80]!r}")


def stream_states(home: Path) -> Target:
    """A state with odd tensors or damaged bytes; the text is continued."""
    models, file = [make_model(config) for config in SYSTEMS], home / "stream.safetensors"
    states = []
    for model in models:
        stream = Stream(model, 12, batch=2)
        stream.push([[1, 2, 3, 4, 5, 1, 2, 3], [7] * 8])
        stream.save(file)
        states.append(load(file.read_bytes()))  # load_file would map the file, which each input replaces
        del states[-1][HASH]  # or nothing behind it would be reached
    inputs = st.tuples(st.sampled_from(range(len(models))), tensor_edits(), damages())

    def place(value: Any) -> Callable[[], object]:
        number, changes, damage = value
        file.write_bytes(damaged(save(edited_tensors(states[number], changes)), damage))
        return lambda: continue_text(models[number], file)

    return Target(inputs, place, home, "stream.safetensors")


def continue_text(model: LanguageModel, file: Path) -> None:
    stream = Stream.load(model, file)
    with suppress(UserError):  # predictions of NaN, after numbers near the largest
        stream.generate(6)
    stream.state()


def make_model(config: Any) -> LanguageModel:
    torch.manual_seed(0)
    return build(config).eval()
