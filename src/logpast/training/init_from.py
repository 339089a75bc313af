"""`--init_from`: the initial weights of a run, from another run or from a Hugging Face GPT-2.

Weights are matched by name. Parts that the source does not have, such as the LayerNorm of a memory, are initialised as
in any run; parts that only the source has are left out.

Position embeddings belong to a sequence of slots and window. The rows of the window stay those of the window, so its
first positions are taken if the new window is shorter. Of the slots, the nearest are taken if there are fewer. A source
without slots, such as GPT-2, gives its first rows, in order, to slots and window: a slot gets the position that a token
there would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from logpast.data import Tokenizer, TokenStore, load_tokenizer
from logpast.models import LanguageModel, Transformer, TransformerConfig, system_of
from logpast.models.decoder import rename_gpt2
from logpast.training.checkpoint import Checkpoint, find_checkpoint
from logpast.util.errors import UserError, first_few
from logpast.util.files import sha256_of
from logpast.util.schema import parse_json

GPT2_FILES = ("model.safetensors", "pytorch_model.bin")
GPT2_SETTINGS = {  # of config.json: what our decoder computes
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass
class Source:
    """Where initial weights come from."""

    name: str
    """for messages: the path of a checkpoint, or as it was given"""
    recipe: dict[str, Any]
    """the settings of its training that a new run takes as defaults: model and tokenizer, and all others if known"""
    slots: int | None
    """of the model; None if its positions, if any, are not slots and window"""
    fingerprint: str
    """of its tokenizer"""
    weights: Callable[[], dict[str, Tensor]]
    identity: dict[str, Any]
    """path, step and SHA-256 of the weights, for state.json"""
    notes: list[str] = field(default_factory=list)
    """what `load_weights` did not match, for the user"""

    @property
    def vocabulary(self) -> int | None:
        vocabulary: int | None = self.recipe["model"]["vocabulary"]
        return vocabulary

    def check_tokenizer(self, store: TokenStore) -> None:
        if store.tokenizer.fingerprint != self.fingerprint:
            raise UserError(
                f"{store.name} has another tokenizer than {self.name}; tokenize it with --data.tokenizer "
                f"{self.recipe['data']['tokenizer']} (a token store: data prepare --tokenizer)"
            )

    def load_weights(self, model: LanguageModel) -> None:
        """Copy all weights that the model has, too. A UserError if any has another shape."""
        given, own = self.weights(), model.state_dict()
        heads = self.recipe["model"]["heads"]
        if heads != model.config.heads:  # the shapes do not show it
            raise UserError(f"{self.name} has {heads} attention heads; set model.heads={heads}")
        found = {name: weight for name, weight in given.items() if name in own}
        if not found:
            raise UserError(f"{self.name} has no weights in common with the model; choose another --model")
        if "positions.weight" in found:
            found["positions.weight"] = self._positions(found["positions.weight"], model)
        for name, weight in found.items():
            if weight.shape != own[name].shape:
                raise UserError(
                    f"{name} is {tuple(weight.shape)} in {self.name}, but {tuple(own[name].shape)} in the model; "
                    "choose the same sizes: they are the defaults if there is no --config"
                )
        model.load_state_dict(found, strict=False)
        new, unused = own.keys() - found.keys(), given.keys() - found.keys()
        self.notes = [f"initial weights from {self.name}"]
        if new:
            self.notes.append(f"newly initialised, because it does not have them: {_parts(new, own)}")
        if unused:
            self.notes.append(f"left out, because the model does not have them: {_parts(unused, given)}")

    def _positions(self, rows: Tensor, model: LanguageModel) -> Tensor:
        """The position embeddings for the model: see the top of this module."""
        if self.slots is None or not isinstance(model, Transformer):
            system = self.recipe["model"].get("system", "log_memory")
            if system_of(model.config) != system:
                raise UserError(
                    f"the position embeddings of {self.name} have another meaning in the model; choose --model {system}"
                )
            return rows
        first, length = max(self.slots - model.slots, 0), model.slots + model.window
        if 0 < self.slots < model.slots or first + length > len(rows):
            raise UserError(
                f"positions.weight is {tuple(rows.shape)} in {self.name}, for {self.slots} slots and a window of "
                f"{len(rows) - self.slots}, which is too few for model.slots={model.slots} and "
                f"model.window={model.window}; choose smaller ones"
            )
        return rows[first : first + length]


def open_source(spec: str) -> Source:
    """The source that `init_from` names: a run, a checkpoint, or a Hugging Face GPT-2."""
    path = Path(spec)
    if (path / "config.json").is_file() and _read_json(path / "config.json").get("model_type") != "logpast":
        return _gpt2(spec, path)
    # a name on the hub is gpt2 or owner/name; a path in an existing folder is one that was misspelt
    if path.exists() or path.is_absolute() or spec.count("/") > 1 or ("/" in spec and path.parent.exists()):
        return _checkpoint(find_checkpoint(path))
    return _gpt2(spec, _download(spec))


def _checkpoint(checkpoint: Checkpoint) -> Source:
    recipe = checkpoint.config.to_dict()
    for name in ("run", "resume", "init_from", "freeze"):
        del recipe[name]
    tokenizer = checkpoint.load_tokenizer()
    recipe["data"]["tokenizer"] = tokenizer.name if tokenizer.name == "gpt2" else str(checkpoint.path)
    model = checkpoint.config.model
    return Source(
        name=str(checkpoint.path),
        recipe=recipe,
        slots=model.slots if isinstance(model, TransformerConfig) else None,
        fingerprint=tokenizer.fingerprint,
        weights=checkpoint.weights,
        identity={
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "sha256": sha256_of(checkpoint.path / "model.safetensors"),
        },
    )


def _gpt2(name: str, folder: Path) -> Source:
    """A GPT-2 in Hugging Face's format. Slots and window are not its own: a run chooses them."""
    config = _read_json(folder / "config.json")
    for key, value in GPT2_SETTINGS.items():
        if config.get(key, value) != value:
            raise UserError(f"{folder / 'config.json'}: {key} is {config[key]!r}; only {value!r} can be used")
    for key in ("n_layer", "n_head", "n_embd", "vocab_size"):
        if not isinstance(config.get(key), int):
            raise UserError(f"{folder / 'config.json'} is not the config of a GPT-2: it has no {key}")
    sizes = {"layers": config["n_layer"], "heads": config["n_head"], "width": config["n_embd"],
             "mlp": config.get("n_inner"), "vocabulary": config["vocab_size"]}  # fmt: skip
    file = next((folder / each for each in GPT2_FILES if (folder / each).is_file()), None)
    if file is None:
        raise UserError(f"{folder} has no {' or '.join(GPT2_FILES)}; save the model with save_pretrained")
    tokenizer = _gpt2_tokenizer(folder, sizes["vocabulary"])
    spec = tokenizer.name if tokenizer.name == "gpt2" else str(folder)
    return Source(
        name=name,
        recipe={"model": sizes, "data": {"tokenizer": spec}},
        slots=0,
        fingerprint=tokenizer.fingerprint,
        weights=lambda: rename_gpt2(_load(file)),
        identity={"path": name, "step": None, "sha256": sha256_of(file)},
    )


