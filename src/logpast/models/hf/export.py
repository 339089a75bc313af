"""`logpast export`: a checkpoint as a Hugging Face model, and back.

DIR/
  config.json, generation_config.json, model.safetensors   the model
  modeling_logpast.py                                      finds the package, for `trust_remote_code=True`
  tokenizer.json, tokenizer_config.json                    its tokenizer
  training.json                                            recipe and state of the run, for the way back
  README.md                                                model card
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerFast

from logpast.data import Tokenizer, load_tokenizer
from logpast.data.tokenizers import END_OF_TEXT
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, TransformerConfig, system_of
from logpast.models.hf import LogPastConfig, LogPastForCausalLM
from logpast.reporting.tables import Table, as_markdown
from logpast.training.checkpoint import STATE, Checkpoint, find_checkpoint, save_checkpoint
from logpast.training.config import DataConfig, TrainConfig, recorded_settings
from logpast.util import schema
from logpast.util.environment import revision
from logpast.util.errors import UserError
from logpast.util.files import atomic_folder, atomic_write, sha256_of
from logpast.util.validation import validate_arguments
from logpast.version import __version__

UNKNOWN = "unknown"
CODE = Path("modeling_logpast.py")
AUTO_CLASSES = '''"""This model needs the package logpast: pip install 'logpast[hf]'"""

from logpast.models.hf import LogPastConfig, LogPastForCausalLM  # noqa: F401
'''


@validate_arguments
def export(checkpoint: Path, to: Literal["hf", "logpast"], out: Path, results: Path | None = None) -> Path:
    """Write a trained model as a Hugging Face model, or a Hugging Face model of ours as a run.

    transformers loads the model with trust_remote_code=True, or after `import logpast.models.hf`; its README.md shows
    how. A run made from a Hugging Face model can be scored and continued, and new runs can start from it (--init_from).

    Examples:
        logpast export runs/mine --to hf --out mine-hf
        logpast export runs/mine --to hf --out mine-hf --results results/mine.jsonl
        logpast export mine-hf --to logpast --out runs/again

    Args:
        checkpoint: a run folder (its best checkpoint is used) or one checkpoints/step-… folder; for --to logpast, the
            folder of a Hugging Face model.
        to: hf writes a Hugging Face model, logpast a run.
        out: the folder to write; it must not exist.
        results: a ledger (.jsonl) with scores of this checkpoint, for the model card; `eval --record` writes one.

    Returns:
        The folder.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists; give another --out")
    if to == "logpast":
        if results is not None:
            raise UserError("results is for --to hf, whose model card has them; leave it out")
        _write_run(checkpoint, out)
    else:
        if (checkpoint / "config.json").is_file():
            raise UserError(f"{checkpoint} is a Hugging Face model already; --to logpast makes a run of it")
        found = find_checkpoint(checkpoint)
        _write_hf(found, [] if results is None else _rows_of(found, results), out)
    print(f"wrote {out}")
    return out


