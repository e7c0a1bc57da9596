"""The SSE comments in which an engine tells the token ids of its events (connector/pointsman_connector/told_answer.py). Pure."""

from __future__ import annotations

import re

_COMMENTS = re.compile(rb"^(:[\d:,]*\.?)$", re.MULTILINE)
_BLOCKS = re.compile(rb"^:[\d:,]*\.?\n\n", re.MULTILINE)


def told_in(events: bytes) -> bytes:
    """Return what whole events tell of the answer, as the comments one after another."""
    return b"".join(_COMMENTS.findall(events))


def without_comments(events: bytes) -> bytes:
    """Return whole events without these comments."""
    return _BLOCKS.sub(b"", events)
