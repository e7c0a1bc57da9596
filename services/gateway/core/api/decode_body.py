"""Decodes the JSON of a request's body, a large one piece by piece, and refuses one that would become very many objects.

The decoder holds the interpreter's lock until it returns: 100,000 messages at once stop everything else in the process for 130
ms, in pieces for 17 ms at a time (that long it takes to find where the pieces end). An empty object takes 27
times its bytes, so the size of a body bounds too little.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pointsman.gateway.core.api.errors import ApiRequestError

MAX_OBJECTS = 1 << 17  # and lists
MAX_VALUES = 1 << 20
PIECE_BYTES = 32 << 10
# Deeper than a part of a message's content, or a tool call's function, nothing large is expected: it is decoded at once.
_MAX_DEPTH = 6
_WINDOW_BYTES = 1 << 20
_QUOTE, _BACKSLASH = b'"', ord("\\")


def decode_body(raw: bytes) -> Any:
    """What msgspec.json.decode() makes of `raw`. Raises what it raises, and ApiRequestError for too many values."""
    if len(raw) <= PIECE_BYTES:
        return msgspec.json.decode(raw)
    _check_values(raw)
    return _decoded(raw, 0)


def _decoded(raw: bytes | msgspec.Raw, depth: int) -> Any:
    """One value, in pieces of about PIECE_BYTES."""
    if len(raw) <= PIECE_BYTES or depth >= _MAX_DEPTH:
        return msgspec.json.decode(raw)
    first, second = _beginning(raw)
    if first == b"{":
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {name: _decoded(value, depth + 1) for name, value in fields.items()}
    if first == b"[" and second in (b"{", b"["):
        return _decoded_list(msgspec.json.decode(raw, type=list[msgspec.Raw]), depth + 1)
    return msgspec.json.decode(raw)


def _decoded_list(items: list[msgspec.Raw], depth: int) -> list[Any]:
    done: list[Any] = []
    together: list[msgspec.Raw] = []
    size = 0
    for item in items:
        length = len(item)
        if length > PIECE_BYTES:
            done += _together(together)
            together, size = [], 0
            done.append(_decoded(item, depth))
            continue
        together.append(item)
        size += length
        if size >= PIECE_BYTES:
            done += _together(together)
            together, size = [], 0
    return done + _together(together)


def _together(items: list[msgspec.Raw]) -> list[Any]:
    # One by one takes twice as long.
    decoded: list[Any] = msgspec.json.decode(b"[" + b",".join(items) + b"]")
    return decoded


def _beginning(raw: bytes | msgspec.Raw) -> tuple[bytes, bytes]:
    """The first two characters that are no blanks."""
    head = bytes(memoryview(raw)[:PIECE_BYTES]).lstrip()
    return head[:1], head[1:].lstrip()[:1]


def _check_values(raw: bytes) -> None:
    """Raises ApiRequestError when `raw` has more objects and lists, or values, than may be. No call of it lasts long."""
    if len(raw) <= MAX_OBJECTS:
        return
    objects = values = 0
    for start in range(0, len(raw), _WINDOW_BYTES):
        more = _count(raw, start, min(start + _WINDOW_BYTES, len(raw)))
        objects, values = objects + more[0], values + more[1]
    if objects > MAX_OBJECTS or values > MAX_VALUES:
        # Perhaps it is text that has them.
        _check_outside_strings(raw)


def _check_outside_strings(raw: bytes) -> None:
    objects = values = at = 0
    while at < len(raw):
        until = min(at + _WINDOW_BYTES, len(raw))
        quote = raw.find(_QUOTE, at, until)
        more = _count(raw, at, until if quote < 0 else quote)
        objects, values = objects + more[0], values + more[1]
        if objects > MAX_OBJECTS or values > MAX_VALUES:
            message = f"The request body has more than {MAX_OBJECTS} objects and lists, or {MAX_VALUES} values."
            raise ApiRequestError(400, message, code="too_many_values")
        at = until if quote < 0 else _string_end(raw, quote + 1)


def _string_end(raw: bytes, at: int) -> int:
    """Where the string that has begun before `at` is over."""
    while (quote := raw.find(_QUOTE, at)) >= 0:
        before = quote - 1
        while before >= at and raw[before] == _BACKSLASH:
            before -= 1
        if (quote - before) % 2:
            return quote + 1
        at = quote + 1
    return len(raw)


def _count(raw: bytes, start: int, end: int) -> tuple[int, int]:
    """Objects and lists, and values (at most one more than commas in each of them), as far as brackets and commas tell."""
    objects = raw.count(b"{", start, end) + raw.count(b"[", start, end)
    return objects, objects + raw.count(b",", start, end)
