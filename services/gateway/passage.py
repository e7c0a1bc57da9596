"""The way of a stream from its instance's connection to its client's."""

from __future__ import annotations

from services.gateway.events import EventStream
from services.gateway.http.connection import Outgoing
from services.gateway.http.exchange import Answer, Shortcut


async def pass_on(answer: Answer, events: EventStream, out: Outgoing) -> None:
    """Everything of the answer's body that `events` lets out, as it comes; `out` has begun. Raises UpstreamError."""

    def write(piece: bytes) -> None:
        if whole := events.feed(piece):
            out.write(whole)

    await answer.pipe(write, Shortcut(events.passes, out) if out.chunked else None)
    if rest := events.rest():
        out.write(rest)
