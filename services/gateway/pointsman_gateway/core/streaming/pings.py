"""What the client of a stream gets while there is no answer: the head, pings, and an error that comes after them."""

from __future__ import annotations

import msgspec

from pointsman_gateway.core.api import ErrorFormat, error_event
from pointsman_gateway.core.http_message import Request, Response

_HEAD = {"Content-Type": "text/event-stream; charset=utf-8"}
_COMMENT = b": keep-alive\n\n"
# Anthropic's API has an event for this, which its clients skip.
_PINGS = {ErrorFormat.ANTHROPIC: b'event: ping\ndata: {"type": "ping"}\n\n'}


def ping_in_silence(request: Request, error_format: ErrorFormat, interval_s: float, since: float) -> None:
    """Let the client of a streamed request get a ping whenever it has had no byte for `interval_s` (0: never). `since`: begin of
    the silence, monotonic s."""
    if interval_s:
        request.writer.ping_in_silence(interval_s, since, _HEAD, _PINGS.get(error_format, _COMMENT))


def as_event(error: Response, error_format: ErrorFormat) -> bytes:
    """Return the event of a stream that tells its client what the body of an error response would have told."""
    if error_format is ErrorFormat.ANTHROPIC:
        return b"event: error\ndata: " + error.body + b"\n\n"
    details = msgspec.json.decode(error.body)["error"]
    code = details["code"] or ""
    if error_format is ErrorFormat.OPENAI:
        # The status, which an engine's own error has as its code, is a number in a stream, as in the engine's own events.
        details["code"] = int(code) if code == str(error.status) else details["code"]
        return b"data: " + msgspec.json.encode({"error": details}) + b"\n\n"
    named = details["type"] if not code or code.isdigit() else code
    return error_event(details["message"], error_format, named, param=details["param"])
