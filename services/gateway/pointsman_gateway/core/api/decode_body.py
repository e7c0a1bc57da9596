"""Decodes the JSON of a request's body, a large one in pieces, and refuses a body that would become too many objects.

The decoder holds the interpreter lock until it returns. Decoding 100,000 messages at once blocks all other threads of the process
for 130 ms; in pieces, for 17 ms at a time (the time to find where the pieces end). An empty object takes 27 times its bytes in
memory, so a limit on the size of a body alone is too weak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from pointsman_gateway.core.api.errors import ApiRequestError

MAX_OBJECTS = 1 << 17  # objects and lists
MAX_STRINGS = 1 << 20  # including field names
MAX_VALUES = 1 << 22  # a number takes at most 40 bytes
# Maximum depth of nested objects and lists, in a body and in JSON inside its strings. Rust's serde_json has the same one. A JSON
# schema takes two for each level of its own; templates indent by the depth, so what they write grows with its square.
MAX_DEPTH = 128
# Size of the pieces that are decoded at once, bytes.
PIECE_BYTES = 32 << 10
# Limits of a light body: bytes, objects and lists, and the items of all of them. It takes a few milliseconds from its bytes to
# its block keys. An example is an agent's turn of 130,000 tokens, with its tools.
LIGHT_BYTES, LIGHT_OBJECTS, LIGHT_ITEMS = 1 << 20, 2_048, 1 << 16
# Maximum number of brackets in the bytes of a light body: those of its objects and lists, and those in its texts, such as code.
# Decoding this many objects takes a millisecond. Code has about 8 brackets per 1,000 characters.
LIGHT_BRACKETS = 16_384
# Depth from which values are decoded at once: nothing large is expected below a content part or a tool call's function.
_DEPTH_IN_PIECES = 6
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"{[")
_INNER = (dict, list)
# Limits of a light body's numbers with a fraction or an exponent: how many, and characters of one. Some take 7 us to decode.
_LIGHT_FLOATS, _FLOAT_CHARS = 1_024, 40
_WINDOW_BYTES = 1 << 20
_QUOTE = b'"'


def decode_light(raw: bytes) -> Any:
    """Return the decoded body if it is light: it may be checked and rendered on the event loop, too. None if it is not light, or
    not valid JSON."""
    small = len(raw) <= PIECE_BYTES
    # translate() looks at each byte once: bytes.count() takes twice as long, and a search for each bracket longer in code.
    if not small and (len(raw) > LIGHT_BYTES or len(raw.translate(None, _NO_BRACKETS)) > LIGHT_BRACKETS):
        return None
    try:
        body = msgspec.json.decode(raw) if small else _decoded_with_few_floats(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _ManyFloats):
        return None
    return body if _is_small_tree(body) else None


class _ManyFloats(Exception):
    """A body has too many numbers with a fraction or an exponent, or too long ones."""


def _decoded_with_few_floats(raw: bytes) -> Any:
    left = _LIGHT_FLOATS

    def number(text: str) -> float:
        nonlocal left
        left -= 1
        if left < 0 or len(text) > _FLOAT_CHARS or math.isinf(value := float(text)):
            raise _ManyFloats
        return value

    return msgspec.json.Decoder(float_hook=number).decode(raw)


def _is_small_tree(value: Any) -> bool:
    """Return whether a decoded value has at most LIGHT_OBJECTS objects and lists, with at most LIGHT_ITEMS items in all, at most
    MAX_DEPTH deep. JSON in the arguments of tool calls counts, because templates get it decoded."""
    objects = items = 0
    for depth, level in enumerate(_levels(value), 1):
        objects += len(level)
        items += sum(map(len, level))
        items += sum(_items_in_text(entry.get("arguments")) for entry in level if type(entry) is dict)
        if objects > LIGHT_OBJECTS or items > LIGHT_ITEMS or depth > MAX_DEPTH:
            return False
    return True


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the objects and lists of each depth of a decoded value, from the outermost."""
    level = [value] if type(value) in _INNER else []
    while level:
        yield level
        level = [
            part
            for entry in level
            for part in (entry.values() if type(entry) is dict else entry)
            if type(part) in _INNER
        ]


def check_depth(value: Any, what: str = "request body is") -> None:
    """Raises ApiRequestError if a decoded value is nested deeper than MAX_DEPTH. `what`: the value, in words."""
    if next(islice(_levels(value), MAX_DEPTH, None), None) is not None:
        raise too_deep(what)


def too_deep(what: str = "request body is") -> ApiRequestError:
    """Return the error for a value, `what` in words, that is nested too deeply."""
    return ApiRequestError(400, f"The {what} nested deeper than {MAX_DEPTH} objects and lists.", code="invalid_json")


def _items_in_text(text: object) -> int:
    return text.count(",") + text.count("{") + text.count("[") if isinstance(text, str) else 0


def decode_body(raw: bytes) -> Any:
    """Return msgspec.json.decode(raw), decoded in pieces unless the body is small. Raises what msgspec.json.decode() raises, and
    ApiRequestError for too many values, or values that are nested too deeply."""
    _check_values(raw)
    try:
        body = _decoded(raw, 0)
    except RecursionError:
        raise too_deep() from None
    check_depth(body)
    return body


def _decoded(raw: bytes | msgspec.Raw, depth: int) -> Any:
    """Decode one value in pieces of about PIECE_BYTES."""
    if len(raw) <= PIECE_BYTES or depth >= _DEPTH_IN_PIECES:
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
    # Decoding the items one by one takes twice as long.
    decoded: list[Any] = msgspec.json.decode(b"[" + b",".join(items) + b"]")
    return decoded


def _beginning(raw: bytes | msgspec.Raw) -> tuple[bytes, bytes]:
    """Return the first two characters of `raw` that are not whitespace."""
    head = bytes(memoryview(raw)[:PIECE_BYTES]).lstrip()
    return head[:1], head[1:].lstrip()[:1]


def _check_values(raw: bytes) -> None:
    """Raises ApiRequestError if `raw` exceeds MAX_OBJECTS, MAX_STRINGS or MAX_VALUES.

    It reads `raw` in windows, so that no single call blocks other threads for long.
    """
    if len(raw) <= MAX_OBJECTS:
        return
    counts = _Counts()
    for start in range(0, len(raw), _WINDOW_BYTES):
        window = raw[start : start + _WINDOW_BYTES]
        counts.add(window, window.count(_QUOTE))
    if not counts.too_many:
        return
    # The counted characters may be inside strings. Count again without the content of strings.
    outside = _Counts()
    in_string, carried = False, b""
    for start in range(0, len(raw), _WINDOW_BYTES):
        window = (carried + raw[start : start + _WINDOW_BYTES]).replace(rb"\\", b"")
        # The window ends with the first character of an escape; its second character is in the next window.
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
    """Counts of brackets, quotes and commas in JSON. A list or object has at most one value more than commas."""

    objects: int = 0
    quotes: int = 0
    commas: int = 0

    def add(self, text: bytes, quotes: int) -> None:
        """Count a piece of JSON. `quotes`: number of quotes that it has, or had before they were removed. Mutates."""
        self.quotes += quotes
        self.objects += text.count(b"{") + text.count(b"[")
        self.commas += text.count(b",")

    @property
    def too_many(self) -> bool:
        return self.objects > MAX_OBJECTS or self.quotes > 2 * MAX_STRINGS or self.objects + self.commas > MAX_VALUES
