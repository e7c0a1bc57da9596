"""A TCP proxy in the test's own event loop that can lose what the server answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class _Asked:
    """The latest request of a connection."""

    request: bytes = b""
    late: bool = False


class Proxy:
    """Passes bytes both ways, for clients that send a request, wait for its answer, and send the next.

    The answer to a request that contains `losing` vanishes. Requests that come between `hold` and `pass_on` wait in here until
    `deliver`, and reach the server then, even when their client has hung up.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.losing: bytes | None = None
        self.lost = 0
        self._target = port
        self._gate: asyncio.Event | None = None
        self._held_back = asyncio.Event()
        self.held = 0
        self.answered_late = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(self) -> None:
        """Keep what comes from now on."""
        self._gate = self._held_back = asyncio.Event()

    def pass_on(self) -> None:
        """Pass on what comes from now on; what is held stays."""
        self._gate = None

    def deliver(self) -> None:
        """Let what is held reach the server."""
        self._held_back.set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        asked = _Asked()
        self._writers += [writer, up_writer]
        for passing in (self._requests(reader, up_writer, asked), self._answers(up_reader, writer, asked)):
            task = asyncio.create_task(passing)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: _Asked) -> None:
        try:
            while piece := await reader.read(65_536):
                asked.request = piece
                if (gate := self._gate) is not None:
                    self.held += 1
                    await gate.wait()
                    asked.late = True
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            # A client that hung up does not stop the server from carrying out what came late, and that is to be seen.
            if not asked.late:
                writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: _Asked) -> None:
        try:
            while piece := await reader.read(65_536):
                self.answered_late += asked.late
                if writer.is_closing():
                    continue
                if self.losing is not None and self.losing in asked.request:
                    self.lost += 1
                    continue
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def proxied(port: int) -> AsyncIterator[Proxy]:
    """A running proxy of 127.0.0.1:port."""
    proxy = Proxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
