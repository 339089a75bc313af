"""`logpast export`: to Hugging Face and back, the tokenizers, the model card, what is refused; the page of the docs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

from logpast.data import TokenStore, load_tokenizer
from logpast.evaluation.evaluate import evaluate
from logpast.generation import generate
from logpast.ledger import row as ledger
from logpast.models import LogMemoryConfig
from logpast.models.hf.export import export, hf_tokenizer
from logpast.training.checkpoint import find_checkpoint, sorted_checkpoints
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError
from markdown_pages import ROOT, code_blocks

logging.disable_progress_bar()
STRANGE = "don't  I'LL\t\r\n\n\n  wörld \u3000日本語 😀 <|endoftext|> 1234 "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    """A trained model with recall, two checkpoints, the first of them the best."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    sizes: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16}
    config = TrainConfig(
        run=folder,
        data=DataConfig(train=str(store.path), validation=str(store.path), streams="document"),
        model=LogMemoryConfig(slots=17, sharpness=20, window=8, recall=50, **sizes),
        optimizer=OptimizerConfig(learning_rate=3e-3, final_learning_rate=1.5, warmup_steps=5, clip=0),
        steps=40, batch_size=16, validate_every=20, checkpoint_every=20, accelerator="cpu", tensorboard=False,
    )  # fmt: skip
    train(config)
    return folder


@pytest.fixture(scope="module")
def scores(run: Path, store: TokenStore) -> Path:
    """A ledger with two rows of the best checkpoint and one of another."""
    file = run.parent / "scores.jsonl"
    evaluate(run, str(store.path), record=file, quiet=True, device="cpu")
    evaluate(run, str(store.path), record=file, quiet=True, device="cpu", stride=4)
    evaluate(sorted_checkpoints(run)[-1], str(store.path), record=file, quiet=True, device="cpu")
    return file


@pytest.fixture(scope="module")
def exported(run: Path, scores: Path) -> Path:
    return export(run, "hf", run.parent / "mine-hf", results=scores)


