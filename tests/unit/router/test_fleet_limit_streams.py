"""Key limits over streams that break in the middle of a report: gateways' reports and a router's accounts in virtual time."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core import usage_reports
from pointsman_gateway.core.rate_limits import (
    KeyCharge,
    LeaseNeeded,
    RateLimited,
    RateLimiter,
    RateLimits,
    name_of,
)
from pointsman_gateway.core.usage_reports import UsageReports
from pointsman_router.core import key_limit_accounts
from pointsman_router.core.key_limit_accounts import KeyLimitAccounts
from pointsman_router.io.convert.key_limit_messages import answer_report

KEYS = 3
TOKENS = 30  # of one request, at most


class Connected:
    """A gateway whose messages and answers are on their way for a while, on a stream that may break."""

    def __init__(self, name: str) -> None:
        self.name, self.starts = name, 0
        self.start()

    def start(self) -> None:
        """A new process: what it had in flight is over, and its leases are forgotten."""
        self.starts += 1
        self.process = f"{self.name}-{self.starts}"
        self.limiter = RateLimiter()
        self.limiter.accounted = True
        self.reports = UsageReports(self.limiter, self.name)
        self.open: list[tuple[int, KeyCharge]] = []
        self.sent: deque[placement_pb2.UsageReport] = deque()
        self.answers: deque[placement_pb2.UsageAnswer] = deque()

    def break_off(self, now: float) -> None:
        """The stream ends, and another one begins: nothing that was on its way arrives."""
        self.sent.clear()
        self.answers.clear()
        self.reports.stream_began(now)

    def report(self, now: float) -> None:
        if self.reports.begin_round():
            while (message := self.reports.next_message(now)) is not None:
                self.sent.append(message)

    def transmit(self, accounts: KeyLimitAccounts, now: float, most: float = math.inf) -> None:
        """Bring the oldest messages to the router, and of the answers half as many."""
        moved = 0
        while self.sent and moved < most:
            moved += 1
            self.answers.append(answer_report(accounts, self.process, self.sent.popleft(), now)[0])
        while self.answers and moved > 0:
            moved -= 2 if most < math.inf else 0
            self.reports.answered(self.answers.popleft(), now)


class Streams(RuleBasedStateMachine):
    """Reports of many messages, which are in transit while requests begin and end. Streams break at any place in a report, and
    gateways start again: the limits hold to the last request. A router that takes over knows only what the gateways tell, so each
    takeover may admit as much as a new minute does."""

    @initialize(
        gateways=st.integers(2, 3),
        limits=st.builds(RateLimits, st.integers(0, 20), st.sampled_from([0, 200]), st.integers(0, 3)),
    )
    def begin(self, gateways: int, limits: RateLimits) -> None:
        self.now, self.limits = 1_000.0, limits
        self.accounts = KeyLimitAccounts()
        self.gateways = [Connected(f"g{number}") for number in range(gateways)]
        self.admitted: list[tuple[float, int]] = []
        self.tokens: list[tuple[float, int, int]] = []
        self.takeovers: list[float] = []
        self.restarted_at = -math.inf

    def one(self, who: int) -> Connected:
        return self.gateways[who % len(self.gateways)]

    @rule(who=st.integers(0, 2), key=st.integers(0, KEYS - 1), many=st.integers(1, 9), tokens=st.integers(0, TOKENS))
    def ask(self, who: int, key: int, many: int, tokens: int) -> None:
        gateway = self.one(who)
        for _ in range(many):
            for _ in range(100):
                try:
                    charge = gateway.limiter.admit(b"%d" % key, self.limits, self.now)
                    break
                except RateLimited:
                    return
                except LeaseNeeded as needed:
                    gateway.sent.append(gateway.reports.asking([needed.name], self.now))
                    gateway.transmit(self.accounts, self.now)
            else:
                raise AssertionError("it asked for ever")
            self.admitted_one(gateway, key, charge, tokens)

    @rule(who=st.integers(0, 2), key=st.integers(0, KEYS - 1), tokens=st.integers(0, TOKENS))
    def use_lease(self, who: int, key: int, tokens: int) -> None:
        """Admit all that the lease has, without the router."""
        gateway = self.one(who)
        with suppress(LeaseNeeded, RateLimited):
            for _ in range(20):
                self.admitted_one(gateway, key, gateway.limiter.admit(b"%d" % key, self.limits, self.now), tokens)

    def admitted_one(self, gateway: Connected, key: int, charge: KeyCharge, tokens: int) -> None:
        gateway.open.append((key, charge))
        self.admitted.append((self.now, key))
        charge.charge(tokens, self.now)
        self.tokens.append((self.now, key, tokens))

    @rule(who=st.integers(0, 2), many=st.integers(1, 9))
    def end(self, who: int, many: int) -> None:
        gateway = self.one(who)
        for _, charge in gateway.open[:many]:
            charge.close()
        del gateway.open[:many]

    @rule(who=st.integers(0, 2))
    def report(self, who: int) -> None:
        self.one(who).report(self.now)

    @rule(who=st.integers(0, 2), messages=st.integers(1, 2))
    def transmit(self, who: int, messages: int) -> None:
        self.one(who).transmit(self.accounts, self.now, messages)

    @rule(who=st.integers(0, 2), messages=st.integers(0, 4))
    def break_off(self, who: int, messages: int) -> None:
        """The router has received some of the last messages, and the gateway none of the answers."""
        gateway = self.one(who)
        for message in list(gateway.sent)[:messages]:
            answer_report(self.accounts, gateway.process, message, self.now)
        gateway.break_off(self.now)
        gateway.report(self.now)

    @rule(who=st.integers(0, 2), key=st.integers(0, KEYS - 1))
    def ask_ahead(self, who: int, key: int) -> None:
        """A gateway requests more of a key, and gets on with other things."""
        gateway = self.one(who)
        if name_of(b"%d" % key) in gateway.limiter.touched():
            gateway.sent.append(gateway.reports.asking([name_of(b"%d" % key)], self.now))

    @rule(who=st.integers(0, 2))
    def restart_gateway(self, who: int) -> None:
        self.one(who).start()
        self.restarted_at = self.now

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 12.0, 20.0]))
    def wait(self, seconds: float) -> None:
        left = seconds
        while left > 0:
            self.now += min(left, 1.0)
            left -= 1.0
            for gateway in self.gateways:
                if seconds >= 1.0:
                    gateway.report(self.now)
                    gateway.sent.append(gateway.reports.without_keys(self.now))
                    gateway.transmit(self.accounts, self.now)

    @rule(key=st.integers(0, KEYS - 1), many=st.integers(0, 4))
    def settle(self, key: int, many: int) -> None:
        """Whatever was lost before: what the router takes for leased is what the gateways hold that have reported since, and
        SILENT_S later it counts as many requests in flight as there are."""
        if self.now - self.restarted_at <= key_limit_accounts.LEASE_S + 1:
            self.wait(key_limit_accounts.LEASE_S + 2)
        for who in range(len(self.gateways)):
            self.ask(who, key, many, 3)
        self.wait(1.0)
        for gateway in self.gateways:
            for name, account in gateway.limiter._by_name.items():
                known = self.accounts._accounts.get(name)
                lease = known.leases.get(gateway.name) if known is not None else None
                if lease is None or lease.heard_at < self.now:
                    continue
                with account.store.open() as usage:
                    if self.limits.requests_per_minute:
                        assert lease.requests == pytest.approx(usage.requests.level, abs=1e-6)
                    if self.limits.tokens_per_minute:
                        assert lease.tokens == pytest.approx(usage.tokens.level, abs=1e-6)
                    if self.limits.in_flight:
                        assert lease.slots == usage.slots
        self.wait(key_limit_accounts.SILENT_S + 2)
        for key in range(KEYS):
            if (known := self.accounts._accounts.get(name_of(b"%d" % key))) is not None:
                self.accounts._forget_ended(known)
                counted = sum(count for count, _ in known.in_flight.values())
                assert counted == sum(key == other for gateway in self.gateways for other, _ in gateway.open)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "limits"):
            return
        for key in range(KEYS):
            if requests := self.limits.requests_per_minute:
                times = [at for at, used in self.admitted if used == key]
                for at, begun in enumerate(times):
                    more = requests * sum(taken >= begun - 60 for taken in self.takeovers)
                    assert len(times) - at <= requests * (1 + (self.now - begun) / 60) + more + 1e-3
            if tokens := self.limits.tokens_per_minute:
                used, overdrawn = 0, len(self.gateways) * TOKENS
                for begun, of, taken in reversed(self.tokens):
                    used += taken if of == key else 0
                    more = (tokens + overdrawn) * sum(taken >= begun - 60 for taken in self.takeovers)
                    assert used <= tokens * (1 + (self.now - begun) / 60) + overdrawn + more + 1e-2
            if most := self.limits.in_flight:
                open_ones = sum(other == key for gateway in self.gateways for other, _ in gateway.open)
                assert open_ones <= most * (1 + len(self.takeovers))

    def teardown(self) -> None:
        """After a minute without requests a single gateway may use all of each limit again."""
        if not hasattr(self, "limits"):
            return
        for number, gateway in enumerate(self.gateways):
            self.end(number, len(gateway.open))
        for _ in range(6):
            self.wait(20.0)
        most = min((limit for limit in (self.limits.requests_per_minute, self.limits.in_flight) if limit), default=20)
        before = len(self.admitted)
        self.ask(len(self.gateways) - 1, 0, most, 0)
        assert len(self.admitted) - before == most


class StreamsAndRouters(Streams):
    """Routers die too, and another one takes over."""

    @rule()
    def take_over(self) -> None:
        self.accounts = KeyLimitAccounts()
        self.takeovers.append(self.now)
        for gateway in self.gateways:
            gateway.break_off(self.now)


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reports, "MAX_KEYS", 1)


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestStreamsAndRouters = StreamsAndRouters.TestCase
TestStreamsAndRouters.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
