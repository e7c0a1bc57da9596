"""Decodes the JSON of a request's body, a large one in pieces, and refuses a body that would become too many objects.

The decoder holds the interpreter lock until it returns. Decoding 100,000 messages at once blocks all other threads of the process
for 130 ms; in pieces, for 17 ms at a time (the time to find where the pieces end). Small nested objects take 36 times their bytes
in memory, so a limit on the size of a body alone is too weak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.pauses import pause

# A request takes at most RATIO times the bytes of its body, and a small one as much as one of SMALL_BODY: the body, its decoded
# values, what they are converted to, and the text of its prompt. MARGIN of it is for texts of which one character is not ASCII:
# each of their characters then takes up to 4 bytes.
RATIO, MARGIN, SMALL_BODY = 20, 3, 32 << 10
# The part of it for objects, lists, strings and numbers, without the characters of strings.
_VALUES_RATIO = 13
# Bytes of memory that values take, by the characters that tell of them. Field names that are repeated take none, but objects
# with many fields take more.
OBJECT_BYTES, LIST_BYTES, STRING_BYTES, COMMA_BYTES, _NAME_BYTES = 184, 88, 58, 24, 20
# A field of an object with more than _FEW_FIELDS has a name of its own.
_FEW_FIELDS, _FIELD_BYTES = 5, 110
MAX_OBJECTS = 1 << 17  # objects and lists
MAX_STRINGS = 1 << 20  # including field names
MAX_VALUES = 1 << 22  # a number takes at most 40 bytes
# Maximum depth of nested objects and lists, in a body and in JSON inside its strings. Rust's serde_json has the same one. A JSON
# schema takes two for each level of its own; templates indent by the depth, so what they write grows with its square.
MAX_DEPTH = 128
# Size of the pieces that are decoded at once, bytes.
PIECE_BYTES = 16 << 10
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
_WINDOW_BYTES = 8 << 10
_QUOTE = b'"'


class Decoded(NamedTuple):
    """A decoded body, and at most how many bytes of memory its values take (but for MARGIN)."""

    body: Any
    memory: int


def memory_left(body_bytes: int, decoded_bytes: int) -> int:
    """Return how many bytes of memory a request may take beside its body of so many bytes and its values, without MARGIN."""
    return max((RATIO - MARGIN) * max(body_bytes, SMALL_BODY) - body_bytes - decoded_bytes, 0)


def _values_memory(body_bytes: int) -> int:
    return _VALUES_RATIO * max(body_bytes, SMALL_BODY)


def decode_light(raw: bytes) -> Decoded | None:
    """Return the decoded body if it is light: it may be checked and rendered on the event loop, too. None if it is not light, or
    not valid JSON."""
    small, most = len(raw) <= PIECE_BYTES, _values_memory(len(raw))
    # translate() looks at each byte once: bytes.count() takes twice as long, and a search for each bracket longer in code.
    # An object with a field takes so much.
    most_brackets = min(LIGHT_BRACKETS, most // (OBJECT_BYTES + 2 * STRING_BYTES))
    if not small:
        if len(raw) > LIGHT_BYTES or (brackets := len(raw.translate(None, _NO_BRACKETS))) > most_brackets:
            return None
        # In a text a quote has a backslash before it; one that ends with a brace counts. Decoding so many objects in vain takes
        # up to 10 ms.
        if brackets > LIGHT_OBJECTS and raw.count(b'{"') > LIGHT_OBJECTS:
            return None
    try:
        body = msgspec.json.decode(raw) if small else _decoded_with_few_floats(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _ManyFloats):
        return None
    memory = _memory_of_small_tree(body)
    return Decoded(body, memory + len(raw)) if 0 <= memory <= most else None


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


def _memory_of_small_tree(value: Any) -> int:
    """Return at most how many bytes of memory a decoded value takes that has at most LIGHT_OBJECTS objects and lists, with at
    most LIGHT_ITEMS items in all, at most MAX_DEPTH deep; -1 for any other. JSON in the arguments of tool calls counts, because
    templates get it decoded."""
    objects = items = memory = 0
    for depth, level in enumerate(_levels(value), 1):
        objects += len(level)
        items += (here := sum(map(len, level)))
        if here > _FEW_FIELDS * len(level):
            memory += _memory_of_fields(level)
        items += sum(_items_in_text(entry.get("arguments")) for entry in level if type(entry) is dict)
        if objects > LIGHT_OBJECTS or items > LIGHT_ITEMS or depth > MAX_DEPTH:
            return -1
    return memory + objects * OBJECT_BYTES + items * STRING_BYTES


def _memory_of_fields(level: list[Any]) -> int:
    """Return how many bytes of memory objects with many fields take more than others."""
    return _FIELD_BYTES * sum(len(entry) for entry in level if len(entry) > _FEW_FIELDS and type(entry) is dict)


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


def decode_body(raw: bytes) -> Decoded:
    """Return msgspec.json.decode(raw), decoded in pieces unless the body is small. Raises what msgspec.json.decode() raises, and
    ApiRequestError for too many values, or values that are nested too deeply."""
    memory = len(raw) + _checked_memory(raw)
    try:
        body = _decoded(raw, 0)
    except RecursionError:
        raise too_deep() from None
    for depth, level in enumerate(_levels(body), 1):
        if depth > MAX_DEPTH:
            raise too_deep()
        memory += _memory_of_fields(level)
    return Decoded(body, memory)


def _decoded(raw: bytes | msgspec.Raw, depth: int) -> Any:
    """Decode one value in pieces of about PIECE_BYTES."""
    if len(raw) <= PIECE_BYTES or depth >= _DEPTH_IN_PIECES:
        return msgspec.json.decode(raw)
    first, second = _beginning(raw)
    if first == b"{":
        fields: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        # In place, because two of them take much memory if there are many.
        for name, value in fields.items():
            fields[name] = _decoded(value, depth + 1)
        return fields
    if first == b"[" and second in (b"{", b"["):
        return _decoded_list(msgspec.json.decode(raw, type=list[msgspec.Raw]), depth + 1)
    return msgspec.json.decode(raw)


def _decoded_list(items: list[msgspec.Raw], depth: int) -> list[Any]:
    done: list[Any] = []
    together: list[msgspec.Raw] = []
    size = 0
    items.reverse()
    while items:
        # An item takes more memory than a small value.
        item = items.pop()
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
    pause()
    # Decoding the items one by one takes twice as long.
    decoded: list[Any] = msgspec.json.decode(b"[" + b",".join(items) + b"]")
    return decoded


def _beginning(raw: bytes | msgspec.Raw) -> tuple[bytes, bytes]:
    """Return the first two characters of `raw` that are not whitespace."""
    head = bytes(memoryview(raw)[:PIECE_BYTES]).lstrip()
    return head[:1], head[1:].lstrip()[:1]


def _checked_memory(raw: bytes) -> int:
    """Return at most how many bytes of memory the values of `raw` take, without the characters of strings. Raises ApiRequestError
    if that is more than its part, or if `raw` exceeds MAX_OBJECTS, MAX_STRINGS or MAX_VALUES."""
    counts = _counted(raw, most := _values_memory(len(raw)))
    if counts.too_many:
        limits = f"{MAX_OBJECTS} objects and lists, {MAX_STRINGS} strings or {MAX_VALUES} values"
        raise ApiRequestError(400, f"The request body has more than {limits}.", code="too_many_values")
    if counts.memory > most:
        message = "The request body has too many objects, lists and strings for its size."
        raise ApiRequestError(400, message, code="too_many_values")
    return counts.memory


def memory_of_json(text: str, most: int) -> int:
    """Return at most how many bytes of memory the values of JSON in a string take, without the characters of strings. The count
    ends where it exceeds `most`."""
    return _counted(text.encode("utf-8", "surrogatepass"), most).memory


def _counted(raw: bytes, most: int) -> _Counts:
    """Return the counts of `raw`, or of its beginning, if that has too many values or takes more than `most` bytes of memory.

    It reads `raw` in windows, so that no single call blocks other threads for long.
    """
    counts = _Counts()
    for start in range(0, len(raw), _WINDOW_BYTES):
        pause()
        window = raw[start : start + _WINDOW_BYTES]
        counts.add(window, window.count(_QUOTE))
    if not counts.too_many and 2 * counts.memory <= most:
        return counts
    # The counted characters may be inside strings. Count again without the content of strings.
    outside = _Counts()
    in_string, carried = False, b""
    for start in range(0, len(raw), _WINDOW_BYTES):
        pause()
        window = (carried + raw[start : start + _WINDOW_BYTES]).replace(rb"\\", b"")
        # The window ends with the first character of an escape; its second character is in the next window.
        carried = b"\\" if window.endswith(b"\\") else b""
        pieces = window.removesuffix(carried).replace(rb"\"", b"").split(_QUOTE)
        text = b"".join(pieces[in_string::2])
        outside.add(text, len(pieces) - 1)
        outside.names += text.count(b":")
        in_string ^= len(pieces) % 2 == 0
        if outside.too_many or outside.memory > most:
            break
    return outside


@dataclass
class _Counts:
    """Counts of brackets, quotes, commas and names in JSON. A list or object has at most one value more than commas. The first
    count of a text includes what is inside its strings."""

    objects: int = 0  # opening braces
    lists: int = 0  # opening brackets
    quotes: int = 0  # two for each string
    commas: int = 0  # between values
    names: int = 0  # colons after the names of fields; 0 in the first count

    def add(self, text: bytes, quotes: int) -> None:
        """Count a piece of JSON. `quotes`: number of quotes that it has, or had before they were removed. Mutates."""
        self.quotes += quotes
        self.objects += text.count(b"{")
        self.lists += text.count(b"[")
        self.commas += text.count(b",")

    @property
    def memory(self) -> int:
        """At most how many bytes of memory the values take."""
        strings = max(self.quotes // 2 - self.names, 0)
        memory = self.objects * OBJECT_BYTES + self.lists * LIST_BYTES + strings * STRING_BYTES
        return memory + self.names * _NAME_BYTES + max(self.commas - strings, 0) * COMMA_BYTES

    @property
    def too_many(self) -> bool:
        objects = self.objects + self.lists
        return objects > MAX_OBJECTS or self.quotes > 2 * MAX_STRINGS or objects + self.commas > MAX_VALUES