def _gpt2_tokenizer(folder: Path, vocabulary: int) -> Tokenizer:
    """GPT-2's own tokenizer, unless the folder has another one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        if vocabulary != 50_257:
            raise UserError(f"{folder} has no tokenizer.json; save the tokenizer with save_pretrained")
        return load_tokenizer("gpt2")
    ids = _read_json(file).get("model", {}).get("vocab")
    if isinstance(ids, dict) and len(ids) == 50_257:  # GPT-2's has been saved in several formats: compare the words
        words = {word: i for word, i in ids.items() if word.isascii() and word.isalnum()}
        if all(load_tokenizer("gpt2").vocabulary[i] == word.encode() for word, i in words.items()):
            return load_tokenizer("gpt2")
    return load_tokenizer(folder)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(file.read_text(encoding="utf-8"), finite=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} has another format than Hugging Face's")
    return content


def _load(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return loaded
    except (SafetensorError, OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}); download it again") from None


def _download(name: str) -> Path:
    """The folder of a model of the Hugging Face hub, from the local cache if it is there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no run {name}; to download a GPT-2 of this name, `pip install huggingface_hub`"
        ) from None
    try:
        for file in GPT2_FILES:  # both would be twice the download
            folder = Path(snapshot_download(name, allow_patterns=["config.json", "tokenizer.json", file]))
            if (folder / file).exists():
                break
        return folder
    except Exception as error:  # the network, proxies, a full disk and an invalid name may raise anything
        raise UserError(
            f"there is no run {name}, and no such model could be downloaded ({type(error).__name__}); give the path "
            "of a run, or of a folder with config.json and model.safetensors"
        ) from None


def _parts(names: Iterable[str], known: Iterable[str]) -> str:
    """The names, with a module in place of its parameters where all of them are meant."""
    names, found = set(names), list[str]()
    others = set(known) - names
    for name in sorted(names):
        words = name.split(".")
        modules = (".".join(words[: end + 1]) for end in range(len(words)))
        found.append(next((each for each in modules if not any(o.startswith(f"{each}.") for o in others)), name))
    return first_few(list(dict.fromkeys(found)))
