"""Traces: who asked what when, without its text. One JSON object per line, plain or gzip.

Fields of our own format: timestamp_ms, session_id, turn (from 1), input_length and output_length (tokens), hash_ids (one per
block of block_size input tokens, equal ids = equal prefix; a last partial block may have one or not), block_size, and think_ms
where known. `pointsman.lab.workload.trace_files` reads these and the formats of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

TINY_TRACE = Path(__file__).parents[1] / "data" / "tiny.jsonl.gz"

Count = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class TraceError(ValueError):
    """A trace that cannot be used; the message names file, line and field."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace."""

    timestamp_ms: Milliseconds
    session_id: str | int
    turn: Count
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]
    block_size: Count
    think_ms: Milliseconds | None = None

    @property
    def session(self) -> str:
        """session_id as text: some traces number their sessions."""
        return str(self.session_id)

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """The ids of the blocks that the input fills: those whose KV another request can use."""
        return self.hash_ids[: self.input_length // self.block_size]


def by_session(requests: Iterable[TraceRequest]) -> dict[str, list[TraceRequest]]:
    """Sessions in the order of their first requests, each with its turns in order."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    for turns in sessions.values():
        turns.sort(key=lambda request: request.turn)
    return sessions


def first_sessions(requests: Sequence[TraceRequest], count: int) -> Sequence[TraceRequest]:
    """The requests of the first `count` sessions (0: of all), in their order."""
    if not count:
        return requests
    chosen = set(list(by_session(requests))[:count])
    return [request for request in requests if request.session in chosen]


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
