"""A gRPC stream to one router, which is opened again whenever it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog

from pointsman.router.v1 import placement_pb2, placement_pb2_grpc
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_common.io.auth import CallMetadata
from pointsman_common.io.batch_queue import BatchQueue
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_common.io.local_calls import LocalChannel
from pointsman_common.io.router_failures import meaning
from pointsman_gateway.core.known_fleet import OutOfStep

log = structlog.get_logger()

# Timeout of a connection, s. gRPC bounds an attempt by 5 s, after the lookup of the name, in which the machine's name servers are
# asked one after the other, some seconds each.
CONNECT_S = 30.0
# Timeout of the router's welcome on a connection, s.
WELCOME_S = 3.0
# Time after the start in which an unavailable router is not logged, s. A router that starts together with its gateways listens
# some seconds later.
STARTUP_S = 10.0
# First and maximum pause before the stream is opened again, s. Each failure doubles the pause.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0

_Queue = BatchQueue[placement_pb2.SessionRequest]
# Returns a channel to a router's address.
Dial: TypeAlias = "Callable[[str], grpc.aio.Channel | LocalChannel]"


class RouterSession:
    """Keeps a stream to `address` open. `hello` returns the first message; the callbacks receive the session that they concern.

    A router ends a gateway's stream when the gateway opens another one. The session therefore does not dial while `reached`
    returns that another session is connected to the same router. A service's name and the router's own address may both lead to
    it.
    """

    def __init__(
        self,
        address: str,
        metadata: CallMetadata,
        hello: Callable[[], placement_pb2.GatewayHello],
        on_up: Callable[[RouterSession], None],
        on_down: Callable[[RouterSession], None],
        on_message: Callable[[RouterSession, placement_pb2.SessionResponse], None],
        reached: Callable[[str], bool],
        dial: Dial,
    ) -> None:
        self.address = address
        self.router_id = ""
        self.accounts_usage = False
        self.channel: grpc.aio.Channel | LocalChannel | None = None
        self._metadata = metadata
        self._hello = hello
        self._on_up, self._on_down, self._on_message = on_up, on_down, on_message
        self._reached = reached
        self._dial = dial
        self._last_id = ""
        self._batch_queue: _Queue | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the router has welcomed this gateway and the stream is open."""
        return self.channel is not None

    def start(self) -> None:
        """Start to dial; return at once."""
        self._task = asyncio.create_task(self._run())

    def send(self, message: placement_pb2.SessionRequest, max_delay_s: float = 0.0) -> None:
        """Queue a message, to be sent with others within `max_delay_s`. Without an open stream the message is dropped; the next
        hello contains its information."""
        if self._batch_queue is not None:
            self._batch_queue.put(message, max_delay_s)

    async def close(self, flush_s: float) -> None:
        """Send the queued messages, and close the stream when the router has read them (or after `flush_s`)."""
        self._closing = True
        if self._task is None:
            return
        if self._batch_queue is not None and self.connected:
            self._batch_queue.end()
            await asyncio.wait({self._task}, timeout=flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause, logged_reason = FIRST_PAUSE_S, ""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self._closing:
            if self._last_id and self._reached(self._last_id):
                await asyncio.sleep(MAX_PAUSE_S)
                continue
            may_be_starting = False
            try:
                await self._session()
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                may_be_starting = error.code() is grpc.StatusCode.UNAVAILABLE and loop.time() - began < STARTUP_S
                reason = meaning(error.code(), error.details() or "", "gateway")
            except (TimeoutError, OutOfStep) as error:
                reason = str(error)
            except Exception as error:
                # A fault ends the session but not this task, which is the gateway's only connection to the router.
                log.exception("a fault in the session with the router", router=self.address)
                reason = f"fault: {type(error).__name__}"
            welcomed, self.channel, self._batch_queue, self.router_id = self.connected, None, None, ""
            if welcomed:
                pause = FIRST_PAUSE_S
                try:
                    self._on_down(self)
                except Exception:
                    log.exception("a fault after the session with the router", router=self.address)
            if self._closing:
                return
            if welcomed or (reason != logged_reason and not may_be_starting):
                log.warning("no session with the router", router=self.address, reason=reason)
                logged_reason = reason
            # A random pause, so that gateways that lost the same router do not dial it at the same time.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, MAX_PAUSE_S)

    async def _session(self) -> None:
        """Run one stream from the hello to its end. Returns when the router ends it. Raises AioRpcError, and TimeoutError with a
        reason."""
        async with self._dial(self.address) as channel:
            stub = placement_pb2_grpc.PlacementServiceStub(channel)  # type: ignore[arg-type]
            # A comparison with END_OF_STREAM does not narrow the type of what read() returns.
            call: Any = stub.Session(None, metadata=self._metadata())
            # From here on reports are queued behind the hello, so the end of a request between hello and welcome is not lost. A
            # request that is placed locally in this time is not announced. The router does not count it until it ends, which is
            # harmless.
            batch_queue: _Queue = BatchQueue(placement_pb2.SessionRequest.ByteSize)
            self._batch_queue = batch_queue
            self.send(placement_pb2.SessionRequest(hello=self._hello()))
            writer = asyncio.create_task(self._write(call, batch_queue))
            try:
                async with _within(CONNECT_S, "no connection in time"):
                    await call.wait_for_connection()
                async with _within(WELCOME_S, "no welcome in time"):
                    first = await call.read()
                if first is END_OF_STREAM:
                    return
                welcome = first.welcome
                if welcome.key_scheme != KEY_SCHEME:
                    log.error(
                        "router has another key scheme",
                        router=self.address,
                        theirs=welcome.key_scheme,
                        ours=KEY_SCHEME,
                    )
                    return
                self.channel, self.router_id = channel, welcome.router_id
                self._last_id, self.accounts_usage = welcome.router_id, welcome.accounts_usage
                log.info("session with router", router=self.address, router_id=welcome.router_id, epoch=welcome.epoch)
                self._on_up(self)
                while (message := await call.read()) is not END_OF_STREAM:
                    for response in message.batch.responses if message.HasField("batch") else (message,):
                        self._on_message(self, response)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                call.cancel()

    @staticmethod
    async def _write(call: Any, batch_queue: _Queue) -> None:
        while messages := await batch_queue.take():
            batch = placement_pb2.SessionRequestBatch(requests=messages) if len(messages) > 1 else None
            await call.write(placement_pb2.SessionRequest(batch=batch) if batch else messages[0])
        await call.done_writing()


@asynccontextmanager
async def _within(seconds: float, else_: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(else_) from None
