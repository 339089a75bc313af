"""The HTTP interface, used by OpenAI's client and by clients that misbehave."""

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from logpast.generation import generate
from logpast.models.stream import Stream
from logpast.serving.engine import Job
from serving.helpers import Serving, wait_for

openai = pytest.importorskip("openai")
ENDLESS = {"model": "tiny", "prompt": "And", "max_tokens": 5000}


def complete(server: Any, prompt: Any = "And God", **settings: Any) -> Any:
    return server.client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 20, "seed": 3} | settings
    )


def text(*arguments: Any, **settings: Any) -> str:
    found: str = complete(*arguments, **settings).choices[0].text
    return found


def send(server: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """Status, headers and JSON of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, body, headers or {}, encode_chunked=False)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, json.loads(content)


def post(server: Any, settings: Any) -> Any:
    body = settings if isinstance(settings, bytes) else json.dumps(settings)
    return send(server, "POST", "/v1/completions", body)


def leave(server: Any, settings: dict[str, Any]) -> None:
    """Ask, and close the connection while the answer is generated."""
    body = json.dumps(settings).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: server.engine.counts()["active"] == 1)
        if settings.get("stream"):
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_completions_are_those_of_generate_with_the_same_seed(server: Any, run: Path) -> None:
    """Whole or streamed, one or several."""
    for settings in ({}, {"temperature": 0.5, "top_p": 0.8, "stop": ["e", "th"]}, {"temperature": 0}):
        both = {"top_p": 1.0, "temperature": 1.0} | settings
        expected = generate(run, "And God", tokens=20, seed=3, samples=3, echo=False, device="cpu", **both)
        found = complete(server, n=3, **settings)
        assert [choice.text for choice in found.choices] == expected
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert text(server, **settings) == expected[0]
        pieces = list(complete(server, n=3, stream=True, **settings))
        streamed = [[piece.choices[0] for piece in pieces if piece.choices[0].index == index] for index in range(3)]
        assert ["".join(choice.text for choice in choices) for choices in streamed] == expected
        assert [choices[-1].finish_reason for choices in streamed] == [each.finish_reason for each in found.choices]
        assert all(choice.finish_reason is None for choices in streamed for choice in choices[:-1])


def test_a_list_of_prompts_or_token_ids_is_completed_like_single_texts(server: Any, parts: Any) -> None:
    prompts = ["And God", "the", ""]
    expected = [text(server, prompt) for prompt in prompts]
    ids = [parts.tokenizer.encode(prompt).tolist() for prompt in prompts]
    assert [choice.text for choice in complete(server, prompts).choices] == expected
    assert [choice.text for choice in complete(server, ids).choices] == expected
    assert text(server, ids[0]) == text(server, [parts.tokenizer.eot, *ids[0]]) == expected[0]
    echoed = complete(server, ids[:2], echo=True, n=2).choices
    assert [choice.text for choice in echoed][::2] == [prompts[0] + expected[0], prompts[1] + expected[1]]


def test_finish_reason_and_usage_say_what_was_done(server: Any, parts: Any) -> None:
    whole = complete(server)
    stop = whole.choices[0].text[5:7]
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 20)
    assert whole.usage.prompt_tokens == len(parts.tokenizer.encode("And God"))
    stopped = complete(server, stop=stop)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == whole.choices[0].text.partition(stop)[0]
    assert stopped.usage.completion_tokens < 20
    nothing = complete(server, max_tokens=0, echo=True)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == ("And God", 0)
    *pieces, last = complete(server, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {piece.usage for piece in pieces} == {None}


def test_without_a_seed_each_answer_is_another(server: Any) -> None:
    assert len({complete(server, seed=None).choices[0].text for _ in range(3)}) == 3


def test_logprobs_are_those_of_the_model(server: Any, parts: Any) -> None:
    choice = complete(server, logprobs=3, max_tokens=8).choices[0]
    found, stream = choice.logprobs, Stream(parts.model, parts.tokenizer.eot)
    stream.push(parts.tokenizer.encode("And God"))
    tokens = Stream.from_state(parts.model, stream.state()).generate(8, seed=3, allowed=parts.tokenizer.is_text)[0]
    for number, expected in enumerate(tokens):
        log_probs = stream.logits()[0].log_softmax(0)
        assert found.token_logprobs[number] == pytest.approx(float(log_probs[expected]), abs=1e-4)
        best = sorted(found.top_logprobs[number].values(), reverse=True)
        assert best == pytest.approx(log_probs.topk(3).values.tolist(), abs=1e-4)
        stream.append([expected], own=True)
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[start:].startswith(token)
    pieces = [piece.choices[0].logprobs for piece in complete(server, logprobs=3, max_tokens=8, stream=True)]
    assert list(chain(*(piece.tokens for piece in pieces))) == found.tokens
    assert complete(server).choices[0].logprobs is None


def test_likely_tokens_are_of_the_tokenizer(server: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's vocabulary is padded."""
    size, logits = parts.tokenizer.size, Stream.logits
    monkeypatch.setattr(Stream, "logits", lambda stream: logits(stream).index_fill(1, torch.arange(size, 320), 9.0))
    assert len(complete(server, logprobs=5, max_tokens=1).choices[0].logprobs.top_logprobs[0]) == 5


def test_tokens_of_a_stop_text_have_no_logprobs(server: Any) -> None:
    whole = complete(server, logprobs=0).choices[0]
    stop = whole.text[10:12]
    choice = complete(server, logprobs=0, stop=[stop], stream=False).choices[0]
    assert choice.logprobs.tokens == [
        token for token, start in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True)
        if start < len(choice.text)
    ]  # fmt: skip


