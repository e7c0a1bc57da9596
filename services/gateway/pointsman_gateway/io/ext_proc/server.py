"""The gRPC server for proxies: Envoy's external processing, and the health services of an endpoint picker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pointsman.gateway.v1 import ext_proc_pb2 as pb
from pointsman_common.io.channel import SERVER_OPTIONS
from pointsman_common.io.listening import listen_on
from pointsman_gateway.io.ext_proc.proxy_stream import Context, ProxyStream, Streams

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Services whose health is that of the gateway. "liveness" is healthy as long as the process answers.
_READY = ("", "readiness", "inference-extension", SERVICE)
# Interval in which the gateway's health and silent answers are looked at, s.
WATCH_S = 0.5
# Maximum size of a message, bytes. Proxies send bodies in pieces of some ten KiB.
MAX_MESSAGE_BYTES = 4 << 20
# How long cancelled requests have to send their ends, s.
LINGER_S = 2.0


class ExtProcServer:
    """Listens for proxies."""

    def __init__(self, streams: Streams, usable: Callable[[], bool], *, reuse_port: bool = False) -> None:
        """`usable`: whether requests can be placed. `reuse_port`: several processes share the address."""
        self._streams = streams
        self._shared = reuse_port
        # Of two options with one name gRPC takes the first.
        own = [("grpc.so_reuseport", int(reuse_port)), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self._server = grpc.aio.server(options=[*own, *SERVER_OPTIONS])
        process = grpc.stream_stream_rpc_method_handler(
            self._process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),))
        self._usable = usable
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._watching: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, listen: str, credentials: grpc.ServerCredentials | None) -> None:
        """Listen on HOST:PORT. Raises OSError if the address cannot be used."""
        self.port = listen_on(self._server, listen, credentials, shared=self._shared)
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        self._watching = asyncio.create_task(self._watch())
        await self._server.start()

    async def close(self, drain_timeout_s: float) -> None:
        """Accept nothing more, wait up to `drain_timeout_s` for open requests to end, then end them with an error."""
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(drain_timeout_s + 2 * LINGER_S))
        if not await self._all_ended(drain_timeout_s):
            self.cancel_all()
            await self._all_ended(LINGER_S)
        # Health is watched for as long as its callers like.
        await self._server.stop(0)
        await stopping
        if self._watching is not None:
            self._watching.cancel()

    async def _all_ended(self, within_s: float) -> bool:
        ends = time.monotonic() + within_s
        while self._streams.open and time.monotonic() < ends:  # noqa: ASYNC110 - once in a process's life
            await asyncio.sleep(0.02)
        return not self._streams.open

    def cancel_all(self) -> None:
        """End every open request; each client gets an error."""
        for stream in list(self._streams.open):
            stream.cancel()

    async def abort_all(self) -> None:
        """End every stream, and discard what is unsent."""
        await self._server.stop(0)

    async def _process(self, _: AsyncIterator[pb.ProcessingRequest], context: Context) -> None:
        await ProxyStream(self._streams, context).run()

    async def _watch(self) -> None:
        while True:
            serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
            for service in _READY:
                await self._health.set(service, serving if self._usable() else not_serving)
            now = time.monotonic()
            for stream in list(self._streams.open):
                stream.overdue(now)
            await asyncio.sleep(WATCH_S)
