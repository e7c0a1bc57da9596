"""Whatever a client sends, the dialect answers with a call or with its own error, and hides what is not the client's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.dialect import (
    FORBIDDEN_FIELDS,
    FORBIDDEN_XARGS,
    DialectError,
    Kind,
    error_event,
    estimated_tokens,
    parse,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}

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
FIELDS = st.sampled_from((*_TYPED, *_OTHER, *FORBIDDEN_FIELDS))


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
    assert not set(FORBIDDEN_XARGS) & (seen.get("vllm_xargs") or {}).keys()
    assert call.payload is raw or call.stripped
    assert call.model
    assert call.max_output_tokens >= 0
    assert estimated_tokens(call) >= 1


@given(st.sampled_from(Kind), JSON)
def test_any_json_is_a_call_or_an_error(kind: Kind, value: Any) -> None:
    parsed_or_refused(kind, json.dumps(value).encode())


@settings(max_examples=400)
@given(st.sampled_from(Kind), st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_any_fields_are_a_call_or_an_error(kind: Kind, fields: dict[str, Any], whole: bool) -> None:
    base = (CHAT if kind is Kind.CHAT else TEXT) if whole else {}
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
    ],
)
def test_a_wrong_field_is_named(kind: Kind, change: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = CHAT if kind is Kind.CHAT else TEXT
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
    assert parse(Kind.COMPLETION, raw, client_cache_salt=True).cache_salt == "s"
    dropped = parse(Kind.COMPLETION, raw)
    assert dropped.cache_salt == ""
    assert b"cache_salt" not in dropped.payload


def test_hints_and_limits_are_read() -> None:
    call = parse(
        Kind.CHAT, json.dumps(CHAT | {"prompt_cache_key": "k", "max_tokens": 5, "max_completion_tokens": 9}).encode()
    )
    assert (call.session_hint, call.max_output_tokens, call.opaque) == ("k", 9, False)
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
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "t" * 400}, image]}]
    assert 100 <= estimated_tokens(parse(Kind.CHAT, json.dumps(CHAT | {"messages": messages}).encode())) < 110

    def of(prompt: object) -> int:
        return estimated_tokens(parse(Kind.COMPLETION, json.dumps(TEXT | {"prompt": prompt}).encode()))

    assert [of("abcdefgh"), of("a"), of([1, 2, 3]), of([[1, 2], [1]]), of(["abcdefgh", "a"])] == [2, 1, 3, 2, 2]
