"""An instance that sends scripted bytes, and a client's requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pointsman_gateway.io.engines.connection_pool import ConnectionPool
from pointsman_gateway.io.engines.engine_connection import UpstreamResponse

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Plain; x=y\r\nContent-Length: 5\r\n\r\nhello"


class Instance:
    """A server that answers each request with the next of `answers`, and records requests and connections."""

    server: asyncio.Server

    def __init__(self) -> None:
        self.answers: list[list[bytes]] = []  # the pieces of each answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.hold: asyncio.Event | None = None  # the last piece of an answer waits for this
        # What follows an answer: keep, close, or, at the next request without an answer, reset or die.
        self.after = "keep"
        self.url = ""
        self.serving: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if self.after in ("reset", "die") and self.answers and not self.answers[0]:
                    self.answers.pop(0)
                    if self.after == "die":
                        self.server.close()
                    return
                pieces = self.answers.pop(0)
                for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
                    if self.hold is not None and not left:
                        await self.hold.wait()
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.after == "close":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.serving.discard(asyncio.current_task())


@asynccontextmanager
async def instance() -> AsyncIterator[Instance]:
    scripted = Instance()
    scripted.server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{scripted.server.sockets[0].getsockname()[1]}"
    async with scripted.server:
        yield scripted
    if scripted.hold is not None:
        scripted.hold.set()
    async with asyncio.timeout(10):
        while scripted.serving:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def ask(to: Instance, of: ConnectionPool) -> UpstreamResponse:
    return await of.send("POST", to.url, "/path", {"X-A": "b\r\nc: d"}, b"body")


async def whole(answer: UpstreamResponse) -> bytes:
    body = b""
    while piece := await answer.read():
        body += piece
    return body
