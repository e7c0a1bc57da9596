"""Reads usage, finish reason, completeness and engine errors from the last bytes of an answer, for each API."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman_gateway.core.api.api_call import Endpoint
from pointsman_gateway.core.json_object import json_object, json_value

# The last event of a Responses stream has the whole response and may be longer than the tail. vLLM writes the event's type last,
# and its usage after everything that can be long. Inside a JSON string these bytes would be escaped.
_LAST_TYPE = re.compile(rb'"type":\s?"response\.(completed|incomplete|failed)"\s*\}\s*$')
_SEQUENCE = re.compile(rb'"sequence_number":\s?(\d{1,9})')
_USAGE = re.compile(rb'"usage":\s?\{')
_INCOMPLETE = re.compile(rb'"incomplete_details":\s?\{\s*"reason":\s?"(\w+)"')
_FUNCTION_CALL = re.compile(rb'"type":\s?"function_call"')
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_ENGINE_ERROR = "the engine reported an error"
_NO_OBJECT = "the engine sent an event that is no JSON object"
# Finish reasons of the other APIs, and earlier ones of OpenAI's -> those of OpenAI's chat completions today.
_FINISH_REASONS = {
    "function_call": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "max_output_tokens": "length",
}
_MAX_REASON = 32
# Names of the counts of prompt and output in the usage of OpenAI's APIs.
_OF_CHOICES, _OF_RESPONSES = ("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")
# Size of a stream's tail, from which its end and usage are read.
TAIL_BYTES = 8 << 10


@dataclass(frozen=True)
class Usage:
    """The engine's token counts, None where the engine reported none. `finish_reason` is in the terms of OpenAI's chat
    completions for every API ("": not reported); with several choices it is the last choice's, or "abort" if one was aborted."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    finish_reason: str = ""


@dataclass(frozen=True)
class StreamEnd:
    """How a stream ended. `error` is set if the engine reported an error. `sequence_number` is the last one in the stream, -1:
    none."""

    complete: bool
    usage: Usage = Usage()
    error: str = ""
    sequence_number: int = -1


class _Read(msgspec.Struct):
    """What is read of a whole answer, and of a choice or an item of the output in it. Other values, such as the logprobs of a
    prompt, would take many times their size as objects."""

    usage: Any = None  # of the answer; its counts' names are those of its API
    choices: list[_Read] | None = None  # of completions and chats
    output: list[_Read] | None = None  # items of a Responses answer
    status: Any = None  # of a Responses answer
    incomplete_details: Any = None  # of a Responses answer: an object with a reason
    stop_reason: Any = None  # of a Messages answer
    finish_reason: Any = None  # of a choice
    type: Any = None  # of an item, or of a Messages answer


