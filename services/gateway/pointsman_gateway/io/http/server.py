"""The HTTP server for clients: it listens, keeps the connections, enforces their deadlines, and drains them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from email.utils import formatdate
from functools import partial

from pointsman_common.core.addresses import Address
from pointsman_gateway.core.memory_budget import MemoryBudget
from pointsman_gateway.io.http.client_connection import HIGH_WATER, LINGER_S, ClientConnection
from pointsman_gateway.io.http.connection_limit import ConnectionLimit
from pointsman_gateway.io.http.handshake import Handshake
from pointsman_gateway.io.http.server_types import HttpHandler, ServerLimits

# The kernel asks an idle peer after so many seconds, at this interval, and closes the connection after so many asks in vain: a
# peer whose machine or network is gone does not hold an idle connection for the whole of `idle_s`.
_ASK_AFTER_S, _ASK_EVERY_S, _ASK_TIMES = 120, 30, 4


def _close_if_the_peer_is_gone(listening: socket.socket) -> None:
    """Set TCP's keep-alive for all connections that `listening` accepts, which inherit it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_AFTER_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)


class Server:
    """Listens for clients and keeps their connections. `close` drains the connections."""

    def __init__(self, handler: HttpHandler, limits: ServerLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.connections: set[ClientConnection] = set()
        self.limit = ConnectionLimit(limits.max_connections)
        self.closing = False
        self.bodies = MemoryBudget(limits.max_buffered_body_bytes)  # bodies of requests whose answers have not begun
        self.answers = MemoryBudget(limits.max_buffered_answer_bytes)  # answers that are not streamed, until sent
        self.busy = MemoryBudget(limits.max_connections)  # connections with requests of known clients, until answered
        self.date: dict[str, str] = {}
        self._listener: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._handshakes: set[Handshake] = set()
        self._ended = asyncio.Event()
        shortest = min(limits.head_s, limits.body_s, limits.idle_s, limits.stall_s, LINGER_S)
        self._sweep_s = min(0.5, shortest / 4)

    async def start(self, address: Address, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None) -> Address:
        """Start to listen; return the address that is bound. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            partial(ClientConnection, self) if tls is None else partial(self._handshake, tls),
            *address.to_listen,
            reuse_port=reuse_port,
            backlog=1024,
        )
        for listening in self._listener.sockets:
            # Connections inherit this option. Without it the kernel buffers megabytes for a client that reads slowly, and reports
            # no progress until a third of them is sent: a client that reads steadily would seem to read nothing.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, HIGH_WATER)
            _close_if_the_peer_is_gone(listening)
        self._sweep()
        bound = self._listener.sockets[0].getsockname()
        return Address(bound[0], bound[1])

    def _handshake(self, tls: ssl.SSLContext) -> Handshake:
        # TLS may still hold the end of an answer at shutdown, so its timeout is the time that a client has to read an answer.
        head_s, stall_s = self.limits.head_s, self.limits.stall_s
        return Handshake(self.limit, self._handshakes, partial(ClientConnection, self), tls, head_s, stall_s)

    async def close(self, drain_timeout_s: float) -> None:
        """Stop accepting, wait up to `drain_timeout_s` for open requests to end, then cancel the remaining ones."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for handshake in list(self._handshakes):
            handshake.abort()
        for connection in list(self.connections):
            connection.close_idle()
        if not await self._all_ended(drain_timeout_s):
            self.cancel_all()
            # A cancelled request reports to the router and aborts the work at its instance; neither step waits for a peer.
            if not await self._all_ended(LINGER_S):
                self.abort_all()
                await self._all_ended(LINGER_S)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def cancel_all(self) -> None:
        """Cancel every open request; each client receives an error."""
        for connection in list(self.connections):
            connection.cancel()

    def abort_all(self) -> None:
        """Close every connection and discard unsent data."""
        for connection in list(self.connections):
            connection.abort()

    async def _all_ended(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return not self.connections
        return True

    def forget(self, connection: ClientConnection) -> None:
        """Remove a connection that is closed and whose request has ended."""
        self.connections.discard(connection)
        self.limit.leave(connection)
        self._ended.set()

    def _sweep(self) -> None:
        self.date = {"Date": formatdate(usegmt=True)}
        now = time.monotonic()
        for connection in [expected for expected in self.connections if expected.deadline < now]:
            connection.overdue(now)
        self._sweeping = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)