def test_exported_model_and_tokenizer_predict_and_generate_as_the_run(
    run: Path, exported: Path, store: TokenStore
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    first = store.documents.tokens[0]
    text = load_tokenizer(store.path).decode(store.tokens[:first].tolist())
    batch = tokenizer(text, return_tensors="pt")
    nats = run.parent / "nats.npy"
    evaluate(run, str(store.path), save_nats=nats, quiet=True, device="cpu")
    loss = model(**batch, labels=batch.input_ids).loss
    assert float(loss.detach()) == pytest.approx(np.load(nats)[:first].mean(), abs=1e-5)
    found = model.generate(**tokenizer("And God", return_tensors="pt"), max_new_tokens=20, do_sample=False)
    expected = generate(run, "And God", tokens=20, temperature=0, recall_own=True, device="cpu")
    assert tokenizer.decode(found[0], skip_special_tokens=True) == expected


def test_auto_classes_find_the_package_and_the_model_can_be_saved_again(exported: Path, tmp_path: Path) -> None:
    """In a process that has not imported it."""
    code = f"""
import sys
from transformers import AutoConfig, AutoModelForCausalLM
assert "logpast" not in sys.modules
AutoConfig.from_pretrained({str(exported)!r}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({str(exported)!r}, trust_remote_code=True)
model.save_pretrained({str(tmp_path / "again")!r})
AutoModelForCausalLM.from_pretrained({str(tmp_path / "again")!r}, trust_remote_code=True)
"""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    weights = [load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "again")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").num_parameters() > 0


def test_neither_end_of_text_nor_rows_without_a_token_are_generated(exported: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    assert model.config.vocab_size > len(tokenizer)
    torch.manual_seed(0)
    prompt = tokenizer(["And God"] * 20, return_tensors="pt")
    found = model.generate(**prompt, max_new_tokens=20, do_sample=True, temperature=1e4, top_k=0)
    added = found[:, prompt.input_ids.shape[1] :]
    assert len(added.unique()) > 100
    assert added.max() < len(tokenizer)
    assert (added != tokenizer.eos_token_id).all()


def test_pipeline_continues_a_text(exported: Path) -> None:
    write = pipeline("text-generation", model=str(exported), device="cpu")
    one = write("And God", max_new_tokens=9, do_sample=False)[0]["generated_text"]
    both = write(["And God", "In the beginning"], max_new_tokens=9, do_sample=False, batch_size=2)
    assert both[0][0]["generated_text"] == one
    assert one.startswith("And God")


def test_run_that_is_exported_and_back_has_the_same_scores(
    run: Path, exported: Path, store: TokenStore, tmp_path: Path
) -> None:
    again = export(exported, "logpast", tmp_path / "again")
    before, after = (evaluate(each, str(store.path), quiet=True, device="cpu") for each in (run, again))
    for name in ("checkpoint", "seconds"):
        del before[name], after[name]
    assert before == after
    old, new = find_checkpoint(run), find_checkpoint(again)
    assert new.state == old.state
    assert new.config.to_dict() | {"run": str(run)} == old.config.to_dict()


def test_checkpoint_that_is_not_the_best_loses_the_best_loss(run: Path, tmp_path: Path) -> None:
    latest = sorted_checkpoints(run)[-1]
    folder = export(latest, "hf", tmp_path / "hf")
    assert "None recorded" in (folder / "README.md").read_text()
    found = find_checkpoint(export(folder, "logpast", tmp_path / "again"))
    assert (found.step, found.state["best"]) == (40, None)


def test_model_that_was_trained_further_becomes_a_run_without_the_old_state(
    exported: Path, store: TokenStore, tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    model = AutoModelForCausalLM.from_pretrained(exported)
    torch.nn.init.normal_(model.core.positions.weight)
    for part in (model, AutoTokenizer.from_pretrained(exported)):
        part.save_pretrained(folder)
    (folder / "training.json").write_text((exported / "training.json").read_text())
    found = find_checkpoint(export(folder, "logpast", tmp_path / "run"))
    assert (found.step, found.state["best"], found.state["data"]["name"]) == (0, None, "unknown")
    assert torch.equal(found.load_model().state_dict()["positions.weight"], model.core.positions.weight)
    evaluate(found.path, str(store.path), quiet=True, device="cpu", record=tmp_path / "row.jsonl")
    assert len(ledger.read(tmp_path / "row.jsonl")) == 1


def test_model_card_has_the_numbers_of_the_rows_and_of_the_checkpoint(run: Path, exported: Path, scores: Path) -> None:
    card, rows, best = (exported / "README.md").read_text(), ledger.read(scores), find_checkpoint(run).state["best"]
    for row in rows[:2]:
        assert f"| {row['scores']['ppl_token']:.4f} | {row['scores']['ppl_word']:.4f} |" in card
    assert f"{rows[2]['scores']['ppl_token']:.4f}" not in card  # another checkpoint's
    assert f"perplexity {best['ppl_token']:.3f}" in card
    assert "stride 4" in card
    assert "it is the training text" in card


@pytest.mark.parametrize("name", ["gpt2", "bpe"])
def test_ids_of_the_exported_tokenizer_are_the_same(name: str, store: TokenStore, tmp_path: Path) -> None:
    own = load_tokenizer("gpt2" if name == "gpt2" else store.path)
    hf_tokenizer(own).save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    for text in (STRANGE, (ROOT / "README.md").read_text(), ""):
        ids = found(text)["input_ids"]
        assert ids == [own.eot, *own.encode(text).tolist()]
        assert found.decode(ids[1:]) == text


def test_nothing_is_overwritten(run: Path, exported: Path) -> None:
    for source, to in ((run, "hf"), (exported, "logpast")):
        with pytest.raises(UserError, match=r"mine-hf already exists"):
            export(source, to, exported)
    assert (exported / "config.json").exists()


def test_wrong_sources_are_named(run: Path, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="mine-hf is a Hugging Face model already"):
        export(exported, "hf", out)
    with pytest.raises(UserError, match=r"no config\.json"):
        export(run, "logpast", out)
    ledger.append(tmp_path / "other.jsonl", {"measured": 1})
    with pytest.raises(UserError, match="no row of"):
        export(run, "hf", out, results=tmp_path / "other.jsonl")
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        export(run, "hf", out, results=tmp_path / "missing.jsonl")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="'gpt2'"):
        export(tmp_path / "gpt2", "logpast", out)
    assert not out.exists()


@pytest.mark.parametrize("damage", ["removed", "truncated", "incomplete", "of another size"])
def test_damaged_weights_are_refused(damage: str, exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in exported.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    if damage == "incomplete":
        kept = {name: value for name, value in load_file(weights).items() if "mlp_in" not in name}
        save_file(kept, weights, {"format": "pt"})
    elif damage == "of another size":
        config = json.loads((folder / "config.json").read_text())
        config["model"]["window"] //= 2
        (folder / "config.json").write_text(json.dumps(config))
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "removed":
        weights.unlink()
    with pytest.raises(UserError, match="damaged"):
        export(folder, "logpast", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_config_of_the_exported_model_is_that_of_the_checkpoint(run: Path, exported: Path) -> None:
    content = json.loads((exported / "config.json").read_text())
    assert content["model"] == find_checkpoint(run).config.to_dict()["model"]


@pytest.mark.parametrize("number", range(len(code_blocks(ROOT / "docs" / "huggingface.md", "python"))))
def test_python_examples_of_the_docs_run(
    number: int, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_blocks(ROOT / "docs" / "huggingface.md", "python")[number]
    (tmp_path / "mine-hf").symlink_to(exported)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"docs/huggingface.md, example {number}", "exec"), {})
