"""A run can start from the weights of another run, or of a Hugging Face GPT-2."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.models import LogMemoryConfig, ModelConfig, RecentConfig, RecurrentMemoryConfig, TransformerXLConfig, build
from logpast.models.decoder import GPT2_MODULES
from logpast.training.checkpoint import find_checkpoint, open_checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.init_from import Source, open_source
from logpast.training.loop import train
from logpast.training.setup import make_model
from logpast.util.errors import UserError
from training.helpers import assert_bit_equal, weights

SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16}
MEMORY = LogMemoryConfig(slots=9, sharpness=20, window=8, **SIZES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    """A run of a memory model."""
    run = tmp_path_factory.mktemp("init_from") / "run"
    data = DataConfig(train=str(store.path), validation=str(store.path), validation_tokens=50)
    config = TrainConfig(run, data, MEMORY, OptimizerConfig(warmup_steps=0), steps=2, batch_size=4, accelerator="cpu")
    train(replace(config, checkpoint_every=1, tensorboard=False))
    return run


@pytest.fixture
def gpt2(tmp_path: Path, store: TokenStore) -> Path:
    """A GPT-2 of random weights, as Hugging Face saves it."""
    folder, shapes = tmp_path / "gpt2", {"attn.c_attn": (16, 48), "mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}
    folder.mkdir()
    torch.manual_seed(5)
    saved = {
        "transformer.wte.weight": torch.randn(store.tokenizer.size, 16),
        "transformer.wpe.weight": torch.randn(32, 16),
    }
    for module in list(GPT2_MODULES)[2:]:
        for prefix in ["transformer."] if module == "ln_f" else ["transformer.h.0.", "transformer.h.1."]:
            shape = (16,) if module.startswith("ln") else shapes.get(module, (16, 16))
            saved[f"{prefix}{module}.weight"] = torch.randn(shape)
            saved[f"{prefix}{module}.bias"] = torch.randn(shape[-1])
    saved["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # a mask, in files of older versions
    save_file(saved, folder / "model.safetensors")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": store.tokenizer.size}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "activation_function": "gelu_new"} | sizes))
    shutil.copy(store.path / "tokenizer.json", folder)
    return folder


def loaded(source: Source, config: ModelConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The initial weights of a model, and those after loading."""
    torch.manual_seed(0)
    model = build(replace(config, vocabulary=source.vocabulary))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source.load_weights(model)
    return before, model.state_dict()


