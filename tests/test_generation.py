"""Generation: the printed text; interactive sessions; errors."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from logpast.data import TokenStore
from logpast.generation import decode, generate, until_stop
from logpast.models import LogMemoryConfig
from logpast.models.stream import Stream
from logpast.recall import OWN
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from logpast.util import progress
from logpast.util.errors import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    """A run whose model has learned some words."""
    config = TrainConfig(
        run=tmp_path_factory.mktemp("trained") / "run",
        data=DataConfig(train=str(store.path)),
        model=LogMemoryConfig(slots=17, sharpness=20, window=8, layers=2, heads=2, width=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        steps=60,
        batch_size=16,
        accelerator="cpu",
        tensorboard=False,
    )
    train(config)
    return config.run


def test_generate_prints_and_returns_the_text(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    text = generate(trained, prompt="And God", tokens=40, seed=3)
    assert isinstance(text, str)
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith("And God")
    assert len(text) > 40
    assert generate(trained, prompt="And God", tokens=40, seed=3) == text
    assert generate(trained, prompt="And God", tokens=40, seed=4) != text
    likeliest = [generate(trained, prompt="And", tokens=12, seed=seed, top_k=1) for seed in (0, 1)]
    assert likeliest[0] == likeliest[1] == generate(trained, prompt="And", tokens=12, seed=2, top_p=1e-9)
    greedy = [generate(trained, prompt="And", tokens=12, temperature=0, seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1]
    (tmp_path / "prompt.txt").write_text("And God")
    assert generate(trained, prompt_file=tmp_path / "prompt.txt", tokens=40, seed=3) == text
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfAnd\r\nGod\r")  # read as training text is
    assert str(generate(trained, prompt_file=tmp_path / "prompt.txt", tokens=1)).startswith("And\nGod\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfAnd\r\n"), newline=""))
    assert str(generate(trained, prompt_file=Path("-"), tokens=1)).startswith("And\n")
    assert generate(trained, tokens=5)  # without a prompt


def test_without_echo_the_prompt_is_neither_printed_nor_returned(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = generate(trained, prompt="And God", tokens=20)
    capsys.readouterr()
    assert f"And God{generate(trained, prompt='And God', tokens=20, echo=False)}" == text
    assert "And God" + capsys.readouterr().out == f"{text}\n"


def test_tokens_before_the_history_change_nothing(trained: Path) -> None:
    rest = " And God said." * 20
    texts = [generate(trained, prompt=first + rest, tokens=20, echo=False) for first in "xy"]
    assert texts[0] == texts[1]
    texts = [generate(trained, prompt=first + rest[:14], tokens=20, echo=False) for first in "xy"]
    assert texts[0] != texts[1]


def test_samples_are_those_of_consecutive_seeds(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = [generate(trained, prompt="And", tokens=30, seed=seed) for seed in (5, 6, 7)]
    assert len(set(single)) == 3
    capsys.readouterr()
    assert generate(trained, prompt="And", tokens=30, seed=5, samples=3) == single
    assert capsys.readouterr().out == "".join(
        f"--- sample {number} of 3 ---\n{text}\n" for number, text in enumerate(single, 1)
    )
    assert generate(trained, prompt="And", tokens=30, seed=5, samples=1) == single[:1]


def test_samples_stop_on_their_own(trained: Path) -> None:
    whole = generate(trained, prompt="And", tokens=60, samples=4, echo=False)
    stopped = generate(trained, prompt="And", tokens=60, samples=4, echo=False, stop=["the"])
    assert stopped == [text.partition("the")[0] for text in whole]
    assert len(set(map(len, stopped))) > 1


@given(
    st.lists(st.text("abé😀", max_size=4), max_size=12), st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3)
)
def test_text_ends_before_the_first_stop_text_however_tokens_split_it(pieces: list[str], stop: list[str]) -> None:
    """Each byte may be a token of its own, and a token may go on after the stop text."""
    whole = "".join(pieces)
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stop))]
    first = whole[: ends[0]] if ends else whole
    expected = first[: min((first.rindex(s) for s in stop if first.endswith(s)), default=len(first))]
    assert "".join(until_stop(pieces, stop)) == expected
    split = decode(whole.encode(), SimpleNamespace(decode_bytes=bytes))  # type: ignore[arg-type]
    assert "".join(until_stop(split, stop)) == expected


def test_text_is_held_back_only_while_it_may_be_a_stop_text() -> None:
    pieces, read = ["a <", "e", "nd", "<end", "x<en", "d>", "z"], []
    shown = until_stop((read.append(piece) or piece for piece in pieces), ["<end>", "§"])
    assert [(text, len(read)) for text in shown if text] == [("a ", 1), ("<end", 4), ("<endx", 5)]
    assert len(read) == 6  # nothing is generated after the stop text


def test_a_stop_text_ends_generation(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(generate(trained, prompt="And", tokens=60))
    stop = text[20:26]
    capsys.readouterr()
    assert generate(trained, prompt="And", tokens=60, stop=["not there", stop]) == text[: text.index(stop)]
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


def converse(trained: Path, lines: bytes, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """The text at the end of an interactive session."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    return str(generate(trained, interactive=True, tokens=12, **options))


