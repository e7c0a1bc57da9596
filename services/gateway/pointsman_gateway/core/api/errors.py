"""Writes errors in the format of the API that was called, and redacts engines' own errors."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman_gateway.core.api.overflow_texts import CODE, in_anthropics_words, says_too_long
from pointsman_gateway.core.json_object import json_object


class ErrorFormat(enum.Enum):
    """The error format of an API."""

    OPENAI = "openai"  # {"error": {message, type, param, code}}; in a stream an unnamed event
    RESPONSES = "responses"  # as OPENAI; in a stream an event named "error" with top-level fields
    # {"type": "error", "error": {type, message}, "request_id"}; in a stream, without the id, an event named "error"
    ANTHROPIC = "anthropic"


# https://docs.anthropic.com/en/api/errors; 529 has no meaning outside Anthropic's own service.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_ADDRESS = re.compile(
    r"\b[a-z][a-z0-9+.-]{1,15}://[^\s\"'<>\\)\]]+"  # a URL of any scheme
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b"  # IPv4, with or without a port
    r"|\[[0-9a-f:]*:[0-9a-f:.]+\](?::\d{1,5})?"  # IPv6 in brackets
    r"|\b(?=[a-z0-9.-]*[a-z])[a-z0-9.-]+:\d{4,5}\b",  # a host name with a port
    re.IGNORECASE,
)

_BEGINS_WITH_ERROR = re.compile(rb'\s*(?:event: ?error|data: ?\{\s*"(?:error"|object": ?"error))')
# What an aborted answer has, and a part of it that is found sooner. A response tells of no abort, and repeats its request.
_ABORTED = {
    ErrorFormat.OPENAI: (b'"abort"', re.compile(rb'"finish_reason":\s?"abort"')),
    ErrorFormat.ANTHROPIC: (b'"stop_reason"', re.compile(rb'"delta":\s?\{"stop_reason":\s?null')),
}
_TRACE = "Traceback (most recent call last)"
_REPORTED = "The engine reported an error."
# Default Retry-After of a 429 or 503, s.
RETRY_S = 1.0
STREAM_FAILED = "The instance failed while it answered."
# `code` of the event that ends a stream of chat or completions when its instance has failed. vLLM's own events have a status
# there, and some clients (cline) ask again only by it: the answer's own status is 200.
_FAILED_STATUS = 502


class ApiRequestError(Exception):
    """An error response to a client's request. `retry_after_s`: None for the default. `fields`: further header fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = RETRY_S if retry_after_s is None and status in (429, 503) else retry_after_s
        self.fields = fields or {}

    @property
    def type(self) -> str:
        """The error's type in OpenAI's format."""
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    def body(self, error_format: ErrorFormat = ErrorFormat.OPENAI) -> bytes:
        """Return the JSON body of the response."""
        if error_format is ErrorFormat.ANTHROPIC:
            return _anthropic(self.status, self.message)
        return _openai(self.message, self.type, self.param, self.code)

    def headers(self) -> dict[str, str]:
        """Return the header fields, with Retry-After in whole seconds, at least 1, unless a retry cannot help."""
        wait_s = self.retry_after_s
        return {**self.fields} if wait_s is None else {"Retry-After": str(max(1, math.ceil(wait_s))), **self.fields}


def error_event(
    message: str,
    error_format: ErrorFormat = ErrorFormat.OPENAI,
    code: str | None = None,
    sequence_number: int = 0,
    param: str | None = None,
) -> bytes:
    """Return the SSE event that ends a failed stream. `sequence_number`: the event's number in a Responses stream. `code`,
    `param`: of these."""
    if error_format is ErrorFormat.ANTHROPIC:
        return b"event: error\ndata: " + _anthropic(500, message) + b"\n\n"
    if error_format is ErrorFormat.RESPONSES:
        event: dict[str, Any] = {"type": "error", "code": code or "server_error", "message": message, "param": param}
        event["sequence_number"] = sequence_number
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + _openai(message, "server_error", None, _FAILED_STATUS) + b"\n\n"


def redact_error(error_format: ErrorFormat, status: int, body: bytes) -> bytes:
    """Return an engine's error body as the client may see it: in the API's format, without network addresses and stack traces. A
    body that is not an error object is replaced by a fixed message. (vLLM writes some errors in OpenAI's format on every
    path.)"""
    error = json_object(body).get("error")
    if not isinstance(error, dict):
        # A 404 without an error object is the answer of a server without this path: its model only embeds, or only generates.
        said = "This model does not serve this API." if status == 404 else "The engine refused the request."
        if error_format is ErrorFormat.ANTHROPIC:
            return _anthropic(status, said)
        return _openai(said, _type_of(status), None, "rejected")
    safe = _safe(error, "The engine refused the request.")
    if error_format is ErrorFormat.ANTHROPIC:
        return _anthropic(status, in_anthropics_words(safe["message"]))
    # vLLM's `code` is the status as a number. OpenAI's is a text or null, and typed clients read no other. In events of streams
    # it stays a number: see _FAILED_STATUS.
    code = safe["code"]
    return msgspec.json.encode({"error": safe | {"code": str(code) if isinstance(code, int) else code}})


