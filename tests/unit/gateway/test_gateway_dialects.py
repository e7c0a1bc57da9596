"""Whatever a client sends, the dialect answers with a call or with its own error, and hides what is not the client's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.dialects import (
    FORBIDDEN_FIELDS,
    FORBIDDEN_XARGS,
    DialectError,
    Form,
    Kind,
    Rules,
    engine_error,
    error_event,
    estimated_tokens,
    parse,
    with_fields,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
GOOD: dict[Kind, dict[str, Any]] = {
    Kind.CHAT: CHAT,
    Kind.COMPLETION: TEXT,
    Kind.RESPONSES: {"model": "m", "input": "hi"},
    Kind.MESSAGES: CHAT | {"max_tokens": 5},
    Kind.COUNT_TOKENS: CHAT,
    Kind.EMBEDDINGS: {"model": "m", "input": "hi"},
    Kind.RERANK: {"model": "m", "query": "q", "documents": ["a", "b"]},
    Kind.SCORE: {"model": "m", "text_1": "a", "text_2": ["b"]},
    Kind.POOLING: {"model": "m", "input": [[1, 2], [3]]},
    Kind.CLASSIFY: {"model": "m", "input": ["a", "b"]},
    Kind.TOKENIZE: TEXT,
    Kind.DETOKENIZE: {"model": "m", "tokens": [1, 2]},
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


def parsed_or_refused(kind: Kind, raw: bytes) -> None:
    try:
        call = parse(kind, raw)
    except DialectError as error:
        refused: DialectError | None = error
    else:
        refused = None
    if refused is not None:
        assert refused.status == 400
        assert set(json.loads(refused.body())["error"]) == {"message", "type", "param", "code"}
        return
    seen = json.loads(call.payload)
    assert not set(FORBIDDEN_FIELDS) & seen.keys()
    assert "cache_salt" not in seen
    # Routes that know no vllm_xargs let anything of that name through, as any field that they do not know.
    if isinstance(seen.get("vllm_xargs"), dict):
        assert not set(FORBIDDEN_XARGS) & seen["vllm_xargs"].keys()
    assert call.payload is raw or call.stripped or call.usage_is_ours
    assert call.opaque or call.chat is not None or call.kind not in (Kind.CHAT, Kind.RESPONSES, Kind.MESSAGES)
    assert call.model
    assert call.max_output_tokens >= 0
    assert estimated_tokens(call) >= 1


@given(st.sampled_from(Kind), JSON)
def test_any_json_is_a_call_or_an_error(kind: Kind, value: Any) -> None:
    parsed_or_refused(kind, json.dumps(value).encode())


@settings(max_examples=400)
@given(st.sampled_from(Kind), st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_any_fields_are_a_call_or_an_error(kind: Kind, fields: dict[str, Any], whole: bool) -> None:
    base = GOOD[kind] if whole else {}
    parsed_or_refused(kind, json.dumps({**fields, **base}).encode())
    parsed_or_refused(kind, json.dumps({**base, **fields}).encode())


@given(st.sampled_from(Kind), st.binary(max_size=64))
def test_any_bytes_are_a_call_or_an_error(kind: Kind, raw: bytes) -> None:
    parsed_or_refused(kind, raw)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"model": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_hostile_bytes_are_malformed(raw: bytes) -> None:
    with pytest.raises(DialectError) as refused:
        parse(Kind.CHAT, raw)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        (Kind.CHAT, {"model": None}, "model"),
        (Kind.CHAT, {"model": 3}, "model"),
        (Kind.CHAT, {"messages": []}, "messages"),
        (Kind.CHAT, {"messages": "hi"}, "messages"),
        (Kind.CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
        (Kind.CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (Kind.CHAT, {"max_tokens": -1}, "max_tokens"),
        (Kind.CHAT, {"max_tokens": 0}, "max_tokens"),
        (Kind.CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (Kind.CHAT, {"max_tokens": True}, "max_tokens"),
        (Kind.CHAT, {"max_completion_tokens": 2**40}, "max_completion_tokens"),
        (Kind.CHAT, {"temperature": "hot"}, "temperature"),
        (Kind.CHAT, {"stream": "yes"}, "stream"),
        (Kind.CHAT, {"n": 0}, "n"),
        (Kind.CHAT, {"tools": {}}, "tools"),
        (Kind.CHAT, {"session_id": 7}, "session_id"),
        (Kind.COMPLETION, {"prompt": None}, "prompt"),
        (Kind.COMPLETION, {"prompt": ""}, "prompt"),
        (Kind.COMPLETION, {"prompt": [1, "a"]}, "prompt"),
        (Kind.COMPLETION, {"prompt": [-1]}, "prompt"),
        (Kind.COMPLETION, {"prompt": [[]]}, "prompt"),
        (Kind.COMPLETION, {"max_tokens": "5"}, "max_tokens"),
        (Kind.RESPONSES, {"input": None}, "input"),
        (Kind.RESPONSES, {"input": ["hi"]}, "input"),
        (Kind.RESPONSES, {"max_output_tokens": -1}, "max_output_tokens"),
        (Kind.RESPONSES, {"reasoning": "high"}, "reasoning"),
        (Kind.RESPONSES, {"previous_response_id": 3}, "previous_response_id"),
        (Kind.MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (Kind.MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (Kind.MESSAGES, {"system": 3}, "system"),
        (Kind.MESSAGES, {"thinking": "on"}, "thinking"),
        (Kind.COUNT_TOKENS, {"messages": []}, "messages"),
        (Kind.EMBEDDINGS, {"input": []}, "input"),
        (Kind.EMBEDDINGS, {"input": [1, "a"]}, "input"),
        (Kind.RERANK, {"documents": None}, "documents"),
        (Kind.RERANK, {"query": 3}, "query"),
        (Kind.SCORE, {"text_1": None}, "text_1"),
        (Kind.POOLING, {"input": None}, "input"),
        (Kind.CLASSIFY, {"input": 3}, "input"),
        (Kind.TOKENIZE, {"prompt": [1]}, "prompt"),
        (Kind.DETOKENIZE, {"tokens": "x"}, "tokens"),
    ],
)
def test_a_wrong_field_is_named(kind: Kind, change: dict[str, Any], param: str) -> None:
    base = GOOD[kind]
    with pytest.raises(DialectError) as refused:
        parse(kind, json.dumps(base | change).encode())
    assert (refused.value.status, refused.value.type, refused.value.param) == (400, "invalid_request_error", param)


def test_null_means_not_set() -> None:
    call = parse(
        Kind.CHAT, json.dumps(CHAT | {"max_tokens": None, "stream": None, "n": None, "vllm_xargs": None}).encode()
    )
    assert (call.max_output_tokens, call.stream) == (0, False)


def test_a_clean_body_stays_the_clients_own_bytes() -> None:
    raw = b' {"model":"m", "prompt":"\\u00fc", "unknown": {"a": 1.50}}\n'
    assert parse(Kind.COMPLETION, raw).payload is raw


def test_escaped_and_repeated_names_are_no_way_around() -> None:
    raw = b'{"model":"m","prompt":"x","kv\\u005ftransfer_params":{"a":1},"vllm_xargs":{"kv_cache_report_mode":"full","a":1}}'
    call = parse(Kind.COMPLETION, raw)
    assert json.loads(call.payload) == {"model": "m", "prompt": "x", "vllm_xargs": {"a": 1}}
    assert call.stripped == ("kv_transfer_params", "vllm_xargs.kv_cache_report_mode")


def test_cache_salt_passes_only_where_clients_may_set_it() -> None:
    raw = json.dumps(TEXT | {"cache_salt": "s"}).encode()
    assert parse(Kind.COMPLETION, raw, Rules(client_cache_salt=True)).cache_salt == "s"
    dropped = parse(Kind.COMPLETION, raw)
    assert dropped.cache_salt == ""
    assert b"cache_salt" not in dropped.payload


def test_hints_and_limits_are_read() -> None:
    call = parse(
        Kind.CHAT, json.dumps(CHAT | {"prompt_cache_key": "k", "max_tokens": 5, "max_completion_tokens": 9}).encode()
    )
    assert (call.session_hint, call.max_output_tokens, call.opaque) == ("k", 9, "")
    assert (
        parse(Kind.CHAT, json.dumps(CHAT | {"session_id": "s", "prompt_cache_key": "k"}).encode()).session_hint == "s"
    )
    assert parse(Kind.CHAT, json.dumps(CHAT | {"chat_template": "x"}).encode()).opaque


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert DialectError(503, "x", retry_after_s=0.2).headers() == {"Retry-After": "1"}
    assert DialectError(429, "x", retry_after_s=1.2).headers() == {"Retry-After": "2"}
    assert DialectError(400, "x").headers() == {}


def test_an_error_event_is_one_sse_event() -> None:
    event = error_event("gone")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["message"] == "gone"


def test_an_estimate_counts_text_and_no_media() -> None:
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "t" * 400}, image]}]
    assert 100 <= estimated_tokens(parse(Kind.CHAT, json.dumps(CHAT | {"messages": messages}).encode())) < 110

    def of(prompt: object) -> int:
        return estimated_tokens(parse(Kind.COMPLETION, json.dumps(TEXT | {"prompt": prompt}).encode()))

    assert [of("abcdefgh"), of("a"), of([1, 2, 3]), of([[1, 2], [1]]), of(["abcdefgh", "a"])] == [2, 1, 3, 2, 2]


@pytest.mark.parametrize("kind", Kind)
def test_a_tenants_salt_goes_before_the_clients(kind: Kind) -> None:
    raw = json.dumps({"cache_salt": "mine", **GOOD[kind]}).encode()
    call = parse(kind, raw, Rules(client_cache_salt=True, cache_salt="the tenant's"))
    assert call.cache_salt == "the tenant's"
    seen = json.loads(call.payload)
    assert seen == GOOD[kind] | ({"cache_salt": "the tenant's"} if kind.placed else {})
    assert call.payload.count(b"cache_salt") == kind.placed


def test_an_alias_is_resolved_for_the_engine() -> None:
    call = parse(Kind.CHAT, json.dumps(CHAT | {"model": "big"}).encode(), Rules(aliases={"big": "org/big-1"}))
    assert (call.model, call.asked, json.loads(call.payload)["model"]) == ("org/big-1", "big", "org/big-1")


def test_a_session_id_passes_only_where_it_is_the_clients_own() -> None:
    raw = json.dumps(CHAT | {"session_id": "s", "vllm_xargs": {"session_id": "s", "a": 1}}).encode()
    assert json.loads(parse(Kind.CHAT, raw).payload)["session_id"] == "s"
    call = parse(Kind.CHAT, raw, Rules(own_session=False))
    assert call.session_hint == "s"
    assert json.loads(call.payload) == CHAT | {"vllm_xargs": {"a": 1}}


def test_a_response_does_not_name_itself() -> None:
    call = parse(Kind.RESPONSES, json.dumps(GOOD[Kind.RESPONSES] | {"request_id": "resp_other"}).encode())
    assert call.stripped == ("request_id",)


@given(st.binary(max_size=3), st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_fields_in_front_change_nothing_else(blanks: bytes, body: dict[str, Any]) -> None:
    space = bytes(b" \t\n\r"[one % 4] for one in blanks)
    raw = space + b"{" + space + json.dumps(body).encode()[1:] + space
    added = {"request\u00fc": 1, "a": ["b"]}
    for name in added:
        body.pop(name, None)
    raw = space + b"{" + space + json.dumps(body).encode()[1:] + space
    assert json.loads(with_fields(raw, added)) == {**added, **body}
    assert with_fields(raw, {}) is raw


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 502, 503])
def test_anthropics_errors_have_its_form(status: int) -> None:
    body = json.loads(DialectError(status, "no", code="x").body(Form.ANTHROPIC))
    assert (body["type"], body["error"]["message"]) == ("error", "no")
    assert body["error"]["type"].endswith(("_error", "_too_large"))
    event = error_event("gone", Form.ANTHROPIC)
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.split(b"data: ")[1])["error"] == {"type": "api_error", "message": "gone"}


def test_an_error_in_a_stream_of_responses_is_the_apis_own_event() -> None:
    name, _, data = error_event("gone", Form.RESPONSES, "instance_failed", 7).partition(b"\ndata: ")
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
    for form in Form:
        safe = engine_error(form, 400, json.dumps({"error": {"message": text, "type": "T", "code": 400}}).encode())
        assert address.encode() not in safe
        message = json.loads(safe)["error"]["message"]
        assert message.startswith("Cannot reach <address>")
        assert message.endswith("position 12:30 is fine at 3.5")


@given(st.sampled_from(Form), st.binary(max_size=40) | JSON.map(lambda value: json.dumps({"error": value}).encode()))
def test_any_engine_error_becomes_the_apis(form: Form, body: bytes) -> None:
    error = json.loads(engine_error(form, 422, body))["error"]
    assert isinstance(error["message"], str)
    assert error["message"] or b"message" in body
