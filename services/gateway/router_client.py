"""The session with a router: one stream for all requests, reopened when it breaks, open requests told anew each time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from services.common.auth import bearer
from services.common.channel import open_channel
from services.common.keys import KEY_SCHEME

log = structlog.get_logger()

WELCOME_S = 3.0
FLUSH_S = 2.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0

_EOF: Any = vars(grpc.aio)["EOF"]  # grpc-stubs does not know it

Step = placement_pb2.Placement | placement_pb2.Refusal
_Outbox = asyncio.Queue[placement_pb2.SessionRequest | None]  # None: nothing follows


class RouterAway(Exception):
    """No router answers, and the grace is over."""


class _Broken(Exception):
    """The session ended before the router answered."""


class RouterClient:
    """Asks routers and reports to them. One task per client; everything happens on the event loop that start() ran on."""

    def __init__(
        self,
        routers: Sequence[str],
        gateway_id: str,
        token: str,
        grace_s: float,
        on_fleet: Callable[[placement_pb2.Fleet], None],
        on_connected: Callable[[bool], None],
    ) -> None:
        self._routers = list(routers)
        self._gateway_id = gateway_id
        self._metadata = bearer(token)
        self._grace_s = grace_s
        self._on_fleet = on_fleet
        self._on_connected = on_connected
        self._open: dict[str, placement_pb2.OpenStream] = {}
        self._waiting: dict[str, asyncio.Future[Step]] = {}
        self._outbox: _Outbox | None = None
        self._channel: grpc.aio.Channel | None = None
        self._up = asyncio.Event()
        self._lost_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def connected(self) -> bool:
        """Whether a router has welcomed this gateway and the stream still stands."""
        return self._up.is_set()

    def inflight(self) -> dict[str, int]:
        """Open requests by instance id."""
        return Counter(stream.instance_id for stream in self._open.values())

    @property
    def open_count(self) -> int:
        """How many requests are placed and not finished."""
        return len(self._open)

    async def start(self) -> None:
        """Begin dialling; returns at once."""
        self._lost_at = time.monotonic()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what is still to be told, and hang up when the router has read it (or after FLUSH_S)."""
        self._closing = True
        if self._task is None:
            return
        if self._outbox is not None and self.connected:
            self._outbox.put_nowait(None)
            await asyncio.wait({self._task}, timeout=FLUSH_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def first_step(self, request: placement_pb2.PlacementRequest, within_s: float) -> Step:
        """The first step of `request`, or its refusal. A session that breaks meanwhile is waited for during the grace, and the
        same request is submitted again with its age and what is left of `within_s`. Raises RouterAway."""
        deadline = time.monotonic() + within_s
        asked_at: float | None = None
        while True:
            await self._ready()
            now = time.monotonic()
            request.deadline.FromNanoseconds(max(1, int((deadline - now) * 1e9)))
            if asked_at is None:
                asked_at = now
            else:
                request.age.FromNanoseconds(int((now - asked_at) * 1e9))
            with contextlib.suppress(_Broken):
                return await self._answer(request.request_id, placement_pb2.SessionRequest(place=request))

    async def next_step(self, request_id: str, index: int, error: str) -> Step:
        """Report a PREFILL step's end (`error` empty: done) and wait for the step after it. Raises RouterAway: a router that
        comes back knows the request as an open one, not its plan."""
        if not self.connected:
            raise RouterAway
        done = placement_pb2.StepDone(request_id=request_id, step_index=index, ok=not error, error=error)
        try:
            return await self._answer(request_id, placement_pb2.SessionRequest(step_done=done))
        except _Broken:
            raise RouterAway from None

    def placed(self, request: placement_pb2.PlacementRequest, instance_id: str, cached_tokens: int) -> None:
        """Remember where a request runs, until finished(): it is announced to a router that comes (back)."""
        known = placement_pb2.PlacementRequest()
        known.CopyFrom(request)
        del known.keys[:]
        self._open[request.request_id] = placement_pb2.OpenStream(
            request=known,
            instance_id=instance_id,
            phase=placement_pb2.PHASE_PREFILL,
            cached_tokens=cached_tokens,
        )

    def first_token(self, request_id: str) -> None:
        """Report the first byte."""
        if stream := self._open.get(request_id):
            stream.phase = placement_pb2.PHASE_DECODE
        self._send(placement_pb2.SessionRequest(first_token=placement_pb2.FirstToken(request_id=request_id)))

    def generated(self, request_id: str, tokens: int) -> None:
        """Add to what a request has generated, for an announcement; nothing is sent now."""
        if stream := self._open.get(request_id):
            stream.generated_tokens += tokens

    def finished(self, finished: placement_pb2.Finished) -> None:
        """Report an attempt's end. While no router is there, not listing it in the next hello says the same."""
        self._open.pop(finished.request_id, None)
        self._send(placement_pb2.SessionRequest(finished=finished))

    async def explain(self, request: placement_pb2.PlacementRequest, within_s: float) -> fleet_pb2.Decision:
        """What would be decided on `request`; nothing is reserved. Raises RouterAway, or grpc.aio.AioRpcError as it came."""
        await self._ready()
        assert self._channel is not None
        stub = fleet_pb2_grpc.FleetServiceStub(self._channel)
        answer = await stub.Explain(
            fleet_pb2.ExplainRequest(request=request), timeout=within_s, metadata=self._metadata
        )
        return answer.decision

    async def _ready(self) -> None:
        left = self._lost_at + self._grace_s - time.monotonic()
        if self.connected:
            return
        if left <= 0:
            raise RouterAway
        try:
            await asyncio.wait_for(self._up.wait(), left)
        except TimeoutError:
            raise RouterAway from None

    async def _answer(self, request_id: str, message: placement_pb2.SessionRequest) -> Step:
        future: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._send(message)
        try:
            return await future
        finally:
            if self._waiting.get(request_id) is future:
                del self._waiting[request_id]

    def _send(self, message: placement_pb2.SessionRequest) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    async def _run(self) -> None:
        at, pause, said = 0, FIRST_PAUSE_S, ""
        while not self._closing:
            address = self._routers[at % len(self._routers)]
            at += 1
            try:
                await self._session(address)
                why = "the stream ended"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except TimeoutError:
                why = "no welcome in time"
            except Exception as error:
                # This task is the gateway's only tie to the fleet: a fault ends the session, never the task.
                log.exception("a fault in the session with the router", router=address)
                why = f"fault: {type(error).__name__}"
            welcomed = self._lose()
            if self._closing:
                return
            if welcomed:
                pause = FIRST_PAUSE_S
            if welcomed or why != said:
                log.warning("no session with the router", router=address, why=why)
                said = why
            if welcomed or at % len(self._routers) == 0:
                # Gateways that lost the same router must not come back in step.
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, MAX_PAUSE_S)

    def _lose(self) -> bool:
        """Forget the session; whether there had been one. Requests that wait for an answer learn of it."""
        was = self._up.is_set()
        self._up.clear()
        self._outbox = self._channel = None
        if was:
            self._lost_at = time.monotonic()
            self._on_connected(False)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_Broken())
        return was

    async def _session(self, address: str) -> None:
        """One stream from hello to its end. Raises AioRpcError or TimeoutError; returns when the router ends it."""
        async with open_channel(address) as channel:
            # grpc-stubs types the synchronous call only.
            open_session: Any = placement_pb2_grpc.PlacementServiceStub(channel).Session
            call = open_session(metadata=self._metadata)
            # From here on reports queue up behind the hello: what ends between hello and welcome is not lost. A request placed
            # locally in between is not announced; the router undercounts it until it ends, which is harmless.
            outbox: _Outbox = asyncio.Queue()
            self._outbox = outbox
            hello = placement_pb2.GatewayHello(gateway_id=self._gateway_id, open_streams=self._open.values())
            outbox.put_nowait(placement_pb2.SessionRequest(hello=hello))
            writer = asyncio.create_task(self._write(call, outbox))
            try:
                first = await asyncio.wait_for(call.read(), WELCOME_S)
                if first is _EOF:
                    return
                welcome = first.welcome
                if welcome.key_scheme != KEY_SCHEME:
                    log.error(
                        "router has another key scheme", router=address, theirs=welcome.key_scheme, ours=KEY_SCHEME
                    )
                    return
                self._channel = channel
                self._up.set()
                self._on_connected(True)
                log.info("session with router", router=address, router_id=welcome.router_id, epoch=welcome.epoch)
                while (message := await call.read()) is not _EOF:
                    self._receive(message)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                call.cancel()

    @staticmethod
    async def _write(call: Any, outbox: _Outbox) -> None:
        while (message := await outbox.get()) is not None:
            await call.write(message)
        await call.done_writing()

    def _receive(self, message: placement_pb2.SessionResponse) -> None:
        match message.WhichOneof("kind"):
            case "placement":
                self._settle(message.placement.request_id, message.placement)
            case "refusal":
                self._settle(message.refusal.request_id, message.refusal)
            case "fleet":
                self._on_fleet(message.fleet)

    def _settle(self, request_id: str, step: Step) -> None:
        future = self._waiting.get(request_id)
        # None: the client left meanwhile, and its Finished is on the way.
        if future is not None and not future.done():
            future.set_result(step)