def _write_hf(found: Checkpoint, rows: list[dict[str, Any]], out: Path) -> None:
    tokenizer, core = found.load_tokenizer(), found.load_model()
    model = wrap(core, tokenizer)
    module = CODE.stem
    model.config.auto_map = {
        "AutoConfig": f"{module}.LogPastConfig",
        "AutoModelForCausalLM": f"{module}.LogPastForCausalLM",
    }
    try:
        with atomic_folder(out) as folder:
            model.save_pretrained(folder)
            (folder / CODE).write_text(AUTO_CLASSES)
            hf_tokenizer(tokenizer).save_pretrained(folder)
            sha256 = sha256_of(folder / "model.safetensors")
            training = {"config": found.config.to_dict(), "state": found.state, "sha256": sha256}
            (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")
            (folder / "README.md").write_text(model_card(found, core, rows, out.name), encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{out} already exists; give another --out") from None


def wrap(core: LanguageModel, tokenizer: Tokenizer) -> LogPastForCausalLM:
    """The Hugging Face model of one of ours, with its weights."""
    ids: dict[str, Any] = {name: tokenizer.eot for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LogPastForCausalLM.from_core(core, **ids)
    # no model has learned to predict end-of-text, nor the rows of the table that have no token
    unused = [tokenizer.eot, *range(tokenizer.size, core.table.num_embeddings)]
    model.generation_config = GenerationConfig(suppress_tokens=unused, **ids)
    return model.eval()


def hf_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer in Hugging Face's form. It adds end-of-text before a text, where our models expect it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.to_hf(),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        split_special_tokens=True,  # "<|endoftext|>" in a text is text
        padding_side="left",  # as generation needs it
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _rows_of(found: Checkpoint, results: Path) -> list[dict[str, Any]]:
    """The rows of a ledger that are scores of this checkpoint."""
    if not results.is_file():
        raise UserError(f"there is no ledger {results}; `logpast eval --record` writes one")
    recipe = ledger.hash_recipe(recorded_settings(found.config))
    rows = [
        row
        for row in ledger.read(results)
        if ledger.is_run(row) and row.get("step") == found.step and ledger.hash_recipe(row["recipe"]) == recipe
    ]
    if not rows:
        raise UserError(
            f"{results} has no row of {found.path}; score it with `logpast eval --checkpoint {found.path} --data FILE "
            f"--record {results}`"
        )
    return rows


def model_card(found: Checkpoint, core: LanguageModel, rows: list[dict[str, Any]], name: str) -> str:
    """README.md: what the model is, how to load it, and what was measured of it."""
    config, state = found.config.model, found.state
    facts = {
        "system": f"`{system_of(config)}`",
        "parameters": f"{core.parameter_count():,}",
        "layers, heads, width": f"{config.layers}, {config.heads}, {config.width}",
        "window": f"{config.window} tokens",
    }
    if isinstance(config, TransformerConfig):
        facts["slots before the window"] = f"{config.slots}, for the last {core.history:,} tokens before it"
    if config.recall:
        facts["recall"] = f"of the last {config.recall:,} tokens"
    facts["trained on"] = f"{state['data']['name']}, {state['tokens']:,} tokens in {state['step']:,} steps"
    facts["seed, logpast"] = f"{found.config.seed}, {state['revision']}"
    about = as_markdown(Table(["", ""], [[key, value] for key, value in facts.items()]))
    return CARD.format(name=name, about=about, scores=_scores(found, rows), version=__version__)


def _scores(found: Checkpoint, rows: list[dict[str, Any]]) -> str:
    """The measured numbers, as Markdown: of the rows, and the validation loss if it is this checkpoint's."""
    parts, best = [], found.state["best"]
    if best and best["step"] == found.step:
        text = (found.state.get("validation_data") or {}).get("name", "the validation text")
        parts.append(
            f"Validation on {text}, on which the checkpoint was chosen: {best['nats_per_token']:.4f} nats per token, "
            f"perplexity {best['ppl_token']:.3f}."
        )
    if rows:
        heads = ["text", "perplexity per token", "perplexity per word", "bits per byte", "notes"]
        parts.append(as_markdown(Table(heads, [_score_cells(row) for row in rows])))
        parts.append("Measured with `logpast eval`, over every token.")
    return "\n\n".join(parts) or "None recorded."


def _score_cells(row: dict[str, Any]) -> list[str]:
    scores = row["scores"]
    numbers = [scores[name] for name in ("ppl_token", "ppl_word", "bits_per_byte")]
    notes = [f"stride {scores['stride']}"] if "stride" in scores else []
    if scores.get("accounting", "all") != "all":
        notes.append(f"accounting {scores['accounting']}")
    if "training_overlap" in scores:
        notes.append(f"not unseen text: {scores['training_overlap']}")
    return [row["test_data"]["name"], *("∞" if n is None else f"{n:.4f}" for n in numbers), "; ".join(notes)]


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- logpast
---

# {name}

A language model of the package logpast (log-compressed memory for transformers).

{about}

## Use

```
pip install 'logpast[hf]'
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)  # or: import logpast.models.hf
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))
```

A text may be longer than the window. The tokenizer adds end-of-text before a text, as in training.
`logpast export {name} --to logpast --out runs/again` makes a run of it, for `logpast eval` and `logpast generate`.

## Scores

{scores}

Exported by logpast {version}.
"""


def _write_run(folder: Path, out: Path) -> None:
    """A run with one checkpoint, without the optimizer's state."""
    model, tokenizer = _load_hf(folder), _our_tokenizer(folder)
    config, state = _training_of(folder, model, tokenizer)
    config = replace(config, run=out, model=model.config.model_config, resume=False)
    if state["best"] and state["best"]["step"] != state["step"]:
        state["best"] = None  # another checkpoint, which is not there
    save_checkpoint(config, model.core.state_dict(), None, tokenizer, state)
    text = config.to_yaml()
    atomic_write(out / "config.yaml", text)


def _load_hf(folder: Path) -> LogPastForCausalLM:
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder} is not the folder of a Hugging Face model: it has no config.json")
    if (kind := _read_json(file).get("model_type")) != LogPastConfig.model_type:
        raise UserError(f"{file}: model_type is {kind!r}, and only {LogPastConfig.model_type!r} can become a run")
    try:
        loaded: Any = LogPastForCausalLM.from_pretrained(folder, output_loading_info=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {' '.join(str(error).split())[:200]}") from None
    model: LogPastForCausalLM = loaded[0]
    found = loaded[1]
    if wrong := [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]:
        raise UserError(f"the weights in {folder} do not fit its config.json: {wrong[0]}; save the model again")
    return model


def _our_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.size == 50_257 and tokenizer.vocabulary == load_tokenizer("gpt2").vocabulary:
        return load_tokenizer("gpt2")
    return tokenizer


def _training_of(folder: Path, model: LogPastForCausalLM, tokenizer: Tokenizer) -> tuple[TrainConfig, dict[str, Any]]:
    """Recipe and state of the run that the model was exported from, if these are still its weights."""
    file, weights = folder / "training.json", folder / "model.safetensors"
    if file.is_file() and weights.is_file():
        saved = _read_json(file)
        if saved.get("sha256") == sha256_of(weights):
            with schema.reading(f"{file} is damaged", "delete it"):
                return TrainConfig.from_dict(saved["config"]), schema.validate(STATE, saved["state"])
    data = {"name": UNKNOWN, "sha256": UNKNOWN, "tokens": 0, "tokenizer": tokenizer.fingerprint}
    state: dict[str, Any] = {"step": 0, "total_steps": 1, "tokens": 0, "seconds": 0.0, "best": None, "data": data}
    state |= {"parameters": model.core.parameter_count(), "revision": revision(), "hardware": {}}
    return TrainConfig(run=folder, data=DataConfig(train=UNKNOWN), steps=1), state


def _read_json(file: Path) -> dict[str, Any]:
    with schema.reading(f"{file} is not the JSON of a Hugging Face model"):
        content: dict[str, Any] = dict(schema.parse_json(file.read_text(encoding="utf-8")))
    return content
