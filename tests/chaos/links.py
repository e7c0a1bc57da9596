"""A TCP proxy in the test's own event loop: a link that can be cut, broken, and slow."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct


class Link:
    """Passes bytes both ways between whoever dials `port` and 127.0.0.1:`target`.

    While it is cut nothing passes, as when packets are lost: what was sent arrives when the cut is over, and so do new
    connections. While it is broken, connections are reset. A slow link takes `delay_s` each way, in order.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._broken = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """HOST:PORT to dial."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        self._reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Let nothing pass until mend()."""
        self._open.clear()

    def break_(self) -> None:
        """Reset all connections, and new ones until mend()."""
        self._broken = True
        self._reset()

    def mend(self) -> None:
        """All is well again."""
        self._open.set()
        self._broken = False
        self.delay_s = 0.0

    def _reset(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._run(self._connect(reader, writer))

    def _run(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            if self._broken:
                raise ConnectionError
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(up_writer)
        self._run(self._pass(reader, up_writer))
        self._run(self._pass(up_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, to its end; pieces that are late are sent on in their order."""
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
