"""Our models in lm-eval: log-likelihoods as our scorer's, greedy or not, generation, and the example of the docs."""

import json
import math
import runpy
import shutil
import sys
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logpast.evaluation.evaluate import evaluate
from logpast.models import RecentConfig
from logpast.models.stream import Stream
from logpast.training.config import TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError
from markdown_pages import ROOT, code_blocks, commands
from models.hf.tiny import save_tiny

TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
lm_eval = pytest.importorskip("logpast.lm_eval")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled by the first test that needs it: `train_config` is a fixture of single tests."""
    return tmp_path_factory.mktemp("lm_eval") / "runs" / "mine"


@pytest.fixture
def model(run: Path, train_config: TrainConfig) -> Any:
    if not run.exists():
        sizes = RecentConfig(slots=3, window=8, layers=1, heads=2, width=16, recall=64)
        train(replace(train_config, run=run, model=sizes, steps=2, tensorboard=False))
    return lm_eval.LogPastLM(run, device="cpu")


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def most_likely(model: Any, text: str, count: int) -> list[int]:
    """The next tokens, by greedy decoding."""
    stream, found = Stream(model.model, model.eot_token_id), []
    stream.push(model.tok_encode(text))
    for _ in range(count):
        logits = stream.logits()[0].clone()
        logits[model.eot_token_id] = -torch.inf
        found.append(int(logits.argmax()))
        stream.push(found[-1:])
    return found


def test_log_likelihood_is_the_sum_over_tokens_one_at_a_time(model: Any) -> None:
    context, target = "Once upon a time there was a king. " * 3, "Once upon a time there was a queen"
    found = model.loglikelihood(requests((context, target), ("", target)))
    for (value, _), before in zip(found, (context, ""), strict=True):
        stream, expected = Stream(model.model, model.eot_token_id), 0.0
        known, whole = model.tok_encode(before.rstrip()), model.tok_encode(before + target)
        stream.push(known)
        for token in whole[len(known) :]:
            expected += float(stream.logits()[0].log_softmax(0)[token])
            stream.push([token])
        assert value == pytest.approx(expected, abs=1e-4)
    assert found[0][0] != pytest.approx(found[1][0], abs=1e-2)


def test_target_is_greedy_if_each_token_is_the_most_likely(model: Any) -> None:
    known = model.tok_encode("Once upon a time")
    best = most_likely(model, "Once upon a time", 3)
    other = [*best[:2], 1 + best[2] % (model.own_tokenizer.size - 1)]
    found = model._loglikelihood_tokens([(None, known, best), (None, [model.eot_token_id, *known], other)])
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_generation_is_greedy_and_ends_before_a_stop_text(model: Any) -> None:
    expected = model.own_tokenizer.decode(most_likely(model, "Once upon", 12))
    stop = expected[5:8]
    texts = model.generate_until(
        requests(("Once upon", {"max_gen_toks": 12}), ("Once upon", {"until": [stop], "max_gen_toks": 12}))
    )
    assert texts == [expected, expected[: expected.index(stop)]]
    sampled = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}
    assert model.generate_until(requests(("Once upon", sampled))) != [expected]


def test_command_of_the_docs_gives_the_bits_per_byte_of_our_scorer(
    model: Any,
    run: Path,
    tmp_path: Path,
    books: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "huggingface.md"
    (words,) = commands(page, "python")
    (task,) = code_blocks(page, "yaml")
    shutil.copytree(books, "mytext/test")
    Path("tasks").mkdir()
    Path("tasks/mytext.yaml").write_text(task)
    shutil.copytree(run, "runs/mine")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    index = partialmethod(TaskManager.__init__, include_defaults=False)  # thousands of tasks, which take seconds
    monkeypatch.setattr(TaskManager, "__init__", index)
    assert words[:2] == ["-m", "logpast.lm_eval"]
    monkeypatch.setattr(sys, "argv", ["lm-eval", *words[2:], "--device", "cpu"])
    lm_eval.main()
    assert "bits_per_byte" in capsys.readouterr().out
    (file,) = Path("scores").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["mytext"]["bits_per_byte,none"]
    ours = evaluate(checkpoint=run, data="mytext/test", streams="document", device="cpu")
    assert found == pytest.approx(ours["bits_per_byte"], rel=1e-8)


def test_attached_model_is_scored_with_its_memory(tmp_path: Path, books: Path) -> None:
    from logpast.models.hf.attach import attach_memory, load_model, save_model_tokenizer

    (tmp_path / "model").mkdir()
    text = (books / "0.txt").read_text()[:300]
    save_tiny(tmp_path / "model", [text])
    for name, recall in (("plain", 0), ("recall", 256)):
        attached = attach_memory(load_model(tmp_path / "model"), window=16, recall=recall)
        if recall:
            torch.nn.init.zeros_(attached.recall.bias)
        attached.save_pretrained(tmp_path / name)
        save_model_tokenizer(tmp_path / "model", tmp_path / name)
    plain, recall = (lm_eval.LogPastLM(tmp_path / name, device="cpu") for name in ("plain", "recall"))
    (before,), (after,) = (each.loglikelihood_rolling(requests((text * 2,))) for each in (plain, recall))
    assert after > before + 10
    (nats,) = plain.nats([plain.tok_encode("")])
    assert len(nats) == 0
    assert math.isfinite(before)
    assert isinstance(recall.generate_until(requests((text, {"max_gen_toks": 5})))[0], str)


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        lm_eval.LogPastLM(tmp_path / "nowhere")


@pytest.mark.parametrize(("run_name", "kind"), [("__main__", SystemExit), ("logpast.lm_eval", UserError)])
def test_missing_package_is_named(run_name: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "logpast.lm_eval")
    with pytest.raises(kind, match=r"logpast\[eval\]"):
        runpy.run_module("logpast.lm_eval", run_name=run_name)
