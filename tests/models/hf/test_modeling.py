"""Our models in transformers: losses equal those of scoring, saving and loading, padding, training, generation."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments
from transformers.utils import logging

from logpast.data import TokenStore
from logpast.data.batching import Windows
from logpast.evaluation.scoring import score
from logpast.models import (
    CompressiveConfig,
    LogMemoryConfig,
    ModelConfig,
    RecentConfig,
    RecurrentMemoryConfig,
    TimeLocalConfig,
    TransformerXLConfig,
    TransformerXLRecurrentMemoryConfig,
)
from logpast.models.hf import LogPastConfig, LogPastForCausalLM
from logpast.models.hf.attach import attach_memory
from logpast.util.errors import UserError
from models.hf.tiny import VOCABULARY, tiny

logging.disable_progress_bar()
EOT = 12
SIZES: dict[str, Any] = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 13}
MEMORY = LogMemoryConfig(slots=13, sharpness=10, **SIZES)
XL = TransformerXLConfig(memory=6, **SIZES)
SYSTEMS = [
    MEMORY,
    RecentConfig(slots=3, **SIZES),
    RecentConfig(slots=0, **SIZES),
    XL,
    RecurrentMemoryConfig(memory_tokens=2, **SIZES),
    TransformerXLRecurrentMemoryConfig(memory=4, memory_tokens=2, **SIZES),
    CompressiveConfig(memory=4, compressed=4, rate=2, **SIZES),
    TimeLocalConfig(slots=5, **SIZES),
]
RECALL = {"recall": 9, "recall_orders": 2, "recall_bins": 2}
SYSTEMS += [replace(config, **RECALL) for config in SYSTEMS]
SYSTEMS += [RecentConfig(slots=3, recall=9, recall_input=False, **SIZES)]
SOME = [MEMORY, replace(MEMORY, **RECALL), XL, replace(XL, **RECALL)]


def random_model(config: ModelConfig, **others: Any) -> LogPastForCausalLM:
    torch.manual_seed(0)
    model = LogPastForCausalLM(LogPastConfig(model=config, bos_token_id=EOT, pad_token_id=EOT, **others)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def texts(*lengths: int) -> list[Tensor]:
    """Each starts with end-of-text."""
    random = np.random.default_rng(0)
    return [torch.tensor([EOT, *random.integers(0, 12, length - 1)]) for length in lengths]


def padded(rows: list[Tensor], before: int = 0, after: int = 0) -> dict[str, Tensor]:
    """The rows in one batch, with padding before them, and more of it around all."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), before + longest + after), EOT)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(before + longest - len(row), before + longest)
        ids[number, place], mask[number, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("config", SYSTEMS)
def test_losses_equal_those_of_scoring_over_several_windows(config: ModelConfig) -> None:
    model, (text,) = random_model(config), texts(24)
    store = TokenStore.in_memory([text[1:].tolist()], 13, EOT)
    expected = score(model.core, store, 4, model.core.history, recall=config.recall_form)
    with torch.no_grad():
        output = model(text[None], labels=text[None])
    losses = -output.logits[0, :-1].log_softmax(-1).gather(1, text[1:, None]).squeeze(1)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert float(output.loss) == pytest.approx(expected.mean(), rel=1e-6)


@pytest.mark.parametrize("config", SYSTEMS)
@torch.no_grad()
def test_logits_with_a_cache_equal_those_without(config: ModelConfig) -> None:
    """In pieces of any length, for two texts at once."""
    model, ids = random_model(config), torch.stack(texts(24, 24))
    expected, cache, found, position = model(ids, use_cache=False).logits, None, [], 0
    for size in (3, 1, 1, 1, 9, 1, 4, 3, 1):
        output = model(ids[:, position : position + size], past_key_values=cache, use_cache=True)
        cache, position = output.past_key_values, position + size
        found.append(output.logits)
    assert cache.get_seq_length() == 24
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", SOME)
@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_padding_changes_nothing(config: ModelConfig, cached: bool) -> None:
    model, rows = random_model(config), texts(19, 6, 1)
    batch = padded(rows, before=2, after=3)
    logits = model(**batch, use_cache=cached).logits
    last = model(**batch, use_cache=cached, logits_to_keep=6).logits
    torch.testing.assert_close(last, logits[:, -6:])
    for number, row in enumerate(rows):
        alone = model(row[None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[number, 21 - len(row) : 21], alone, rtol=1e-6, atol=1e-6)
    losses = [float(model(row[None], labels=row[None]).loss) * (len(row) - 1) for row in rows[:2]]
    loss = model(**batch, labels=batch["input_ids"]).loss  # those of padding do not count
    assert float(loss) == pytest.approx(sum(losses) / 23, rel=1e-6)


def test_positions_to_keep_may_be_a_tensor() -> None:
    model, (text,) = random_model(MEMORY), texts(9)
    found = model(text[None], logits_to_keep=torch.tensor([1, 7])).logits
    assert torch.equal(found, model(text[None]).logits[:, [1, 7]])


@pytest.mark.parametrize("config", SYSTEMS[:8] + SYSTEMS[8:9])
def test_saved_model_is_loaded_to_the_bit(config: ModelConfig, tmp_path: Path) -> None:
    model, (text,) = random_model(config).float(), texts(15)
    expected = model(text[None], use_cache=False).logits
    model.save_pretrained(tmp_path)
    for how in ({}, {"device_map": "cpu"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **how)
        assert type(loaded) is LogPastForCausalLM
        assert torch.equal(loaded(text[None], use_cache=False).logits, expected)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.core.table.weight.dtype == torch.bfloat16
    assert torch.equal(half(text[None]).logits, copy.deepcopy(model).bfloat16()(text[None]).logits)


def test_weights_that_a_saved_model_lacks_get_their_initial_values(tmp_path: Path) -> None:
    random_model(MEMORY).save_pretrained(tmp_path)
    config = LogPastConfig(model=replace(MEMORY, **RECALL), bos_token_id=EOT)
    recall = LogPastForCausalLM.from_pretrained(tmp_path, config=config).core.recall
    fresh = LogPastForCausalLM(config).core.recall
    assert all(torch.equal(value, fresh.state_dict()[name].to(value)) for name, value in recall.state_dict().items())


def test_new_model_has_the_initial_weights_of_our_own() -> None:
    torch.manual_seed(3)
    core = LogPastForCausalLM(LogPastConfig(model=MEMORY)).core
    torch.manual_seed(3)
    own = type(core)(MEMORY).state_dict()
    assert all(torch.equal(value, own[name]) for name, value in core.state_dict().items())


@pytest.mark.parametrize("config", [MEMORY, replace(MEMORY, **RECALL)])
def test_gradients_equal_those_of_our_own_training(config: ModelConfig) -> None:
    model, (text,) = random_model(config).train(), texts(24)
    store = TokenStore.in_memory([text[1:].tolist()], 13, EOT)
    windows = Windows(store, 4, model.core.history, recall=config.recall_form)
    (model.core(*windows.batch(np.arange(len(windows))).inputs).sum() / 23).backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    model(text[None], labels=text[None]).loss.backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [SYSTEMS[number] for number in (3, 4, 6, 7, 8)])
def test_gradient_checkpointing_computes_again_and_changes_nothing(config: ModelConfig) -> None:
    model, rows = random_model(config).train(), texts(24, 9)
    calls, found = [], []
    model.core.blocks[0].register_forward_pre_hook(lambda *given: calls.append(1))
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        calls.clear()
        model.zero_grad()
        loss = model(**padded(rows), labels=padded(rows)["input_ids"]).loss
        forward = len(calls)
        loss.backward()
        assert len(calls) == forward * (1 + enabled)
        found.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-12)


def test_extra_loss_of_a_recurrent_model_is_trained() -> None:
    model, (text,) = random_model(CompressiveConfig(memory=4, compressed=4, rate=2, **SIZES)), texts(24)
    model.train()(text[None], labels=text[None]).loss.backward()
    assert model.core.compressions[0].kernel.weight.grad.abs().sum() > 0


@torch.no_grad()
def reference(model: LogPastForCausalLM, text: Tensor, number: int) -> list[int]:
    """The most likely tokens after a text, each from the whole text before it."""
    found = text
    for _ in range(number):
        found = torch.cat([found, model(found[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return found[len(text) :].tolist()


@pytest.mark.parametrize("config", SOME)
def test_greedy_generation_of_texts_with_padding_takes_the_most_likely_tokens(config: ModelConfig) -> None:
    model, rows = random_model(config), texts(10, 3, 10)
    found = model.generate(**padded(rows), max_new_tokens=6, do_sample=False)
    assert found[:, 10:].tolist() == [reference(model, row, 6) for row in rows]


@pytest.mark.parametrize("config", [SOME[1], SOME[2]])
@pytest.mark.parametrize(
    "how", [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}], ids=["beams", "sampling"]
)
def test_generation_with_a_cache_equals_that_without(config: ModelConfig, how: dict[str, Any]) -> None:
    model, batch = random_model(config), padded(texts(10, 6))
    found = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        found.append(model.generate(**batch, max_new_tokens=6, use_cache=use_cache, **how))
    assert torch.equal(*found)
    assert len(set(map(tuple, found[0].tolist()))) > 1


def test_each_new_token_costs_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a new window the computation of its slots."""
    model, lengths = random_model(MEMORY), []
    hidden = model.core.hidden

    def counted(x: Tensor, *others: Any, **more: Any) -> Tensor:
        lengths.append(x.shape[1])
        return hidden(x, *others, **more)

    monkeypatch.setattr(model.core, "hidden", counted)
    model.generate(**padded(texts(6)), max_new_tokens=8, do_sample=False)
    assert lengths == [13 + 2, 1, 1, 13 + 1, 1, 1, 1, 13 + 1]


@pytest.mark.parametrize("config", [SOME[1], SOME[2]])
def test_cache_of_a_prompt_serves_several_continuations(config: ModelConfig) -> None:
    """Also of a single token, which uses the cached keys and values."""
    model, (prompt, other) = random_model(config), texts(10, 5)
    with torch.no_grad():
        cache = model(prompt[None], use_cache=True).past_key_values
    for added in (other[:1], other):
        text = torch.cat([prompt, added])
        with torch.no_grad():
            logits = model(added[None], past_key_values=copy.deepcopy(cache)).logits
            torch.testing.assert_close(logits, model(text[None], use_cache=False).logits[:, 10:], rtol=1e-6, atol=1e-6)
        how = {"past_key_values": copy.deepcopy(cache), "max_new_tokens": 5, "do_sample": False}
        found = model.generate(**padded([text]), **how)
        assert found[0, len(text) :].tolist() == reference(model, text, 5)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("config", [SOME[1], SOME[2]])
@torch.no_grad()
def test_rows_of_a_cache_can_be_selected_and_repeated(config: ModelConfig) -> None:
    model, batch = random_model(config), padded(texts(10, 3, 10))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = model(**batch, use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor([2, 1, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    chosen, added = [2, 2, 1, 1], torch.tensor([[1], [2], [3], [4]])
    found = model(added, past_key_values=cache).logits[:, 0]
    whole = torch.cat([ids[chosen], added], dim=1), torch.cat([mask[chosen], torch.ones_like(added)], dim=1)
    expected = model(whole[0], attention_mask=whole[1], use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_trainer_trains_and_resumes(tmp_path: Path) -> None:
    data = Dataset.from_list([{"input_ids": text.tolist(), "labels": text.tolist()} for text in texts(*[14] * 8)])

    def trained(steps: int, resume: bool) -> tuple[LogPastForCausalLM, float]:
        how = {"use_cpu": True, "report_to": "none", "save_steps": 2, "per_device_train_batch_size": 4, "seed": 1}
        model = random_model(MEMORY).float()
        arguments = TrainingArguments(
            str(tmp_path / ("parts" if steps < 6 or resume else "whole")),
            max_steps=steps, learning_rate=0.01, lr_scheduler_type="constant", disable_tqdm=True, **how,
        )  # fmt: skip
        result = Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return model, result.training_loss

    whole, loss = trained(6, resume=False)
    assert loss < random_model(MEMORY)(torch.stack(texts(14)), labels=torch.stack(texts(14))).loss
    trained(4, resume=False)
    resumed, _ = trained(6, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def attached_model(family: str = "llama", **how: Any) -> LogPastForCausalLM:
    """A pretrained model with recall and slots; texts start with id 1."""
    core = attach_memory(tiny(family), window=5, slots=9, recall=30, recall_orders=2, recall_bins=2, **how)
    torch.manual_seed(1)
    with torch.no_grad():
        core.scale.fill_(0.5)
        core.recall.weight.normal_(std=0.2)
    return LogPastForCausalLM.from_core(core).eval()


def texts_from_one(*lengths: int) -> list[Tensor]:
    """Each starts with id 1."""
    random = np.random.default_rng(0)
    return [torch.tensor([1, *random.integers(3, 12, length - 1)]) for length in lengths]


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "llama"])
@torch.no_grad()
def test_pretrained_model_with_a_memory_predicts_what_scoring_predicts(family: str) -> None:
    """At once, in pieces with a cache, and with padding before the tokens."""
    model, (text, short) = attached_model(family, input=family == "llama"), texts_from_one(24, 8)
    store = TokenStore.in_memory([text[1:].tolist()], VOCABULARY, 1)
    expected = score(model.core, store, 5, model.core.history, recall=model.core.config.recall_form)
    output = model(text[None], labels=text[None])
    losses = -output.logits[0, :-1].log_softmax(-1).gather(1, text[1:, None]).squeeze(1)
    np.testing.assert_allclose(losses, expected, rtol=1e-3, atol=1e-4)
    assert float(output.loss) == pytest.approx(expected.mean(), rel=1e-4)
    cache, found, position = None, [], 0
    for size in (3, 1, 1, 9, 1, 6, 3):
        step = model(text[None, position : position + size], past_key_values=cache, use_cache=True)
        cache, position = step.past_key_values, position + size
        found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), output.logits, rtol=1e-3, atol=1e-3)
    batch = padded([text, short], before=2)
    alone = model(short[None]).logits[0]
    torch.testing.assert_close(model(**batch).logits[1, -8:], alone, rtol=1e-3, atol=1e-3)


def test_pretrained_model_with_a_memory_generates_with_a_cache() -> None:
    model, rows = attached_model(), texts_from_one(12, 7)
    model.generation_config.pad_token_id = 0
    found = model.generate(**padded(rows), max_new_tokens=8, do_sample=False)
    stopped = [reference(model, row, 8) for row in rows]
    assert found[:, 12:].tolist() == stopped
    stream = model.stream()
    stream.push(rows[0])  # with its first id, which is not doubled
    assert stream.generate(8, temperature=0)[0] == stopped[0]
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        samples.append(model.generate(**padded(rows), max_new_tokens=8, do_sample=True, top_k=0, use_cache=use_cache))
    assert torch.equal(*samples)
    beams = [model.generate(**padded(rows), max_new_tokens=6, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "llama"])
def test_pretrained_model_with_a_memory_is_loaded_to_the_bit(family: str, tmp_path: Path) -> None:
    """Also where embeddings and head are one table, as in all of them but this Llama."""
    model, (text,) = attached_model(family), texts_from_one(20)
    expected = model(text[None]).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LogPastForCausalLM
    assert loaded.core.config == model.core.config
    assert torch.equal(loaded(text[None]).logits, expected)
    tied = loaded.core.model.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (family != "llama")
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.core.table.weight.dtype == torch.bfloat16


def test_trainer_fits_the_memory_and_leaves_a_frozen_model_alone(tmp_path: Path) -> None:
    model, rows = attached_model(), texts_from_one(*[21] * 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows])
    batch = torch.stack(rows)
    loss = float(model(batch, labels=batch).loss.detach())
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, learning_rate=0.05, use_cpu=True, report_to="none", save_strategy="no",
        per_device_train_batch_size=4, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
    assert float(model.eval()(batch, labels=batch).loss.detach()) < loss - 0.1
    changed = {name.split(".")[1] for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"recall", "memory", "scale"}


def test_gradients_of_a_pretrained_model_with_a_memory_are_those_of_attaching() -> None:
    model, (text,) = attached_model(frozen=False).train(), texts_from_one(24)
    store = TokenStore.in_memory([text[1:].tolist()], VOCABULARY, 1)
    windows = Windows(store, 5, model.core.history, recall=model.core.config.recall_form)
    (model.core(*windows.batch(np.arange(len(windows))).inputs).sum() / 23).backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    model(text[None], labels=text[None]).loss.backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-3, atol=1e-5)


def test_model_with_adapters_is_refused() -> None:
    peft = pytest.importorskip("peft")
    core = attach_memory(tiny(), window=5, recall=30)
    core.model = peft.get_peft_model(core.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="merge_and_unload"):
        LogPastForCausalLM.from_core(core)


@torch.no_grad()
def test_generation_with_recall_uses_the_index_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a comparison with all tokens in reach, for each new one."""
    model = random_model(replace(MEMORY, **RECALL))

    def compared(*given: Any) -> None:
        raise AssertionError("log_probs")

    monkeypatch.setattr(type(model.core.recall), "log_probs", compared)
    assert model.generate(**padded(texts(9, 6)), max_new_tokens=4).shape == (2, 13)


def test_wrong_inputs_are_named() -> None:
    model = random_model(MEMORY)
    for empty in (
        {"input_ids": torch.zeros(1, 0, dtype=torch.int64)},
        padded(texts(3)) | {"attention_mask": torch.zeros(1, 3)},
    ):
        with pytest.raises(UserError, match="bos_token_id"):
            model(**empty)
    with pytest.raises(UserError, match="needs first"):
        LogPastForCausalLM(LogPastConfig(model=MEMORY)).stream()
    with pytest.raises(UserError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 8))
    with pytest.raises(UserError, match="DynamicCache"):
        model(texts(3)[0][None], past_key_values=DynamicCache())
