"""Attach memories to a pretrained decoder of Hugging Face: GPT-2, Llama, Qwen, Mistral, Gemma and their like.

    sequence = [sink (1)] + [slots (L)] + [tokens of the window (m)]      contiguous positions from 0

The sink is the first token of the text, to which pretrained models attend from everywhere. A slot is the embedding of
one of the L tokens before the window, plus a learned scale times the log-compressed memory. The scales start at 0: a
pretrained model cannot read blurred embeddings, so before training the slots are plain tokens. Positions before the
start of the text are masked. `Recall` is mixed into the predictions; its gates see the last hidden state, as the head
does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from logpast.data import hub
from logpast.data.tokenizers import Pretrained
from logpast.memory import LogMemory
from logpast.models.decoder import KeyValueCache, Transformer
from logpast.models.hf import require
from logpast.models.log_memory import LogMemoryConfig
from logpast.recall import Recall
from logpast.util.checksums import verify_folder, write_sums
from logpast.util.errors import UserError
from logpast.util.schema import parse_json, schema, validate
from logpast.util.validation import Count, from_saved

SETTINGS, WEIGHTS = "logpast.json", "logpast.safetensors"
FORMAT, VERSION = "logpast attached memory", 1
SAVED: TypeAdapter[Any] = TypeAdapter(schema({"format": str, "version": int, "model": Optional[str]}))  # noqa: UP045
LOGITS = 2**26  # computed at once, which bounds the memory needed


@dataclass(frozen=True)
class AttachedConfig(LogMemoryConfig):
    """The memories of a pretrained decoder. The sizes are the decoder's, except `heads`, which is not used."""

    sink: bool = True
    """whether the first token of a text stays in front of every window"""
    first_token: Count | None = None
    """the id that every text starts with"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.first_token or 0) >= (self.vocabulary or 1):
            raise UserError(f"first_token is {self.first_token}, but the model has only {self.vocabulary} tokens")


class Attached(Transformer):
    """A Hugging Face decoder with memories, and with the interface of our own decoders; made by `attach_memory`.

    Its own parameters are `recall`, `memory` (the LayerNorm of the slots) and `scale` (one number per slot); those of
    the decoder are below `model`.
    """

    Config = AttachedConfig
    config: AttachedConfig
    model: Any

    def __init__(self, model: nn.Module, config: AttachedConfig) -> None:
        nn.Module.__init__(self)  # not the parent's: embeddings, blocks and head are the model's
        self.model, self.config, self.window = model, config, config.window
        self.slots = config.sink + config.slots
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weight = self.table.weight
        if config.slots:
            self.memory = LogMemory(config.width, config.bank).to(weight.device)
            self.scale = nn.Parameter(torch.zeros(config.slots, 1, device=weight.device))
            if not weight.is_meta:  # a scale of 1 is as large as a token's embedding
                with torch.no_grad():
                    some = torch.arange(0, len(weight), -(-len(weight) // 4096), device=weight.device)
                    size = float(self.embed(some).float().square().mean().sqrt())
                nn.init.constant_(self.memory.norm.get_parameter("weight"), size)
        if form := config.recall_form:
            self.recall = Recall(config.width, form, config.recall_limit).to(weight.device)

    @property
    def causal_lm(self) -> Any:
        """The model with a head, without the wrapper of `peft`."""
        return without_adapters(self.model)

    @property
    def table(self) -> nn.Embedding:  # type: ignore[override]
        found: nn.Embedding = self.causal_lm.get_input_embeddings()
        return found

    @property
    def history(self) -> int:
        if not self.config.slots:
            return int(self.config.sink)  # whether a window is the first, which starts with that token itself
        return max(self.config.slots, self.memory.bank.horizon)

    @property
    def _pair_bytes(self) -> int:
        text = self.causal_lm.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * 4 * self.config.layers * heads * size

    def _embed(self, tokens: Tensor) -> Tensor:
        """By the model's own module, because some models scale their embeddings."""
        x: Tensor = self.table(tokens.clamp(min=0))
        return x * (tokens >= 0).unsqueeze(-1)

    def make_slots(self, history: Tensor) -> Tensor:
        """Sink and slots (B, `self.slots`, d). Those before the start of the text are zero vectors."""
        begun = history[:, -1:] >= 0
        parts = [history.new_zeros(len(history), 0, self.config.width).to(self.table.weight.dtype)]
        if self.config.sink:
            parts.append(self.embed(torch.where(begun, self.config.first_token or 0, -1)))
        if self.config.slots:
            missing = max(0, self.config.slots - history.shape[1])
            recent = F.pad(history, (missing, 0), value=-1)[:, -self.config.slots :]
            memory = self.memory.from_ids(history, self.table.weight.to(self.scale.dtype))
            slots = self.embed(recent) + self.scale * memory * (recent >= 0).unsqueeze(-1)
            parts.append(slots.to(self.table.weight.dtype))
        return torch.cat(parts, dim=1)

    def hidden(self, x: Tensor, cache: KeyValueCache | None = None, start: int = 0, skip: int = 0) -> Tensor:
        """As in `Transformer`. Zero vectors, which are no tokens, are not attended to.

        Positions continue those in the cache, so `start` is not needed.
        """
        past, seen = None, _is_token(x)
        if cache is not None:
            layers = [cache.layers[number] for number in range(len(cache.layers) - 1)]
            past = require("transformers").DynamicCache(layers)
            seen = torch.cat([cache.layers[self][0], seen], dim=1) if layers else seen
        decoder = self.causal_lm.base_model
        mask = None if seen.all() else seen.long()
        found: Tensor = decoder(inputs_embeds=x, attention_mask=mask, past_key_values=past, use_cache=past is not None)[
            0
        ]
        if cache is not None and past is not None:
            cache.layers = {number: (layer.keys, layer.values) for number, layer in enumerate(past.layers)}
            cache.layers[self] = seen, seen
        return found[:, skip:]

    @torch.no_grad()
    def slot_attention(self, history: Tensor, tokens: Tensor, followers: Tensor | None = None) -> Tensor:
        """As in `Transformer`, without the sink. The model has eager attention from now on, which gives the weights."""
        self.causal_lm.set_attn_implementation("eager")
        x = self._sequence(history, tokens, followers)
        found = self.causal_lm.base_model(
            inputs_embeds=x, attention_mask=_is_token(x).long(), use_cache=False, output_attentions=True
        ).attentions
        weights = torch.stack([each.float().mean(1) for each in found]).mean(0)
        return weights[:, self.slots :, int(self.config.sink) : self.slots].flip(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.causal_lm.get_output_embeddings()(hidden)
        cap = getattr(self.causal_lm.config.get_text_config(), "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def own_nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        rows = max(1, LOGITS // (self.config.vocabulary or 1))
        parts = zip(hidden.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
        losses = [
            F.cross_entropy(self.logits(some).float(), wanted, ignore_index=-1, reduction="none")
            for some, wanted in parts
        ]
        return torch.cat(losses).view_as(targets)

    def save_pretrained(self, folder: str | Path, save_model: bool | None = None) -> None:
        """Write the settings (`logpast.json`) and the memories' weights (`logpast.safetensors`), for `load_attached`.

        Args:
            folder: created if needed.
            save_model: also write the model's own files. By default only the adapters of a `peft` model are written;
                any other model is loaded from where it came from.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        adapters = self.causal_lm is not self.model
        if adapters or save_model:
            self.model.save_pretrained(folder)
        about = {
            "format": FORMAT,
            "version": VERSION,
            "model": None if save_model and not adapters else self.causal_lm.config.name_or_path,
            **asdict(self.config),
        }
        own = {name: value for name, value in self.state_dict().items() if not name.startswith("model.")}
        save_file({name: value.detach().cpu().contiguous() for name, value in own.items()}, folder / WEIGHTS)
        (folder / SETTINGS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        write_sums(folder)


def without_adapters(model: Any) -> Any:
    """A Hugging Face model without the wrapper of `peft`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_token(x: Tensor) -> Tensor:
    """(B, T): whether a position is no zero vector."""
    return (x != 0).any(-1)


def attach_memory(
    model: Any,
    window: int = 256,
    slots: int = 0,
    recall: int = 8192,
    sharpness: float = 100,
    sink: bool = True,
    recall_orders: int = 8,
    recall_bins: int = 4,
    recall_limit: float = 1.0,
    input: bool = False,
    first_token: int | None = None,
    frozen: bool = True,
) -> Attached:
    """Give a Hugging Face causal language model a long past, at the price of a short window.

    Args:
        model: GPT-2, Llama, Qwen, Mistral, Gemma or any other decoder that takes `inputs_embeds`; also with adapters of
            `peft`. It is used as it is, not copied.
        window: m, the number of most recent tokens that the model attends to.
        slots: L, positions before the window for the tokens before it and the log-compressed memory; 0: none.
        recall: how many tokens back to look up what followed the last tokens before; 0: no recall.
        sharpness: k of the memory's filters.
        sink: keep the first token of the text in front of every window.
        recall_orders, recall_bins, recall_limit: as in `RecallForm` and `Recall`.
        input: also add embeddings of the tokens that followed the latest matches to the model's input. Needs training.
        first_token: the id that every text starts with; by default the model's beginning-of-text, else its end-of-text.
        frozen: turn off the gradients of the model, so that only the memories are trained. Adapters of `peft` keep
            theirs.

    Returns:
        The model with its memories. `detach_memory` gives the model back.
    """
    _check_decoder(model)
    lm = without_adapters(model)
    text = lm.config.get_text_config()
    if first_token is None:
        first_token = _first_token(text)
    if sink and first_token is None:
        raise UserError("the model's config names no beginning-of-text token; give first_token, or sink=False")
    config = AttachedConfig(
        window=window, layers=text.num_hidden_layers, heads=1, width=text.hidden_size,
        vocabulary=len(lm.get_input_embeddings().weight), recall=recall, recall_orders=recall_orders,
        recall_bins=recall_bins, recall_input=bool(input and recall), recall_limit=recall_limit, slots=slots,
        sharpness=sharpness, normalize="area", sink=sink, first_token=first_token,
    )  # fmt: skip
    return _attach(model, config, frozen)


def _attach(model: Any, config: AttachedConfig, frozen: bool = True) -> Attached:
    attached = Attached(model, config)
    text = attached.causal_lm.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest and attached.attention_length > longest:
        raise UserError(
            f"sink, slots and window take {attached.attention_length} positions, but the model has {longest}; use a "
            f"window of at most {longest - attached.slots}"
        )
    sliding, layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if sliding and attached.attention_length > sliding and "full_attention" not in (layers or []):
        raise UserError(
            f"sink, slots and window take {attached.attention_length} positions, but the model attends to its last "
            f"{sliding} only; use a window of at most {sliding - attached.slots}"
        )
    _check_logits(attached)
    if frozen and without_adapters(model) is model:
        model.requires_grad_(False)
    return attached.train(model.training)


def detach_memory(attached: Attached) -> Any:
    """The model without its memories, as it was given to `attach_memory` (and trained since, if it was not frozen)."""
    for parameter in attached.trainable:
        parameter.requires_grad_(True)
    return attached.model


def load_attached(folder: str | Path, model: Any = None) -> Attached:
    """Load what `Attached.save_pretrained` wrote.

    Args:
        folder: the folder.
        model: the model to attach to. By default the one in the folder, else the one that `logpast.json` names. With
            adapters in the folder, the model that they are for.
    """
    folder = Path(folder)
    verify_folder(folder, "attach the memory again")
    config, source = read_settings(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({error}); save it again") from error
    if model is None:
        if source == "":
            raise UserError(f"{folder} does not say where its model came from; give model=")
        model = load_model(_found(source, folder))
    if (folder / "adapter_config.json").is_file() and without_adapters(model) is model:
        model = require("peft").PeftModel.from_pretrained(model, folder)
    lm = without_adapters(model)
    if (size := tuple(lm.get_input_embeddings().weight.shape)) != (config.vocabulary, config.width):
        raise UserError(
            f"{folder} is for a model with embeddings of {(config.vocabulary, config.width)}, not {size}; give that one"
        )
    attached = _attach(model, config)
    own = {name: value for name, value in attached.state_dict().items() if not name.startswith("model.")}
    if wrong := [name for name in own.keys() | weights.keys() if _shape(own, name) != _shape(weights, name)]:
        raise UserError(f"{folder / WEIGHTS} does not fit {SETTINGS}: {', '.join(sorted(wrong))}; save it again")
    attached.load_state_dict(weights, strict=False)
    return attached


def _found(source: str | None, folder: Path) -> str | Path:
    """Where the model of a folder is."""
    if source is not None and os.path.isabs(source) and not os.path.exists(source):
        raise UserError(f"the model of {folder} was in {source}, which does not exist; put it back, or attach again")
    return folder if source is None else source


def _shape(tensors: dict[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def read_settings(folder: Path) -> tuple[AttachedConfig, str | None]:
    """The settings that `Attached.save_pretrained` wrote, and where the model is; None: in the folder."""
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{folder} has no {SETTINGS}; give a folder that save_pretrained or `logpast attach` wrote")
    try:
        about = parse_json((folder / SETTINGS).read_text(encoding="utf-8"), finite=False)
        validate(SAVED, about)
        if about.pop("format") != FORMAT:
            raise ValueError("it is of another format")
        if (version := about.pop("version")) > VERSION:
            raise ValueError(f"it is of version {version}, which a newer logpast wrote: upgrade logpast")
        source = about.pop("model")
        return from_saved(AttachedConfig, about), source
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / SETTINGS} cannot be used: {error}; save it again") from error


def load_model(source: str | Path, **options: Any) -> Any:
    """A causal language model from a folder, a .gguf file or the hub. `options` are those of `from_pretrained`."""
    transformers = require("transformers")
    if str(source).endswith(".gguf"):
        options |= {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model = _from_pretrained(transformers.AutoModelForCausalLM, source, **options)
    model.config.name_or_path = os.path.abspath(source) if os.path.exists(source) else str(source)
    return model


def load_model_tokenizer(source: str | Path, first_token: int | None = None) -> Pretrained:
    """The tokenizer of a model, for token stores. `first_token` is the id that every text starts with."""
    tokenizer = _from_pretrained(require("transformers").AutoTokenizer, source)
    if first_token is None:
        first_token = _first_token(tokenizer)
    if not getattr(tokenizer, "is_fast", False) or first_token is None:
        raise UserError(
            f"{source} has no tokenizer.json with a beginning-of-text token; save the model's fast tokenizer"
        )
    return Pretrained(tokenizer.backend_tokenizer.to_str(), first_token)


def save_model_tokenizer(source: str | Path, folder: Path) -> None:
    """Copy the tokenizer of a model into a folder."""
    _from_pretrained(require("transformers").AutoTokenizer, source).save_pretrained(folder)


def _from_pretrained(auto: Any, source: str | Path, **options: Any) -> Any:
    path = Path(source)
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"{source} is no model; give a folder, a .gguf file, or OWNER/NAME on the hub")
    if not path.exists() and (path.is_absolute() or len(path.parts) != 2 or str(source).startswith(".")):
        raise UserError(f"{source} does not exist; give a folder, a .gguf file, or OWNER/NAME on the hub")
    if path.suffix == ".gguf":
        source, options = path.parent, {**options, "gguf_file": path.name}
    kind = "tokenizer" if "Tokenizer" in auto.__name__ else "causal language model"
    unreachable = None if path.exists() else hub.problem()
    try:
        if unreachable:  # transformers would try for a minute
            source = require("huggingface_hub").snapshot_download(str(source), local_files_only=True)
        return auto.from_pretrained(str(source), **options)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:  # all of them come from bad folders
        reason = unreachable or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"no {kind} could be loaded from {path}: {reason}") from error


def _first_token(names: Any) -> int | None:
    """The beginning-of-text id of a config or tokenizer, else its end-of-text."""
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(names, name, None)
        found = found[0] if isinstance(found, list) else found
        if found is not None:
            return int(found)
    return None


def _check_decoder(model: Any) -> None:
    lm = without_adapters(model)
    config = getattr(lm, "config", None)
    head = lm.get_output_embeddings() if hasattr(lm, "get_output_embeddings") else None
    if head is None or config is None or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{type(lm).__name__} is not a causal language model with a head, such as LlamaForCausalLM")


@torch.no_grad()
def _check_logits(attached: Attached) -> None:
    """An architecture that computes its logits in another way, or sees later tokens, is refused."""
    lm, rows = attached.causal_lm, torch.arange(1, 9).view(2, 4) % (attached.config.vocabulary or 1)
    ids = rows.to(attached.table.weight.device)
    ids[1, :3] = ids[0, :3]  # differ in the last token only
    with _evaluating(lm):
        expected = lm(input_ids=ids).logits.float()
        found = attached.logits(attached.hidden(attached.embed(ids))).float()
    exact = 1e-3 if attached.table.weight.dtype in (torch.float32, torch.float64) else 5e-2
    size = float(expected.abs().max())
    if float((found - expected).abs().max()) > exact * size:
        raise UserError(f"{type(lm).__name__} computes its logits in a way that logpast does not know")
    if float((expected[0, :3] - expected[1, :3]).abs().max()) > exact * size:
        raise UserError(f"{type(lm).__name__} is not causal: its predictions depend on later tokens")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