def with_request_id(body: bytes, request_id: str | None) -> bytes:
    """Return an error's body in Anthropic's format with the id of its request, as its API has it."""
    return body[:-1] + b',"request_id":' + msgspec.json.encode(request_id) + b"}"


def was_aborted(error_format: ErrorFormat, text: bytes) -> bool:
    """Whether an engine aborted an answer, as vLLM does with all running requests when it is told to stop. `text`: a part of a
    stream, or the body of a chat or completion. Inside a model's output these bytes would be escaped."""
    part, sign = _ABORTED.get(error_format, (b"", None))
    return sign is not None and part in text and sign.search(text) is not None


def begins_with_error(stream: bytes) -> bool:
    """Whether the next event of an engine's stream, perhaps incomplete, reports an error."""
    return _BEGINS_WITH_ERROR.match(stream) is not None


def reports_error(error_format: ErrorFormat, event: bytes) -> bool:
    """Whether an event of an engine's stream, without its end, reports an error or an abort; also if it cannot be read."""
    found = _object_of(event)
    return found is not None and (_is_error(found) or was_aborted(error_format, event))


def redact_error_event(error_format: ErrorFormat, event: bytes, sequence_number: int = 0) -> bytes:
    """Return one event of an engine's stream, without its end, as the client may see it. An event that reports an error is
    redacted as an error body is; other events are unchanged. `sequence_number`: for a Responses event that has none."""
    found = _object_of(event)
    if found is None:
        return event
    response = found.get("response")
    if isinstance(response, dict) and response.get("error"):
        response["error"] = _safe(response["error"], _REPORTED, ("code",))
        kept = [line for line in event.splitlines() if not line.startswith(b"data:")]
        return b"\n".join([*kept, b"data: " + msgspec.json.encode(found)])
    if was_aborted(error_format, event):
        return error_event(STREAM_FAILED, error_format, "instance_failed", sequence_number).rstrip()
    if not _is_error(found):
        return event
    safe = _safe(found.get("error") or found, _REPORTED)
    if error_format is ErrorFormat.ANTHROPIC:
        type_ = safe["type"] if found.get("type") == "error" and safe["type"] != "error" else None
        error = {"type": type_ or "api_error", "message": safe["message"]}
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", "error": error})
    if error_format is ErrorFormat.RESPONSES:
        number = found.get("sequence_number", sequence_number)
        code = safe["code"] if isinstance(safe["code"], str) else None
        return error_event(safe["message"], error_format, code, number if isinstance(number, int) else 0).rstrip()
    return b"data: " + msgspec.json.encode({"error": safe})


def _object_of(event: bytes) -> dict[str, Any] | None:
    """Return the object of an event, None if it has no data. What cannot be read counts as an error, and what is no object if the
    event has that name."""
    lines = event.splitlines()
    data = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
    if not data:
        return None
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {"type": "error"}
    if isinstance(found, dict):
        return found
    return {"type": "error", "message": found} if b"event: error" in lines else {}


def _is_error(found: dict[str, Any]) -> bool:
    return bool(found.get("error")) or "error" in (found.get("type"), found.get("object"))


def _safe(error: Any, otherwise: str, fields: tuple[str, ...] = ("type", "param", "code")) -> dict[str, Any]:
    """Return an engine's error (an object or a text) as {message, *fields} without addresses, stack traces and nested values.
    `otherwise`: the message if none is left."""
    found = error if isinstance(error, dict) else {"message": error}
    kept = {name: found.get(name) for name in fields}
    texts = {name: without_addresses(value) if isinstance(value, str) else value for name, value in kept.items()}
    scalars = {
        name: value if isinstance(value, str | int) and not isinstance(value, bool) else None
        for name, value in texts.items()
    }
    message = found.get("message")
    text = message.partition(_TRACE)[0].strip() if isinstance(message, str) else ""
    if "code" in scalars and says_too_long(text):
        scalars["code"] = CODE
    return {"message": without_addresses(text) or otherwise, **scalars}


def _type_of(status: int) -> str:
    """Return OpenAI's type of an error."""
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


def without_addresses(text: str) -> str:
    """Return `text` with URLs, IP addresses and hosts with ports replaced by "<address>"."""
    return _ADDRESS.sub("<address>", text)


def _openai(message: str, type_: str, param: str | None, code: str | int | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def _anthropic(status: int, message: str) -> bytes:
    type_ = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": type_, "message": message}})
