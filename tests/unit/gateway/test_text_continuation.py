"""Answers that go on by their text: what their events say, what the other engine is asked, and what the client gets of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.api.parse import parse
from pointsman_gateway.core.request.text_continuation import continued_text, text_of
from pointsman_gateway.core.streaming.rest_of_text import RestOfText
from pointsman_gateway.core.streaming.sse import SseFilter
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from tests.support.tiny_tokenizer import CHATML, make_tokenizer

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "set the points"}],
    "stream": True,
    "max_tokens": 90,
}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "set the points", "stream": True, "max_tokens": 9}


def event(**choice: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({"id": "x", "choices": [{"index": 0, "finish_reason": None} | choice]}).encode()
        + b"\n\n"
    )


def chunk(text: str) -> bytes:
    return event(delta={"content": text}, logprobs=None, token_ids=None)


ROLE = event(delta={"role": "assistant", "content": ""})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("m") / "model"))


def test_the_text_of_events() -> None:
    assert text_of(Endpoint.CHAT, ROLE + chunk("a ") + chunk("b\n\nc")) == "a b\n\nc"
    assert text_of(Endpoint.CHAT, chunk("a")[chunk("a").index(b'"choices"') :] + chunk("b")) == "ab", (
        "what precedes the choices may be absent"
    )
    assert text_of(Endpoint.COMPLETION, event(text="a") + event(text="b")) == "ab"
    assert text_of(Endpoint.CHAT, chunk("a") + chunk("") + chunk("\u00e9")) == "a\u00e9", "a character of two tokens"


@pytest.mark.parametrize(
    "other",
    [
        event(delta={"tool_calls": []}),
        event(delta={"reasoning": "hm"}),
        chunk(""),
        chunk("") + chunk("b"),
        event(delta={"content": ""}, finish_reason="stop"),
        event(delta={"content": 5}),
        event(delta={"content": "a"}, logprobs={"content": []}),
        event(delta=None),
        b'data: {"choices":[],"usage":{}}\n\n',
        b"data: [DONE]\n\n",
        b'data: {"choices":[1]}\n\n',
        b'data: {"choices":\n\n',
    ],
)
def test_an_answer_of_more_than_text_has_none(other: bytes) -> None:
    assert text_of(Endpoint.CHAT, chunk("a") + other) is None


def test_the_other_engine_gets_the_prompt_and_exactly_the_text(tokenizer: ModelTokenizer) -> None:
    found = continued_text(
        Endpoint.CHAT, json.dumps(CHAT).encode(), ROLE + chunk("the right ") + chunk("track"), tokenizer
    )
    assert found is not None
    asked = json.loads(found.payload)
    assert asked["messages"][-1] == {"role": "assistant", "content": "the right track"}
    assert asked["max_tokens"] == 90 - len(found.ids)
    assert found.prompt_tokens == len(tokenizer.prompt(parse(Endpoint.CHAT, json.dumps(CHAT).encode())).ids)
    assert tokenizer.decode(found.ids) == "the right track"
    assert (
        continued_text(Endpoint.COMPLETION, json.dumps(COMPLETION).encode(), event(text=" so"), tokenizer) is not None
    )


@pytest.mark.parametrize("limit", ["90", 90.0])
def test_a_limit_in_another_form_is_read_as_engines_read_it(tokenizer: ModelTokenizer, limit: object) -> None:
    asked = json.dumps(CHAT | {"max_tokens": limit, "cache_salt": "s"}).encode()
    found = continued_text(Endpoint.CHAT, asked, chunk("the right track"), tokenizer)
    assert found is not None
    sent = json.loads(found.payload)
    assert (sent["max_tokens"], sent["cache_salt"]) == (90 - len(found.ids), "s")


def test_a_template_that_changes_the_text_is_not_trusted(tmp_path: Path) -> None:
    stripping = CHATML.replace("message.content", "message.content | trim")
    thinking = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think></think>'", 1)
    for number, (template, text) in enumerate([(stripping, "the right "), (thinking, "the right")]):
        assert template != CHATML
        one = load_tokenizer(make_tokenizer(tmp_path / f"{number}", template))
        assert continued_text(Endpoint.CHAT, json.dumps(CHAT).encode(), chunk(text), one) is None


def test_a_text_that_spells_a_special_token_is_not_continued(tokenizer: ModelTokenizer) -> None:
    """The other engine would see the token, not its name."""
    assert continued_text(Endpoint.CHAT, json.dumps(CHAT).encode(), chunk("a <|im_end|> b"), tokenizer) is None


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (Endpoint.CHAT, CHAT | {"stop": ["x"]}),
        (Endpoint.CHAT, CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Endpoint.CHAT, CHAT | {"ignore_eos": True}),
        (Endpoint.CHAT, CHAT | {"stream_options": {"continuous_usage_stats": True, "include_usage": True}}),
        (Endpoint.COMPLETION, COMPLETION | {"max_tokens": None}),
        (Endpoint.COMPLETION, COMPLETION | {"prompt": [1, 2]}),
        (Endpoint.RESPONSES, {"model": "m", "input": "a", "stream": True}),
    ],
)
def test_what_its_text_does_not_tell(endpoint: Endpoint, body: dict[str, Any]) -> None:
    call = parse(endpoint, json.dumps(body).encode())
    assert (call.continuable, call.continuable_by_text) == (True, False)


def test_an_answer_that_has_all_its_tokens_is_not_continued(tokenizer: ModelTokenizer) -> None:
    payload = json.dumps(CHAT | {"max_tokens": 2}).encode()
    assert continued_text(Endpoint.CHAT, payload, chunk("the right track"), tokenizer) is None


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_rest_has_no_role_and_the_usage_of_the_whole(size: int) -> None:
    events = SseFilter(Endpoint.CHAT)
    rest = RestOfText(events, prompt_tokens=10)
    usage = {
        "prompt_tokens": 14,
        "completion_tokens": 3,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 12},
    }
    end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    stream = ROLE + chunk("c") + event(delta={"content": "d"}, finish_reason="stop") + end
    out = b"".join(rest.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + rest.flush()
    assert b"role" not in out
    assert out.startswith(chunk("c"))
    found = events.stream_end()
    assert found.complete
    assert (found.usage.prompt, found.usage.output, found.usage.cached) == (10, 7, 10)


@pytest.mark.parametrize(
    "odd", [b'{"choices":[1],"role":1}', b'{"choices":[],"usage":{"prompt_tokens":null}}', b'{"role":']
)
def test_an_event_of_another_form_passes_unchanged(odd: bytes) -> None:
    rest = RestOfText(SseFilter(Endpoint.CHAT), prompt_tokens=10)
    assert rest.feed(b"data: " + odd + b"\n\n") == b"data: " + odd + b"\n\n"


def test_events_with_other_line_ends_pass_at_once_and_long_ones_are_not_held() -> None:
    rest = RestOfText(SseFilter(Endpoint.CHAT), prompt_tokens=10)
    windows = chunk("a").replace(b"\n\n", b"\r\n\r\n")
    assert rest.feed(windows) == windows
    long = chunk("b" * 100_000)
    assert rest.feed(long[:90_000]) + rest.feed(long[90_000:]) == long


def test_an_end_without_its_blank_line_is_an_end() -> None:
    events = SseFilter(Endpoint.CHAT, tells=True)
    events.texts, events.texts_limit = bytearray(), 400
    events.feed(chunk("a") + b"data: [DONE]\n")
    assert events.flush() == b"data: [DONE]\n"
    assert events.stream_end().complete


def test_an_error_before_any_text_is_the_client_s() -> None:
    events = SseFilter(Endpoint.CHAT, tells=True)
    events.texts, events.texts_limit = bytearray(), 400
    assert b"too long" in events.feed(ROLE + b'data: {"error": {"message": "too long"}}\n\n')


def test_events_are_collected_from_their_choices_on_and_up_to_a_limit() -> None:
    events = SseFilter(Endpoint.CHAT, tells=True)
    events.texts, events.texts_limit = bytearray(), 400
    for text in ("a", "b"):
        passed = b"%x\r\n%b\r\n" % (len(chunk(text)), chunk(text))
        assert events.pass_whole(passed) == passed
    for kept_alive in (b": keep-alive\n\n", b": keep-alive\n\n" + chunk("c")):
        assert not events.pass_whole(b"%x\r\n%b\r\n" % (len(kept_alive), kept_alive))
        assert events.feed(kept_alive) == kept_alive
    assert events.has_text
    assert text_of(Endpoint.CHAT, bytes(events.texts)) == "abc"
    assert events.feed(b'data: {"error": {"message": "x"}}\n\n') == b"", "another engine goes on"
    events.begin_again()
    events.feed(chunk("c" * 400))
    assert events.texts is None
    assert not events.has_text


def test_events_that_pass_whole_are_collected_up_to_the_limit_too() -> None:
    events = SseFilter(Endpoint.CHAT, tells=True)
    events.texts, events.texts_limit = bytearray(), 400
    passed = b"%x\r\n%b\r\n" % (len(chunk("a")), chunk("a"))
    for _ in range(2 + 400 // len(passed[passed.find(b'"choices"') :])):
        assert events.texts is not None
        assert events.pass_whole(passed) == passed
    assert events.pass_whole(passed) == passed
    assert events.texts is None
