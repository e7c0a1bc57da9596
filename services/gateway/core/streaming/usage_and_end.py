"""Reads from an answer's last bytes, API by API, its usage, whether it is complete, and whether the engine failed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.gateway.core.api.api_call import Endpoint

# A Responses stream's last event holds the whole response and may be longer than the tail; vLLM writes its type last, and
# its usage behind everything that can be long. Inside a JSON string these bytes would be escaped.
_LAST_TYPE = re.compile(rb'"type":\s?"response\.(completed|incomplete|failed)"\s*\}\s*$')
_SEQUENCE = re.compile(rb'"sequence_number":\s?(\d{1,9})')
_USAGE = re.compile(rb'"usage":\s?\{')
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_ENGINE_ERROR = "the engine reported an error"


@dataclass(frozen=True)
class Usage:
    """Tokens as the engine counted them; None where it did not say."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


@dataclass(frozen=True)
class StreamEnd:
    """How a stream ended. `error` is the engine's own ("" without); `sequence_number` is the last one seen, -1 for none."""

    complete: bool
    usage: Usage = Usage()
    error: str = ""
    sequence_number: int = -1


def parse_stream_end(kind: Endpoint, text: bytes) -> StreamEnd:
    """What the end of a stream says, in the manner of its API; `text` is its last few KiB, from anywhere in an event on."""
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith(b"data:")]
    if kind is Endpoint.MESSAGES:
        return _messages_ending(lines)
    if kind is Endpoint.RESPONSES:
        return _responses_ending(lines, text)
    return _openai_ending(lines)


def usage_of(body: bytes, kind: Endpoint) -> Usage:
    """Usage of an answer that is one JSON object; all None when it has none."""
    found = _object(body).get("usage")
    if not isinstance(found, dict):
        return Usage()
    return {Endpoint.MESSAGES: _messages_usage, Endpoint.RESPONSES: _responses_usage}.get(kind, _openai_usage)(found)


def _openai_ending(lines: list[bytes]) -> StreamEnd:
    usage, error = Usage(), ""
    # Usage is in the last event before [DONE]; one more is looked at for engines that end with an empty choice.
    for line in lines[-3:]:
        event = _object(line)
        if isinstance(event.get("usage"), dict):
            usage = _openai_usage(event["usage"])
        if event.get("error"):
            error = _ENGINE_ERROR
    return StreamEnd(bool(lines) and lines[-1] == b"[DONE]", usage, error)


def _messages_ending(lines: list[bytes]) -> StreamEnd:
    """message_delta has the usage, message_stop ends; after an error event nothing follows."""
    complete, usage, error = False, Usage(), ""
    for line in lines[-4:]:
        event = _object(line)
        kind = event.get("type")
        if kind == "message_delta" and isinstance(event.get("usage"), dict):
            usage = _messages_usage(event["usage"])
        complete = kind in ("message_stop", "error")
        if kind == "error":
            error = _ENGINE_ERROR
    return StreamEnd(complete, usage, error)


def _responses_ending(lines: list[bytes], text: bytes) -> StreamEnd:
    sequence = int(found[-1]) if (found := _SEQUENCE.findall(text)) else -1
    last = _object(lines[-1]) if lines else {}
    if last.get("type") == "error":
        return StreamEnd(True, Usage(), _ENGINE_ERROR, sequence)
    response = last.get("response")
    if isinstance(response, dict):
        complete, failed, usage = (
            last.get("type") in _ENDS,
            last.get("type") == "response.failed",
            response.get("usage"),
        )
    else:
        ended = _LAST_TYPE.search(text)
        complete, failed = ended is not None, ended is not None and ended[1] == b"failed"
        usage = _object_at_last(_USAGE, text) if complete else None
    error = _ENGINE_ERROR if failed else ""
    return StreamEnd(complete, _responses_usage(usage) if isinstance(usage, dict) else Usage(), error, sequence)


def _object_at_last(key: re.Pattern[bytes], text: bytes) -> Any:
    """The object behind the last match of `key` in JSON that has lost its beginning; None when there is none."""
    *_, at = [None, *(found.end() - 1 for found in key.finditer(text))]
    if at is None:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[at:].decode("utf-8", "replace"))[0]
    except (ValueError, RecursionError):
        return None


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _openai_usage(usage: dict[str, Any]) -> Usage:
    cached = _inner(usage, "prompt_tokens_details", "cached_tokens")
    return Usage(_count(usage.get("prompt_tokens")), cached, _count(usage.get("completion_tokens")))


def _responses_usage(usage: dict[str, Any]) -> Usage:
    cached = _inner(usage, "input_tokens_details", "cached_tokens")
    return Usage(_count(usage.get("input_tokens")), cached, _count(usage.get("output_tokens")))


def _messages_usage(usage: dict[str, Any]) -> Usage:
    """Anthropic's input_tokens leave out what was read from or written to a cache."""
    fresh, cached = _count(usage.get("input_tokens")), _count(usage.get("cache_read_input_tokens"))
    if fresh is not None:
        fresh += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    return Usage(fresh, cached, _count(usage.get("output_tokens")))


def _inner(usage: dict[str, Any], name: str, field: str) -> int | None:
    details = usage.get(name)
    return _count(details.get(field)) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32 else None
