"""How idle sessions are told apart: by how their last answer ended, and by how long they are idle. Pure."""

from __future__ import annotations

from bisect import bisect_right
from enum import IntEnum
from typing import TypeAlias

import msgspec

# Lower ends of the bins of idle time, s, and the end of the last bin: a session that is idle for longer is forgotten.
EDGES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 600.0, 1_200.0, 3_600.0)
BINS = len(EDGES_S) - 1


class AnswerKind(IntEnum):
    """How the last answer of a session ended. A session's first answer is a kind of its own, because most sessions of one-turn
    traffic have no second one."""

    TOOL = 0
    STOP = 1
    OTHER = 2
    FIRST_TOOL = 3
    FIRST_STOP = 4
    FIRST_OTHER = 5


KINDS = tuple(AnswerKind)
# Numbers by kind and bin.
Observed: TypeAlias = tuple[tuple[float, ...], ...]


def answer_kind(finish_reason: str, turns: int) -> AnswerKind:
    """Return the kind of an answer by its finish reason (as in ev.Finished) and the number of answers of its session."""
    ended = AnswerKind.OTHER
    if finish_reason == "TOOL_CALLS":
        ended = AnswerKind.TOOL
    elif finish_reason == "STOP":
        ended = AnswerKind.STOP
    return AnswerKind(ended + 3) if turns <= 1 else ended


def bin_of(idle_s: float) -> int:
    """Return the bin of an idle time; BINS if it is beyond the last one."""
    return bisect_right(EDGES_S, max(idle_s, 0.0)) - 1


class IdleSessions(msgspec.Struct, frozen=True, gc=False):
    """What the owner of a pool stores of its idle sessions for the next owner.

    `tokens`: their sizes, by kind of answer and bin of idle time. `returns`, `exposure_s`: what it has learned of their returns
    (ReturnChances.observed). Raises ValueError for numbers that no owner has: a router of another version, with other bins, may
    have stored them.
    """

    tokens: Observed
    returns: Observed
    exposure_s: Observed

    def __post_init__(self) -> None:
        for bins_by_kind in (self.tokens, self.returns, self.exposure_s):
            if len(bins_by_kind) != len(KINDS) or any(len(bins) != BINS for bins in bins_by_kind):
                raise ValueError("other kinds or bins")
            if min(map(min, bins_by_kind)) < 0:
                raise ValueError("a negative number")
        if not min(map(min, self.exposure_s)):
            raise ValueError("no exposure")
