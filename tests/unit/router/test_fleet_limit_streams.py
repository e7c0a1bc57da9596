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

    def transmit(
        self, accounts: KeyLimitAccounts, now: float, messages: float = math.inf, answers: float = math.inf
    ) -> None:
        """Bring the oldest messages to the router, and the oldest answers to the gateway."""
        while self.sent and messages > 0:
            messages -= 1
            self.answers.append(answer_report(accounts, self.process, self.sent.popleft(), now)[0])
        while self.answers and answers > 0:
            answers -= 1
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

    @rule(who=st.integers(0, 2), messages=st.integers(0, 3), answers=st.integers(0, 2))
    def transmit(self, who: int, messages: int, answers: int) -> None:
        self.one(who).transmit(self.accounts, self.now, messages, answers)

    @rule(who=st.integers(0, 2), before=st.integers(0, 2), after=st.integers(0, 2), key=st.integers(0, KEYS - 1))
    def break_off(self, who: int, before: int, after: int, key: int) -> None:
        """Some of the last messages arrive, and none of their answers. Then some of the new stream's messages arrive before
        another gateway requests more."""
        gateway = self.one(who)
        gateway.transmit(self.accounts, self.now, before, 0)
        gateway.break_off(self.now)
        gateway.report(self.now)
        gateway.transmit(self.accounts, self.now, after, 0)
        self.ask(who + 1, key, 3, 0)

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
                with account.open() as usage:
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


def used_up(gateway: Connected, accounts: KeyLimitAccounts, key: int, limits: RateLimits, now: float) -> int:
    """Return how many requests of a key the gateway admits until it refuses one. They stay in flight."""
    machine = Streams()
    machine.now, machine.limits, machine.accounts, machine.gateways = now, limits, accounts, [gateway]
    machine.admitted, machine.tokens = [], []
    machine.ask(0, key, 10_000, 0)
    return len(machine.admitted)


def test_a_grant_on_its_way_is_not_granted_again() -> None:
    accounts, one, other, limits = KeyLimitAccounts(), Connected("one"), Connected("other"), RateLimits(in_flight=9)
    with suppress(LeaseNeeded):
        one.limiter.admit(b"0", limits, 1.0)
    for _ in range(3):
        one.sent.append(one.reports.asking([name_of(b"0")], 1.0))
    one.transmit(accounts, 1.0, 3, 0)
    admitted = used_up(other, accounts, 0, limits, 1.0)
    one.transmit(accounts, 1.0)
    assert admitted + used_up(one, accounts, 0, limits, 1.0) == 9


def test_what_a_full_report_has_not_come_to_yet_is_still_in_flight() -> None:
    accounts, one, other, limits = KeyLimitAccounts(), Connected("one"), Connected("other"), RateLimits(in_flight=2)
    for key in range(KEYS):
        assert used_up(one, accounts, key, limits, 1.0) == 2
    one.report(1.0)
    one.transmit(accounts, 1.0)
    one.break_off(1.0)
    one.report(1.0)
    one.transmit(accounts, 1.0, 1)
    assert [used_up(other, accounts, key, limits, 1.0) for key in range(KEYS)] == [0] * KEYS


def test_a_lease_that_has_expired_is_not_used() -> None:
    accounts, one, other = KeyLimitAccounts(), Connected("one"), Connected("other")
    limits = RateLimits(requests_per_minute=600)
    one.sent.append(one.reports.without_keys(1.0))
    with suppress(LeaseNeeded):
        one.limiter.admit(b"0", limits, 1.0)
    one.sent.append(one.reports.asking([name_of(b"0")], 1.0))
    one.transmit(accounts, 1.0)
    assert used_up(other, accounts, 0, limits, 60.0) + used_up(one, accounts, 0, limits, 60.0) == 600


def test_what_was_used_beyond_a_lease_is_told_again() -> None:
    accounts, one, limits = KeyLimitAccounts(), Connected("one"), RateLimits(tokens_per_minute=600)
    with suppress(LeaseNeeded):
        one.limiter.admit(b"0", limits, 1.0)
    one.sent.append(one.reports.asking([name_of(b"0")], 1.0))
    one.transmit(accounts, 1.0)
    one.limiter.admit(b"0", limits, 1.0).charge(1_200, 1.0)
    one.report(1.0)
    one.break_off(1.0)
    one.report(1.0)
    one.transmit(accounts, 1.0)
    assert used_up(one, accounts, 0, limits, 50.0) == 0
    assert used_up(one, accounts, 0, limits, 62.0) > 0


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reports, "MAX_KEYS", 1)


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestStreamsAndRouters = StreamsAndRouters.TestCase
TestStreamsAndRouters.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
