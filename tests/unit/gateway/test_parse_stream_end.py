"""Ends and usage of each API's answers, however the bytes are cut."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.streaming.parse_stream_end import StreamEnd, Usage, parse_stream_end, usage_of

OPENAI = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
ANTHROPIC = {
    "input_tokens": 2,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 1,
    "output_tokens": 3,
}
RESPONSES = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3, "total_tokens": 10}
USAGES = {Endpoint.CHAT: OPENAI, Endpoint.MESSAGES: ANTHROPIC, Endpoint.RESPONSES: RESPONSES}


def named(*events: dict[str, Any]) -> bytes:
    """Return SSE events with event names, as Messages and Responses write them."""
    return "".join(f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n" for payload in events).encode()


def messages_stream(*, stop: bool = True) -> bytes:
    start: dict[str, Any] = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": '"usage": {'}}
    events = [start, *[delta] * 5, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": ANTHROPIC}]
    return named(*events, *([{"type": "message_stop"}] if stop else []))


def responses_stream(last: str = "response.completed", text: str = "", user: str = "") -> bytes:
    response: dict[str, Any] = {
        "id": "resp_1",
        "instructions": text,
        "output": [],
        "status": last.removeprefix("response."),
        "usage": RESPONSES,
        "user": user,
        "input_messages": None,
    }
    return named(
        {"response": {"usage": None}, "sequence_number": 0, "type": "response.created"},
        {"delta": text[:50], "sequence_number": 1, "type": "response.output_text.delta"},
        {"response": response, "sequence_number": 2, "type": last},
    )


ENDS: list[tuple[Endpoint, dict[str, Any], str]] = [
    (Endpoint.CHAT, {"choices": [{"finish_reason": "length"}]}, "length"),
    (Endpoint.CHAT, {"choices": [{"finish_reason": "stop"}, {"finish_reason": "tool_calls"}]}, "tool_calls"),
    (Endpoint.CHAT, {"choices": [{"finish_reason": "function_call"}]}, "tool_calls"),
    (Endpoint.CHAT, {"choices": [{"finish_reason": "abort"}, {"finish_reason": "stop"}]}, "abort"),
    (Endpoint.COMPLETION, {"choices": [{"finish_reason": "repetition"}]}, "repetition"),
    (Endpoint.CHAT, {"choices": [{"finish_reason": None}]}, ""),
    (Endpoint.CHAT, {"choices": ["stop"]}, ""),
    (Endpoint.CHAT, {"choices": [{"finish_reason": {"a": 1}}]}, ""),
    (Endpoint.MESSAGES, {"stop_reason": "end_turn"}, "stop"),
    (Endpoint.MESSAGES, {"stop_reason": "max_tokens"}, "length"),
    (Endpoint.MESSAGES, {"stop_reason": "tool_use"}, "tool_calls"),
    (Endpoint.MESSAGES, {"content": [{"input": {"finish_reason": "abort"}}], "stop_reason": "tool_use"}, "tool_calls"),
    (Endpoint.MESSAGES, {"content": [{"input": {"stop_reason": "end_turn"}}], "stop_reason": None}, ""),
    (Endpoint.RESPONSES, {"status": "completed", "output": [{"type": "message"}]}, "stop"),
    (Endpoint.RESPONSES, {"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
    (Endpoint.RESPONSES, {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
    (Endpoint.RESPONSES, {"status": "incomplete", "incomplete_details": None}, ""),
    (Endpoint.RESPONSES, {"status": "failed"}, ""),
]


@pytest.mark.parametrize(("endpoint", "answer", "reason"), ENDS)
def test_why_an_answer_ended_is_reported_in_one_apis_words(
    endpoint: Endpoint, answer: dict[str, Any], reason: str
) -> None:
    assert usage_of(json.dumps(answer).encode(), endpoint).finish_reason == reason


@pytest.mark.parametrize("endpoint", USAGES)
def test_usage_of_a_whole_answer(endpoint: Endpoint) -> None:
    assert usage_of(json.dumps({"usage": USAGES[endpoint]}).encode(), endpoint) == Usage(7, 4, 3)
    for odd in (b"", b"[]", b"{", b'{"usage": 3}', b'{"usage": {"prompt_tokens": "7", "input_tokens": -1}}'):
        assert usage_of(odd, endpoint) == Usage()


@pytest.mark.parametrize("odd", [{"choices": ["stop"]}, {"choices": {}, "output": 5}, {"output": [None]}])
@pytest.mark.parametrize("endpoint", USAGES)
def test_usage_beside_fields_of_odd_types(endpoint: Endpoint, odd: dict[str, Any]) -> None:
    assert usage_of(json.dumps({"usage": USAGES[endpoint], **odd}).encode(), endpoint) == Usage(7, 4, 3)


def test_a_large_answer_is_not_decoded_for_its_usage() -> None:
    token = {"5": {"logprob": -1.5, "rank": 1, "decoded_token": "w"}}
    choices = [{"index": 0, "text": "w", "prompt_logprobs": [token] * 20_000, "finish_reason": "length"}]
    body = json.dumps({"choices": choices, "usage": OPENAI}).encode()
    tracemalloc.start()
    try:
        assert usage_of(body, Endpoint.COMPLETION) == Usage(7, 4, 3, "length")
        assert tracemalloc.get_traced_memory()[1] < 100_000 < len(body)
    finally:
        tracemalloc.stop()


def test_without_cache_figures_anthropics_input_is_the_prompt() -> None:
    assert usage_of(b'{"usage": {"input_tokens": 5, "output_tokens": 1}}', Endpoint.MESSAGES) == Usage(5, None, 1)


@given(st.integers(0, 500))
def test_a_messages_stream_ends_with_message_stop(lost: int) -> None:
    assert parse_stream_end(Endpoint.MESSAGES, messages_stream()[lost:]) == StreamEnd(True, Usage(7, 4, 3, "stop"))
    assert parse_stream_end(Endpoint.MESSAGES, messages_stream(stop=False)[lost:]).complete is False


@pytest.mark.parametrize("user", ["", 'a "usage": {"input_tokens": 1} b', '\\"usage\\":{\\"input_tokens\\":99}'])
@pytest.mark.parametrize("size", [0, 20_000])
def test_a_response_stream_is_understood_from_its_last_bytes(size: int, user: str) -> None:
    whole = responses_stream(text="u" * size + '"usage": {"input_tokens": 5}', user=user)
    assert parse_stream_end(Endpoint.RESPONSES, whole[-8_192:]) == StreamEnd(True, Usage(7, 4, 3, "stop"), "", 2)
    assert parse_stream_end(Endpoint.RESPONSES, whole) == StreamEnd(True, Usage(7, 4, 3, "stop"), "", 2)
    failed = responses_stream("response.failed", "u" * size)
    assert parse_stream_end(Endpoint.RESPONSES, failed[-8_192:]).error
    assert parse_stream_end(Endpoint.RESPONSES, failed[-8_192:]).complete


@given(st.integers(1, 400))
def test_a_response_stream_that_is_cut_is_not_complete(missing: int) -> None:
    whole = responses_stream(text='"type":"response.completed"}')
    # Without the blank line after it the last event is still complete, so the cut removes more than these two bytes.
    assert parse_stream_end(Endpoint.RESPONSES, whole[: -missing - 2]).complete is False


def test_an_engines_own_error_ends_a_stream() -> None:
    error = {"type": "error", "error": {"type": "internal_error", "message": "x"}}
    assert parse_stream_end(Endpoint.MESSAGES, named({"type": "message_start"}, error)) == StreamEnd(
        True, Usage(), "the engine reported an error"
    )
    event = {"type": "error", "message": "x", "sequence_number": 4}
    assert parse_stream_end(Endpoint.RESPONSES, named(event)) == StreamEnd(
        True, Usage(), "the engine reported an error", 4
    )
    openai = b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'
    assert parse_stream_end(Endpoint.CHAT, openai) == StreamEnd(True, Usage(), "the engine reported an error")


@pytest.mark.parametrize("garbage", ['{"choices":[{"text":', "<html>", "[1]"])
def test_an_event_that_is_no_object_is_the_engines_error(garbage: str) -> None:
    """Otherwise an engine that spoils each answer, and ends it in order, would count as one that answers."""
    events = chat_stream({"choices": [{"delta": {"content": "a"}}]})
    spoilt = events.replace(b"data: [DONE]", f"data: {garbage}\n\ndata: [DONE]".encode())
    assert parse_stream_end(Endpoint.CHAT, events) == StreamEnd(True)
    assert parse_stream_end(Endpoint.CHAT, spoilt).error == "the engine sent an event that is no JSON object"


@given(
    st.sampled_from(Endpoint),
    st.binary(max_size=300) | st.text(max_size=100).map(lambda text: f"data: {text}".encode()),
)
def test_any_bytes_have_an_ending(endpoint: Endpoint, text: bytes) -> None:
    parse_stream_end(endpoint, text)
    usage_of(text, endpoint)


def chat_stream(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("kind", [[], {}, 5, None])
def test_an_event_of_a_response_may_have_any_type(kind: object) -> None:
    event = b"data: " + json.dumps({"type": kind, "response": {"usage": {"input_tokens": 1}}}).encode() + b"\n\n"
    assert not parse_stream_end(Endpoint.RESPONSES, event).complete


def test_why_a_chat_stream_ended_stands_before_its_usage() -> None:
    going: dict[str, Any] = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
    last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}
    usage = {"choices": [], "usage": OPENAI}
    for events in ([going, last, usage], [going, last, {"choices": []}, usage], [going, last | {"usage": OPENAI}]):
        end = parse_stream_end(Endpoint.CHAT, chat_stream(*events))
        assert end == StreamEnd(True, Usage(7, 4, 3, "tool_calls"))
    assert parse_stream_end(Endpoint.CHAT, chat_stream(going, last)).usage == Usage(finish_reason="tool_calls")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("last", "reason"), [("incomplete", "length"), ("completed", "tool_calls")])
def test_why_a_response_stream_ended_is_read_from_its_last_bytes(last: str, reason: str, whole: bool) -> None:
    response = {
        "id": "resp_1",
        "instructions": "u" * 20_000,
        "incomplete_details": {"reason": "max_output_tokens"} if last == "incomplete" else None,
        "output": [{"type": "function_call", "name": "f"}] if last == "completed" else [],
        "status": last,
        "usage": RESPONSES,
    }
    text = named({"response": response, "sequence_number": 2, "type": f"response.{last}"})
    assert parse_stream_end(Endpoint.RESPONSES, text if whole else text[-8_192:]).usage == Usage(7, 4, 3, reason)
