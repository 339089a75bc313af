"""Generation: probabilities equal those of scoring, across windows; sampling; the printed text; errors."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.generation import _sample, continuations, generate, next_logits
from logpast.models import (
    CompressiveConfig,
    LogMemoryConfig,
    RecentConfig,
    RecurrentMemoryConfig,
    TimeLocalConfig,
    TransformerXLConfig,
    TransformerXLRecurrentMemoryConfig,
    build,
)
from logpast.training.config import TrainConfig
from logpast.training.loop import train
from logpast.util.errors import UserError

SIZES = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 13}


@pytest.mark.parametrize(
    "config",
    [
        LogMemoryConfig(slots=13, sharpness=10, **SIZES),
        RecentConfig(slots=3, **SIZES),
        RecentConfig(slots=0, **SIZES),
        TransformerXLConfig(memory=6, **SIZES),
        RecurrentMemoryConfig(memory_tokens=2, **SIZES),
        TransformerXLRecurrentMemoryConfig(memory=4, memory_tokens=2, **SIZES),
        CompressiveConfig(memory=4, compressed=4, rate=2, **SIZES),
        TimeLocalConfig(slots=5, **SIZES),
    ],
)
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 9])
def test_probabilities_equal_those_of_scoring(config: LogMemoryConfig, prompt: int) -> None:
    """Over several windows, each token of a text gets the same probability as in scoring."""
    torch.manual_seed(0)
    model = build(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    text = np.random.default_rng(0).integers(0, 12, 23).tolist()
    expected = score(model, TokenStore.in_memory([text], 13, 12), 4, model.history)
    stream, nats = [12, *text[: prompt - 1]], []
    for logits in next_logits(model, stream):
        token = text[len(stream) - 1]
        nats.append(-float(logits.double().log_softmax(0)[token]))
        stream.append(token)
        if len(stream) > len(text):
            break
    np.testing.assert_allclose(nats, expected[prompt - 1 :], rtol=1e-5)


def test_sampling() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    random = torch.Generator().manual_seed(0)

    def sampled(**how: float) -> list[int]:
        settings = {"temperature": 1.0, "top_k": None, "top_p": None} | how
        return [_sample(logits, **settings, random=random) for _ in range(2000)]  # type: ignore[arg-type]

    assert set(sampled(temperature=0)) == {0}
    assert set(sampled(top_k=2)) == {0, 1}
    assert set(sampled(top_p=0.01)) == {0}
    assert set(sampled(top_p=0.7)) == {0, 1}  # the first has only 0.64
    shares = np.bincount(sampled(), minlength=4) / 2000
    np.testing.assert_allclose(shares, logits.softmax(0), atol=0.04)
    cold = np.bincount(sampled(temperature=0.5), minlength=4) / 2000
    np.testing.assert_allclose(cold, (2 * logits).softmax(0), atol=0.04)


def test_padding_and_end_of_text_are_never_sampled() -> None:
    torch.manual_seed(0)
    model = build(RecentConfig(slots=0, window=4, layers=1, heads=1, width=8, vocabulary=64))
    allowed = torch.ones(10, dtype=torch.bool)
    allowed[9] = False
    tokens = continuations(model, [9], allowed, temperature=5.0)
    assert max(next(tokens) for _ in range(300)) == 8


def test_predictions_of_nan_are_an_error() -> None:
    model = build(RecentConfig(slots=0, window=4, layers=1, heads=1, width=8, vocabulary=64))
    torch.nn.init.constant_(model.table.weight, float("nan"))
    with pytest.raises(UserError, match="diverged"):
        next(continuations(model, [9], torch.ones(10, dtype=torch.bool)))


def test_generate_prints_and_returns_the_text(
    train_config: TrainConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(train_config, steps=20)
    train(config)
    capsys.readouterr()
    text = generate(config.run, prompt="And God", tokens=40, seed=3)
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith("And God")
    assert len(text) > 40
    assert generate(config.run, prompt="And God", tokens=40, seed=3) == text
    assert generate(config.run, prompt="And God", tokens=40, seed=4) != text
    likeliest = [generate(config.run, prompt="And", tokens=12, seed=seed, top_k=1) for seed in (0, 1)]
    assert likeliest[0] == likeliest[1] == generate(config.run, prompt="And", tokens=12, seed=2, top_p=1e-9)
    greedy = [generate(config.run, prompt="And", tokens=12, temperature=0, seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    (tmp_path / "prompt.txt").write_text("And God")
    assert generate(config.run, prompt_file=tmp_path / "prompt.txt", tokens=40, seed=3) == text
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfAnd\r\nGod\r")  # read as training text is
    assert generate(config.run, prompt_file=tmp_path / "prompt.txt", tokens=1).startswith("And\nGod\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfAnd\r\n"), newline=""))
    assert generate(config.run, prompt_file=Path("-"), tokens=1).startswith("And\n")
    assert generate(config.run, tokens=5)  # without a prompt


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"seed": -1},
    ],
)
def test_illegal_options_are_named(wrong: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        generate(tmp_path, **wrong)  # type: ignore[arg-type]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        generate(tmp_path / "nowhere")
    with pytest.raises(UserError, match="prompt_file"):
        generate(tmp_path, prompt="a", prompt_file=tmp_path / "b")
    with pytest.raises(UserError, match=str(tmp_path / "b")):
        generate(tmp_path, prompt_file=tmp_path / "b")
    (tmp_path / "c").write_text("And", encoding="utf-16")
    with pytest.raises(UserError, match=r"c is not UTF-8 .*iconv -f utf-16"):
        generate(tmp_path, prompt_file=tmp_path / "c")
