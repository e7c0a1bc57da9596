"""Relays a streamed answer from its instance's connection to its client's."""

from __future__ import annotations

from pointsman.gateway.core.http_message import ResponseWriter
from pointsman.gateway.core.streaming.sse import SseFilter
from pointsman.gateway.io.engines.engine_connection import Passthrough, UpstreamResponse


async def relay_stream(answer: UpstreamResponse, events: SseFilter, out: ResponseWriter) -> None:
    """Everything of the answer's body that `events` lets out, as it comes; `out` has begun. Raises UpstreamError."""

    def write(piece: bytes) -> None:
        if whole := events.feed(piece):
            out.write(whole)

    await answer.pipe(write, Passthrough(events.pass_unchanged, out) if out.chunked else None)
    if flush := events.flush():
        out.write(flush)
