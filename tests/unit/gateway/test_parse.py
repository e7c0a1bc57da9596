"""Whatever a client sends, the parser answers with a call or with its own error, and hides what is not the client's."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_gateway.core.api import (
    FORBIDDEN_FIELDS,
    FORBIDDEN_XARGS,
    ApiRequestError,
    ClientRules,
    Endpoint,
    ErrorFormat,
    error_event,
    estimated_tokens,
    parse,
    redact_error,
    redact_error_event,
    with_fields,
    with_request_id,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
GOOD: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: CHAT,
    Endpoint.COMPLETION: TEXT,
    Endpoint.RESPONSES: {"model": "m", "input": "hi"},
    Endpoint.MESSAGES: CHAT | {"max_tokens": 5},
    Endpoint.COUNT_TOKENS: CHAT,
    Endpoint.EMBEDDINGS: {"model": "m", "input": "hi"},
    Endpoint.RERANK: {"model": "m", "query": "q", "documents": ["a", "b"]},
    Endpoint.SCORE: {"model": "m", "text_1": "a", "text_2": ["b"]},
    Endpoint.POOLING: {"model": "m", "input": [[1, 2], [3]]},
    Endpoint.CLASSIFY: {"model": "m", "input": ["a", "b"]},
    Endpoint.TOKENIZE: TEXT,
    Endpoint.DETOKENIZE: {"model": "m", "tokens": [1, 2]},
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_TYPED = (
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "stream_options",
    "temperature",
)
_OTHER = ("tools", "session_id", "prompt_cache_key", "cache_salt", "vllm_xargs", "chat_template_kwargs", "seed", "stop")
_NEWER = ("input", "instructions", "reasoning", "system", "thinking", "output_config", "query", "documents", "tokens")
FIELDS = st.sampled_from((*_TYPED, *_OTHER, *_NEWER, *FORBIDDEN_FIELDS))


def parsed_or_refused(endpoint: Endpoint, raw: bytes) -> None:
    try:
        call = parse(endpoint, raw)
    except ApiRequestError as error:
        refused: ApiRequestError | None = error
    else:
        refused = None
    if refused is not None:
        assert refused.status == 400
        assert set(json.loads(refused.body())["error"]) == {"message", "type", "param", "code"}
        return
    seen = json.loads(call.payload)
    assert not set(FORBIDDEN_FIELDS) & seen.keys()
    assert "cache_salt" not in seen
    # A route without vllm_xargs passes a field of this name unchanged, as any unknown field.
    if isinstance(seen.get("vllm_xargs"), dict):
        assert not set(FORBIDDEN_XARGS) & seen["vllm_xargs"].keys()
    assert call.payload is raw or call.stripped or call.hide_usage
    assert (
        call.untokenizable
        or call.chat is not None
        or call.endpoint not in (Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES)
    )
    assert call.model
    assert call.max_output_tokens >= 0
    assert estimated_tokens(call) >= 1


@given(st.sampled_from(Endpoint), JSON)
def test_any_json_is_a_call_or_an_error(endpoint: Endpoint, value: Any) -> None:
    parsed_or_refused(endpoint, json.dumps(value).encode())


@settings(max_examples=400)
@given(st.sampled_from(Endpoint), st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_any_fields_are_a_call_or_an_error(endpoint: Endpoint, fields: dict[str, Any], whole: bool) -> None:
    base = GOOD[endpoint] if whole else {}
    parsed_or_refused(endpoint, json.dumps({**fields, **base}).encode())
    parsed_or_refused(endpoint, json.dumps({**base, **fields}).encode())


@given(st.sampled_from(Endpoint), st.binary(max_size=64))
def test_any_bytes_are_a_call_or_an_error(endpoint: Endpoint, raw: bytes) -> None:
    parsed_or_refused(endpoint, raw)


@pytest.mark.parametrize(
    "raw", [b"[" * 4_000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"model": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_hostile_bytes_are_malformed(raw: bytes) -> None:
    with pytest.raises(ApiRequestError) as refused:
        parse(Endpoint.CHAT, raw)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("endpoint", "change", "param"),
    [
        (Endpoint.CHAT, {"model": None}, "model"),
        (Endpoint.CHAT, {"model": 3}, "model"),
        (Endpoint.CHAT, {"messages": []}, "messages"),
        (Endpoint.CHAT, {"messages": "hi"}, "messages"),
        (Endpoint.CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (Endpoint.CHAT, {"max_tokens": -1}, "max_tokens"),
        (Endpoint.CHAT, {"max_tokens": 2**31}, "max_tokens"),
        (Endpoint.CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (Endpoint.CHAT, {"max_tokens": "5.5"}, "max_tokens"),
        (Endpoint.CHAT, {"max_completion_tokens": 2**40}, "max_completion_tokens"),
        (Endpoint.CHAT, {"temperature": "hot"}, "temperature"),
        (Endpoint.CHAT, {"stream": "perhaps"}, "stream"),
        (Endpoint.CHAT, {"n": 0}, "n"),
        (Endpoint.CHAT, {"tools": {}}, "tools"),
        (Endpoint.CHAT, {"session_id": 7}, "session_id"),
        (Endpoint.COMPLETION, {"prompt": None}, "prompt"),
        (Endpoint.COMPLETION, {"prompt": ""}, "prompt"),
        (Endpoint.COMPLETION, {"prompt": [1, "a"]}, "prompt"),
        (Endpoint.COMPLETION, {"prompt": [-1]}, "prompt"),
        (Endpoint.COMPLETION, {"prompt": [[]]}, "prompt"),
        (Endpoint.COMPLETION, {"max_tokens": "many"}, "max_tokens"),
        (Endpoint.RESPONSES, {"input": None}, "input"),
        (Endpoint.RESPONSES, {"input": ["hi"]}, "input"),
        (Endpoint.RESPONSES, {"max_output_tokens": -1}, "max_output_tokens"),
        (Endpoint.RESPONSES, {"reasoning": "high"}, "reasoning"),
        (Endpoint.RESPONSES, {"previous_response_id": 3}, "previous_response_id"),
        (Endpoint.MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (Endpoint.MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (Endpoint.MESSAGES, {"system": 3}, "system"),
        (Endpoint.MESSAGES, {"thinking": "on"}, "thinking"),
        (Endpoint.COUNT_TOKENS, {"messages": []}, "messages"),
        (Endpoint.EMBEDDINGS, {"input": []}, "input"),
        (Endpoint.EMBEDDINGS, {"input": [1, "a"]}, "input"),
        (Endpoint.RERANK, {"documents": None}, "documents"),
        (Endpoint.RERANK, {"query": 3}, "query"),
        (Endpoint.SCORE, {"text_1": None}, "text_1"),
        (Endpoint.POOLING, {"input": None}, "input"),
        (Endpoint.CLASSIFY, {"input": 3}, "input"),
        (Endpoint.TOKENIZE, {"prompt": [1]}, "prompt"),
        (Endpoint.DETOKENIZE, {"tokens": "x"}, "tokens"),
    ],
)
def test_a_wrong_field_is_named(endpoint: Endpoint, change: dict[str, Any], param: str) -> None:
    base = GOOD[endpoint]
    with pytest.raises(ApiRequestError) as refused:
        parse(endpoint, json.dumps(base | change).encode())
    assert (refused.value.status, refused.value.type, refused.value.param) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("fields", "limit", "stream"),
    [
        ({"max_tokens": "16"}, 16, False),
        ({"max_tokens": 16.0, "temperature": "0.5"}, 16, False),
        ({"max_tokens": True, "stream": "yes"}, 1, True),
        ({"max_tokens": 3, "stream": 1}, 3, True),
        ({"max_tokens": 3, "stream": 0.0}, 3, False),
    ],
)
def test_numbers_and_booleans_are_read_as_vllm_reads_them(fields: dict[str, Any], limit: int, stream: bool) -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT | fields).encode())
    assert (call.max_output_tokens, call.stream, call.hide_usage) == (limit, stream, stream)


@pytest.mark.parametrize("value", [True, 5, 1.5, "x", [{}], [[]], {"a": 1}])
@pytest.mark.parametrize("field", ["include", "stream_options", "tools", "truncation", "text", "tool_choice", "seed"])
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_whether_a_stream_may_go_on_can_be_said_of_any_fields(endpoint: Endpoint, field: str, value: Any) -> None:
    """Fields that an API does not have, or does not check, have any values."""
    parsed_or_refused(endpoint, json.dumps(GOOD[endpoint] | {"stream": True, field: value}).encode())


def test_null_means_not_set() -> None:
    call = parse(
        Endpoint.CHAT, json.dumps(CHAT | {"max_tokens": None, "stream": None, "n": None, "vllm_xargs": None}).encode()
    )
    assert (call.max_output_tokens, call.stream) == (0, False)


def test_a_clean_body_stays_the_clients_own_bytes() -> None:
    raw = b' {"model":"m", "prompt":"\\u00fc", "unknown": {"a": 1.50}}\n'
    assert parse(Endpoint.COMPLETION, raw).payload is raw


def test_escaped_and_repeated_names_are_no_way_around() -> None:
    raw = b'{"model":"m","prompt":"x","kv\\u005ftransfer_params":{"a":1},"vllm_xargs":{"kv_cache_report_mode":"full","a":1}}'
    call = parse(Endpoint.COMPLETION, raw)
    assert json.loads(call.payload) == {"model": "m", "prompt": "x", "vllm_xargs": {"a": 1}}
    assert call.stripped == ("kv_transfer_params", "vllm_xargs.kv_cache_report_mode")


def test_cache_salt_passes_only_where_clients_may_set_it() -> None:
    raw = json.dumps(TEXT | {"cache_salt": "s"}).encode()
    assert parse(Endpoint.COMPLETION, raw, ClientRules(client_cache_salt=True)).cache_salt == "s"
    dropped = parse(Endpoint.COMPLETION, raw)
    assert dropped.cache_salt == ""
    assert b"cache_salt" not in dropped.payload


def test_hints_and_limits_are_read() -> None:
    call = parse(
        Endpoint.CHAT,
        json.dumps(CHAT | {"prompt_cache_key": "k", "max_tokens": 5, "max_completion_tokens": 9}).encode(),
    )
    assert (call.prompt_cache_key, call.max_output_tokens, call.untokenizable) == ("k", 9, "")
    assert parse(Endpoint.CHAT, json.dumps(CHAT | {"session_id": "s"}).encode()).session_id == "s"
    assert parse(Endpoint.CHAT, json.dumps(CHAT | {"chat_template": "x"}).encode()).untokenizable


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert ApiRequestError(503, "x", retry_after_s=0.2).headers() == {"Retry-After": "1"}
    assert ApiRequestError(429, "x", retry_after_s=1.2).headers() == {"Retry-After": "2"}
    assert ApiRequestError(400, "x").headers() == {}


def test_an_error_event_is_one_sse_event() -> None:
    event = error_event("gone")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    # As vLLM's own events: some clients (cline) ask again only by a number in `code`.
    assert json.loads(event[6:])["error"] == {"message": "gone", "type": "server_error", "param": None, "code": 502}


def test_an_estimate_counts_text_and_no_media() -> None:
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "t" * 400}, image]}]
    assert 100 <= estimated_tokens(parse(Endpoint.CHAT, json.dumps(CHAT | {"messages": messages}).encode())) < 110

    def of(prompt: object) -> int:
        return estimated_tokens(parse(Endpoint.COMPLETION, json.dumps(TEXT | {"prompt": prompt}).encode()))

    assert [of("abcdefgh"), of("a"), of([1, 2, 3]), of([[1, 2], [1]]), of(["abcdefgh", "a"])] == [2, 1, 3, 3, 3]


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_tenants_salt_goes_before_the_clients(endpoint: Endpoint) -> None:
    raw = json.dumps({"cache_salt": "mine", **GOOD[endpoint]}).encode()
    call = parse(endpoint, raw, ClientRules(client_cache_salt=True, cache_salt="the tenant's"))
    assert call.cache_salt == "the tenant's"
    seen = json.loads(call.payload)
    assert seen == GOOD[endpoint] | ({"cache_salt": "the tenant's"} if endpoint.is_placed else {})
    assert call.payload.count(b"cache_salt") == endpoint.is_placed


def test_an_alias_is_resolved_for_the_engine() -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT | {"model": "big"}).encode(), ClientRules(aliases={"big": "org/big-1"}))
    assert (call.model, call.requested_model, json.loads(call.payload)["model"]) == ("org/big-1", "big", "org/big-1")


def test_a_session_id_passes_only_where_it_is_the_clients_own() -> None:
    raw = json.dumps(CHAT | {"session_id": "s", "vllm_xargs": {"session_id": "s", "a": 1}}).encode()
    assert json.loads(parse(Endpoint.CHAT, raw).payload)["session_id"] == "s"
    call = parse(Endpoint.CHAT, raw, ClientRules(own_session=False))
    assert call.session_id == "s"
    assert json.loads(call.payload) == CHAT | {"vllm_xargs": {"a": 1}}


def test_a_response_does_not_name_itself() -> None:
    call = parse(Endpoint.RESPONSES, json.dumps(GOOD[Endpoint.RESPONSES] | {"request_id": "resp_other"}).encode())
    assert call.stripped == ("request_id",)


@given(st.binary(max_size=3), st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_fields_in_front_change_nothing_else(blanks: bytes, body: dict[str, Any]) -> None:
    space = bytes(b" \t\n\r"[number % 4] for number in blanks)
    raw = space + b"{" + space + json.dumps(body).encode()[1:] + space
    added = {"request\u00fc": 1, "a": ["b"]}
    for name in added:
        body.pop(name, None)
    raw = space + b"{" + space + json.dumps(body).encode()[1:] + space
    assert json.loads(with_fields(raw, added)) == {**added, **body}
    assert with_fields(raw, {}) is raw


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 502, 503])
def test_anthropics_errors_have_its_form(status: int) -> None:
    body = json.loads(ApiRequestError(status, "no", code="x").body(ErrorFormat.ANTHROPIC))
    assert (body["type"], body["error"]["message"]) == ("error", "no")
    assert body["error"]["type"].endswith(("_error", "_too_large"))
    event = error_event("gone", ErrorFormat.ANTHROPIC)
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.split(b"data: ")[1])["error"] == {"type": "api_error", "message": "gone"}


def test_anthropics_errors_name_their_request() -> None:
    body = redact_error(
        ErrorFormat.ANTHROPIC, 400, b'{"error": {"message": "no", "type": "BadRequestError", "code": 400}}'
    )
    for error in (body, ApiRequestError(500, "no").body(ErrorFormat.ANTHROPIC)):
        parsed = json.loads(with_request_id(error, 'a "quoted" id'))
        assert parsed == json.loads(error) | {"request_id": 'a "quoted" id'}


def test_the_code_of_an_engines_error_is_a_text() -> None:
    error: dict[str, Any] = {"message": "no", "type": "BadRequestError", "param": None, "code": 400}
    parsed = json.loads(redact_error(ErrorFormat.OPENAI, 400, json.dumps({"error": error}).encode()))
    assert parsed == {"error": error | {"code": "400"}}
    # In an event it stays a number: cline asks again only by one.
    event = redact_error_event(ErrorFormat.OPENAI, b"data: " + json.dumps({"error": error}).encode())
    assert json.loads(event.removeprefix(b"data: ")) == {"error": error}
    for code in ("null", "true", "1.5", "[]"):
        body = json.dumps({"error": error | {"code": json.loads(code)}}).encode()
        assert json.loads(redact_error(ErrorFormat.OPENAI, 400, body))["error"]["code"] is None


def test_an_error_in_a_stream_of_responses_is_the_apis_own_event() -> None:
    name, _, data = error_event("gone", ErrorFormat.RESPONSES, "instance_failed", 7).partition(b"\ndata: ")
    assert name == b"event: error"
    assert json.loads(data) == {
        "type": "error",
        "code": "instance_failed",
        "message": "gone",
        "param": None,
        "sequence_number": 7,
    }


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3:8000",
        "10.1.2.3",
        "http://gpu-7.cluster.local:8000/v1",
        "tcp://[fd00::7]:5557",
        "[fd00::7]:80",
        "gpu-7.cluster.local:8000",
        "localhost:8000",
    ],
)
def test_an_engines_error_shows_no_address(address: str) -> None:
    text = f"Cannot reach {address} (retry later), position 12:30 is fine at 3.5"
    for error_format in ErrorFormat:
        safe = redact_error(
            error_format, 400, json.dumps({"error": {"message": text, "type": "T", "code": 400}}).encode()
        )
        assert address.encode() not in safe
        message = json.loads(safe)["error"]["message"]
        assert message.startswith("Cannot reach <address>")
        assert message.endswith("position 12:30 is fine at 3.5")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (rb"a\ud83d b", rb"\ud83d"),
        (rb"a\udE00 b", rb"\udE00"),
        (rb"\ud83d\ude00 \\\ud83d", rb"\ud83d"),
        (rb"\ud83d\ud83d\ude00", rb"\ud83d"),
        (rb"\ud83d\ude00\ude00", rb"\ude00"),
        (rb"\ud83d\ude00" * 20_000 + rb"\ud83d", rb"\ud83d"),
    ],
)
def test_half_of_a_surrogate_pair_is_found(text: bytes, parsed: bytes) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % text
    with pytest.raises(ApiRequestError) as refused:
        parse(Endpoint.CHAT, body)
    at = int(re.fullmatch(r".*surrogate pair, (\S+), at byte (\d+)\.", refused.value.message)[2])  # type: ignore[index]
    assert body[at : at + 6] == parsed
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_whole_surrogate_pairs_and_escaped_backslashes_are_not_meant() -> None:
    for text in (rb"\ud83d\ude00", rb"\\ud83d"):
        parse(Endpoint.CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % text)
        with pytest.raises(ApiRequestError, match="not valid JSON"):
            parse(Endpoint.CHAT, b'{"model": "m", "messages": "%s"' % text)


@pytest.mark.parametrize(("status", "type_"), [(500, "server_error"), (503, "server_error"), (429, "rate_limit_error")])
def test_an_engines_page_does_not_blame_the_client(status: int, type_: str) -> None:
    assert json.loads(redact_error(ErrorFormat.OPENAI, status, b"<html>"))["error"]["type"] == type_


@given(
    st.sampled_from(ErrorFormat), st.binary(max_size=40) | JSON.map(lambda value: json.dumps({"error": value}).encode())
)
def test_any_engine_error_becomes_the_apis(error_format: ErrorFormat, body: bytes) -> None:
    error = json.loads(redact_error(error_format, 422, body))["error"]
    assert isinstance(error["message"], str)
    assert error["message"] or b"message" in body


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.COUNT_TOKENS])
def test_a_system_prompt_may_stand_alone(endpoint: Endpoint) -> None:
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        parse(endpoint, json.dumps(GOOD[endpoint] | {"messages": [], "system": system}).encode())
    for nothing in ("null", '""', "[]"):
        with pytest.raises(ApiRequestError, match="at least one message"):
            parse(endpoint, json.dumps(GOOD[endpoint] | {"messages": [], "system": json.loads(nothing)}).encode())
