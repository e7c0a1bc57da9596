"""Decodes the JSON of a request's body, a large one piece by piece, and refuses one that would become very many objects.

The decoder holds the interpreter's lock until it returns: 100,000 messages at once stop everything else in the process for 130
ms, in pieces for 17 ms at a time (that long it takes to find where the pieces end). An empty object takes 27
times its bytes, so the size of a body bounds too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.gateway.core.api.errors import ApiRequestError

MAX_OBJECTS = 1 << 17  # and lists
MAX_STRINGS = 1 << 20  # names of fields included
MAX_VALUES = 1 << 22  # a number takes 40 bytes at most
PIECE_BYTES = 32 << 10
# A body with no more than this takes some milliseconds from its bytes to its keys: an agent's turn of 100,000 tokens, for one.
LIGHT_BYTES, LIGHT_OBJECTS = 512 << 10, 1_000
# Deeper than a part of a message's content, or a tool call's function, nothing large is expected: it is decoded at once.
_MAX_DEPTH = 6
_WINDOW_BYTES = 1 << 20
_QUOTE = b'"'


def is_light(raw: bytes) -> bool:
    """Whether a body may be decoded, checked and rendered at once on the event loop."""
    return len(raw) <= PIECE_BYTES or (len(raw) <= LIGHT_BYTES and raw.count(b"{") + raw.count(b"[") <= LIGHT_OBJECTS)


def decode_body(raw: bytes, *, light: bool = False) -> Any:
    """What msgspec.json.decode() makes of `raw`; at once where it is known to be `light`. Raises what it raises, and
    ApiRequestError for too many values."""
    if light or len(raw) <= PIECE_BYTES:
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
    """Raises ApiRequestError when `raw` has more objects and lists, strings, or values, than may be. No call of it lasts long."""
    if len(raw) <= MAX_OBJECTS:
        return
    counts = _Counts()
    for start in range(0, len(raw), _WINDOW_BYTES):
        window = raw[start : start + _WINDOW_BYTES]
        counts.add(window, window.count(_QUOTE))
    if not counts.too_many:
        return
    # Perhaps it is text that has them.
    outside = _Counts()
    in_string, carried = False, b""
    for start in range(0, len(raw), _WINDOW_BYTES):
        window = (carried + raw[start : start + _WINDOW_BYTES]).replace(rb"\\", b"")
        # The first half of an escape; what follows it is in the next window.
        carried = b"\\" if window.endswith(b"\\") else b""
        pieces = window.removesuffix(carried).replace(rb"\"", b"").split(_QUOTE)
        outside.add(b"".join(pieces[in_string::2]), len(pieces) - 1)
        in_string ^= len(pieces) % 2 == 0
        if outside.too_many:
            most = f"{MAX_OBJECTS} objects and lists, {MAX_STRINGS} strings or {MAX_VALUES} values"
            message = f"The request body has more than {most}."
            raise ApiRequestError(400, message, code="too_many_values")


@dataclass
class _Counts:
    """What JSON has, as far as brackets, quotes and commas tell; values are at most one more than commas in each list."""

    objects: int = 0
    quotes: int = 0
    commas: int = 0

    def add(self, text: bytes, quotes: int) -> None:
        """Count a piece of it, which has so many quotes or had them. Mutates."""
        self.quotes += quotes
        self.objects += text.count(b"{") + text.count(b"[")
        self.commas += text.count(b",")

    @property
    def too_many(self) -> bool:
        return self.objects > MAX_OBJECTS or self.quotes > 2 * MAX_STRINGS or self.objects + self.commas > MAX_VALUES
