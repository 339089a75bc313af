"""Streams: probabilities equal those of scoring, across windows; saved states; sampling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import (
    CompressiveConfig,
    LanguageModel,
    LogMemoryConfig,
    ModelConfig,
    RecentConfig,
    RecurrentMemoryConfig,
    TimeLocalConfig,
    TransformerXLConfig,
    TransformerXLRecurrentMemoryConfig,
    build,
)
from logpast.models.sampling import Sampling, generators
from logpast.models.stream import Stream
from logpast.util.errors import UserError

SIZES = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 13}


SYSTEMS = [
    LogMemoryConfig(slots=13, sharpness=10, **SIZES),
    RecentConfig(slots=3, **SIZES),
    RecentConfig(slots=0, **SIZES),
    TransformerXLConfig(memory=6, **SIZES),
    RecurrentMemoryConfig(memory_tokens=2, **SIZES),
    TransformerXLRecurrentMemoryConfig(memory=4, memory_tokens=2, **SIZES),
    CompressiveConfig(memory=4, compressed=4, rate=2, **SIZES),
    TimeLocalConfig(slots=5, **SIZES),
]
SYSTEMS += [replace(config, recall=9, recall_orders=2, recall_bins=2) for config in SYSTEMS]
SYSTEMS += [RecentConfig(slots=3, recall=9, recall_input=False, **SIZES)]


def random_model(config: ModelConfig) -> LanguageModel:
    torch.manual_seed(0)
    model = build(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture(params=["cpu", "cuda"])
def recall_as_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recall's two ways to find matches: an index, or on a GPU comparisons. Both run here."""
    monkeypatch.setattr("logpast.models.stream.INDEXED_ON", "cpu" if request.param == "cpu" else "none")


@pytest.mark.usefixtures("recall_as_on")
@pytest.mark.parametrize("config", SYSTEMS)
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 9])
def test_probabilities_equal_those_of_scoring(config: ModelConfig, prompt: int) -> None:
    """Over several windows, each token of two texts in a batch gets the same probability as in scoring."""
    model = random_model(config)
    texts = np.random.default_rng(0).integers(0, 12, (2, 23)).tolist()
    stores, form = [TokenStore.in_memory([text], 13, 12) for text in texts], config.recall_form
    expected = np.stack([score(model, store, 4, model.history, recall=form) for store in stores])
    stream, nats = Stream(model, 12, batch=2), []
    stream.push([text[: prompt - 1] for text in texts])
    for position in range(prompt - 1, 23):
        logits = stream.logits().double().log_softmax(1)
        nats.append([-float(row[text[position]]) for row, text in zip(logits, texts, strict=True)])
        stream.push([[text[position]] for text in texts])
    np.testing.assert_allclose(np.transpose(nats), expected[:, prompt - 1 :], rtol=1e-5)


