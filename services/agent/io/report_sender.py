"""Keeps one instance reported to one router: a stream, and another when it breaks, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from pointsman.agent.core.cached_blocks import CachedBlocks
from pointsman.agent.core.report_protocol import ProtocolError, ReportProtocol
from pointsman.agent.v1 import agent_pb2 as pb
from pointsman.agent.v1 import agent_pb2_grpc
from pointsman.common.io.auth import CallMetadata
from pointsman.common.io.channel import ReloadingChannel

log = structlog.get_logger()

WELCOME_S = 10.0
GOODBYE_S = 1.0
# A router that reads nothing more does not hold a reporter that is told to stop.
STOP_S = 3.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0
# What an operator has to change first: another key scheme, a block size, a token.
REFUSED_RETRY_S = 30.0
# Another agent reports the instance, and the newest one is heard: two that took turns at once would have the router forget and
# read all of its keys ten times a second. Sooner than routers forget a lost instance, in case that the other one leaves.
DISPLACED_RETRY_S = 10.0
# How soon to ask a router again that has refused the instance, by its answer.
_REFUSED_FOR = {
    grpc.StatusCode.FAILED_PRECONDITION: REFUSED_RETRY_S,
    grpc.StatusCode.UNAUTHENTICATED: REFUSED_RETRY_S,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED_RETRY_S,
    grpc.StatusCode.INVALID_ARGUMENT: REFUSED_RETRY_S,
    grpc.StatusCode.UNIMPLEMENTED: REFUSED_RETRY_S,
    grpc.StatusCode.ABORTED: DISPLACED_RETRY_S,
}

Call = grpc.aio.StreamStreamCall[pb.ReportRequest, pb.ReportResponse]


@dataclass(slots=True)
class ReporterCounts:
    """Streams opened, snapshots begun on streams that have ended, and resyncs asked for, since the reporter began."""

    streams: int = 0
    snapshots: int = 0
    resyncs: int = 0


class Reporter:
    """Reports `cached blocks` and `load` as `instance` over `channel`. Call `changed` after each change of the cached blocks."""

    def __init__(
        self,
        router: str,
        channel: ReloadingChannel,
        metadata: CallMetadata,
        cached_blocks: CachedBlocks,
        instance: pb.Instance,
        agent_id: str,
        *,
        consistency_check_interval_s: float,
        report_interval_s: float,
    ) -> None:
        self.router = router
        self.connected = False
        """Whether the router has welcomed the stream that is open now."""
        self.refusal = ""
        """What the router answered when it refused the instance; empty otherwise."""
        self.counts = ReporterCounts()
        self._stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)  # type: ignore[call-overload]
        self._metadata = metadata
        self._cached_blocks = cached_blocks
        self._instance = instance
        self._agent_id = agent_id
        self._consistency_check_interval_s = consistency_check_interval_s
        self._report_interval_s = report_interval_s
        self._load: tuple[pb.Load, float] | None = None
        self._machine: ReportProtocol | None = None
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._goodbye = ""
        self._again = False
        self._log = log.bind(instance=instance.instance_id, router=router)
        self.task = asyncio.create_task(self._run(), name=f"report {instance.instance_id} to {router}")

    @property
    def snapshots(self) -> int:
        """Snapshots begun so far, those of the open stream included."""
        return self.counts.snapshots + (self._machine.snapshots if self._machine is not None else 0)

    def changed(self) -> None:
        """There may be something to say."""
        self._wake.set()

    def load(self, load: pb.Load, taken_at: float) -> None:
        """The newest sample, as of `taken_at` on the monotonic clock."""
        self._load = (load, taken_at)
        if self._machine is not None:
            self._machine.load(load, taken_at)
        self._wake.set()

    def describe(self, instance: pb.Instance) -> None:
        """Say hello again, as `instance`: its fixed properties changed, its keys did not."""
        self._instance = instance
        self._again = True
        self._wake.set()

    async def stop(self, goodbye: str = "") -> None:
        """End the stream; with a reason, say goodbye first. Returns when the task has ended, at the latest after STOP_S."""
        self._stopping.set()
        self._goodbye = goodbye
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.task

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping.is_set():
            call: Call = self._stub.Report(None, metadata=self._metadata())
            slower_s = min(LAST_RETRY_S, retry_s * 2)
            try:
                await self._stream(call)
                retry_s = FIRST_RETRY_S if self.connected else slower_s
            except ProtocolError as error:
                self._log.error("a router breaks the report protocol", reason=str(error))
                retry_s = REFUSED_RETRY_S
            except TimeoutError:
                self._log.warning("a router does not answer the report", waited_s=WELCOME_S)
                retry_s = slower_s
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                retry_s = await self._after_failure(call, slower_s)
            finally:
                self.connected = False
                self.counts.snapshots, self._machine = self.snapshots, None
                call.cancel()
            await _wait(self._stopping, retry_s * random.uniform(0.8, 1.0))

    async def _after_failure(self, call: Call, slower_s: float) -> float:
        """Log why the call ended and say how long to wait, in seconds."""
        call.cancel()
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.UNAUTHENTICATED and self.connected:
            # The token was good when the stream began, and another may be in the file by now.
            self._log.warning("the report to a router has ended", code=code.name, reason=details)
            return FIRST_RETRY_S
        if (refused_s := _REFUSED_FOR.get(code)) is not None:
            if details != self.refusal:
                self._log.error("a router refuses the report", code=code.name, reason=details)
            self.refusal = details or code.name
            return refused_s
        level = self._log.warning if self.connected else self._log.debug
        level("report_stream_lost", code=code.name, reason=details)
        return FIRST_RETRY_S if self.connected else slower_s

    async def _stream(self, call: Call) -> None:
        """One stream from Hello to its end. Returns when it ended in order; raises gRPC's errors, ProtocolError and
        TimeoutError when no welcome came."""
        machine = self._machine = ReportProtocol(
            self._cached_blocks,
            self._instance,
            self._agent_id,
            consistency_check_interval_s=self._consistency_check_interval_s,
            report_interval_s=self._report_interval_s,
        )
        self._again = False
        if self._load is not None:
            machine.load(*self._load)
        reading = asyncio.create_task(self._read(call, machine))
        opened, greeted = time.monotonic(), False
        self.counts.streams += 1
        try:
            while not reading.done() and not self._stopping.is_set() and not self._again:
                self._wake.clear()
                if (message := machine.next_message(time.monotonic())) is not None:
                    await call.write(message)
                    greeted = True
                    continue
                if (until := machine.wake_at()) is None:
                    until = opened + WELCOME_S
                    if until <= time.monotonic():
                        raise TimeoutError
                await _wait(self._wake, until - time.monotonic())
            if reading.done():
                await reading
                return
            # A hello that is written is read before its goodbye, whether its welcome has come back or not.
            if self._stopping.is_set() and self._goodbye and greeted:
                await call.write(pb.ReportRequest(goodbye=pb.Goodbye(reason=self._goodbye)))
            await call.done_writing()
            with contextlib.suppress(TimeoutError):
                # The router ends its side once it has read everything; cancelling sooner could discard what was written.
                async with asyncio.timeout(GOODBYE_S):
                    await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()

    async def _read(self, call: Call, machine: ReportProtocol) -> None:
        try:
            # What is no message is gRPC's mark of the end.
            while isinstance(response := await call.read(), pb.ReportResponse):
                machine.received(response, time.monotonic())
                if response.HasField("welcome"):
                    self.connected = True
                    self.refusal = ""
                    self._log.info(
                        "a router takes the report", router_id=response.welcome.router_id, snapshots=machine.snapshots
                    )
                else:
                    self.counts.resyncs += 1
                    self._log.warning("a router asks for a snapshot", reason=response.resync.reason)
                self._wake.set()
        finally:
            self._wake.set()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until `event` is set or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
