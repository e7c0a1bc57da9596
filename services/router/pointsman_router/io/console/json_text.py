"""Converts protobuf messages to JSON text in small pieces, so that placements can be answered while a long one is converted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message


def json_chunks(message: Message) -> Iterator[str]:
    """Yield the text of protobuf's JSON mapping of `message` in pieces. Each entry of a repeated field of pointsman messages, in
    `message` and in the pointsman messages that it contains, is a separate piece. Fields that are not set are omitted, as in
    protobuf's mapping."""
    # protobuf's own printer takes about 0.1 ms for each instance and blocks the event loop until the last one.
    rest = type(message)()
    rest.CopyFrom(message)
    long: list[tuple[FieldDescriptor, Any]] = []
    for field, value in message.ListFields():
        if _is_long(field) or _holds_long(field):
            rest.ClearField(field.name)
            long.append((field, value))
    head = json.dumps(json_format.MessageToDict(rest))
    if not long:
        yield head
        return
    yield head[:-1]
    comma = ", " if len(head) > len("{}") else ""
    for field, value in long:
        yield f'{comma}"{field.json_name}": '
        comma = ", "
        if not field.is_repeated:
            yield from json_chunks(value)
            continue
        before = "["
        for entry in value:
            yield before
            yield from json_chunks(entry)
            before = ", "
        yield "]"
    yield "}"


def _is_long(field: FieldDescriptor) -> bool:
    ours = _ours(field)
    return field.is_repeated and ours is not None and not ours.GetOptions().map_entry


def _holds_long(field: FieldDescriptor) -> bool:
    ours = _ours(field)
    return not field.is_repeated and ours is not None and any(map(_is_long, ours.fields))


def _ours(field: FieldDescriptor) -> Descriptor | None:
    kind = field.message_type
    return kind if kind is not None and kind.full_name.startswith("pointsman.") else None
