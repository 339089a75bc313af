"""Memories attached to Hugging Face decoders: logits, slots, caches, saving, adapters, errors; real weights."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logpast.data import TokenStore
from logpast.data.batching import Windows
from logpast.evaluation.scoring import score
from logpast.memory.naive import embed
from logpast.models.decoder import KeyValueCache
from logpast.models.hf import require
from logpast.models.hf.attach import (
    Attached,
    attach_memory,
    detach_memory,
    load_attached,
    load_model,
    load_model_tokenizer,
)
from logpast.models.stream import Stream
from logpast.training.optimizer import freeze
from logpast.util.errors import UserError
from models.hf.stories15m import save_stories15m
from models.hf.tiny import FAMILIES, VOCABULARY, tiny

pytest.importorskip("transformers")

IDS = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (2, 60)))


def text(length: int = 150) -> TokenStore:
    ids = np.random.default_rng(1).integers(3, 20, length)
    return TokenStore.in_memory([ids, ids[:70]], VOCABULARY, eot=1)


def losses(attached: Attached, store: TokenStore) -> Any:
    form = attached.config.recall_form
    return score(attached, store, attached.window, attached.history, 3, "document", recall=form)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_models_own_without_memories(family: str) -> None:
    model = tiny(family)
    attached = attach_memory(model, window=20, recall=0, sink=False)
    for window in IDS.split(20, dim=1):
        expected = model(input_ids=window).logits
        found = attached(window[:, :0], window)
        assert expected.std() > 0.05
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_equal_the_models_own_with_recall_closed(family: str) -> None:
    model, store = tiny(family), text()
    attached = attach_memory(model, window=20, recall=100, sink=False)
    with torch.no_grad():
        attached.recall.bias[1:] = -100
    ids = torch.from_numpy(store.tokens[:150].astype(np.int64))
    ids = torch.cat([torch.tensor([1]), ids])
    inputs, targets = (list(part.split(20)) for part in (ids[:-1], ids[1:]))
    with torch.no_grad():
        logits = [model(input_ids=window[None]).logits[0] for window in inputs]
    expected = torch.cat(
        [torch.nn.functional.cross_entropy(*both, reduction="none") for both in zip(logits, targets, strict=True)]
    )
    assert np.abs(losses(attached, store)[:150] - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_to_slots_is_the_models_own_to_the_tokens_in_them(family: str) -> None:
    attached = attach_memory(tiny(family), window=10, slots=9, recall=0)
    history, window = IDS[:, :30], IDS[:, 30:40]
    before = attached(history, window)
    found = attached.slot_attention(history, window)
    ids = torch.cat([torch.ones(2, 1, dtype=torch.int64), history[:, -9:], window], dim=1)
    with torch.no_grad():
        weights = attached.model(input_ids=ids, output_attentions=True).attentions
    expected = torch.stack(weights).mean((0, 2))[:, 10:, 1:10].flip(-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert found.std() > 1e-3
    assert (attached(history, window) - before).abs().max() < 1e-4  # also with eager attention


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_before_training_are_plain_tokens_after_the_sink(family: str) -> None:
    model = tiny(family)
    attached = attach_memory(model, window=10, slots=9, recall=0)
    history, window = IDS[:, :30], IDS[:, 30:40]
    plain = torch.cat([torch.ones(2, 1, dtype=torch.int64), IDS[:, 21:40]], dim=1)
    assert (attached(history, window) - model(input_ids=plain).logits[:, -10:]).abs().max() < 1e-4
    assert attached.history == max(9, attached.memory.bank.horizon)


def test_slots_hold_the_memory_at_the_scale_of_embeddings() -> None:
    """Also in a model that scales its embeddings."""
    attached = attach_memory(tiny("gemma3"), window=10, slots=17, recall=0, sink=False)
    with torch.no_grad():
        attached.scale.fill_(1)
    slots = attached.make_slots(IDS).detach()
    memory = slots - attached.embed(IDS[:, -17:])
    assert float(memory.square().mean()) == pytest.approx(float(attached.embed(IDS).square().mean()), rel=0.1)
    assert not torch.equal(memory[0], memory[1])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_positions_before_the_start_of_a_text_are_not_attended_to(family: str) -> None:
    """Rotary positions are relative, so the first window is as if it stood alone."""
    model = tiny(family)
    attached = attach_memory(model, window=6, slots=9, recall=0)
    with torch.no_grad():
        attached.scale.fill_(1)
        attached.memory.norm.bias.fill_(1)
    empty = torch.full((2, attached.history), -1)
    assert (attached(empty, IDS[:, :6]) - model(input_ids=IDS[:, :6]).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("past", [4, 30])
def test_one_token_at_a_time_gives_the_same_as_all_at_once(family: str, past: int) -> None:
    """Also where a text begins, and beyond a model's own sliding window. A cache that was copied stays as it was."""
    attached = attach_memory(tiny(family), window=12, slots=9, recall=0)
    history = torch.nn.functional.pad(IDS[:, :past], (attached.history - past, 0), value=-1)
    with torch.no_grad():
        attached.scale.fill_(0.5)
        x = torch.cat([attached.make_slots(history), attached.embed(IDS[:, 30:42])], dim=1)
        expected = attached.hidden(x, skip=attached.slots)
        before = KeyValueCache()
        found = [attached.hidden(x[:, : attached.slots + 1], before)[:, -1:]]
        for position in range(attached.slots + 1, x.shape[1]):
            for _ in range(2):  # the first could have been interrupted
                cache = KeyValueCache()
                cache.layers |= before.layers
                step = attached.hidden(x[:, position : position + 1], cache, start=position)
            before = cache
            found.append(step)
    assert (torch.cat(found, dim=1) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_stream_predicts_what_scoring_predicts(family: str) -> None:
    attached, store = attach_memory(tiny(family), window=12, slots=9, recall=100), text(30)
    with torch.no_grad():
        attached.scale.fill_(0.5)
        attached.recall.weight.normal_(std=0.1)
    stream, found = Stream(attached, 1, batch=2), []
    for token in store.tokens[:30].tolist():
        stream = stream.select([1, 0])
        found.append(-float(stream.logits()[1].log_softmax(-1)[token]))
        stream.push([token])
    assert np.abs(np.array(found) - losses(attached, store)[:30]).max() < 1e-4


def test_recall_lowers_the_loss_of_a_repeated_text_and_fitted_gates_lower_it_further() -> None:
    attached = attach_memory(tiny(), window=16, recall=200)
    random = np.random.default_rng(2).integers(3, VOCABULARY, 60)
    store = TokenStore.in_memory([np.tile(random, 4)], VOCABULARY, eot=1)
    unfitted = losses(attached, store).mean()
    assert unfitted < losses(attach_memory(tiny(), window=16, recall=0), store).mean() - 1
    assert [name for name, p in attached.named_parameters() if p.requires_grad] == [
        "recall.weight", "recall.bias", "recall.confidence"
    ]  # fmt: skip
    optimizer = torch.optim.Adam([p for p in attached.parameters() if p.requires_grad], lr=0.1)
    batch = Windows(store, 16, attached.history, recall=attached.config.recall_form).batch(np.arange(15))
    for _ in range(15):
        optimizer.zero_grad()
        attached(*batch.inputs).mean().backward()
        optimizer.step()
    assert losses(attached, store).mean() < unfitted - 0.3


def test_detached_model_is_the_original_to_the_bit() -> None:
    model = tiny()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.lm_head.weight.requires_grad_(False)
    expected = model(input_ids=IDS).logits
    attached = attach_memory(model, window=10, slots=9, recall=50)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    losses(attached, text())
    back = detach_memory(attached)
    assert back is model
    assert list(back.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in back.state_dict().items())
    assert torch.equal(back(input_ids=IDS).logits, expected)
    assert {name for name, p in back.named_parameters() if not p.requires_grad} == {"lm_head.weight"}


def test_parameters_are_chosen_by_name() -> None:
    attached = attach_memory(tiny(), window=10, slots=9, recall=50, frozen=False)
    freeze(attached, ["!memory", "!scale"])
    trained = [name for name, p in attached.named_parameters() if p.requires_grad]
    assert sorted(trained) == ["memory.norm.bias", "memory.norm.weight", "scale"]
    attached(IDS[:, :30], IDS[:, 30:40], IDS[:, 31:41], attached.recall.count(IDS)[:, 31:41]).sum().backward()
    assert attached.scale.grad is not None
    assert attached.scale.grad.abs().min() > 0


@pytest.mark.parametrize("before", [True, False])
def test_lora_trains_the_adapters_and_is_saved_with_the_memories(before: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tiny().save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base")
    if before:
        attached = attach_memory(peft.get_peft_model(model, lora), window=10, recall=50)
    else:
        attached = attach_memory(model, window=10, recall=50)
        attached.model = peft.get_peft_model(attached.model, lora)
    trained = {name for name, p in attached.named_parameters() if p.requires_grad}
    assert all("lora" in name or name.startswith("recall.") for name in trained)
    assert any("lora" in name for name in trained)
    attached.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    assert np.array_equal(losses(load_attached(tmp_path / "saved"), text()), losses(attached, text()))


@pytest.mark.parametrize("save_model", [True, False])
def test_saved_memories_load_with_the_same_losses(save_model: bool, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    attached = attach_memory(load_model(tmp_path / "base"), window=10, slots=9, recall=50, input=True)
    with torch.no_grad():
        for parameter in (attached.scale, attached.recall.weight, attached.recall.input.weight):
            parameter.normal_(std=0.1)
    attached.save_pretrained(tmp_path / "saved", save_model)
    if save_model:
        (tmp_path / "base").rename(tmp_path / "elsewhere")
    loaded = load_attached(tmp_path / "saved")
    assert loaded.config == attached.config
    assert np.array_equal(losses(loaded, text()), losses(attached, text()))
    given = load_attached(tmp_path / "saved", tiny())
    assert np.array_equal(losses(given, text()), losses(attached, text()))


def test_damaged_or_foreign_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"logpast\.json"):
        load_attached(tmp_path)
    attach_memory(tiny(), window=10, recall=50).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model="):
        load_attached(tmp_path)
    with pytest.raises(UserError, match="embeddings"):
        load_attached(tmp_path, _wider())
    (tmp_path / "SHA256SUMS").unlink()
    settings = json.loads((tmp_path / "logpast.json").read_text())
    (tmp_path / "logpast.json").write_text(json.dumps(settings | {"recall": 0}))
    with pytest.raises(UserError, match=r"recall\.weight"):
        load_attached(tmp_path, tiny())
    for newer in ({"version": 99}, {"new_setting": 1}):
        (tmp_path / "logpast.json").write_text(json.dumps(settings | newer))
        with pytest.raises(UserError, match=r"logpast\.json cannot be used: .*(99|new_setting).*upgrade logpast"):
            load_attached(tmp_path, tiny())
    (tmp_path / "logpast.json").write_text("{")
    with pytest.raises(UserError, match=r"logpast\.json cannot be used"):
        load_attached(tmp_path, tiny())


def _wider() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=97))