def test_an_interactive_session_remembers_lines_and_printed_answers(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty line adds nothing. What follows a stop text, and the stop text itself, are not remembered."""
    stop = ["\n", "e", "�"]
    single = generate(trained, prompt="And God", tokens=12, echo=False, stop=stop)
    capsys.readouterr()
    text = converse(trained, "said, ü😀\n\nIn the\n".encode(), monkeypatch, prompt="And God", stop=stop)
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 4
    assert answers[0] == single
    assert any(answers[1:])
    assert text == f"And God{answers[0]}\nsaid, ü😀{answers[1]}{answers[2]}\nIn the{answers[3]}"


def test_a_session_remembers_which_words_are_the_models(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    converse(trained, b"And God\nIn the\n", monkeypatch, save_state=tmp_path / "state")
    ids = load_file(tmp_path / "state")["ids"][0]
    own = find_checkpoint(trained).load_tokenizer().decode((ids[ids >= OWN] - OWN).tolist())
    assert ids[0] >= OWN  # of the first answer
    assert "".join(capsys.readouterr().out.split("\n")).endswith("".join(own.split("\n")))


def test_reset_forgets_the_text_so_far(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = converse(trained, b"And God\n/rest\n/reset\nIn the\n", monkeypatch, temperature=0)
    assert text == generate(trained, prompt="In the", tokens=12, temperature=0)
    assert "unknown command /rest; /reset" in capsys.readouterr().err


def test_ctrl_c_ends_only_the_current_answer(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was printed of it is remembered."""
    calls, logits = [], Stream.logits

    def interrupted(stream: Stream) -> torch.Tensor:
        calls.append(stream)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return logits(stream)

    monkeypatch.setattr(Stream, "logits", interrupted)
    text = converse(trained, b"And God\nIn the\n", monkeypatch, stop=["�"])
    first, second = text.removeprefix("And God").split("\nIn the")
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert second
    assert len(calls) > 5


def follow(trained: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    return str(generate(trained, follow=Path("-"), tokens=12, **options))


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_a_text_that_is_followed_is_continued_like_a_prompt_however_it_is_read(
    block: int, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In pieces that do not change the tokens; what is followed is not printed, the prompt after it is."""
    monkeypatch.setattr("logpast.generation.BLOCK", block)
    text = "And God  said,\n\nLet thère be light 😀 " * 20 + "and"
    (tmp_path / "book.txt").write_text(text)
    expected = generate(trained, prompt=text, tokens=12, echo=False)
    capsys.readouterr()
    assert generate(trained, follow=tmp_path / "book.txt", tokens=12) == expected
    assert capsys.readouterr().out == f"{expected}\n"
    assert follow(trained, text.encode(), monkeypatch) == expected
    cut = text.rindex(" and")
    assert follow(trained, text[:cut].encode(), monkeypatch, prompt=" and") == f" and{expected}"
    samples = generate(trained, follow=tmp_path / "book.txt", tokens=12, samples=2)
    assert samples[0] == expected != samples[1]


def test_an_interactive_session_comes_after_the_text_that_is_followed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after /reset, which forgets the session."""
    (tmp_path / "book.txt").write_text("And God said.")
    text = converse(trained, b"In the\n", monkeypatch, follow=tmp_path / "book.txt", temperature=0)
    assert f"And God said.{text}" == generate(trained, prompt="And God said.\nIn the", tokens=12, temperature=0)
    again = converse(trained, b"no\n/reset\nIn the\n", monkeypatch, follow=tmp_path / "book.txt", temperature=0)
    assert again == text


def test_a_saved_state_continues_the_text_that_was_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, state = tmp_path / "book.txt", tmp_path / "new" / "book.state"
    book.write_text("And God said, Let there be light. " * 30)
    expected = generate(trained, follow=book, prompt="And", tokens=12, save_state=state)
    assert f"And{generate(trained, tokens=12, load_state=state)}" == expected
    more = generate(trained, prompt=" God", tokens=12, load_state=state, save_state=state)
    assert generate(trained, tokens=12, load_state=state, seed=0) == str(more).removeprefix(" God")
    session = converse(trained, b"In the\n", monkeypatch, load_state=state, save_state=state, stop=["�"])
    whole = generate(trained, follow=book, prompt=f"And God{session}", tokens=5, echo=False)
    assert generate(trained, load_state=state, tokens=5) == whole


def test_texts_and_states_that_cannot_be_used_are_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"And God" * 20_000 + b"\xff")
    for name, problem in (("empty", "empty is empty"), ("latin", "latin is not UTF-8 at byte 140000"), ("no", "/no")):
        for option in ("follow", "prompt_file"):
            with pytest.raises(UserError, match=problem):
                generate(trained, **{option: tmp_path / name})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="standard input is empty"):
        follow(trained, b"", monkeypatch)
    with pytest.raises(UserError, match="latin is not the state of a stream"):
        generate(trained, load_state=tmp_path / "latin")
    model = find_checkpoint(trained).load_model()
    model.stream(0, batch=2).save(tmp_path / "two")
    with pytest.raises(UserError, match="state of 2 texts"):
        generate(trained, load_state=tmp_path / "two")
    torch.nn.init.normal_(model.table.weight)
    model.stream(0).save(tmp_path / "other")
    with pytest.raises(UserError, match="other: the state is that of another model"):
        generate(trained, load_state=tmp_path / "other")
    with pytest.raises(UserError, match=f"{tmp_path} is a folder"):
        generate(trained, save_state=tmp_path)


def test_a_long_text_shows_progress(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "BAR_SECONDS", -1.0)
    monkeypatch.setattr("logpast.generation.BLOCK", 1000)
    (tmp_path / "book.txt").write_text("And God " * 400)
    generate(trained, follow=tmp_path / "book.txt", tokens=1)
    assert re.search(r"reading .*book.txt, kB 2/3 .* tokens/s .* left", capsys.readouterr().err)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as in most locales, and in the C locale
def test_a_line_that_is_not_utf8_is_left_out_of_a_session(
    trained: Path, errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for lines in (b"And\nab\xff\nGod\n", b"And\nGod\n"):
        standard_input = io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", standard_input)
        texts.append(generate(trained, interactive=True, tokens=5))
    assert texts[0] == texts[1]
    assert capsys.readouterr().err.count("not UTF-8") == 1


def test_a_text_that_is_read_is_not_replaced_by_the_state(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("And God")
    for option in ("prompt_file", "follow"):
        with pytest.raises(UserError, match=r"--save_state would replace .*text, which is read"):
            generate(trained, **{option: tmp_path / "text"}, save_state=tmp_path / "text")  # type: ignore[arg-type]


def test_input_that_is_not_utf8_is_reported(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):  # as in most locales, and in the C locale
        standard_input = io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", standard_input)
        with pytest.raises(UserError, match=r"standard input.*(byte 0xff in position|at byte) 2"):
            generate(trained, prompt_file=Path("-"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        generate(trained, prompt_file=Path("-"))


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
        {"samples": 0},
        {"samples": -1},
        {"stop": ["a", ""]},
        {"recall_limit": 0.0},
        {"recall_limit": 1.5},
        {"interactive": True, "samples": 2},
        {"interactive": True, "prompt_file": "-"},
        {"interactive": True, "follow": "-"},
        {"follow": "-", "prompt_file": "-"},
    ],
)
def test_illegal_options_are_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        generate(tmp_path, **wrong)


def test_a_limit_on_copies_is_for_models_with_recall(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recall_limit"):
        generate(trained, recall_limit=0.5)
    config = replace(find_checkpoint(trained).config, run=tmp_path / "run", steps=1)
    train(replace(config, model=replace(config.model, recall=50)))
    # untrained gates give n = 0 and longer matches in a repetitive prompt most of the weight
    texts = [generate(config.run, "And God " * 20, tokens=30, seed=1, recall_limit=limit) for limit in (1, 1e-9)]
    assert texts[0] != texts[1]
    texts = [generate(config.run, "And God ", tokens=200, seed=1, recall_own=own) for own in (True, False)]
    assert texts[0] != texts[1]


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
