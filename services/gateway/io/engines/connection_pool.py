"""A pool of HTTP connections to instances, kept for each origin, with one exchange at a time on each.

An idle connection is closed before uvicorn would (5 s). A request on a kept connection that ends before a byte of the answer is
sent once more, on a new one: the instance closed it while the request was on its way. One that is silent while an answer is due
is given up when nobody listens any more where it leads to, as if it had broken off.
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

from pointsman.common.io.tls import client_context
from pointsman.gateway.core.dead_connections import SILENT_S, DeadConnectionDetector, Peer
from pointsman.gateway.core.http_message import request_bytes
from pointsman.gateway.io.engines.engine_connection import (
    Origin,
    StaleConnection,
    UpstreamConnection,
    UpstreamError,
    UpstreamResponse,
)

KEEPALIVE_S = 3.0
SWEEP_S = 0.5
PROBE_TIMEOUT_S = 1.0


class ConnectionPool:
    """HTTP/1.1 to any number of origins. It has no limit of its own: the router is what limits load."""

    def __init__(self, connect_s: float, idle_s: float, ca: Path | None = None) -> None:
        """`idle_s`: the longest silence within an answer; `ca`: what https origins' certificates are signed by, None for whom the
        system trusts. Raises OSError and ValueError for a `ca` that cannot be used."""
        self.connections: set[UpstreamConnection] = set()
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[Origin, list[UpstreamConnection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._dead_connections = DeadConnectionDetector()
        self._probing: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context() if ca is None else client_context(ca)

    def start(self) -> None:
        """Begin to look after connections, and go on."""
        self.sweep(time.monotonic())
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self.start)

    def sweep(self, now: float) -> None:
        """Close connections that were idle for too long. Give those up where an answer is due and does not come: for too long, or
        because nobody listens any more at its instance."""
        for connections in list(self._idle.values()):
            for connection in [one for one in connections if now - one.since > KEEPALIVE_S]:
                connections.remove(connection)
                connection.abort()
        silent: dict[Peer, list[UpstreamConnection]] = {}
        for connection in list(self.connections):
            silence = connection.silence(now)
            if silence > self._idle_s and connection.answers:
                connection.give_up("went silent")
            elif silence >= SILENT_S and (peer := connection.peer) is not None:
                silent.setdefault(peer, []).append(connection)
        for peer in [one for one in silent if self._dead_connections.is_dead(one)]:
            for connection in silent.pop(peer):
                connection.give_up("went silent, and nobody listens there any more")
        for peer in self._dead_connections.due(silent, now):
            task = asyncio.create_task(self._probe(peer))
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _probe(self, peer: Peer) -> None:
        refused = await refuses_connections(peer)
        self._dead_connections.probed(peer, refused=refused, now=time.monotonic())

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
        """One request to `url` (an instance's base) + `path`; its answer's head. Raises UpstreamError."""
        origin, host, prefix = _origin(url)
        message = request_bytes(method, prefix + path, host, headers, body)
        if (kept := self._kept(origin)) is not None:
            try:
                return await kept.exchange(message)
            except StaleConnection:
                pass
        connection = await self._connected(origin)
        try:
            return await connection.exchange(message)
        except StaleConnection:
            raise UpstreamError("no answer: closed") from None

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
        """A connection is free for the next request."""
        connection.since = time.monotonic()
        self._idle.setdefault(connection.origin, []).append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection is over."""
        self.connections.discard(connection)
        kept = self._idle.get(connection.origin)
        if kept and connection in kept:
            kept.remove(connection)
        if kept is not None and not kept:
            del self._idle[connection.origin]


async def refuses_connections(peer: Peer) -> bool:
    """Whether nobody listens at `peer` for certain: what is busy or far away is only slow to accept."""
    family = socket.AF_INET6 if len(peer) == 4 else socket.AF_INET
    try:
        with socket.socket(family) as asking:
            asking.setblocking(False)
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(asking, peer)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    return False


@lru_cache(4096)
def _origin(url: str) -> tuple[Origin, str, str]:
    """Where to connect, the Host header, and the path before every path. Raises UpstreamError."""
    try:
        parts = urlsplit(url)
        tls = {"http": False, "https": True}[parts.scheme]
        origin = Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls)
    except (ValueError, KeyError):
        raise UpstreamError("no answer: the instance's address is not one") from None
    return origin, parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