def test_too_many_positions_for_the_model_are_an_error() -> None:
    with pytest.raises(UserError, match="window of at most 54"):
        attach_memory(tiny("gpt2"), window=60, slots=9)


def test_a_sliding_window_of_the_model_that_is_too_short_is_an_error() -> None:
    """Of all its layers: others see the whole sequence."""
    with pytest.raises(UserError, match="last 32 only; use a window of at most 22"):
        attach_memory(tiny("mistral"), window=23, slots=9)
    attach_memory(tiny("mistral"), window=22, slots=9)
    attach_memory(tiny("gemma2"), window=23, slots=9)


def test_models_that_are_no_causal_decoders_are_refused() -> None:
    import transformers

    with pytest.raises(UserError, match="Linear is not a causal language model"):
        attach_memory(torch.nn.Linear(3, 3))
    with pytest.raises(UserError, match="LlamaModel is not a causal language model"):
        attach_memory(tiny().model)
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config.bos_token_id = 1
    with pytest.raises(UserError, match="BertForMaskedLM"):
        attach_memory(transformers.BertForMaskedLM(config).eval(), recall=10)


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'logpast\[hf\]'"):
        require("transformers")


def test_memories_stay_in_full_precision_on_a_half_precision_model() -> None:
    attached = attach_memory(tiny().to(torch.bfloat16), window=10, slots=9, recall=50)
    assert attached.recall.weight.dtype == attached.scale.dtype == torch.float32
    full = attach_memory(tiny(), window=10, slots=9, recall=50)
    assert np.abs(losses(attached, text()) - losses(full, text())).mean() < 0.1


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stories15m(tmp_path_factory.mktemp("stories15m"))


