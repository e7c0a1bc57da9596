"""The SSE comments in which an engine tells its events' token ids (connector/pointsman_connector/answer_record.py). Pure."""

from __future__ import annotations

import re

_COMMENTS = re.compile(rb"^(:[\d:,]*\.?)(?:x\d+)?$", re.MULTILINE)
_BLOCKS = re.compile(rb"^:[\d:,]*\.?(?:x\d+)?\n\n", re.MULTILINE)
_EVENTS = re.compile(rb":[\d:,]*\.?(?:x(\d+))?\n\n")


def ids_in(events: bytes) -> bytes:
    """Return what whole events tell of the answer, as the comments one after another."""
    return b"".join(_COMMENTS.findall(events))


def without_comments(events: bytes) -> bytes:
    """Return whole events without these comments."""
    return _BLOCKS.sub(b"", events)


def incomplete(events: bytes) -> bool:
    """Return whether fewer events follow than the comment tells with which `events` begins. Without a number it tells of one."""
    events_of = _EVENTS.match(events)
    return events_of is not None and events.count(b"\n\n", events_of.end()) < int(events_of[1] or 1)
