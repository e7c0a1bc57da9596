"""Whether an engine's answer with status 200 has the form of the APIs. If not, the engine is at fault, or a server before it."""

from __future__ import annotations

# Fields of server-sent events, and comments.
_FIELDS = (b"data", b"event", b"id", b"retry", b":")
_BLANK = b" \t\r\n"


def has_json_form(body: bytes) -> bool:
    """Whether a body begins and ends as a JSON object or array does. Its inside is not looked at: O(1) but for blanks."""
    whole = body.strip(_BLANK)
    return whole[:1] + whole[-1:] in (b"{}", b"[]")


def begins_as_events(arrived: bytes) -> bool:
    """Whether the first bytes of a stream can begin server-sent events; True if there are too few to say."""
    begins = arrived.lstrip(b"\xef\xbb\xbf\r\n")
    return any(begins.startswith(field) or field.startswith(begins) for field in _FIELDS)
