"""The gateway's side of API key limits that all gateways share: it reports the keys' usage and requests leases.

Reports on used keys are sent to one router once a second, and at once if a request waits for a larger lease. While no router
answers, this gateway admits requests by its share of the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from itertools import islice

import structlog

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.rate_limits import KeyCharge, LeaseNeeded, RateLimiter
from pointsman_gateway.core.tenants import Client
from pointsman_gateway.core.usage_reports import MAX_KEYS, UsageReports
from pointsman_gateway.io.routing.router_client import RouterClient
from pointsman_gateway.io.routing.router_stream import RouterSession

log = structlog.get_logger()

# Interval between two reports, s. Also the maximum wait for the answer to a report.
PERIOD_S = 1.0
# Maximum time that a request waits for a lease, s. After it the router counts as unreachable.
ANSWER_S = 0.25
# Maximum time for which a request asks for a lease again, s. Other requests may use up what was granted before it is admitted.
ASK_AGAIN_S = 1.0
# Maximum interval between two reports, s. The router forgets a process that sends none for three times this interval.
HEARTBEAT_S = 5.0
# Maximum number of unanswered messages of a report; also of empty messages while no router accounts for limits.
_MAX_UNANSWERED = 4


class KeyLimitLeases:
    """Renews the leases of a RateLimiter. All calls must come from the event loop that start() ran on."""

    def __init__(
        self,
        limiter: RateLimiter,
        router: RouterClient,
        gateway: str,
        limited: Callable[[], bool],
        on_accounted: Callable[[bool], None],
    ) -> None:
        """`gateway`: the name that all processes of a gateway share. `limited` returns whether any key has limits."""
        self._limiter = limiter
        self._router = router
        self._reports = UsageReports(limiter, gateway)
        self._limited = limited
        self._on_accounted = on_accounted
        self._session: RouterSession | None = None
        self._sent_at = 0.0
        self._due: dict[bytes, None] = {}
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._answer_came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to send reports."""
        self._router.on_usage = self._answered
        self._router.on_routes = self._check_route
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send a last report, which returns the leases to other gateways. Call before the router client is closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._check_route()
        await self._report()
        # The router client ends its sessions next, while their routers are well.
        self._router.on_routes = lambda: None

    async def admit(self, client: Client) -> KeyCharge:
        """Admit one request of the client. Waits only if the key's lease is used up. Raises RateLimited."""
        now = time.monotonic()
        give_up_at = now + ASK_AGAIN_S
        while True:
            try:
                return self._limiter.admit(client.key, client.limits, now, final=now >= give_up_at)
            except LeaseNeeded as needed:
                await self._ask(needed.name)
                now = time.monotonic()

    async def _ask(self, name: bytes) -> None:
        waiting = self._waiting.get(name)
        if waiting is None:
            loop = asyncio.get_running_loop()
            waiting = self._waiting[name] = loop.create_future()
            if not self._due:
                loop.call_soon(self._send_due)  # one report for all keys of this iteration of the loop
            self._due[name] = None
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(waiting)
        except TimeoutError:
            if not waiting.done():
                self._set_accounted(False)

    def _send_due(self) -> None:
        if self._session is None or not self._limiter.accounted:
            self._due.clear()
            self._release()
            return
        due = list(islice(self._due, MAX_KEYS))
        for name in due:
            del self._due[name]
        self._send(self._session, self._reports.asking(due, time.monotonic()))
        if self._due:
            asyncio.get_running_loop().call_soon(self._send_due)

    async def _run(self) -> None:
        while True:
            self._check_route()
            try:
                await self._report()
            except Exception:
                # A fault must not end this task, which returns leases; the next report tries again.
                log.exception("a fault in the report of keys' usage")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._wake.wait()

    def _check_route(self) -> None:
        """Switch to the router that now accounts for limits, if it is another one."""
        session = self._router.usage_session()
        if session is self._session:
            return
        self._session = session
        self._reports.stream_began(time.monotonic())
        self._answer_came.set()
        self._set_accounted(session is not None)
        self._release()  # answers to the earlier stream's requests for leases are lost
        # Report at once: a router that takes over may grant unreported usage a second time.
        self._wake.set()

    def _set_accounted(self, accounted: bool) -> None:
        if accounted is not self._limiter.accounted:
            self._limiter.accounted = accounted
            self._on_accounted(accounted)
            # Without keys with limits there is nothing to account for, and a gateway that stops needs no lease.
            if not accounted and self._task is not None and not self._task.done() and self._limited():
                log.warning("no router accounts for keys' limits", gateways=self._limiter.gateways)
        if not accounted:
            self._release()

    def _release(self) -> None:
        """Wake all requests that wait for a lease, so that they try again."""
        waiting, self._waiting = self._waiting, {}
        for waiting_call in waiting.values():
            if not waiting_call.done():
                waiting_call.set_result(None)

    async def _report(self) -> None:
        """Send the regular report, message by message, so that neither side is busy for long. While no router accounts for
        limits, send an empty message instead, up to _MAX_UNANSWERED."""
        session, now = self._session, time.monotonic()
        if session is None:
            return
        since = self._reports.waiting_since
        if since is not None and now - since > PERIOD_S:
            self._set_accounted(False)
        if not self._limiter.accounted:
            if self._reports.unanswered < _MAX_UNANSWERED:
                self._send(session, self._reports.without_keys(now))
            return
        if not self._limited():
            return
        if not self._reports.begin_round():
            if now - self._sent_at >= HEARTBEAT_S:
                self._send(session, self._reports.without_keys(now))
            return
        while (
            session is self._session
            and await self._has_room()
            and (message := self._reports.next_message(time.monotonic())) is not None
        ):
            self._send(session, message)
            await asyncio.sleep(0)

    async def _has_room(self) -> bool:
        """Wait until few messages are unanswered; return whether they are, within PERIOD_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                while self._reports.unanswered >= _MAX_UNANSWERED:
                    self._answer_came.clear()
                    await self._answer_came.wait()
        return self._reports.unanswered < _MAX_UNANSWERED

    def _send(self, session: RouterSession, message: placement_pb2.UsageReport) -> None:
        session.send(placement_pb2.SessionRequest(usage=message))
        self._sent_at = time.monotonic()

    def _answered(self, session: RouterSession, answer: placement_pb2.UsageAnswer) -> None:
        if session is not self._session:
            return
        self._reports.answered(answer, time.monotonic())
        self._answer_came.set()
        for grant in answer.keys:
            waiting = self._waiting.pop(grant.key, None) if grant.wanted else None
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if answer.tell_all:
            self._wake.set()
        self._set_accounted(True)
