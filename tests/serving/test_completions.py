"""Requests and their texts, apart from HTTP."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logpast.serving.completions import Choice, Completions, Request, TokenLogprobs, parse
from logpast.serving.engine import OutOfTime, Refused


@given(
    st.lists(st.text("abé😀", max_size=4), max_size=8), st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=3)
)
def test_text_and_logprobs_come_together_however_tokens_split_characters(pieces: list[str], stop: list[str]) -> None:
    """Each byte may be a token. The text ends before the first stop text, and with it the tokens."""
    whole = "".join(pieces)
    choice, found = Choice(0, stop), []
    for number, byte in enumerate(whole.encode()):
        if not choice.ended:
            found.append(choice.add(bytes([byte]), TokenLogprobs(str(number), 0.0, {}, 0)))
    if not choice.ended:
        found.append(choice.end())
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stop))]
    first = whole[: ends[0]] if ends else whole
    expected = first[: min((first.rindex(s) for s in stop if first.endswith(s)), default=len(first))]
    assert "".join(piece.text for piece in found) == choice.text == expected
    assert [piece.finish for piece in found if piece.finish] == ["stop" if ends else "length"]
    tokens = [each.token for piece in found for each in piece.logprobs or []]
    assert tokens == [str(number) for number in range(len(expected.encode()))]


def test_a_character_that_was_not_completed_is_shown_at_the_end() -> None:
    choice = Choice(0, [])
    assert choice.add("é".encode()[:1], None).text == ""
    assert choice.end().text == "�"


def test_unknown_parameters_are_corrected() -> None:
    with pytest.raises(Refused, match="did you mean max_tokens"):
        parse(b'{"max_token": 5}')


def test_prompts_and_stop_texts_have_several_forms() -> None:
    forms = [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [], [2]], [[1], [], [2]])]
    for given_, expected in forms:
        assert parse(json.dumps({"prompt": given_}).encode()).prompts == expected
    assert parse(b'{"stop": "a"}').stops == ["a"]
    assert parse(b'{"stop": ["a", "b"]}').stops == ["a", "b"]
    assert parse(b"{}").stops == []


@pytest.fixture
def completions(parts: Any) -> Completions:
    stream = parts.model.stream(parts.tokenizer.eot)
    return Completions(parts.model, parts.tokenizer, stream.state(), kept=1, prompt_tokens=9000, tokens=100)


def test_a_long_prompt_is_read_in_parts(completions: Completions) -> None:
    """Others take turns meanwhile; and time may be over before its end."""
    request = Request(prompt=[5] * 3000, max_tokens=2, seed=1)
    steps = completions.steps("a", request, completions.encode(request))
    assert [next(steps) for _ in range(4)][:3] == [None] * 3
    steps = completions.steps("a", request, completions.encode(request))
    next(steps)
    with pytest.raises(OutOfTime):
        steps.throw(OutOfTime)


def test_when_time_is_over_prompts_that_were_not_reached_have_empty_texts(completions: Completions) -> None:
    request = Request(prompt=["a", "b"], max_tokens=50, seed=1, n=2)
    steps = completions.steps("a", request, completions.encode(request))
    found = [next(steps) for _ in range(4)]
    with pytest.raises(StopIteration) as ended:
        steps.throw(OutOfTime)
    done = ended.value.value
    assert done.completion_tokens == 2 * len([each for each in found[1:]])
    assert [(piece.index, piece.finish) for piece in done.pieces] == [(index, "length") for index in range(4)]
    assert [piece.text for piece in done.pieces[2:]] == ["", ""]