class StreamTail:
    """The last TAIL_BYTES or more of a stream, kept as the received pieces, so that no byte is copied until the end."""

    __slots__ = ("_pieces", "_size", "endpoint")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._pieces: list[bytes] = []  # a list, because an empty deque takes 0.7 KB and most tails are empty
        self._size = 0

    def add(self, piece: bytes) -> None:
        """Add one piece, and drop pieces that the tail no longer needs. Mutates."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.pop(0))

    def stream_end(self, *more: bytes) -> StreamEnd:
        """Return how the stream ended, by the rules of its API. `more` is appended to the pieces, which do not change."""
        return parse_stream_end(self.endpoint, b"".join((*self._pieces, *more)))


def parse_stream_end(kind: Endpoint, text: bytes) -> StreamEnd:
    """Return how a stream ended, by the rules of its API. `text`: its last few KiB, which may begin in the middle of an event."""
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith(b"data:")]
    if kind is Endpoint.MESSAGES:
        return _messages_ending(lines)
    if kind is Endpoint.RESPONSES:
        return _responses_ending(lines, text)
    return _openai_ending(lines)


def usage_of(body: bytes, kind: Endpoint) -> Usage:
    """Return the usage of an answer that is one JSON object; empty if it has none."""
    read = json_value(body, _Read)
    answer = json_object(body) if read is None else msgspec.to_builtins(read)
    if kind is Endpoint.MESSAGES:
        return _messages_usage(answer.get("usage"), answer.get("stop_reason"))
    if kind is Endpoint.RESPONSES:
        return _usage(answer.get("usage"), _responses_reason(answer), *_OF_RESPONSES)
    return _usage(answer.get("usage"), _choices_reason(answer), *_OF_CHOICES)


def _openai_ending(lines: list[bytes]) -> StreamEnd:
    usage, reason, error = None, "", ""
    # Usage is in the last event before [DONE]. Two more events are read: for the choice's end, and for engines that send an empty
    # choice after the usage.
    for line in lines[-4:]:
        event = json_object(line)
        usage = event.get("usage") or usage
        reason = _choices_reason(event) or reason
        if event.get("error"):
            error = _ENGINE_ERROR
        elif not event and line not in (b"[DONE]", b"{}", b""):
            error = error or _NO_OBJECT
    return StreamEnd(bool(lines) and lines[-1] == b"[DONE]", _usage(usage, reason, *_OF_CHOICES), error)


def _messages_ending(lines: list[bytes]) -> StreamEnd:
    """Read message_delta for the usage, and message_stop or error as the end. No event follows an error event."""
    complete, usage, error = False, Usage(), ""
    for line in lines[-4:]:
        event = json_object(line)
        kind = event.get("type")
        if kind == "message_delta":
            delta = event.get("delta")
            usage = _messages_usage(event.get("usage"), delta.get("stop_reason") if isinstance(delta, dict) else "")
        complete = kind in ("message_stop", "error")
        if kind == "error":
            error = _ENGINE_ERROR
    return StreamEnd(complete, usage, error)


def _responses_ending(lines: list[bytes], text: bytes) -> StreamEnd:
    sequence = int(found[-1]) if (found := _SEQUENCE.findall(text)) else -1
    last = json_object(lines[-1]) if lines else {}
    if last.get("type") == "error":
        return StreamEnd(True, Usage(), _ENGINE_ERROR, sequence)
    response = last.get("response")
    if isinstance(response, dict):
        complete, failed = last.get("type") in _ENDS, last.get("type") == "response.failed"
        usage = _usage(response.get("usage"), _responses_reason(response), *_OF_RESPONSES)
    else:
        ended = _LAST_TYPE.search(text)
        complete, failed = ended is not None, ended is not None and ended[1] == b"failed"
        usage = _usage_in_tail(text, ended[1].decode()) if ended is not None else Usage()
    return StreamEnd(complete, usage, _ENGINE_ERROR if failed else "", sequence)


def _usage_in_tail(text: bytes, status: str) -> Usage:
    """Return the usage of a response whose beginning is not in the tail."""
    reason = _INCOMPLETE.findall(text)[-1:]
    called = status == "completed" and _FUNCTION_CALL.search(text) is not None
    answer = {
        "status": status,
        "incomplete_details": {"reason": reason[0].decode()} if reason else None,
        "output": [{"type": "function_call"}] if called else [],
    }
    return _usage(_object_at_last(_USAGE, text), _responses_reason(answer), *_OF_RESPONSES)


def _object_at_last(key: re.Pattern[bytes], text: bytes) -> Any:
    """Return the object after the last match of `key` in JSON without its beginning; None if there is none."""
    *_, at = [None, *(found.end() - 1 for found in key.finditer(text))]
    if at is None:
        return None
    try:
        return json.JSONDecoder().raw_decode(text[at:].decode("utf-8", "replace"))[0]
    except (ValueError, RecursionError):
        return None


def _usage(usage: Any, reason: str, prompt: str, output: str) -> Usage:
    """Return usage of an API of OpenAI. `prompt` and `output`: the names of its counts of tokens."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get(f"{prompt}_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(_count(usage.get(prompt)), cached, _count(usage.get(output)), reason)


def _messages_usage(usage: Any, reason: object) -> Usage:
    """Return usage of Anthropic's API, whose input_tokens exclude tokens read from or written to a cache."""
    usage = usage if isinstance(usage, dict) else {}
    fresh, cached = _count(usage.get("input_tokens")), _count(usage.get("cache_read_input_tokens"))
    if fresh is not None:
        fresh = _count(fresh + (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0))
    return Usage(fresh, cached, _count(usage.get("output_tokens")), _reason(reason))


def _choices_reason(event: dict[str, Any]) -> str:
    """Return why the last of an event's choices ended, or that one was aborted; "" if it has not ended or there is none."""
    choices = event.get("choices")
    found = choices if isinstance(choices, list) else []
    reasons = ["", *(_reason(choice.get("finish_reason")) for choice in found if isinstance(choice, dict))]
    return "abort" if "abort" in reasons else reasons[-1]


def _responses_reason(response: dict[str, Any]) -> str:
    """Return why a response ended. Its API has no finish_reason, so this uses its status, its details and the calls in its
    output."""
    status, details, output = (response.get(name) for name in ("status", "incomplete_details", "output"))
    if status == "incomplete":
        return _reason(details.get("reason")) if isinstance(details, dict) else ""
    if status != "completed":
        return ""
    items = output if isinstance(output, list) else []
    called = any(isinstance(item, dict) and item.get("type") == "function_call" for item in items)
    return "tool_calls" if called else "stop"


def _reason(said: object) -> str:
    return _FINISH_REASONS.get(said, said[:_MAX_REASON]) if isinstance(said, str) else ""


def _count(value: object) -> int | None:
    # The routers' protocol has room for the sum of two of them.
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None
