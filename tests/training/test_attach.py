"""The command `attach`: what each kind of training changes, the scores it prints, and its errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import TEXT
from logpast.analysis.analyze import analyze
from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.generation import generate
from logpast.ledger import row as ledger
from logpast.ledger.results import results
from logpast.models.hf.attach import attach_memory, load_attached, load_model, load_model_tokenizer
from logpast.models.hf.export import export
from logpast.training.attach import _split, attach, choose_trained
from logpast.util.errors import UserError
from models.hf.tiny import save_tiny, tiny

pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"window": 16, "recall": 200, "steps": 3, "batch_size": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_tiny(folder, [TEXT])


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that repeats itself, which recall can copy."""
    file = tmp_path_factory.mktemp("text") / "repeated.txt"
    file.write_text(TEXT * 5)
    return file


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def test_fitted_gates_lower_the_loss_and_leave_the_model_alone(
    model: Path, repeated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights_of(model)
    scores = attach(str(model), str(repeated), tmp_path / "out", **SMALL | {"steps": 40, "learning_rate": 0.05})
    assert scores["memory"]["nats_per_token"] < scores["model"]["nats_per_token"] - 1
    assert scores["own"] == scores["model"]
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores
    assert f"{scores['memory']['ppl_token']:.2f}" in capsys.readouterr().out
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


def test_scores_are_those_of_the_saved_model(model: Path, repeated: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXT * 2)
    scores = attach(
        str(model), str(repeated), tmp_path / "out", str(tmp_path / "other.txt"), slots=9, train="slots",
        learning_rate=0.05, recall_orders=6, **SMALL,
    )  # fmt: skip
    attached = load_attached(tmp_path / "out")
    assert attached.scale.abs().min() > 0
    assert attached.recall.form.orders == 6
    store = open_tokens(
        str(tmp_path / "other.txt"), load_model_tokenizer(tmp_path / "out", attached.config.first_token)
    )
    nats = score(attached, store, 16, attached.history, 4, "document", recall=attached.config.recall_form)
    assert nats.mean() == pytest.approx(scores["memory"]["nats_per_token"], abs=1e-5)
    assert scores["own"] != scores["model"]


@pytest.mark.parametrize("train", ["lora", "all"])
def test_fine_tuned_model_is_compared_with_the_same_fine_tuning_without_memory(
    train: Any, model: Path, repeated: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    before = weights_of(model)
    how = SMALL | {"steps": 8, "model_learning_rate": 1e-2}
    scores = attach(str(model), str(repeated), tmp_path / "out", slots=9, train=train, **how)
    assert set(scores) == {"model", "control", "memory", "own"}
    assert scores["control"]["nats_per_token"] < scores["model"]["nats_per_token"] - 0.01
    assert scores["memory"]["nats_per_token"] < scores["control"]["nats_per_token"] - 0.1
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    saved = "adapter_model.safetensors" if train == "lora" else "model.safetensors"
    assert (tmp_path / "out" / saved).exists()
    trained = load_attached(tmp_path / "out").causal_lm.state_dict()
    changed = [name for name, value in trained.items() if name in before and not torch.equal(value, before[name])]
    assert bool(changed) == (train == "all")


def test_control_without_recall_is_the_slots_as_plain_tokens(model: Path, repeated: Path, tmp_path: Path) -> None:
    """With a rate of 0 for the model, fine-tuning changes nothing, so the control is the model itself."""
    how = SMALL | {"recall": 0, "model_learning_rate": 0, "learning_rate": 10.0}
    scores = attach(str(model), str(repeated), tmp_path / "out", slots=9, train="all", **how)
    assert scores["control"]["nats_per_token"] == pytest.approx(scores["model"]["nats_per_token"], abs=1e-6)
    assert scores["memory"] == scores["own"] != scores["model"]


def test_model_and_memories_are_trained_also_at_equal_rates(model: Path, repeated: Path, tmp_path: Path) -> None:
    sizes, rates = {"window": 16, "recall": 200}, {"learning_rate": 0.01, "model_learning_rate": 0.01}
    attach(str(model), str(repeated), tmp_path / "out", train="all", **SMALL | rates)
    attached, before = load_attached(tmp_path / "out"), attach_memory(load_model(model), **sizes)
    for part in ("recall", "model"):
        now, then = (dict(getattr(each, part).named_parameters()) for each in (attached, before))
        assert any(not torch.equal(value, then[name]) for name, value in now.items())


@pytest.mark.parametrize(("family", "matrices"), [("llama", 4), ("gpt2", 2)])
def test_adapters_are_those_of_attention(family: str, matrices: int) -> None:
    pytest.importorskip("peft")
    attached = attach_memory(tiny(family), window=16)
    choose_trained(attached, "lora", 2, 0)
    adapted = [name for name, _ in attached.named_modules() if name.endswith("lora_A.default")]
    assert len(adapted) == 2 * matrices
    assert all("attn" in name for name in adapted)


def test_adapters_of_an_unknown_attention_are_refused() -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 97, "bos_token_id": 1}
    attached = attach_memory(transformers.MptForCausalLM(transformers.MptConfig(**sizes)), window=16)
    with pytest.raises(UserError, match="names of the attention of MptForCausalLM"):
        choose_trained(attached, "lora", 2, 0)


def test_without_a_validation_text_the_last_tenth_is_held_out(model: Path, repeated: Path, tmp_path: Path) -> None:
    store = TokenStore.in_memory([np.arange(50), np.arange(30), np.arange(20)], 60, eot=59)
    first, last = _split(store)
    assert np.array_equal(np.concatenate([first.tokens, last.tokens]), store.tokens)
    assert (first.documents.tokens.tolist(), last.documents.tokens.tolist()) == ([50, 30, 10], [10])
    scores = attach(str(model), str(repeated), tmp_path / "out", **SMALL)
    tokenizer = load_model_tokenizer(model)
    _, last = _split(open_tokens(str(repeated), tokenizer))
    attached = load_attached(tmp_path / "out")
    nats = score(attached, last, 16, 1, recall=attached.config.recall_form)
    assert nats.mean() == pytest.approx(scores["memory"]["nats_per_token"], abs=1e-5)


def test_eval_and_generate_take_the_folder(
    model: Path, repeated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the score that attach printed, a warning about the training text, and a row of a ledger."""
    out, other, rows = tmp_path / "out", tmp_path / "other.txt", tmp_path / "rows.jsonl"
    other.write_text(TEXT * 2)
    scores = attach(str(model), str(repeated), out, str(other), **SMALL | {"steps": 40, "learning_rate": 0.05})
    found = evaluate(out, str(other), device="cpu", record=rows, against=out)
    assert found["ppl_token"] == pytest.approx(scores["memory"]["ppl_token"], rel=1e-5)
    assert (found["streams"], found["against"]["nats_per_token"]) == ("document", 0)
    (row,) = ledger.read(rows)
    assert (row["recipe"]["model"]["system"], row["recipe"]["model"]["recall"]) == ("attached", 200)
    assert row["init_from"] == {"path": str(model)}
    assert row["recipe"]["fit"]["train"] == "gates"
    assert len(results(["model.system=attached"], folder=tmp_path)) == 1
    assert "is not unseen text" not in capsys.readouterr().err
    evaluate(out, str(repeated), device="cpu")
    assert "it is the training text" in capsys.readouterr().err
    text = generate(out, follow=repeated, prompt="And God", tokens=40, device="cpu", seed=1, temperature=0.5)
    assert text.startswith("And God")
    assert "<|endoftext|>" not in text
    attached = load_attached(out)
    stream, tokenizer = attached.stream(), load_model_tokenizer(out)
    for part in (TEXT * 5, "And God"):
        stream.push(tokenizer.encode(part))
    likeliest = generate(out, follow=repeated, prompt="And God", tokens=9, device="cpu", temperature=0, echo=False)
    assert tokenizer.decode(stream.generate(9, temperature=0)[0]) == likeliest


def test_without_steps_recall_gains_and_the_folder_is_scored(model: Path, repeated: Path, tmp_path: Path) -> None:
    scores = attach(str(model), str(repeated), tmp_path / "out", str(repeated), **SMALL | {"steps": 0})
    assert scores["memory"]["nats_per_token"] < scores["model"]["nats_per_token"] - 1
    found = evaluate(tmp_path / "out", str(repeated), device="cpu", record=tmp_path / "rows.jsonl")
    assert found["ppl_token"] == pytest.approx(scores["memory"]["ppl_token"], rel=1e-5)


def test_folder_without_tokenizer_or_training_text_is_scored(model: Path, repeated: Path, tmp_path: Path) -> None:
    attach_memory(load_model(model), window=16, recall=50).save_pretrained(tmp_path)
    found = evaluate(tmp_path, str(repeated), device="cpu", record=tmp_path / "rows.jsonl")
    assert found["ppl_token"] > 1


def test_commands_that_need_a_run_refuse_the_folder(model: Path, tmp_path: Path) -> None:
    attach_memory(load_model(model), window=16, recall=50).save_pretrained(tmp_path)
    for refuse in (lambda: analyze(tmp_path, "x"), lambda: export(tmp_path, "hf", tmp_path / "out")):
        with pytest.raises(UserError, match="only eval, explore, generate and serve take"):
            refuse()


def test_same_seed_gives_the_same_gates(model: Path, repeated: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        attach(str(model), str(repeated), tmp_path / name, **SMALL)
    one, two = (load_file(tmp_path / name / "logpast.safetensors") for name in ("one", "two"))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_half_precision_model_is_fitted_in_full_precision_on_a_cpu(model: Path, repeated: Path, tmp_path: Path) -> None:
    half = shutil.copytree(model, tmp_path / "half")
    load_model(model).to(torch.bfloat16).save_pretrained(half)
    attach(str(half), str(repeated), tmp_path / "out", train="all", **SMALL)
    assert {value.dtype for value in weights_of(tmp_path / "out").values()} == {torch.float32}


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["attach", *map(str, words), "--device", "cpu"])
    assert stop.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("logpast: ")
    return line


def test_folder_finds_its_model_from_another_folder(
    model: Path, repeated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    attach("model", str(repeated), Path("out"), **SMALL)
    monkeypatch.chdir("/")
    evaluate(tmp_path / "out", str(repeated), device="cpu")
    shutil.rmtree(copied)
    with pytest.raises(UserError, match=r"the model of .*out was in .*model, which does not exist"):
        load_attached(tmp_path / "out")


@pytest.mark.parametrize("changes", [{"recall_orders": 3}, {"model": 5}, {"first_token": 10**6}, {"version": "a"}])
def test_changed_settings_are_refused_in_words(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    attach_memory(load_model(model), window=16, recall=50).save_pretrained(tmp_path)
    about = json.loads((tmp_path / "logpast.json").read_text())
    (tmp_path / "logpast.json").write_text(json.dumps(about | changes))
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match=r"recall\.|model|first_token|version"):
        load_attached(tmp_path)


def test_diverged_fit_is_not_saved(model: Path, repeated: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lower the learning rates"):
        attach(str(model), str(repeated), tmp_path / "out", **SMALL | {"learning_rate": 1e30})
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_line(model: Path, repeated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    text, out = ["--data", repeated, "--window", 16], ["--out", tmp_path / "out"]
    (tmp_path / "there").mkdir()
    assert "there already exists" in error_of(capsys, "--model", model, *text, "--out", tmp_path / "there")
    assert "cannot write" in error_of(capsys, "--model", "not looked at", *text, "--out", "/dev/null/out")
    assert "is no model" in error_of(capsys, "--model", repeated, *text, *out)
    assert "nowhere" in error_of(capsys, "--model", tmp_path / "nowhere", *text, *out)
    (tmp_path / "short.txt").write_text("A few words.")
    assert "too short" in error_of(capsys, "--model", model, "--data", tmp_path / "short.txt", *out)
    assert "--recall 0" in error_of(capsys, "--model", model, *text, *out, "--recall", 0)
    assert "batch_size must be at least 1" in error_of(capsys, "--model", model, *text, *out, "--batch_size", 0)
    assert "seed must be at least 0" in error_of(capsys, "--model", model, *text, *out, "--seed", -1)
    assert "learning_rate must be at least 0" in error_of(capsys, "--model", model, *text, *out, "--learning_rate", -1)
    sizes = {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "vocab_size": 50}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    assert "no causal language model" in error_of(capsys, "--model", tmp_path / "t5", *text, *out)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    assert "no tokenizer" in error_of(capsys, "--model", bare, *text, *out)
    assert not (tmp_path / "out").exists()


def test_missing_extra_is_an_error_with_the_fix(
    model: Path, repeated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'logpast\[hf\]'"):
        attach(str(model), str(repeated), tmp_path / "out", **SMALL)