def test_a_new_run_starts_from_the_weights_and_records_where_they_are_from(
    trained: Path, train_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    source = find_checkpoint(trained)
    still = OptimizerConfig(learning_rate=0, final_learning_rate=0)
    config = replace(train_config, model=MEMORY, optimizer=still, init_from=str(trained), steps=1, keep=9)
    state = train(config)
    assert_bit_equal(weights(config.run), source.weights())
    sha256 = hashlib.sha256((source.path / "model.safetensors").read_bytes()).hexdigest()
    identity = {"path": str(source.path), "step": source.step, "sha256": sha256}
    assert state["init_from"] == identity
    assert state["step"] == 1
    assert f"initial weights from {source.path}" in capsys.readouterr().err
    shutil.copytree(trained, config.run.with_name("source"))
    gone = replace(config, init_from=str(config.run.with_name("source")), run=config.run.with_name("gone"))
    train(gone)
    shutil.rmtree(config.run.with_name("source"))
    assert train(replace(gone, steps=2, resume="auto"))["init_from"]["sha256"] == sha256  # resuming does not need it


def test_weights_in_double_precision_keep_their_digits(
    trained: Path, train_config: TrainConfig, store: TokenStore, tmp_path: Path
) -> None:
    shutil.copytree(find_checkpoint(trained).path, tmp_path / "double")
    exact = {name: value.double() + 1e-12 for name, value in open_source(str(trained)).weights().items()}
    save_file(exact, tmp_path / "double" / "model.safetensors")
    (tmp_path / "double" / "SHA256SUMS").unlink()
    source = open_source(str(tmp_path / "double"))
    config = replace(train_config, model=MEMORY, precision="64-true")
    assert_bit_equal(make_model(config, store, source, False, torch.device("cpu")).state_dict(), exact)
    single = make_model(replace(config, precision="32-true"), store, source, False, torch.device("cpu"))
    assert single.table.weight.dtype == torch.float32


def test_new_parts_are_initialised_and_missing_parts_are_left_out(trained: Path) -> None:
    source = open_source(str(trained))
    old, new = loaded(source, TransformerXLConfig(window=8, memory=8, **SIZES | {"layers": 3}))
    given = source.weights()
    assert torch.equal(new["table.weight"], given["table.weight"])
    assert torch.equal(new["blocks.1.mlp_in.weight"], given["blocks.1.mlp_in.weight"])
    for name in ("biases", "blocks.2.mlp_in.weight", "blocks.0.attention.query.weight"):
        assert torch.equal(new[name], old[name])
    _, initialised, left_out = source.notes
    assert initialised.endswith(
        ": biases, blocks.0.attention.distance, blocks.0.attention.key_value, blocks.0.attention.query, "
        "blocks.1.attention.distance, blocks.1.attention.key_value, blocks.1.attention.query, blocks.2"
    )
    assert left_out.endswith(
        ": blocks.0.attention.query_key_value, blocks.1.attention.query_key_value, memory, positions"
    )


def test_long_lists_of_parts_are_shortened(trained: Path) -> None:
    source = open_source(str(trained))
    loaded(source, TransformerXLConfig(window=8, memory=8, **SIZES | {"layers": 9}))
    assert source.notes[1].endswith(" and 6 more")


@pytest.mark.parametrize(
    ("slots", "window", "rows"),
    [(9, 8, slice(0, 17)), (9, 5, slice(0, 14)), (4, 8, slice(5, 17)), (4, 3, slice(5, 12)), (0, 8, slice(9, 17))],
)
def test_position_embeddings_of_fewer_slots_or_a_shorter_window(
    trained: Path, slots: int, window: int, rows: slice
) -> None:
    """The window's first positions stay those of the window; the nearest slots, which are the last ones, are kept."""
    source = open_source(str(trained))
    for model in (RecentConfig(slots=slots, window=window, **SIZES), replace(MEMORY, slots=slots, window=window)):
        _, new = loaded(source, model)
        assert torch.equal(new["positions.weight"], source.weights()["positions.weight"][rows])


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (replace(MEMORY, slots=10), r"positions.weight is \(17, 16\) .* 9 slots and a window of 8.*model.slots=10"),
        (replace(MEMORY, slots=5, window=12), r"positions.weight is \(17, 16\)"),  # as many rows, of other positions
        (replace(MEMORY, width=32), r"is \(\d*16.*\) in .*but \(\d*32.*\) in the model"),
        (replace(MEMORY, mlp=48), r"blocks.0.mlp_\w+.\w+ is .*64.* but .*48"),
        (replace(MEMORY, heads=4), "2 attention heads"),
        (RecurrentMemoryConfig(window=15, memory_tokens=1, **SIZES), "position embeddings"),
    ],
)
def test_weights_of_other_shapes_are_refused(trained: Path, model: ModelConfig, named: str) -> None:
    source = open_source(str(trained))
    with pytest.raises(UserError, match=named) as error:
        loaded(source, model)
    assert source.name in str(error.value)


