"""The gateway's side of limits that hold over all gateways: reports what keys have used, and asks for leases.

Reports go to one router once a second, about keys that were used, and at once where a request waits for more of a lease. While no
router answers, requests are admitted by this gateway's share of the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import structlog

from pointsman.gateway.core.rate_limits import Admission, LeaseNeeded, RateLimiter
from pointsman.gateway.core.tenants import Client
from pointsman.gateway.io.routing.router_client import RouterClient
from pointsman.gateway.io.routing.router_stream import RouterSession
from pointsman.router.v1 import placement_pb2

log = structlog.get_logger()

PERIOD_S = 1.0
# How long a request waits for an answer; then the router counts as away.
ANSWER_S = 0.25
# How long a request that is granted something, which others take before it, goes on asking.
ASK_AGAIN_S = 1.0
# The router forgets a process that it has not heard of for three times as long.
HEARTBEAT_S = 5.0
MAX_KEYS = 1_000
_MAX_UNANSWERED = 4


class LeaseClient:
    """Keeps a RateLimiter's leases. Belongs to the event loop that start() ran on."""

    def __init__(
        self,
        limiter: RateLimiter,
        router: RouterClient,
        gateway: str,
        limited: Callable[[], bool],
        on_accounted: Callable[[bool], None],
    ) -> None:
        """`gateway` is the name that all processes of a gateway share; `limited` tells whether any key has limits."""
        self._limiter = limiter
        self._router = router
        self._gateway = gateway
        self._limited = limited
        self._on_accounted = on_accounted
        self._session: RouterSession | None = None
        self._full = True  # the next report must name all that is in flight
        self._sent: deque[float] = deque()  # when reports that are not answered were sent; monotonic s
        self._sent_at = 0.0
        self._due: dict[bytes, None] = {}
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to report."""
        self._router.on_usage = self._answered
        self._router.on_routes = self._check_route
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Report a last time, so that other gateways have what this one gives back; before the router's client is closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._check_route()
        self._report()

    async def admit(self, client: Client) -> Admission:
        """Admit one request of the client; waits only where its lease is used up. Raises RateLimited."""
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
                loop.call_soon(self._send_due)  # with the other requests that came in the same moment
            self._due[name] = None
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.shield(waiting)
        except TimeoutError:
            if not waiting.done():
                self._set_accounted(False)

    def _send_due(self) -> None:
        due, self._due = list(self._due), {}
        if self._session is None or not self._limiter.accounted:
            self._release()
            return
        self._send(due, asked=True)

    async def _run(self) -> None:
        while True:
            self._check_route()
            if self._sent and time.monotonic() - self._sent[0] > PERIOD_S:
                self._set_accounted(False)
            try:
                self._report()
            except Exception:
                # A fault must not end what gives leases back; the next report tries again.
                log.exception("a fault in the report of keys' usage")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._wake.wait()

    def _check_route(self) -> None:
        """Which router accounts may have changed."""
        session = self._router.usage_session()
        if session is self._session:
            return
        self._session = session
        self._sent.clear()
        self._full = True
        self._set_accounted(session is not None)
        # A router that takes over grants what it has not been told of as used.
        self._wake.set()

    def _set_accounted(self, accounted: bool) -> None:
        if accounted is not self._limiter.accounted:
            self._limiter.accounted = accounted
            self._on_accounted(accounted)
            self._full = True
            if not accounted:
                log.warning("no router accounts for keys' limits", gateways=self._limiter.gateways)
        if not accounted:
            self._release()

    def _release(self) -> None:
        """Let all requests that wait for an answer look again."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.done():
                one.set_result(None)

    def _report(self) -> None:
        """The regular report; to a router that does not answer an empty one, now and then, until it does."""
        if self._session is None:
            return
        now = time.monotonic()
        if not self._limiter.accounted:
            if len(self._sent) < _MAX_UNANSWERED:
                self._write(self._session, [], full=False)
            return
        full, self._full = self._full and self._limited(), False
        names = self._limiter.touched()
        if full:
            names = list(dict.fromkeys([*names, *self._limiter.open_names()]))
        if names or full or (now - self._sent_at >= HEARTBEAT_S and self._limited()):
            self._send(names, asked=False, full=full)

    def _send(self, names: list[bytes], *, asked: bool, full: bool = False) -> None:
        assert self._session is not None
        for at in range(0, max(len(names), 1), MAX_KEYS):
            reports = self._limiter.reports(names[at : at + MAX_KEYS], time.monotonic(), asked=asked)
            self._write(self._session, reports, full=full and at == 0)

    def _write(self, session: RouterSession, reports: list[placement_pb2.KeyReport], *, full: bool) -> None:
        report = placement_pb2.UsageReport(gateway=self._gateway, full=full, keys=reports)
        session.send(placement_pb2.SessionRequest(usage=report))
        self._sent_at = time.monotonic()
        self._sent.append(self._sent_at)

    def _answered(self, session: RouterSession, answer: placement_pb2.UsageAnswer) -> None:
        if session is not self._session:
            return
        if self._sent:
            self._sent.popleft()
        now = time.monotonic()
        self._limiter.count_gateways(answer.gateways, now)
        self._limiter.granted(answer.keys, now)
        for one in answer.keys:
            waiting = self._waiting.pop(one.key, None) if one.wanted else None
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self._full = self._full or answer.tell_all
        self._set_accounted(True)