def test_a_stored_text_is_continued_without_sending_it_again(serving: Serving, parts: Any) -> None:
    """From an answer, several times; its stop text is not part of it."""
    with serving(text="In the beginning") as server:
        first = complete(server, extra_body={"store": True}, stop="e")
        second = complete(server, " And", extra_body={"store": True, "previous_response_id": first.id})
        again = complete(server, " And", extra_body={"previous_response_id": first.id})
        third = complete(server, " the", extra_body={"previous_response_id": second.id})
    stream = parts.model.stream(parts.tokenizer.eot)
    for piece in ("In the beginning", "And God", first.choices[0].text, " And"):
        stream.append(parts.tokenizer.encode(piece), own=piece == first.choices[0].text)
    beginning, settings = stream.state(), {"seed": 3, "allowed": parts.tokenizer.is_text}
    assert parts.tokenizer.decode(stream.generate(20, **settings)[0]) == second.choices[0].text
    assert again.choices[0].text == second.choices[0].text
    stream = Stream.from_state(parts.model, beginning)
    for piece in (second.choices[0].text, " the"):
        stream.append(parts.tokenizer.encode(piece), own=piece == second.choices[0].text)
    assert parts.tokenizer.decode(stream.generate(20, **settings)[0]) == third.choices[0].text


def test_the_text_that_was_not_used_for_longest_is_forgotten(serving: Serving) -> None:
    with serving(stored=2) as server:
        ids = [complete(server, max_tokens=0, extra_body={"store": True}).id for _ in range(2)]
        complete(server, extra_body={"previous_response_id": ids[0]})
        complete(server, max_tokens=1, extra_body={"store": True})
        complete(server, extra_body={"previous_response_id": ids[0]})
        with pytest.raises(openai.NotFoundError) as caught:
            complete(server, extra_body={"previous_response_id": ids[1]})
        assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "word " * 6000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5001}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"n": 17}, "n"),
        ({"prompt": ["a"] * 9, "n": 2}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**62}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"usage": True}}, "stream_options"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"suffix": "end"}, "suffix"),
        ({"store": True, "n": 2}, "store"),
        ({"max_token": 5}, "max_token"),
    ],
)
def test_a_wrong_parameter_is_named(settings: dict[str, Any], param: str, server: Any) -> None:
    status, _, answer = post(server, settings)
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
    assert param in answer["error"]["message"] or "prompt has" in answer["error"]["message"]


