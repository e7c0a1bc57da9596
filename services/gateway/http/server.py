"""The server that clients reach: listens, keeps the connections, sees to their deadlines, and ends them gracefully."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol

from services.gateway.http.connection import LINGER_S, Connection
from services.gateway.http.message import Request, Response


@dataclass(frozen=True)
class Limits:
    """What clients may take: bytes, header fields, seconds. The deadlines for head and body are for the whole of each."""

    max_body_bytes: int
    max_held_bytes: int  # of the bodies of all clients together, until their answers begin
    max_head_bytes: int = 32 << 10
    max_headers: int = 100
    head_s: float = 10.0
    body_s: float = 120.0
    idle_s: float = 75.0
    stall_s: float = 300.0  # a client that reads nothing of its answer


class Site(Protocol):
    """What is served."""

    def admit(self, request: Request) -> Response | None:
        """An answer that needs no body, or None to read the body and ask `answer`. Must not raise."""

    def answer(self, request: Request) -> Awaitable[Response | None]:
        """The answer; None when it went out through request.outgoing. Cancelled when the client leaves."""

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        """An answer to what never became a request; `path` as far as it is known."""


class Server:
    """Listens and keeps the connections. `close` ends them gracefully."""

    def __init__(self, site: Site, limits: Limits) -> None:
        self.site = site
        self.limits = limits
        self.connections: set[Connection] = set()
        self.closing = False
        self.held_bytes = 0  # of bodies whose answers have not begun
        self.date: dict[str, str] = {}
        self._listener: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        shortest = min(limits.head_s, limits.body_s, limits.idle_s, limits.stall_s, LINGER_S)
        self._sweep_s = min(0.5, shortest / 4)

    async def start(
        self, host: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Listen; the address that is really bound. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self), host, port, reuse_port=reuse_port, backlog=1024, ssl=tls
        )
        self._sweep()
        bound = self._listener.sockets[0].getsockname()
        return bound[0], bound[1]

    async def close(self, drain_s: float) -> None:
        """Stop accepting, let requests under way end for up to `drain_s`, cancel the rest."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_idle()
        if not await self._all_ended(drain_s):
            for connection in list(self.connections):
                connection.cancel()
            # What is cancelled tells the router and aborts its instance's work, which takes no waiting for anybody.
            await self._all_ended(LINGER_S)
        if self._sweeping is not None:
            self._sweeping.cancel()

    async def _all_ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return not self.connections
        return True

    def has_room(self, more: int) -> bool:
        """Whether `more` bytes of a body can be held."""
        return self.held_bytes + more <= self.limits.max_held_bytes

    def forget(self, connection: Connection) -> None:
        """A connection is over, its request included."""
        self.connections.discard(connection)
        self._ended.set()

    def _sweep(self) -> None:
        self.date = {"Date": formatdate(usegmt=True)}
        now = time.monotonic()
        for connection in [one for one in self.connections if one.deadline < now]:
            connection.overdue(now)
        self._sweeping = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)
