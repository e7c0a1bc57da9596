"""Draws values that a JSON schema allows, for the arguments of generated tool calls. Pure.

Supported are `type`, `const`, `enum`, `properties` and `required`, `items`, `prefixItems` and their number, `uniqueItems`,
lengths, bounds and `multipleOf` of numbers, the usual formats, `$ref` within the schema, `allOf`, and the first of `anyOf` or
`oneOf`. `pattern`, `not`, `if` and dependencies between properties are not supported. Only required properties get a value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

# The first word of every text. An agent may execute what it gets; no program, file or host has this name.
FIRST_WORD = "emulated"
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "emulated@example.com",
    "hostname": "emulated.example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/emulated",
    "url": "https://example.com/emulated",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
# Limits of the values, since a client's schema may require any amount.
# Maximum number of values; further values are null.
MAX_VALUES = 1_000
# Maximum depth of nesting; deeper values are null.
MAX_DEPTH = 32
# Maximum number of items of an array.
MAX_ITEMS = 32
# Maximum length of a text, characters.
MAX_CHARACTERS = 2_000
# Depth below which a value is null or empty if its schema allows that, so that a schema that contains itself has finite values.
_FULL_DEPTH = 3
_LARGEST, _FINEST = 2**53, 1e-9
_SPAN = 100  # range of integers without an upper or a lower bound


class SchemaSampler:
    """Draws values of one schema. Texts consist of `words` (each with its leading space)."""

    def __init__(self, schema: object, draw: random.Random, words: Sequence[str]) -> None:
        self._root = schema
        self._draw = draw
        self._words = words
        self._values = 0

    def arguments(self) -> dict[str, Any]:
        """Return an object, whatever the schema's type is."""
        value = self._value({"type": "object", **self._plain(self._root, 0)}, 0)
        return value if isinstance(value, dict) else {}

    def _value(self, schema: object, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            return None
        plain = self._plain(schema, depth)
        if "const" in plain:
            return plain["const"]
        if isinstance(plain.get("enum"), list) and plain["enum"]:
            return self._draw.choice(plain["enum"])
        match _type_of(plain, depth):
            case "object":
                return self._object(plain, depth)
            case "array":
                return self._array(plain, depth)
            case "integer" | "number":
                return self._number(plain)
            case "boolean":
                return self._draw.random() < 0.5
            case "null":
                return None
            case _:
                return self._text(plain)

    def _plain(self, schema: object, depth: int) -> dict[str, Any]:
        """Return `schema` with its references, its `allOf` and one of its alternatives merged into it."""
        plain = dict(schema) if isinstance(schema, Mapping) else {}
        for _ in range(MAX_DEPTH):
            reference = plain.pop("$ref", None)
            rest = plain.pop("allOf", None)
            options = [option for name in ("anyOf", "oneOf") for option in _list(plain.pop(name, None))]
            if not (isinstance(reference, str) or rest or options):
                break
            parts = [self._found(reference)] if isinstance(reference, str) else []
            parts += _list(rest)
            if options:
                parts.append(
                    next((option for option in options if _is_null(option) == (depth > _FULL_DEPTH)), options[0])
                )
            for part in parts:
                plain = _merged(plain, part)
        return plain

    def _found(self, reference: str) -> object:
        """Return what a reference into the schema itself (`#/$defs/Name`) refers to; None for any other reference."""
        place: Any = self._root if reference.startswith("#") else None
        for step in reference.removeprefix("#").split("/")[1:]:
            place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return place

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        known = schema.get("properties")
        properties = known if isinstance(known, Mapping) else {}
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        names = [name for name in properties if name in required] + [
            name for name in required if name not in properties
        ]
        return {
            name: self._value(properties.get(name, schema.get("additionalProperties")), depth + 1) for name in names
        }

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        heads = _list(schema.get("prefixItems"))
        wanted = max(len(heads), 0 if depth > _FULL_DEPTH or schema.get("items") is False else 1)
        low, high = _count(schema.get("minItems"), 0), _count(schema.get("maxItems"), MAX_ITEMS)
        items: list[Any] = []
        for at in range(min(max(low, wanted), high, MAX_ITEMS)):
            inner = heads[at] if at < len(heads) else schema.get("items")
            value = self._value(inner, depth + 1)
            tries = 0
            while schema.get("uniqueItems") is True and value in items and tries < MAX_ITEMS:
                value, tries = self._value(inner, depth + 1), tries + 1
            items.append(value)
        return items

    def _number(self, schema: Mapping[str, Any]) -> float:
        step = _bound(schema.get("multipleOf")) or 1
        if step < _FINEST or (schema.get("type") == "integer" and step != int(step)):
            step = 1
        least, above = _bound(schema.get("minimum")), _bound(schema.get("exclusiveMinimum"))
        most, below = _bound(schema.get("maximum")), _bound(schema.get("exclusiveMaximum"))
        lows = [math.ceil(least / step)] if least is not None else []
        lows += [math.floor(above / step) + 1] if above is not None else []
        highs = [math.floor(most / step)] if most is not None else []
        highs += [math.ceil(below / step) - 1] if below is not None else []
        if not lows and not highs:
            low, high = 1, _SPAN
        else:
            low = max(lows) if lows else min(highs) - _SPAN
            high = min(highs) if highs else low + _SPAN
        if low <= high:
            return self._draw.randint(low, high) * step
        edges = [limit for limit in (least, above, most, below) if limit is not None]
        return sum(edges) / len(edges)  # no multiple of the step fits: the mean of the bounds

    def _text(self, schema: Mapping[str, Any]) -> str:
        if isinstance(form := schema.get("format"), str) and form in _FORMATS:
            return _FORMATS[form]
        text = FIRST_WORD + "".join(self._draw.choices(self._words, k=self._draw.randint(2, 5)))
        least = min(_count(schema.get("minLength"), 0), MAX_CHARACTERS)
        while len(text) < least:
            text += self._draw.choice(self._words)
        return text[: _count(schema.get("maxLength"), MAX_CHARACTERS)]


def _type_of(schema: Mapping[str, Any], depth: int) -> str:
    kinds = schema.get("type")
    if isinstance(kinds, list):
        if depth > _FULL_DEPTH and "null" in kinds:
            return "null"
        kinds = next((kind for kind in kinds if kind != "null"), "null")
    if isinstance(kinds, str):
        return kinds
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "string"


def _is_null(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _merged(schema: Mapping[str, Any], more: object) -> dict[str, Any]:
    if not isinstance(more, Mapping):
        return dict(schema)
    merged = {**schema, **more}
    ours, theirs = schema.get("properties"), more.get("properties")
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged["properties"] = {**ours, **theirs}
    if "required" in schema and "required" in more:
        merged["required"] = [*_list(schema["required"]), *_list(more["required"])]
    return merged


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object, default: int) -> int:
    return value if type(value) is int and value >= 0 else default


def _bound(value: object) -> float | None:
    """Return a number that is safe to compute with, else None: JSON may have infinities, and integers that no float can hold."""
    if type(value) not in (int, float):
        return None
    assert isinstance(value, int | float)
    return value if -_LARGEST <= value <= _LARGEST else None