def test_null_and_values_without_effect_are_accepted(server: Any) -> None:
    plain = {"prompt": "And", "max_tokens": 5, "seed": 1}
    neutral = {"best_of": 1, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "stop": None, "logprobs": None}
    answers = [post(server, plain | more)[2]["choices"] for more in ({}, neutral)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"top_p": NaN}', b"[" * 5000]
)
def test_a_body_that_is_no_json_object_is_a_bad_request(body: bytes, server: Any) -> None:
    status, _, answer = post(server, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_clients_get_the_exceptions_of_their_package(server: Any, serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        complete(server, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        complete(server, model="gpt-4")
    assert unknown.value.code == "model_not_found"
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").owned_by == "logpast"
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="tiny", messages=[])
    with serving(api_key="key-1") as locked:
        assert text(locked)
        with pytest.raises(openai.AuthenticationError):
            text(locked, extra_headers={"Authorization": "Bearer key-2"})
        assert send(locked, "GET", "/v1/models")[0] == 401
        assert send(locked, "GET", "/v1/models", headers={"Authorization": "Bearer kéy"})[0] == 401
        assert send(locked, "GET", "/health")[0] == 200


def test_web_pages_and_wrong_methods_are_refused(server: Any) -> None:
    assert send(server, "GET", "/v1/models", headers={"Origin": "http://example.com"})[0] == 403
    status, headers, answer = send(server, "GET", "/v1/completions")
    assert (status, headers["Allow"], answer["error"]["type"]) == (405, "POST", "invalid_request_error")


@pytest.mark.parametrize("size", [100_001, 700_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(size: int, chunked: bool, server: Any) -> None:
    """With and without Content-Length; its sender sees the answer if he waits for it."""
    blocks = [b"a" * 50_000] * (size // 50_000) + [b"a" * (size % 50_000)]
    head = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n\r\n")
        try:
            for block in blocks:
                connection.sendall(b"%x\r\n%s\r\n" % (len(block), block) if chunked and block else block)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
        except ConnectionError:
            assert size > 800_000  # it is read no further than that
        else:
            assert connection.recv(1000).startswith(b"HTTP/1.1 413") or size > 800_000
    assert text(server)


def test_a_body_that_does_not_arrive_times_out(serving: Serving) -> None:
    with serving(seconds=0.2) as server, socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_when_the_client_leaves(stream: bool, serving: Serving) -> None:
    with serving() as server:
        leave(server, {**ENDLESS, "stream": stream})
        wait_for(lambda: server.engine.counts()["cancelled"] == 1)
        counts = server.engine.counts()
        assert (counts["active"], counts["waiting"]) == (0, 0)
        assert counts["steps"] < 5000
        assert text(server)


def test_a_client_that_leaves_while_it_waits_is_forgotten(serving: Serving) -> None:
    with serving(active=1) as server:
        endless = complete(server, max_tokens=5000, stream=True)
        next(iter(endless))
        with pytest.raises(openai.APITimeoutError):
            complete(server, timeout=0.3)
        wait_for(lambda: server.engine.counts()["cancelled"] == 1)
        assert server.engine.counts()["waiting"] == 0
        endless.close()


def test_when_time_is_over_the_answer_ends_with_what_there_is(serving: Serving, server: Any) -> None:
    with serving(seconds=1, tokens=10**6) as brief:
        found = complete(brief, max_tokens=10**6, stop="not there")
        *_, last = complete(brief, max_tokens=10**6, stream=True)
    assert found.choices[0].finish_reason == last.choices[0].finish_reason == "length"
    assert 0 < found.usage.completion_tokens < 10**6
    assert found.choices[0].text == text(server, max_tokens=found.usage.completion_tokens)


def test_a_request_without_time_for_a_token_is_a_timeout(serving: Serving) -> None:
    def work() -> Any:
        time.sleep(0.5)
        yield

    with serving(seconds=0.2, active=1) as server:
        server.engine.submit(Job(work(), lambda event: None, time.monotonic() + 9))
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                complete(server, stream=stream)
            assert (caught.value.status_code, caught.value.code) == (504, "timeout")
            server.engine.submit(Job(work(), lambda event: None, time.monotonic() + 9))


def test_fifty_at_once_get_the_answers_that_they_get_alone(server: Any) -> None:
    """The server answers other questions meanwhile."""
    prompts = [f"And God {number}" for number in range(50)]
    alone = [text(server, prompt, seed=number, max_tokens=8) for number, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(50) as pool:
        answers = [
            pool.submit(text, server, prompt, seed=number, max_tokens=8) for number, prompt in enumerate(prompts)
        ]
        wait_for(lambda: server.engine.counts()["waiting"] > 0)
        status, _, health = send(server, "GET", "/health")
        assert (status, health["model"]) == (200, "tiny")
        assert [answer.result() for answer in answers] == alone


def test_requests_beyond_the_queue_are_refused_for_now(serving: Serving) -> None:
    with serving(active=1, waiting=0) as server:
        endless = complete(server, max_tokens=5000, stream=True)
        next(iter(endless))
        status, headers, answer = post(server, ENDLESS)
        assert (status, headers["Retry-After"], answer["error"]["code"]) == (503, "1", "overloaded")
        endless.close()
        wait_for(lambda: not server.engine.counts()["active"])
        assert text(server)


def test_short_requests_are_not_held_up_by_a_long_one(serving: Serving) -> None:
    with serving() as server:
        endless = complete(server, max_tokens=5000, stream=True)
        next(iter(endless))
        assert text(server)
        assert server.engine.counts()["active"] == 1
        endless.close()


def test_a_bug_is_an_internal_error_and_the_server_lives_on(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, calls = Stream.step, []

    def broken(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) % 5 == 0:
            raise ZeroDivisionError
        return step(*arguments)

    monkeypatch.setattr(Stream, "step", broken)
    calls += [1] * 4
    with pytest.raises(openai.InternalServerError) as caught:
        complete(server)
    assert caught.value.status_code == 500
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(openai.APIError, match="internal error"):  # the status is sent before
        list(complete(server, stream=True))
    monkeypatch.undo()
    assert text(server)


def test_stopping_ends_answers_with_what_there_is(serving: Serving) -> None:
    with serving() as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(lambda: list(complete(server, max_tokens=5000, stream=True)))
        wait_for(lambda: server.engine.counts()["steps"] > 2)
        server.stop()
        pieces = answer.result()
    assert 0 < len(pieces) < 5000
    assert pieces[-1].choices[0].finish_reason == "length"
