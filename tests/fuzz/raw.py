"""Targets of bytes, for atheris: the first byte chooses the file that holds the others."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from fuzz.folders import make_run, make_store, use_checkpoint, use_store, use_tokenizer
from fuzz.harness import Target
from fuzz.mutations import as_yaml
from fuzz.pages import VARIED, list_cells, read_as_train
from fuzz.rows import full_row, use_rows
from fuzz.texts import ARTICLES, NAMES, SYSTEMS, continue_text, make_model, place_text
from ledger_rows import scored_row
from logpast.models.stream import Stream
from logpast.training.checkpoint import SUMS, find_checkpoint

Call = Callable[[], object]
GRID = {
    "recipe": VARIED,
    "test": "c.txt",
    "grids": [{"model.width": [16, 32]}, {"sizes": {"a": {"steps": 9}, "b": {}}}],
}


def yaml_text(home: Path) -> tuple[Target, list[bytes]]:
    """A recipe, or a sweep."""
    pages = [
        (home / "recipe.yaml", read_as_train, as_yaml(VARIED)),
        (home / "sweep.yaml", functools.partial(list_cells, home), as_yaml(GRID)),
    ]
    return _files(home, [(file, functools.partial(call, file), content) for file, call, content in pages])


def json_text(home: Path) -> tuple[Target, list[bytes]]:
    """Ledger rows, the JSON of a store, of a checkpoint without checksums, and of a tokenizer."""
    run, store, rows = make_run(home, 0), make_store(home / "kept"), home / "rows.jsonl"
    checkpoint = run / "checkpoints" / "step-00000002"
    (checkpoint / SUMS).unlink()
    state, about = checkpoint / "state.json", store / "store.json"
    tokenizer = home / "tokenizer.json"
    whole = "".join(json.dumps(row) + "\n" for row in (scored_row(), full_row())).encode()
    trained = (store / "tokenizer.json").read_bytes()
    return _files(home, [
        (rows, functools.partial(use_rows, rows), whole),
        (about, functools.partial(use_store, store), about.read_bytes()),
        (state, functools.partial(use_checkpoint, run), state.read_bytes()),
        (tokenizer, functools.partial(use_tokenizer, tokenizer), trained),
    ])  # fmt: skip


def tensors(home: Path) -> tuple[Target, list[bytes]]:
    """The state of a stream, weights and moments."""
    run, state, model = make_run(home, 1), home / "stream.safetensors", make_model(SYSTEMS[2])
    checkpoint = run / "checkpoints" / "step-00000002"
    (checkpoint / SUMS).unlink()
    Stream(model, 12, batch=2).save(state)
    use = functools.partial(find_checkpoint, run / "checkpoints" / "step-00000002", for_training=True)
    weights, moments = checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors"
    return _files(home, [
        (state, functools.partial(continue_text, model, state), state.read_bytes()),
        (weights, lambda: use().load_model(), weights.read_bytes()),
        (moments, functools.partial(use_checkpoint, run), moments.read_bytes()),
    ])  # fmt: skip


def text(home: Path) -> tuple[Target, list[bytes]]:
    """A text that is prepared with GPT-2's tokenizer: a file, WikiText's format, a folder."""

    def place(content: bytes) -> Call:
        return place_text(home, content[1:], NAMES[content[0] % len(NAMES)] if content else NAMES[0], "gpt2")

    seeds = [bytes([number]) + ARTICLES.encode() for number in range(len(NAMES))]
    return Target(st.binary(), place, home, "text"), [*seeds, b"\0a\r\nb\xe2\x80\xa8"]


def _files(home: Path, files: list[tuple[Path, Call, bytes]]) -> tuple[Target, list[bytes]]:
    """A target of several files, one of which an input replaces."""

    def place(content: bytes) -> Call:
        for file, _, valid in files:
            file.write_bytes(valid)
        file, call, _ = files[content[0] % len(files) if content else 0]
        file.write_bytes(content[1:])
        return call

    return Target(st.binary(), place, home, str(home)), [bytes([n]) + valid for n, (_, _, valid) in enumerate(files)]


RAW: dict[str, Callable[[Path], tuple[Target, list[bytes]]]] = {
    "YAML, bytes": yaml_text,
    "JSON, bytes": json_text,
    "tensors, bytes": tensors,
    "text, bytes": text,
}
