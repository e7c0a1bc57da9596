"""TCP proxies in the test's event loop: one that can be cut, broken or slow, and one that loses answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # the two ends of one connection


class TcpProxy:
    """Listens on `port` and connects to 127.0.0.1:`target`. Subclasses decide which bytes pass, and when."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """HOST:PORT to connect to."""
        return f"127.0.0.1:{self.port}"

    def lead_to(self, target: int) -> None:
        """Connect new connections to 127.0.0.1:`target`; open ones stay."""
        self._target = target

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the listener and all connections."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        self._reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _admit(self) -> None:
        """Wait until a new connection may be made. Raises ConnectionError to refuse the connection."""

    def _directions(self, client: Ends, server: Ends) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return the coroutines that forward a connection's bytes, one per direction."""
        raise NotImplementedError

    def _reset(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._run(self._connect(reader, writer))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._admit()
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(up_writer)
        for passing in self._directions((reader, writer), (up_reader, up_writer)):
            self._run(passing)


class Link(TcpProxy):
    """A proxy with a network's faults.

    While the link is cut nothing passes, as when packets are lost: sent bytes and new connections arrive after the cut. While the
    link is broken, connections are reset. A slow link delays bytes by `delay_s` in each direction, in order.
    """

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._broken = False

    def cut(self) -> None:
        """Hold all bytes and new connections until repair()."""
        self._open.clear()

    def break_(self) -> None:
        """Reset all open connections, and new ones until repair()."""
        self._broken = True
        self._reset()

    def repair(self) -> None:
        """End all faults of the link."""
        self._open.set()
        self._broken = False
        self.delay_s = 0.0

    async def _admit(self) -> None:
        await self._open.wait()
        if self._broken:
            raise ConnectionError

    def _directions(self, client: Ends, server: Ends) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._pass(client[0], server[1]), self._pass(server[0], client[1])

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until its end; delayed pieces keep their order."""
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, piece = await late.get()
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                await self._open.wait()
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            while piece := await reader.read(65_536):
                late.put_nowait((loop.time() + self.delay_s, piece))
            late.put_nowait((loop.time() + self.delay_s, b""))
            await sending
        except OSError:
            pass
        finally:
            sending.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await sending
            self._writers.discard(writer)
            writer.close()


@dataclass
class _Asked:
    """The latest request of a connection, and whether it was held."""

    request: bytes = b""
    late: bool = False


class LossyProxy(TcpProxy):
    """A proxy that loses answers, for clients that wait for each answer before the next request.

    The answer to a request that contains `losing` is dropped. Requests that come between hold() and pass_on() wait in the proxy
    until deliver(), and then reach the server even if the client has disconnected.
    """

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.losing: bytes | None = None
        self.lost = 0
        self._gate: asyncio.Event | None = None
        self._held_back = asyncio.Event()
        self.held = 0
        self.answered_late = 0

    def hold(self) -> None:
        """Hold requests that come from now on."""
        self._gate = self._held_back = asyncio.Event()

    def pass_on(self) -> None:
        """Forward requests that come from now on; held requests stay held."""
        self._gate = None

    def deliver(self) -> None:
        """Send the held requests to the server."""
        self._held_back.set()

    def _directions(self, client: Ends, server: Ends) -> tuple[Coroutine[Any, Any, None], ...]:
        asked = _Asked()
        return self._requests(client[0], server[1], asked), self._answers(server[0], client[1], asked)

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
            # After a held request the server stays connected: its answer is counted even if the client has disconnected.
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
