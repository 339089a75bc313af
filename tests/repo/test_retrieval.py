"""benchmarks/retrieval.py: where facts and names stand, how answers are scored, what recall finds by construction."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import retrieval

from logpast.data import TokenStore, open_tokens
from logpast.models.hf.attach import attach_memory, load_model, load_model_tokenizer
from models.hf.tiny import save_tiny

pytest.importorskip("transformers")

STORY = "He saw Anna in the house. The king went out, and the king came home. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has the words of the tasks, and texts."""
    folder = tmp_path_factory.mktemp("retrieval")
    (folder / "texts").mkdir()
    quiet = "the rain fell on the grey road and nobody came by. " * 60
    (folder / "texts" / "0.txt").write_text(STORY + quiet + "Then he met Anna again and again. " + quiet)
    (folder / "model").mkdir()
    sentences = [each for sentence, asked in retrieval.FACTS.values() for each in (sentence, *asked.values())]
    return save_tiny(folder / "model", [STORY + quiet, " saw Anna" * 99, " met Anna" * 99, *sentences * 3]).parent


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_model_tokenizer(folder / "model")


@pytest.fixture(scope="module")
def store(folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return open_tokens(str(folder / "texts"), tokenizer, tmp_path_factory.mktemp("cache"))


def decoded(tokenizer: Any, question: retrieval.Question) -> tuple[str, str]:
    return tokenizer.decode(question.tokens), tokenizer.decode(question.answer)


@pytest.mark.parametrize("task", retrieval.FACTS)
def test_fact_is_told_once_at_the_distance_and_is_the_same_in_both_wordings(
    task: str, store: TokenStore, tokenizer: Any
) -> None:
    found = {}
    for wording in ("exact", "paraphrased"):
        question = retrieval.told(task, wording, 600, store, tokenizer, np.random.default_rng(0))
        text, answer = decoded(tokenizer, question)
        assert text.count(answer.strip()) == 1
        rest = tokenizer.encode(text[text.index(answer.strip()) :])
        assert 560 < len(rest) < 600
        found[wording] = text.split("\n")[-1], answer
    assert found["exact"][1] == found["paraphrased"][1]
    assert found["exact"][0] in text
    assert text.count(found["paraphrased"][0]) == 1


def test_white_space_before_an_answer_is_given(tokenizer: Any) -> None:
    question, answer = retrieval.split(tokenizer, "The pass key is", " 71423")
    assert (tokenizer.decode(question), tokenizer.decode(answer)) == ("The pass key is ", "71423")
    assert tokenizer.decode(retrieval.split(tokenizer, "He met", " Anna")[1]) == " Anna"


def test_names_are_mentioned_that_far_back_and_never_in_lower_case(store: TokenStore, tokenizer: Any) -> None:
    ids = store.tokens.astype(int).tolist()
    text = tokenizer.decode(ids)
    far = len(tokenizer.encode(text[text.index(" Anna in", 300) : text.index(" Anna again")]))
    question, *more = retrieval.mentions(store, tokenizer, far + 20)
    before, name = decoded(tokenizer, question)
    assert not more
    assert name == " Anna"
    assert before.endswith("Then he met")
    assert " Anna" in before
    assert len(question.tokens) == far + 20
    assert not list(retrieval.mentions(store, tokenizer, far - 20))


def test_scores_of_an_answer_are_those_of_the_models_logits(folder: Path, tokenizer: Any) -> None:
    model = load_model(folder / "model")
    attached = attach_memory(model, 200, recall=0, sink=False)
    tokens = tokenizer.encode(STORY)[:40].astype(np.int64)
    first = int(attached.config.first_token or 0)

    def logits(*more: int) -> torch.Tensor:
        ids = torch.tensor([[first, *tokens.tolist(), *more]])
        with torch.no_grad():
            return model(input_ids=ids).logits[0, -1].log_softmax(0)

    best = int(logits().argmax())
    second = int(logits(best).argsort(descending=True)[1])
    found = retrieval.answer_scores(attached, retrieval.Question(tokens, [best, second]))
    assert found[0] == pytest.approx(float(logits()[best] + logits(best)[second]), abs=1e-4)
    assert found[1:] == (1, False)
    assert retrieval.answer_scores(attached, retrieval.Question(tokens, [second]))[1] > 1
    assert retrieval.answer_scores(attached, retrieval.Question(tokens, [best]))[2]


def test_unfitted_recall_finds_exact_wording_only(folder: Path, store: TokenStore, tokenizer: Any) -> None:
    attached = attach_memory(load_model(folder / "model"), 16, recall=2000)
    for wording, right in (("exact", True), ("paraphrased", False)):
        question = retrieval.told("passkey", wording, 1000, store, tokenizer, np.random.default_rng(1))
        assert retrieval.answer_scores(attached, question)[2] == right


def test_report_has_each_system_and_length_and_is_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGPAST_CACHE", str(tmp_path / "cache"))
    words = f"x --model {folder / 'model'} --filler {folder / 'texts'} --train {folder / 'texts'} --device cpu"
    words += f" --out {tmp_path / 'out.json'} --trials 1 --train_tokens 64 --steps 1 --window 16 --slots 5 --reach 4000"
    small = [*words.split(), "--lengths", "200", "--tasks", "passkey"]
    monkeypatch.setattr(sys, "argv", [*small, "--systems", "window"])
    retrieval.main()
    first = json.loads((tmp_path / "out.json").read_text())["rows"]
    monkeypatch.setattr(sys, "argv", [*small[:-4], "--lengths", "200", "1100", "--tasks", "passkey", "names",
                                      "--systems", "window", "full", "both"])  # fmt: skip
    retrieval.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows[:2] == first
    found = {(row["system"], row["task"], row["length"]) for row in rows}
    systems = ("window", "both")
    tasks = {(system, "passkey", length) for system in systems for length in (200, 1100)}
    assert found - {(system, "names", 1100) for system in systems} == tasks | {("full", "passkey", 200)}
    assert all(0 < row["probability"] < 1 and row["rank"] >= 1 and row["trials"] for row in rows)
