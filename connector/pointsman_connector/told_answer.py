"""The token ids of an answer, as an engine tells them beside its stream and as they come back to continue the answer. Pure.

Before each event of a stream that may be continued elsewhere the engine writes an SSE comment: `:17:5,9` for outputs of the
engine with the ids 17, and 5 and 9. It ends with `.` if the answer is complete; each event after that has the comment `:.`. If it
tells of several events, `x` and their number follow. The gateway takes comments out. Their texts, without these numbers, one
after another are the told answer: what the client has, no more and no less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Name in `vllm_xargs` by which a request asks for the ids (empty text), or is to be continued after a told answer.
FIELD = "pointsman_answer"
# The comment with which a continued stream begins.
CONTINUED = ":\n\n"
_TOLD = re.compile(r"(?::(?:\d+(?:,\d+)*)?\.?)*")


def comment(pieces: Sequence[Sequence[int]], *, complete: bool, events: int = 1) -> str:
    """Return the comment for so many events with these outputs' ids; empty if there is nothing to tell."""
    if not pieces and not complete and events <= 1:
        return ""
    return f"{told(pieces, complete=complete)}{f'x{events}' if events > 1 else ''}\n\n"


def told(pieces: Sequence[Sequence[int]], *, complete: bool = False) -> str:
    """Return a told answer."""
    told_pieces = "".join(":" + ",".join(map(str, piece)) for piece in pieces)
    return (told_pieces or ":") + ("." if complete else "")


def read(text: str) -> tuple[list[list[int]], int]:
    """Return the outputs' ids of a told answer, and 0 if the answer is not complete, else 1 and the number of events after it.
    Raises ValueError for any other text."""
    if not _TOLD.fullmatch(text):
        raise ValueError("not a told answer")
    pieces = [piece for piece in text.replace(".", "").split(":") if piece]
    return [[int(one) for one in piece.split(",")] for piece in pieces], text.count(".")


def asked(fields: Mapping[str, Any] | None) -> str | None:
    """Return what a request's `vllm_xargs` asks for: a told answer, empty for the ids alone; None for neither."""
    found = (fields or {}).get(FIELD)
    return found if isinstance(found, str) else None
