"""Reports one instance to one router over a gRPC stream, and opens another stream when one breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman.agent.v1 import agent_pb2_grpc
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.report_protocol import ProtocolError, ReportProtocol
from pointsman_common.io.auth import CallMetadata
from pointsman_common.io.channel import ReloadingChannel
from pointsman_common.io.router_failures import meaning

log = structlog.get_logger()

# Timeout for a router's welcome after the first message, which waits for a connection, s.
WELCOME_S = 10.0
# Maximum time that an ending stream waits for the router to end its side, s.
GOODBYE_S = 1.0
# Maximum duration of `stop`, s. A router that no longer reads must not block it.
STOP_S = 3.0
# Time in which a router that cannot be reached may be starting, s.
STARTUP_S = 10.0
# Backoff after a stream that the router welcomed, s. Each stream without a welcome doubles the backoff.
FIRST_RETRY_S = 0.1
# Maximum backoff unless the router refuses the instance, s.
LAST_RETRY_S = 1.0
# Retry interval after a refusal that an operator must resolve (another key scheme, a block size, a token), s.
REFUSED_RETRY_S = 30.0
# Retry interval after another agent has replaced this one as the instance's reporter, s. A router accepts the newest agent. Two
# agents that replaced each other without a pause would make the router drop and read all of the instance's keys ten times a
# second. The interval is shorter than the time after which routers remove a lost instance, in case the other agent stops.
DISPLACED_RETRY_S = 10.0
# What a router says as it stops in order.
STOPS = "the router is stopping"
# Retry interval by the status code with which a router refuses an instance, s.
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
    """Counts since the reporter's start: streams opened, snapshots begun on streams that have ended, resyncs requested."""

    streams: int = 0
    snapshots: int = 0
    resyncs: int = 0


class Reporter:
    """Reports the cached blocks and the load of `instance` over `channel`, in a task that starts at once. Call `changed` after
    each change of the cached blocks."""

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
        """Whether the router has welcomed the open stream."""
        self.refusal = ""
        """The router's reason if it refused the instance; empty otherwise."""
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
        # Since when the router may be starting: the start of this, or the router's announced stop.
        self._may_start_since = time.monotonic()
        # Whether it is logged that no stream is welcomed.
        self._told_unreached = False
        self._goodbye = ""
        self._again = False
        self._log = log.bind(instance=instance.instance_id, router=router)
        self.task = asyncio.create_task(self._run(), name=f"report {instance.instance_id} to {router}")

    @property
    def snapshots(self) -> int:
        """Number of snapshots begun, including those of the open stream."""
        return self.counts.snapshots + (self._machine.snapshots if self._machine is not None else 0)

    def changed(self) -> None:
        """Wake the task, because the cached blocks have changed."""
        self._wake.set()

    def load(self, load: pb.Load, taken_at: float) -> None:
        """Send `load`, sampled at `taken_at` on the monotonic clock, on this stream and first on the next ones."""
        self._load = (load, taken_at)
        if self._machine is not None:
            self._machine.load(load, taken_at)
        self._wake.set()

    def describe(self, instance: pb.Instance) -> None:
        """Open a new stream with a hello for `instance`: its fixed properties have changed, its keys have not."""
        self._instance = instance
        self._again = True
        self._wake.set()

    async def stop(self, goodbye: str = "") -> None:
        """End the stream, after a goodbye if there is a reason. Returns when the task has ended, at the latest after STOP_S."""
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
        """Log why the call ended; return the time to wait before the next, in s."""
        call.cancel()
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.UNAUTHENTICATED and self.connected:
            # The token was valid when the stream began, and the file may have a new one by now.
            self._log.warning("the report to a router has ended", code=code.name, reason=details)
            return FIRST_RETRY_S
        if (refused_s := _REFUSED_FOR.get(code)) is not None:
            reason = details or code.name
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                reason = meaning(code, reason, "agent")
            if reason != self.refusal:
                self._log.error("a router refuses the report", code=code.name, reason=reason)
            self.refusal = reason
            return refused_s
        if details == STOPS:
            self._may_start_since = time.monotonic()
            self._log.info("the report stream broke", code=code.name, reason=details)
        elif self.connected:
            self._told_unreached = True
            self._log.warning("the report stream broke", code=code.name, reason=details)
        elif not self._told_unreached and time.monotonic() - self._may_start_since >= STARTUP_S:
            self._told_unreached = True
            self._log.warning("a router does not take the report", reason=meaning(code, details or "", "agent"))
        return FIRST_RETRY_S if self.connected else slower_s

    async def _stream(self, call: Call) -> None:
        """Run one stream from Hello to its end. Returns when the stream has ended in order. Raises gRPC's errors, ProtocolError,
        and TimeoutError if no welcome came."""
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
        greeted_at: float | None = None
        self.counts.streams += 1
        try:
            while not reading.done() and not self._stopping.is_set() and not self._again:
                self._wake.clear()
                if (message := machine.next_message(time.monotonic())) is not None:
                    await call.write(message)
                    greeted_at = greeted_at or time.monotonic()
                    continue
                if (until := machine.wake_at()) is None:
                    until = (greeted_at or time.monotonic()) + WELCOME_S
                    if until <= time.monotonic():
                        raise TimeoutError
                await _wait(self._wake, until - time.monotonic())
            if reading.done():
                await reading
                return
            if self._stopping.is_set() and not self._goodbye:
                for change in machine.last_changes(time.monotonic()):
                    await call.write(change)
            # The router reads a written hello before the goodbye, so the goodbye need not wait for the welcome.
            if self._stopping.is_set() and self._goodbye and greeted_at is not None:
                await call.write(pb.ReportRequest(goodbye=pb.Goodbye(reason=self._goodbye)))
            await call.done_writing()
            with contextlib.suppress(TimeoutError):
                # The router ends its side when it has read everything. An earlier cancel could discard written messages.
                async with asyncio.timeout(GOODBYE_S):
                    await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()

    async def _read(self, call: Call, machine: ReportProtocol) -> None:
        try:
            # gRPC returns a value that is not a message at the end of the stream.
            while isinstance(response := await call.read(), pb.ReportResponse):
                machine.received(response, time.monotonic())
                if response.HasField("welcome"):
                    self.connected = True
                    self._told_unreached = False
                    self.refusal = ""
                    self._log.info(
                        "a router accepts the report", router_id=response.welcome.router_id, snapshots=machine.snapshots
                    )
                elif response.HasField("resync"):
                    self.counts.resyncs += 1
                    self._log.warning("a router requests a snapshot", reason=response.resync.reason)
                self._wake.set()
        finally:
            self._wake.set()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until `event` is set or the time has passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
