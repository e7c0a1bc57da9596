"""The SSE comments in which an engine tells its events' token ids (connector/pointsman_connector/answer_record.py). Pure."""

from __future__ import annotations

import re

_COMMENTS = re.compile(rb"\n(:[\d:,]*\.?)(?:x\d{1,9})?(?=\n|\Z)")  # a literal beginning is found sooner than a line's
_BLOCKS = re.compile(rb"\n:[\d:,]*\.?(?:x\d{1,9})?\n(?=\n)")
_EVENTS = re.compile(rb":[\d:,]*\.?(?:x(\d{1,9}))?\n\n")


def ids_in(events: bytes) -> bytes:
    """Return what whole events tell of the answer, as the comments one after another."""
    return b"".join(_COMMENTS.findall(b"\n" + events))


def without_comments(events: bytes) -> bytes:
    """Return whole events without these comments."""
    return _BLOCKS.sub(b"", b"\n" + events)[1:]


def end_of_comment(events: bytes, at: int) -> int:
    """Return where the first event begins, if a comment begins at `at` and all events follow that it tells of; else 0. Without a
    number it tells of one."""
    found = _EVENTS.match(events, at)
    if found is None or events.count(b"\n\n", found.end()) < int(found[1] or 1):
        return 0
    return found.end()


def incomplete(events: bytes) -> bool:
    """Return whether fewer events follow than the comment tells with which `events` begins."""
    return _EVENTS.match(events) is not None and not end_of_comment(events, 0)
