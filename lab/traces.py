"""Traces: who asked what when, without its text. One JSON object per line, plain or gzip.

Fields: timestamp_ms, session_id, turn (from 1), input_length and output_length (tokens), hash_ids (one per block of block_size
input tokens, equal ids = equal prefix; a last partial block may have one or not), block_size, and think_ms where known.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

TINY_TRACE = Path(__file__).parent / "data" / "tiny.jsonl.gz"

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


def load_trace(path: Path) -> list[TraceRequest]:
    """Read a trace, ordered by time. Raises TraceError for a missing, empty or malformed file."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    turns: set[tuple[str, int]] = set()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        if wrong := _inconsistent(request):
            raise TraceError(f"{path}:{number}: {wrong}")
        if (request.session, request.turn) in turns:
            raise TraceError(f"{path}:{number}: turn: {request.turn} of session {request.session} is there twice")
        turns.add((request.session, request.turn))
        requests.append(request)
    if not requests:
        raise TraceError(f"{path}: the trace has no requests")
    return sorted(requests, key=lambda request: request.timestamp_ms)


def save_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write a trace (gzip when the name ends so); the same requests give the same bytes."""
    encoder = msgspec.json.Encoder()
    data = b"".join(encoder.encode(request) + b"\n" for request in requests)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def by_session(requests: Sequence[TraceRequest]) -> dict[str, list[TraceRequest]]:
    """Sessions in the order of their first requests, each with its turns in order."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    for turns in sessions.values():
        turns.sort(key=lambda request: request.turn)
    return sessions


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def _inconsistent(request: TraceRequest) -> str:
    whole, rest = divmod(request.input_length, request.block_size)
    if len(request.hash_ids) not in (whole, whole + bool(rest)):
        return f"hash_ids: {len(request.hash_ids)} for input_length {request.input_length} in blocks of {request.block_size}"
    return ""
