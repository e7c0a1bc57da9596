"""Connections between a gateway and the engines, in place of those of its HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import msgspec

from pointsman_gateway.io.engines.engine_client import Upstream
from pointsman_gateway.io.engines.engine_connection import UpstreamError, UpstreamResponse
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.virtual.engines import Engine
from tests.support.virtual.network import Ended, Network, Node, Pipe, here

# Maximum silence within an answer, and interval of the sweep that looks for it, s.
IDLE_S, SWEEP_S = 12.0, 2.0


class Connection:
    """One request's connection. The network uses it like a Call, and the engine writes its answer to it."""

    keeps_alive = False

    def __init__(self, network: Network, engine: Engine) -> None:
        self._network = network
        self.client, self.server = here(), engine.node
        self.answer = UpstreamResponse(self)
        self.head = asyncio.get_running_loop().create_future()
        self.heard_at = 0.0
        """When the last piece of the answer came, s on the loop's clock; 0: none has."""
        self._down = Pipe(network, self.server, self.client)
        self._serving: asyncio.Task[None] | None = None
        network.calls[self] = None

    def begin(self, method: str, path: str, body: bytes, engine: Engine) -> None:
        """Send the request, and read the answer."""
        self._serving = engine.node.spawn(engine.serve(path, body, self))
        self.client.spawn(self._read())

    async def _read(self) -> None:
        while not isinstance(item := await self._down.get(), Ended):
            status, piece = msgspec.msgpack.decode(item)
            self.heard_at = asyncio.get_running_loop().time()
            if self.head.cancelled():
                continue  # the caller does not wait any more
            if status:
                self.answer.status = status
                self.answer.headers.add("Content-Type", piece.decode())
                self.head.set_result(None)
            else:
                self.answer.take(piece) if self.answer.sink is None else self.answer.sink(piece)
        self._network.calls.pop(self, None)
        error = UpstreamError(item.details, broke=item.code is grpc.StatusCode.UNAVAILABLE) if item.details else None
        self.answer.end(error)
        if not self.head.done():
            self.head.set_exception(error or UpstreamError("no answer"))

    # Called by the engine.

    def start(self, status: int, media_type: str) -> None:
        """Send the answer's head."""
        self._down.put(msgspec.msgpack.encode((status, media_type.encode())))

    def write(self, piece: bytes) -> None:
        """Send a part of the body."""
        self._down.put(msgspec.msgpack.encode((0, piece)))

    def end(self) -> None:
        """End the body."""
        self._down.put(Ended())

    # Called by the gateway and the network.

    def abort(self) -> None:
        """Close the connection; the gateway does not want the answer any more."""
        if self._serving is not None:
            self._serving.cancel()
        self._network.calls.pop(self, None)
        self._down.end(Ended(details="closed"))

    def give_up(self, text: str) -> None:
        """End the answer with an error: the gateway does not want the rest of it from this engine."""
        answer = self.answer
        self.abort()
        answer.end(UpstreamError(text, answer.status))

    def pause(self) -> None:
        """Do nothing: the answer is buffered without a limit."""

    resume = pause

    def lose(self) -> None:
        """End the connection, because the engine or the gateway has died."""
        self._network.calls.pop(self, None)
        if self._serving is not None:
            self._serving.cancel()
        self._down.end(Ended(grpc.StatusCode.UNAVAILABLE, "connection lost"))

    def flush(self) -> None:
        """Deliver what a cut has held."""
        self._down.flush()


class ConnectionPool:
    """The connections of one gateway."""

    def __init__(self, network: Network, engines: Mapping[str, Engine]) -> None:
        self._network = network
        self._engines = {engine.url: engine for engine in engines.values()}
        self._gateway: Node = here()
        self._gateway.spawn(self._sweep())

    async def _sweep(self) -> None:
        """Fail the answers that are silent for too long, as the HTTP client does."""
        while True:
            await asyncio.sleep(SWEEP_S)
            before = asyncio.get_running_loop().time() - IDLE_S
            for open_call in [call for call in self._network.calls if call.client is self._gateway]:
                if isinstance(open_call, Connection) and open_call.heard_at and open_call.heard_at < before:
                    open_call.give_up("went silent")

    def lost(self, url: str) -> None:
        """Do nothing: connections to a dead engine break at once."""

    async def send(
        self, method: str, url: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> UpstreamResponse:
        """Send one request, and return when the answer's head has come. Raises UpstreamError."""
        engine = self._engines.get(url)
        if engine is None:
            raise UpstreamError("no engine has this URL", sent=False)
        await asyncio.sleep(self._network.delay_s())
        while self._network.is_cut(self._gateway.name, engine.instance_id):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.05)
        if not engine.node.alive:
            raise UpstreamError("connection refused", sent=False)
        connection = Connection(self._network, engine)
        connection.begin(method, path, body, engine)
        try:
            await connection.head
        except asyncio.CancelledError:
            connection.abort()
            raise
        return connection.answer


def upstream(network: Network, engines: Mapping[str, Engine]) -> Upstream:
    """Return the gateway's own Upstream on virtual connections, for the node whose code is running."""
    pool: Any = ConnectionPool(network, engines)
    return Upstream(GatewaySettings(), pool)


class ResponseWriter:
    """A client's end of a streamed answer, in place of the HTTP server's writer."""

    chunked = full = False
    lost = True  # read when a request is cancelled: nothing drains in virtual time

    def __init__(self) -> None:
        self.begun = self.ended = self.aborted = False
        self.body = b""

    def begin(self, status: int, headers: Mapping[str, str], source: object) -> None:
        """Record the head."""
        assert status == 200
        self.begun = True

    def go_on(self, source: object) -> None:
        """Do nothing: nobody pauses a source."""

    def write(self, piece: bytes) -> None:
        """Append a part of the body."""
        self.body += piece

    def end(self) -> None:
        """End the body in order."""
        self.ended = True

    def abort(self) -> None:
        """End the answer without an error event."""
        self.aborted = True