@pytest.mark.usefixtures("recall_as_on")
@pytest.mark.parametrize("recall_input", [True, False])
@pytest.mark.parametrize("system", [RecentConfig, TransformerXLConfig])
def test_many_short_pushes_between_predictions(system: type[ModelConfig], recall_input: bool) -> None:
    """Also where old tokens are dropped between two predictions."""
    model = random_model(system(recall=1024, recall_orders=2, recall_input=recall_input, **SIZES))
    text = np.random.default_rng(0).integers(0, 12, 1200)
    stream, whole = Stream(model, 12), Stream(model, 12)
    stream.push(text[:1100])
    for position in range(1100, 1200):
        if position in (1120, 1150, 1180):
            stream.logits()
        stream.push(text[position : position + 1])
    whole.push(text)
    torch.testing.assert_close(stream.logits(), whole.logits(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("recall_as_on")
@pytest.mark.parametrize("system", [RecentConfig, TransformerXLConfig])
def test_own_words_are_read_but_copied_only_if_that_is_wanted(system: type[ModelConfig]) -> None:
    model = random_model(system(recall=30, recall_orders=2, **SIZES))
    model.recall.bias.data[1:] += 60  # copies are all of a prediction
    copied = {}
    for copy_own in (True, False):
        model.recall.copy_own = copy_own
        stream = Stream(model, 0)
        stream.push([1, 2, 3, 4, 5])
        for allowed in (7, 8, 7):
            stream.step(generators(0, 1), Sampling(allowed=torch.arange(SIZES["vocabulary"]) == allowed))
        later = Stream.from_state(model, stream.state())
        torch.testing.assert_close(later.logits(), stream.logits(), rtol=1e-9, atol=1e-9)
        assert stream.tokens(0, stream.length).tolist() == [[0, 1, 2, 3, 4, 5, 7, 8, 7]]
        copied[copy_own] = set(torch.nonzero(stream.logits()[0].exp() > 1e-9)[:, 0].tolist())
        stream.push([7])  # somebody else's word
        assert stream.logits()[0, 7].exp() > 1e-9
    assert copied == {True: {1, 2, 3, 4, 5, 7, 8}, False: {1, 2, 3, 4, 5}}


@pytest.mark.usefixtures("recall_as_on")
@pytest.mark.parametrize("config", SYSTEMS)
def test_a_stream_continues_from_its_saved_state(config: ModelConfig, tmp_path: Path) -> None:
    """At any length, also beyond what is kept; with the same predictions, now and later."""
    model, random = random_model(config), np.random.default_rng(0)
    stream = Stream(model, 12, batch=2)
    for added in (0, 3, 1, 4, 40, 1, 7):
        stream.push(random.integers(0, 12, (2, added)))
        stream.save(tmp_path / "state")
        saved = Stream.load(model, tmp_path / "state")
        for _ in range(3):
            torch.testing.assert_close(saved.logits(), stream.logits(), rtol=1e-5, atol=1e-5)
            for each in (saved, stream):
                each.push([[1], [2]])


@pytest.mark.usefixtures("recall_as_on")
@pytest.mark.parametrize("config", SYSTEMS)
def test_texts_of_a_stream_can_be_exchanged(config: ModelConfig) -> None:
    model = random_model(config)
    texts = np.random.default_rng(0).integers(0, 12, (2, 14))
    stream, expected = Stream(model, 12, batch=2), Stream(model, 12, batch=3)
    stream.push(texts)
    stream.logits()
    stream = stream.select([1, 0, 1])
    expected.push(texts[[1, 0, 1]])
    for tokens in ([[3], [4], [5]], [[1], [1], [1]]):
        for each in (stream, expected):
            each.push(tokens)
        torch.testing.assert_close(stream.logits(), expected.logits(), rtol=1e-5, atol=1e-5)


def test_the_state_has_a_constant_size(tmp_path: Path) -> None:
    model = random_model(LogMemoryConfig(slots=13, sharpness=10, recall=30, **SIZES))
    stream, sizes = Stream(model, 12), []
    for _ in range(6):
        stream.push(np.random.default_rng(0).integers(0, 12, 500))
        stream.logits()
        stream.save(tmp_path / "state")
        sizes.append(((tmp_path / "state").stat().st_size, stream._buffer.nbytes))
    assert len(set(sizes[1:])) == 1


def test_a_file_that_is_no_state_is_named(tmp_path: Path) -> None:
    model = random_model(RecentConfig(slots=3, **SIZES))
    (tmp_path / "other").write_text("text")
    for name in ("other", "missing"):
        with pytest.raises(UserError, match=name):
            Stream.load(model, tmp_path / name)


def test_a_state_of_another_model_is_refused_but_not_one_in_another_precision(tmp_path: Path) -> None:
    config = RecentConfig(slots=3, **SIZES)
    model = random_model(config)
    model.stream(12).save(tmp_path / "state")
    Stream.load(random_model(config).float(), tmp_path / "state")
    Stream.load(random_model(config).bfloat16(), tmp_path / "state")
    other = random_model(config)
    torch.nn.init.normal_(other.table.weight)
    for wrong in (other, random_model(replace(config, window=5)), random_model(replace(config, recall=9))):
        with pytest.raises(UserError, match=r"state: .*another model"):
            Stream.load(wrong, tmp_path / "state")


def test_a_recurrent_model_reads_each_segment_of_a_conversation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(TransformerXLConfig(memory=6, **SIZES))
    lengths, segment = [], model.segment

    def counted(tokens: torch.Tensor, *others: Any) -> Any:
        lengths.append(tokens.shape[1])
        return segment(tokens, *others)

    monkeypatch.setattr(model, "segment", counted)
    stream = Stream(model, 12)
    stream.push(list(range(11)))
    stream.logits()
    assert lengths == [4, 4, 4]
    stream.push([1, 2])
    stream.logits()
    assert lengths[3:] == [4, 2]


def test_padding_and_end_of_text_are_never_sampled() -> None:
    torch.manual_seed(0)
    model = build(RecentConfig(slots=0, window=4, layers=1, heads=1, width=8, vocabulary=64))
    allowed = torch.ones(10, dtype=torch.bool)
    allowed[9] = False
    tokens = Stream(model, 9).sample(generators(0, 1), Sampling(5.0, allowed=allowed))
    assert max(next(tokens)[0] for _ in range(300)) == 8
    assert max(Stream(model, 9).generate(300, temperature=5.0, allowed=allowed.numpy())[0]) == 8


def test_first_id_that_is_pushed_again_is_not_doubled() -> None:
    """Hugging Face's tokenizers add it. Later in a text it is a token like any other."""
    model, text = random_model(LogMemoryConfig(slots=13, sharpness=10, **SIZES)), [[12, 3, 12, 5], [12, 4, 12, 6]]
    stream, expected = model.stream(12, batch=2), model.stream(12, batch=2)
    stream.push(torch.tensor(text))
    expected.append([row[1:] for row in text])
    assert (stream.length, expected.length) == (4, 4)
    assert torch.equal(stream.logits(), expected.logits())
    assert Stream(model, [12, 11]).batch == 2
    with pytest.raises(UserError, match="needs first"):
        model.stream()


@pytest.mark.parametrize("ids", [[1, 10**6], [-1], [2**32]])
def test_ids_beyond_the_vocabulary_are_refused_and_change_nothing(ids: list[int]) -> None:
    stream = random_model(RecentConfig(slots=3, **SIZES)).stream(0)
    with pytest.raises(UserError, match=f"got .*{max(ids)}"):
        stream.push(ids)
    assert stream.length == 1


@pytest.mark.parametrize("ids", [[0.5], "a text", [[1], [2], [3]], [[[1]]]], ids=str)
def test_what_are_no_ids_of_these_texts_is_refused(ids: Any) -> None:
    stream = Stream(random_model(SYSTEMS[0]), 12, batch=2)
    with pytest.raises(UserError, match=r"whole numbers|must be \(T,\)"):
        stream.push(ids)
    assert stream.length == 1


def test_predictions_of_nan_are_an_error() -> None:
    model = build(RecentConfig(slots=0, window=4, layers=1, heads=1, width=8, vocabulary=64))
    torch.nn.init.constant_(model.table.weight, float("nan"))
    with pytest.raises(UserError, match="diverged"):
        Stream(model, 9).generate(1)


DAMAGED_STATES: dict[str, tuple[dict[str, Tensor], str]] = {
    "an id beyond the vocabulary": ({"ids": torch.full((1, 1), 10_000, dtype=torch.int32)}, "10000, .*vocabulary"),
    "a negative id": ({"ids": torch.full((1, 1), -1, dtype=torch.int32)}, "-1, .*vocabulary"),
    "too few ids": ({"lengths": torch.tensor([5, 0])}, "ids"),
    "no text": ({"ids": torch.zeros((0, 1), dtype=torch.int32)}, "ids"),
    "ids that are no integers": ({"ids": torch.zeros(1, 1)}, "ids"),
    "impossible lengths": ({"lengths": torch.tensor([1, 2])}, "lengths"),
    "an empty text": ({"lengths": torch.tensor([0, 0]), "ids": torch.zeros((1, 0), dtype=torch.int32)}, "lengths"),
    "a length that overflows": (
        {"lengths": torch.tensor([2**63 - 1, 0]), "ids": torch.zeros((1, 7), dtype=torch.int32)},
        "lengths",
    ),
    "a negative length": ({"lengths": torch.tensor([-3, -4])}, "lengths"),
    "a hash of another type": ({"model": torch.zeros(32)}, "another model"),
}


@pytest.mark.parametrize(("changes", "problem"), DAMAGED_STATES.values(), ids=DAMAGED_STATES)
def test_a_damaged_state_is_refused_in_words(changes: dict[str, Tensor], problem: str, tmp_path: Path) -> None:
    model = random_model(RecentConfig(slots=3, **SIZES))
    save_file(model.stream(12).state() | changes, tmp_path / "state")
    with pytest.raises(UserError, match=f"{tmp_path / 'state'}: .*{problem}"):
        Stream.load(model, tmp_path / "state")


def test_a_changed_id_in_a_saved_state_is_noticed(tmp_path: Path) -> None:
    model = random_model(RecentConfig(slots=3, **SIZES))
    stream, file = model.stream(12), tmp_path / "state"
    stream.push([7, 7, 7])
    stream.save(file)
    before = torch.tensor([7, 7, 7], dtype=torch.int32).numpy().tobytes()
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, torch.tensor([7, 5, 7], dtype=torch.int32).numpy().tobytes()))
    with pytest.raises(UserError, match=f"{file}: it has changed"):
        Stream.load(model, file)