def test_stories15m_writes_english_and_slots_cost_it_at_most_one_percent(stories: Path) -> None:
    """The same text with as many plain tokens; slots that hold the memory alone cost more than 10 %."""
    model, tokenizer = load_model(stories), load_model_tokenizer(stories)
    torch.manual_seed(0)
    start = torch.tensor([[1, *tokenizer.encode("Once upon a time, there was").tolist()]])
    ids = model.generate(start, max_new_tokens=200, do_sample=False)[0, 1:]
    story = tokenizer.decode(ids.tolist())
    assert "a little girl named Lily. She loved to play outside" in story
    attached = attach_memory(model, window=64, slots=33, recall=0)
    window, targets = ids[120:184][None], ids[121:185][None]
    with torch.no_grad():
        found = attached(ids[:120][None], window, targets).mean()
        plain = torch.cat([torch.tensor([1]), ids[87:184]])[None]
        logits = model(input_ids=plain).logits[0, -64:]
        expected = torch.nn.functional.cross_entropy(logits, targets[0])
        blurred = torch.cat([_blurred(attached, ids[:120][None]), embed(attached.table.weight, window)], dim=1)
        other = attached.own_nats(attached.hidden(blurred, skip=34), targets).mean()
    assert math.exp(found - expected) < 1.01
    assert math.exp(other - expected) > 1.1


def _blurred(attached: Attached, history: Tensor) -> Tensor:
    """The sink, and slots that hold the memory alone."""
    memory = attached.memory.from_ids(history, attached.table.weight)
    return torch.cat([attached.embed(torch.tensor([[1]])), memory], dim=1)
