"""The TLS handshake of a client's connection, which counts as a connection while it lasts."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast

from pointsman_gateway.io.http.connection_limit import ConnectionLimit, Place


class Handshake(asyncio.Protocol):
    """A connection until its TLS handshake is complete; then `protocol` makes the protocol of what follows."""

    def __init__(
        self,
        limit: ConnectionLimit,
        open_ones: set[Handshake],
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        within_s: float,
        shutdown_s: float,
    ) -> None:
        """`open_ones`: the server's handshakes, of which this is one while it lasts. `within_s`: timeout of the handshake, s;
        `shutdown_s`: of the end of the TLS connection, s."""
        self._limit = limit
        self._open = open_ones
        self._protocol = protocol
        self._tls = tls
        self._within_s = within_s
        self._shutdown_s = shutdown_s
        self._early = bytearray()  # received before TLS listens
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if self._limit.enter(self, time.monotonic()) is Place.NONE:
            self._transport.abort()
            return
        self._open.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        # Not called any more once TLS listens.
        if self._task is not None:
            self._task.cancel()

    async def _shake_hands(self) -> None:
        received = _Received()
        try:
            transport = await self._secured(received)
        except OSError:  # no TLS, or the client has left, or was too slow
            self._transport.abort()
            return
        finally:
            self._open.discard(self)
            self._limit.leave(self)
        if transport is None or self._transport.is_closing():
            return  # the handshake of a connection that was closed may end without an error
        protocol = self._protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        received.replay(protocol)

    async def _secured(self, protocol: asyncio.Protocol) -> asyncio.Transport | None:
        loop = asyncio.get_running_loop()
        starting = loop.create_task(
            loop.start_tls(
                self._transport,
                protocol,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._within_s,
                ssl_shutdown_timeout=self._shutdown_s,
            )
        )
        # start_tls() has then replaced this protocol, and scheduled the connection_made() of its own, which must come first.
        await asyncio.sleep(0)
        loop.call_soon(self._pass_on_early)
        return await starting

    def _pass_on_early(self) -> None:
        if self._transport.is_closing():
            return
        # uvloop's is not a subclass of asyncio's.
        listening = cast(asyncio.BufferedProtocol, self._transport.get_protocol())
        while self._early:
            room = memoryview(listening.get_buffer(len(self._early)))
            count = min(len(room), len(self._early))
            room[:count] = self._early[:count]
            del self._early[:count]
            listening.buffer_updated(count)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()


class _Received(asyncio.Protocol):
    """Keeps what a client sends with the end of its handshake, before the protocol that receives it is made."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._lost: list[Exception | None] = []

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.append(exc)

    def replay(self, protocol: asyncio.Protocol) -> None:
        """Pass on what has been received."""
        for data in self._data:
            protocol.data_received(data)
        for exc in self._lost:
            protocol.connection_lost(exc)
