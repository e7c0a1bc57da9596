"""The reports of a gateway on more keys than a message holds, over streams that break."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.rate_limits import RateLimited, RateLimiter, RateLimits
from pointsman_gateway.core.tenants import Client
from pointsman_gateway.io.routing import key_limit_leases
from pointsman_gateway.io.routing.key_limit_leases import KeyLimitLeases
from pointsman_router.core.key_limit_accounts import KeyLimitAccounts
from pointsman_router.io.convert.key_limit_messages import answer_report
from tests.support.waiting import eventually

MANY = 1_200  # keys; a message has at most 1,000
LIMITS = RateLimits(in_flight=100)


class Stream:
    """A session with a router that answers at once. `losing`: its messages do not reach the router any more."""

    def __init__(self, process: RouterOfTest, accounts: KeyLimitAccounts) -> None:
        self._process, self._accounts = process, accounts
        self.losing = False
        self.sizes: list[int] = []  # of the messages, in keys

    def send(self, message: placement_pb2.SessionRequest) -> None:
        self.sizes.append(len(message.usage.keys))
        if not self.losing:
            answer, _ = answer_report(self._accounts, self._process.name, message.usage, time.monotonic())
            asyncio.get_running_loop().call_soon(self._process.on_usage, self, answer)


class RouterOfTest:
    """What the leases use of a RouterClient."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session: Stream | None = None
        self.on_usage: Callable[[Stream, placement_pb2.UsageAnswer], None] = lambda session, answer: None
        self.on_routes: Callable[[], None] = lambda: None

    def usage_session(self) -> Stream | None:
        return self.session

    def connect(self, accounts: KeyLimitAccounts) -> Stream:
        self.session = Stream(self, accounts)
        self.on_routes()
        return self.session


class Gateway:
    def __init__(self, name: str) -> None:
        self.router = RouterOfTest(name)
        self.leases = KeyLimitLeases(RateLimiter(), self.router, name, lambda: True, lambda _: None)  # type: ignore[arg-type]

    async def used_up(self, number: int) -> int:
        """Return how many requests of a key can be in flight at once, until it refuses one."""
        open_requests = []
        with contextlib.suppress(RateLimited):
            while True:
                open_requests.append(await self.leases.admit(client_of(number)))
        for request in open_requests:
            request.close()
        return len(open_requests)


def client_of(number: int) -> Client:
    return Client("t", key=b"%032d" % number, limits=LIMITS)


async def test_what_a_broken_stream_lost_is_kept_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report that returns the leases of all keys is lost. The next stream tells what the gateway holds, of every key."""
    monkeypatch.setattr(key_limit_leases, "PERIOD_S", 60.0)  # no report before all leases are granted
    accounts, one, other = KeyLimitAccounts(), Gateway("one"), Gateway("other")
    try:
        for gateway in (one, other):
            await gateway.leases.start()
            gateway.router.connect(accounts)
        admissions = [await one.leases.admit(client_of(number)) for number in range(MANY)]
        for admission in admissions:
            admission.close()
        monkeypatch.setattr(key_limit_leases, "PERIOD_S", 0.2)
        broken = one.router.connect(accounts)
        broken.losing = True
        await eventually(lambda: sum(broken.sizes) >= 1_000, "the keys are reported")
        one.router.connect(accounts)
        samples = range(0, MANY, 50)
        for number in samples:
            (await one.leases.admit(client_of(number))).close()  # a lease that is not used expires
        await asyncio.sleep(0.5)
        found = [await other.used_up(number) for number in samples]
        assert min(found) >= 95, found
    finally:
        for gateway in (one, other):
            await gateway.leases.close()


async def test_the_end_of_a_gateway_is_no_loss_of_a_router() -> None:
    """Its router client ends all sessions after the last report (K5)."""
    gateway = Gateway("one")
    with capture_logs() as logs:
        await gateway.leases.start()
        gateway.router.connect(KeyLimitAccounts())
        await gateway.leases.close()
        gateway.router.session = None
        gateway.router.on_routes()
    assert not logs
