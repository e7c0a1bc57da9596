"""The token ids of an answer, as an engine tells them beside its stream and as they come back to continue the answer. Pure.

Before each event of a stream that may be continued elsewhere the engine writes an SSE comment: `:17:5,9` for outputs of the
engine with the ids 17, and 5 and 9. It ends with `.` if the answer is complete; each event after that has the comment `:.`. If it
tells of several events, `x` and their number follow. The gateway takes comments out. Their texts, without these numbers, one
after another are the answer record: what the client has, no more and no less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Name in `vllm_xargs` by which a request asks for the ids (empty text), or is to be continued after an answer record.
FIELD = "pointsman_answer"
# The comment with which a continued stream begins.
CONTINUED = ":\n\n"
_RECORD = re.compile(r"(?::(?:\d+(?:,\d+)*)?\.?)*")


def comment(pieces: Sequence[Sequence[int]], *, complete: bool, events: int = 1) -> str:
    """Return the comment for so many events with these outputs' ids; empty if there is nothing to tell."""
    if not pieces and not complete and events <= 1:
        return ""
    return f"{record_of(pieces, complete=complete)}{f'x{events}' if events > 1 else ''}\n\n"


def record_of(pieces: Sequence[Sequence[int]], *, complete: bool = False) -> str:
    """Return an answer record."""
    written = "".join(":" + ",".join(map(str, piece)) for piece in pieces)
    return (written or ":") + ("." if complete else "")


def read(text: str) -> tuple[list[list[int]], int]:
    """Return the outputs' ids of an answer record, and 0 if the answer is not complete, else 1 and the number of events after it.
    Raises ValueError for any other text."""
    if not _RECORD.fullmatch(text):
        raise ValueError("not an answer record")
    pieces = [piece for piece in text.replace(".", "").split(":") if piece]
    return [[int(token_id) for token_id in piece.split(",")] for piece in pieces], text.count(".")


def asked(fields: Mapping[str, Any] | None) -> str | None:
    """Return what a request's `vllm_xargs` asks for: an answer record, empty for the ids alone; None for neither."""
    found = (fields or {}).get(FIELD)
    return found if isinstance(found, str) else None
