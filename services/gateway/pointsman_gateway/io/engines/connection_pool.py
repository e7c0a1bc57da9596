"""A pool of HTTP connections to instances by origin, with one exchange at a time on each connection.

An idle connection is closed before uvicorn would close it (5 s). If a kept connection ends before the first byte of an answer,
the instance closed it while the request was on its way: the request is sent once more on a new connection. A connection that is
silent while an answer is due fails, as if it had broken, when its peer no longer accepts connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from pointsman_common.core.addresses import address_of_url
from pointsman_common.io.tls import client_context
from pointsman_gateway.core.dead_connections import SILENT_S, DeadConnectionDetector, Peer, Probe
from pointsman_gateway.core.http_message import request_bytes
from pointsman_gateway.io.engines.engine_connection import (
    Origin,
    StaleConnection,
    UpstreamConnection,
    UpstreamError,
    UpstreamResponse,
)

# Maximum idle time of a kept connection, s.
KEEPALIVE_S = 3.0
# Interval between two sweeps over all connections, s.
SWEEP_S = 0.5
# Timeout of a probe whether a peer accepts connections, s.
PROBE_TIMEOUT_S = 1.0


class ConnectionPool:
    """HTTP/1.1 connections to any number of origins. Their number is not limited here, because routers limit the load."""

    def __init__(self, connect_s: float, idle_s: float, ca: Path | None = None) -> None:
        """`connect_s`: timeout of a connection attempt, s. `idle_s`: maximum silence within an answer, s. `ca`: CA certificates
        for https origins (None: the system's). Raises OSError and ValueError for a `ca` that cannot be used."""
        self.connections: set[UpstreamConnection] = set()
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[Origin, list[UpstreamConnection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._dead_connections = DeadConnectionDetector()
        self._probing: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context() if ca is None else client_context(ca)

    def start(self) -> None:
        """Sweep now and every SWEEP_S from now on."""
        self.sweep(time.monotonic())
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self.start)

    def sweep(self, now: float) -> None:
        """Close connections that were idle for more than KEEPALIVE_S. Fail answers that are silent for more than idle_s, and
        silent connections whose peer is dead (dead_connections.py)."""
        for connections in list(self._idle.values()):
            for connection in [unused for unused in connections if now - unused.since > KEEPALIVE_S]:
                connections.remove(connection)
                connection.abort()
        silent: dict[Peer, list[UpstreamConnection]] = {}
        for connection in list(self.connections):
            silence = connection.silence(now)
            if silence > self._idle_s and connection.answers:
                connection.give_up("went silent")
            elif silence >= SILENT_S and (peer := connection.peer) is not None:
                silent.setdefault(peer, []).append(connection)
        for peer in [peer for peer in silent if self._dead_connections.is_dead(peer)]:
            for connection in silent.pop(peer):
                connection.give_up("went silent, and nobody listens there any more")
        for peer in self._dead_connections.due(silent, now):
            task = asyncio.create_task(self._probe(peer))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _probe(self, peer: Peer) -> None:
        result = await probe(peer)
        self._dead_connections.probed(peer, result, time.monotonic())

    def lost(self, url: str) -> None:
        """Note that the router has lost the agent of the instance at `url`: silent answers fail if it takes no connections."""
        origin, _, _ = _origin(url)
        for peer in {connection.peer for connection in self.connections if connection.origin == origin}:
            if peer is not None:
                self._dead_connections.lost(peer)

    def close(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in self._probing:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()

    async def send(
        self, method: str, url: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> UpstreamResponse:
        """Send a request to `url` (an instance's base URL) + `path`; return the answer after its head. Raises UpstreamError."""
        origin, host, prefix = _origin(url)
        message = request_bytes(method, prefix + path, host, headers, body)
        closed = False
        if (kept := self._kept(origin)) is not None:
            try:
                return await kept.exchange(message)
            except StaleConnection:
                closed = True
        try:
            connection = await self._connected(origin)
        except UpstreamError as error:
            if closed:
                # It closed the kept connection with this request on it, and is gone: perhaps it died of the request.
                raise UpstreamError(f"no answer: closed, then {error.text}", broke=True) from error
            raise
        try:
            return await connection.exchange(message)
        except StaleConnection:
            raise UpstreamError("no answer: closed", broke=True) from None

    def _kept(self, origin: Origin) -> UpstreamConnection | None:
        connections = self._idle.get(origin)
        while connections:
            connection = connections.pop()
            if time.monotonic() - connection.since <= KEEPALIVE_S:
                return connection
            connection.abort()
        return None

    async def _connected(self, origin: Origin) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"no answer: {type(error).__name__}", sent=False) from error
        return connection

    def keep(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        connection.since = time.monotonic()
        self._idle.setdefault(connection.origin, []).append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove a connection that has ended."""
        self.connections.discard(connection)
        kept = self._idle.get(connection.origin)
        if kept and connection in kept:
            kept.remove(connection)
        if kept is not None and not kept:
            del self._idle[connection.origin]


async def probe(peer: Peer) -> Probe:
    """Return whether `peer` takes connections. A timeout or another error is not a refusal: a busy or distant peer is slow."""
    family = socket.AF_INET6 if len(peer) == 4 else socket.AF_INET
    try:
        with socket.socket(family) as asking:
            asking.setblocking(False)
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(asking, peer)
    except ConnectionRefusedError:
        return Probe.REFUSED
    except (OSError, TimeoutError):
        return Probe.UNANSWERED
    return Probe.ACCEPTED


@lru_cache(4096)
def _origin(url: str) -> tuple[Origin, str, str]:
    """Return the origin of a base URL, its Host header, and the prefix of its paths. Raises UpstreamError."""
    try:
        parts = urlsplit(url)
        tls = {"http": False, "https": True}[parts.scheme]
        origin = Origin(*address_of_url(url), tls)
    except (ValueError, KeyError):
        raise UpstreamError("no answer: the instance's address is not a valid URL") from None
    return origin, parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