def test_logits_may_be_changed_by_the_caller() -> None:
    stream = Stream(random_model(SYSTEMS[0]), 12)
    stream.push([1, 2, 3])
    stream.logits()[:, 5] = -torch.inf


@pytest.mark.parametrize("config", SYSTEMS[3:8])
def test_a_state_continues_in_another_precision(config: ModelConfig) -> None:
    model = random_model(config)
    state = model.stream(12).state()
    floats = {name: value.float() if value.dtype == torch.float64 else value for name, value in state.items()}
    stream = Stream.from_state(model, floats)
    stream.push([1, 2, 3])
    assert stream.logits().dtype == model.table.weight.dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_a_carried_state_of_another_type_or_with_nan_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(TransformerXLConfig(memory=6, **SIZES))
    state = model.stream(12).state()
    save_file(state | {"state.memory": state["state.memory"].to(dtype)}, tmp_path / "state")
    with pytest.raises(UserError, match=rf"state\.memory has the type {dtype}"):
        Stream.load(model, tmp_path / "state")
    save_file(state | {"state.memory": state["state.memory"] / 0}, tmp_path / "state")
    with pytest.raises(UserError, match=r"state\.memory has NaN"):
        Stream.load(model, tmp_path / "state")
    save_file(state | {"state.memory": state["state.memory"].float()}, tmp_path / "state")
    Stream.load(model, tmp_path / "state")  # of the same model in another precision