def test_another_tokenizer_is_refused(trained: Path, train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
    prepare([str(books)], tmp_path / "other", tokenizer="bpe-290", workers=1)
    config = replace(train_config, data=DataConfig(train=str(tmp_path / "other")), init_from=str(trained))
    with pytest.raises(UserError, match=f"another tokenizer.*--data.tokenizer {trained}"):
        train(config)
    assert not config.run.exists()


def test_the_recipe_of_a_run_is_that_of_its_training(trained: Path) -> None:
    best = find_checkpoint(trained)
    recipe = open_source(str(trained)).recipe
    assert recipe["model"] == best.config.to_dict()["model"]
    assert recipe["steps"] == 2
    assert recipe["data"]["tokenizer"] == str(best.path)
    assert not recipe.keys() & {"run", "resume", "init_from", "freeze"}


def test_a_gpt2_gives_its_first_positions_to_slots_and_window(gpt2: Path) -> None:
    theirs, source = load_file(gpt2 / "model.safetensors"), open_source(str(gpt2))
    for model in (MEMORY, RecentConfig(slots=20, window=12, **SIZES)):
        _, new = loaded(source, model)
        assert torch.equal(new["positions.weight"], theirs["transformer.wpe.weight"][: model.slots + model.window])
        assert torch.equal(new["table.weight"], theirs["transformer.wte.weight"])
        assert torch.equal(new["blocks.1.mlp_out.weight"], theirs["transformer.h.1.mlp.c_proj.weight"].T)
    with pytest.raises(UserError, match=f"position embeddings of {gpt2}"):
        loaded(source, RecurrentMemoryConfig(window=30, memory_tokens=1, **SIZES))
    assert len(source.notes) == 1  # the control has the parts of GPT-2, no more and no less
    with pytest.raises(UserError, match=r"positions.weight is \(32, 16\).*model.window=30"):
        loaded(source, replace(MEMORY, window=30))


def test_training_from_a_gpt2_and_resuming_it(gpt2: Path, train_config: TrainConfig, store: TokenStore) -> None:
    """Its table has as many rows as tokens, not a multiple of 64."""
    config = replace(train_config, model=MEMORY, init_from=str(gpt2), steps=2, checkpoint_every=1)
    state = train(config)
    assert state["init_from"]["path"] == str(gpt2)
    found = find_checkpoint(config.run)
    assert found.config.model.vocabulary == store.tokenizer.size
    shutil.rmtree(found.path)
    again = replace(config, resume=str(config.run), run=config.run.with_name("again"))
    train(again)
    assert_bit_equal(open_checkpoint(again.run / "checkpoints" / found.path.name).weights(), weights(again.run))


def test_a_gpt2_saved_by_torch(gpt2: Path) -> None:
    expected = open_source(str(gpt2)).weights()
    torch.save(load_file(gpt2 / "model.safetensors"), gpt2 / "pytorch_model.bin")
    (gpt2 / "model.safetensors").unlink()
    assert_bit_equal(open_source(str(gpt2)).weights(), expected)
    (gpt2 / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"pytorch_model.bin cannot be read"):
        open_source(str(gpt2)).weights()


def test_a_gpt2_that_our_model_would_not_compute_is_refused(gpt2: Path) -> None:
    config = json.loads((gpt2 / "config.json").read_text())
    for change, named in [
        ({"activation_function": "relu"}, "activation_function"),
        ({"model_type": "gpt_neo"}, "model_type"),
        ({"n_head": None}, "n_head"),
    ]:
        (gpt2 / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=f"config.json.* {named}"):
            open_source(str(gpt2))
    (gpt2 / "config.json").write_text(json.dumps(config))
    (gpt2 / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=f"{gpt2} has no tokenizer.json"):
        open_source(str(gpt2))
    (gpt2 / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{gpt2} has no model.safetensors"):
        open_source(str(gpt2))


def test_other_models_of_hugging_face_are_refused_and_our_own_become_a_run_first(tmp_path: Path) -> None:
    for kind, problem in (("llama", "model_type is 'llama'"), ("logpast", f"export {tmp_path} --to logpast")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(UserError, match=problem):
            open_source(str(tmp_path))


def test_gpt2s_own_tokenizer_is_recognised_by_its_words(gpt2: Path) -> None:
    from logpast.data import load_tokenizer

    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(config | {"vocab_size": 50_257}))
    own = load_tokenizer("gpt2")
    ids = {word.decode("latin-1") if word.isalnum() else f"Ġ{i}": i for i, word in enumerate(own.vocabulary)}
    (gpt2 / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    assert open_source(str(gpt2)).fingerprint == own.fingerprint
    ids["the"], ids["and"] = ids["and"], ids["the"]
    (gpt2 / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    with pytest.raises(UserError, match=r"tokenizer.json"):
        open_source(str(gpt2))
    (gpt2 / "tokenizer.json").unlink()
    assert open_source(str(gpt2)).fingerprint == own.fingerprint


@pytest.mark.parametrize("name", ["gpt2", "someone/gpt2"])
def test_a_name_that_is_no_path_is_downloaded(
    name: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if repo != name:
            raise OSError("no network")
        return str(gpt2)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.chdir(gpt2)
    source = open_source(name)
    assert source.identity["path"] == name
    assert len(asked) == 1  # the weights once
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("runs/gpt2", "/gpt2", "a/b/gpt2"):
        with pytest.raises(UserError, match=f"no checkpoint at {path}"):
            open_source(path)
    with pytest.raises(UserError, match=r"no run elsewhere.*downloaded \(OSError\)"):
        open_source("elsewhere")
