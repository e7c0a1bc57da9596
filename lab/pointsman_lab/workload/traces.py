"""Traces: the times, sessions and lengths of requests, without their text. One JSON object per line, plain or gzip.

Fields of the pointsman format: timestamp_ms, session_id, turn (from 1), input_length and output_length (tokens), hash_ids (one
per block of block_size input tokens, equal ids = equal prefix; a last partial block may have one or not), block_size, and
think_ms where known. `pointsman_lab.workload.trace_files` reads this format and others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

TINY_TRACE = Path(__file__).parents[1] / "data" / "tiny.jsonl.gz"

# What decoding a line that is no JSON of its kind raises.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Count = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class TraceError(ValueError):
    """A trace that cannot be used; the message names file, line and field."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace."""

    timestamp_ms: Milliseconds  # time of sending, from any origin
    session_id: str | int  # text or number, as the source has it
    turn: Count  # from 1, in the order of the session
    input_length: Count  # tokens of the whole prompt
    output_length: Count  # tokens of the answer
    hash_ids: tuple[int, ...]  # of the prompt's blocks, in order; a last partial block may have one
    block_size: Count  # tokens per block
    think_ms: Milliseconds | None = None  # pause since the end of the session's last answer; None: unknown

    @property
    def session(self) -> str:
        """session_id as text, because some traces number their sessions."""
        return str(self.session_id)

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """The ids of the blocks that the input fills. Another request can use only the KV of these."""
        return self.hash_ids[: self.input_length // self.block_size]


def id_span(requests: Iterable[TraceRequest]) -> int:
    """Return a number by multiples of which all block ids, also negative ones, can be shifted so that none becomes another."""
    ids = [block for request in requests for block in request.hash_ids]
    return 1 + max(ids, default=0) - min(0, min(ids, default=0))


def require_think_times(sessions: Iterable[Sequence[TraceRequest]]) -> None:
    """Raise TraceError if a turn after a session's first has no think_ms, by which it is sent."""
    for turns in sessions:
        for turn in turns[1:]:
            if turn.think_ms is None:
                raise TraceError(f"think_ms: missing in session {turn.session} turn {turn.turn}")


def by_session(requests: Iterable[TraceRequest]) -> dict[str, list[TraceRequest]]:
    """Return the sessions in the order of their first requests, each with its turns in order."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    for turns in sessions.values():
        turns.sort(key=lambda request: request.turn)
    return sessions


def first_sessions(requests: Sequence[TraceRequest], count: int) -> Sequence[TraceRequest]:
    """Return the requests of the first `count` sessions (0: of all), in their order."""
    if not count:
        return requests
    chosen = set(list(by_session(requests))[:count])
    return [request for request in requests if request.session in chosen]


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading items that are equal."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
