"""Folders that logpast writes and reads again: token stores, checkpoints, tokenizers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from fuzz.harness import Target
from fuzz.mutations import IN_JSON, IN_YAML, as_json, as_yaml, damaged, damages, edited, edits
from logpast.data import TokenStore, open_tokens
from logpast.data.batching import Windows
from logpast.data.prepare import prepare
from logpast.data.tokenizers import load_tokenizer
from logpast.models import LogMemoryConfig, TransformerXLConfig, build
from logpast.training.checkpoint import SUMS, find_checkpoint, moments_of, save_checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.optimizer import build_optimizer
from logpast.util.checksums import CRC

TEXT = "In the beginning God created the heaven and the earth. It's 7 o'clock, café.\n\n  And the earth was void;\n" * 3
SIZES = {"window": 8, "layers": 1, "heads": 2, "width": 8}
Tensors = dict[str, torch.Tensor]


def token_stores(home: Path) -> Target:
    """A store whose checksums are those of its damaged files, or not; its tokens, tokenizer and windows are used."""
    folder, kept = home / "store", make_store(home / "kept")
    about = json.loads((kept / "store.json").read_text())
    table = [line.split("\t") for line in (kept / "documents.tsv").read_text().splitlines()]
    content = {name: (kept / name).read_bytes() for name in ("tokens.bin", "tokenizer.json")}
    folder.mkdir()
    parts = ("store.json", "documents.tsv", "tokens.bin", "tokenizer.json", "several")
    inputs = st.tuples(
        st.sampled_from(parts), edits(IN_JSON, 2), edits(IN_JSON, 2), damages(), st.sampled_from("yyyn"), _missing(4)
    )

    def place(value: Any) -> Callable[[], object]:
        part, of_about, of_table, damage, sealed, missing = value

        def changed(file: str, bytes_: bytes) -> bytes:
            return damaged(bytes_, damage) if part in (file, "several") else bytes_

        rows = edited(table, of_table) if part in ("documents.tsv", "several") else table
        rows = rows if isinstance(rows, list) else [rows]
        lines = ["\t".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows]
        text = changed("documents.tsv", "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
        tokens = changed("tokens.bin", content["tokens.bin"])
        new = dict(about)
        if sealed == "y":
            new["sha256"] = {"tokens.bin": _sha256(tokens), "documents.tsv": _sha256(text)}
            del new[CRC]
        new = edited(new, of_about) if part in ("store.json", "several") else new
        (folder / "store.json").write_bytes(changed("store.json", as_json(new, indent=2)))
        (folder / "documents.tsv").write_bytes(text)
        (folder / "tokens.bin").write_bytes(tokens)
        (folder / "tokenizer.json").write_bytes(changed("tokenizer.json", content["tokenizer.json"]))
        if missing < 4:
            (folder / parts[missing]).unlink()
        return lambda: use_store(folder)

    return Target(inputs, place, home, "store")


def use_store(folder: Path) -> None:
    if not (folder / "store.json").exists() and not (folder / "tokens.bin").exists():
        TokenStore.open(folder)
    store = open_tokens(folder)
    repr(store)
    tokenizer = store.load_tokenizer()
    tokenizer.decode(store.tokens[:20].tolist())
    for streams in ("corpus", "document"):
        windows = Windows(store, 8, 4, streams)  # type: ignore[arg-type]
        for index in range(min(len(windows), 3)):
            windows.batch(torch.tensor([index]).numpy())


def tokenizers(home: Path) -> Target:
    """A tokenizer.json of each kind; a text is encoded and decoded."""
    trained = json.loads((make_store(home / "kept") / "tokenizer.json").read_text())
    pretrained = {"name": "pretrained", "eot": trained["added_tokens"][0]["id"], "tokenizer": trained}
    fingerprint = load_tokenizer("gpt2").fingerprint
    known, file = [trained, pretrained, {"name": "gpt2", "fingerprint": fingerprint}], home / "tokenizer.json"
    inputs = st.tuples(st.sampled_from([0, 0, 0, 1, 1, 2]), edits(IN_JSON), damages())

    def place(value: Any) -> Callable[[], object]:
        number, changes, damage = value
        file.write_bytes(damaged(as_json(edited(known[number], changes)), damage))
        return lambda: use_tokenizer(file)

    return Target(inputs, place, home, "tokenizer.json")


def use_tokenizer(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode(TEXT)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.size:
        raise AssertionError(f"ids from {ids.min()} to {ids.max()} of {tokenizer.size}")
    tokenizer.decode([*ids.tolist(), tokenizer.eot])
    tokenizer.is_text  # noqa: B018


def checkpoints(home: Path) -> Target:
    """A run whose checkpoint is damaged in one file, with its checksums renewed or not; it is loaded whole."""
    runs = [make_run(home, number) for number in range(2)]
    run = home / "run"
    inputs = st.tuples(
        st.sampled_from([0, 1]), st.sampled_from(("state.json", "config.yaml", "tensors", "bytes", "sums", "early")),
        edits(IN_JSON), edits(IN_YAML), damages(), tensor_edits(), st.sampled_from("yyyn"), _missing(6),
    )  # fmt: skip

    def place(value: Any) -> Callable[[], object]:
        number, part, of_state, of_config, damage, of_tensors, sealed, missing = value
        folder, kept = run / "checkpoints" / "step-00000002", runs[number]
        if folder.exists():
            shutil.rmtree(run)
        folder.mkdir(parents=True)
        files = {path.name: path.read_bytes() for path in kept.glob("checkpoints/*/*")}
        names = sorted(set(files) - {SUMS})
        name = names[missing % len(names)]
        if part in ("state.json", "early"):
            state = json.loads(files["state.json"])
            if part == "early":
                state["sizes"] = {
                    each: len(content) for each, content in files.items() if each not in (SUMS, "state.json")
                }
                state["sums"] = {each: _sha256(files[each]) for each in state["sizes"]}
            files["state.json"] = damaged(as_json(edited(state, of_state), indent=2), damage)
        elif part == "config.yaml":
            files[part] = damaged(as_yaml(edited(yaml_of(files[part]), of_config)), damage)
        elif part == "tensors":
            tensors = [each for each in names if each.endswith(".safetensors")]
            name = tensors[missing % len(tensors)]
            files[name] = save(edited_tensors(load_file(kept / "checkpoints" / "step-00000002" / name), of_tensors))
        elif part == "bytes":
            files[name] = damaged(files[name], damage)
        if sealed == "y":
            files[SUMS] = "".join(f"{_sha256(files[each])}  {each}\n" for each in names).encode()
        if part == "sums":
            files[SUMS] = damaged(files[SUMS], damage)
        if part == "early":
            del files[SUMS]
        for each, content in files.items():
            (folder / each).write_bytes(content)
        if missing == 5:
            (folder / name).unlink()
        return lambda: use_checkpoint(run)

    return Target(inputs, place, home, "step-00000002")


def use_checkpoint(run: Path) -> None:
    find_checkpoint(run)
    checkpoint = find_checkpoint(run / "checkpoints" / "step-00000002", for_training=True)
    tokenizer = checkpoint.load_tokenizer()
    model = checkpoint.load_model()
    checkpoint.load_optimizer(
        model, optimizer := build_optimizer(model, checkpoint.config.optimizer, torch.device("cpu"))
    )
    stream = model.stream(tokenizer.eot)
    stream.push(tokenizer.encode("And God said"))
    stream.logits()
    if "transformer_xl" in str(type(model)):
        checkpoint.carried()
    optimizer.step()


TENSOR_CHANGES = (
    "delete", "rename", "float64", "float16", "int32", "bool", "uint8", "flat", "cut", "pad", "empty", "scalar",
    "value", "nan", "more", "swap", "negative",
)  # fmt: skip


def tensor_edits() -> st.SearchStrategy[Any]:
    """Changes to named tensors: which, how, and a number."""
    numbers = st.sampled_from([0, 1, -1, 2, 7, 255, 300, 2**31 - 1, -(2**31), 2**62, -(2**63), 1e300])
    return st.lists(st.tuples(st.integers(0, 99), st.sampled_from(TENSOR_CHANGES), numbers), min_size=1, max_size=3)


def edited_tensors(tensors: Tensors, changes: list[tuple[int, str, float]]) -> Tensors:
    found = {name: value.clone() for name, value in tensors.items()}
    for which, change, number in changes:
        if not found:
            return found
        name = sorted(found)[which % len(found)]
        found[name] = value = found[name].clone()
        if change == "delete":
            del found[name]
        elif change == "rename":
            found[f"{name}x" if number else name[:-1]] = found.pop(name)
        elif change in ("float64", "float16", "int32", "bool", "uint8"):
            found[name] = value.to(getattr(torch, change))
        elif change == "flat":
            found[name] = value.flatten()
        elif change == "cut":
            found[name] = value[: len(value) // 2].clone() if value.ndim else value
        elif change == "pad":
            found[name] = torch.cat([value, value]) if value.ndim else value.reshape(1)
        elif change == "empty":
            found[name] = value.new_empty(0, *value.shape[1:])
        elif change == "scalar":
            found[name] = value.new_zeros(())
        elif change == "more":
            found["other"] = torch.zeros(3)
        elif change == "swap":
            other = sorted(found)[which * 3 % len(found)]
            found[name], found[other] = found[other].clone(), found[name].clone()
        elif value.numel():
            info = torch.finfo(value.dtype) if value.is_floating_point() else None
            limits = (info.min, info.max) if info else (0, 1)
            if info is None and value.dtype != torch.bool:
                limits = (torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max)
            new = float("nan") if change == "nan" and info else min(max(number, limits[0]), limits[1])
            flat = value.flatten()
            flat[which % len(flat)] = new if info else int(new)
            found[name] = flat.reshape(value.shape)
    return found


def yaml_of(content: bytes) -> Any:
    import yaml

    return yaml.safe_load(content)


def make_store(folder: Path) -> Path:
    """A small store of two documents, made once."""
    if not folder.exists():
        texts = folder.with_name("texts")
        texts.mkdir()
        for number in range(2):
            (texts / f"{number}.txt").write_text(TEXT[number:], encoding="utf-8")
        prepare([str(texts)], folder, tokenizer="bpe-300", workers=1)
    return folder


def make_run(home: Path, number: int) -> Path:
    """A run with one checkpoint: of a stateless system, and of a recurrent one."""
    folder, tokenizer = home / f"run-{number}", load_tokenizer(make_store(home / "kept"))
    vocabulary = tokenizer.size
    sizes = [LogMemoryConfig(slots=5, sharpness=20, vocabulary=vocabulary, **SIZES),
             TransformerXLConfig(memory=8, segments=2, vocabulary=vocabulary, recall=9, **SIZES)]  # fmt: skip
    data = DataConfig(train="a.txt")
    config = TrainConfig(
        run=folder, data=data, model=sizes[number], optimizer=OptimizerConfig(), steps=4, accelerator="cpu"
    )
    torch.manual_seed(0)
    model = build(config.model)
    optimizer = build_optimizer(model, config.optimizer, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    about = {"name": "a.txt", "sha256": "0", "tokens": 9, "tokenizer": tokenizer.fingerprint}
    state = {
        "step": 2, "total_steps": 4, "tokens": 9, "parameters": model.parameter_count(), "seconds": 1.5,
        "best": {"step": 2, "nats_per_token": 3.5}, "data": about, "validation_data": None, "revision": "0" * 40,
        "hardware": {"device": "cpu"},
    }  # fmt: skip
    carried = model.start(2) if number else None
    save_checkpoint(config, model.state_dict(), moments_of(model, optimizer), tokenizer, state, carried)
    return folder


def _missing(count: int) -> st.SearchStrategy[int]:
    """Which file is missing, mostly none."""
    return st.integers(0, 8 * count)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
