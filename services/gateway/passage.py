"""The way of a stream from its instance's connection to its client's."""

from __future__ import annotations

from services.gateway.events import EventStream
from services.gateway.http.connection import Outgoing
from services.gateway.http.exchange import Answer


async def pass_on(answer: Answer, events: EventStream, out: Outgoing) -> None:
    """Everything of the answer's body that `events` lets out, as it comes; `out` has begun. Raises UpstreamError."""

    def write(piece: bytes) -> None:
        if whole := events.feed(piece):
            out.write(whole)

    def write_chunk(chunk: bytes) -> bool:
        if not events.passes(chunk):
            return False
        out.pass_on(chunk)
        return True

    await answer.pipe(write, write_chunk if out.chunked else None)
    if rest := events.rest():
        out.write(rest)
