"""Limits hold over several gateways: their limiters and a router's accounts in virtual time, with what may get lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.rate_limits import KeyCharge, LeaseNeeded, RateLimited, RateLimiter, RateLimits, name_of
from pointsman_gateway.core.usage_reports import UsageReports
from pointsman_router.core import key_limit_accounts
from pointsman_router.core.key_limit_accounts import KeyLimitAccounts, KeyReport
from pointsman_router.io.convert.key_limit_messages import answer_report, usage_reports

KEY = b"k"
TOKENS = 30  # of one request, at most


class Gateway:
    """A limiter, and its way to the router."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.limiter = RateLimiter()
        self.reports = UsageReports(self.limiter, name)
        self.open: list[KeyCharge] = []

    def connect(self, accounts: KeyLimitAccounts, now: float) -> None:
        self.limiter.accounted = True
        self.reports.stream_began(now)
        self.exchange(accounts, now, asked=False)

    def exchange(self, accounts: KeyLimitAccounts, now: float, *, asked: bool, lost: str = "") -> None:
        """One report and its answer, through their wire forms; `lost`: which of the two never arrives."""
        if asked:
            wire = self.reports.asking([name_of(KEY)], now)
        elif self.reports.begin_round():
            first = self.reports.next_message(now)
            assert first is not None
            wire = first
        else:
            wire = self.reports.without_keys(now)
        if lost == "report":
            return
        answer, _ = answer_report(accounts, self.name, wire, now)
        if lost != "answer":
            self.reports.answered(answer, now)

    def admit(self, accounts: KeyLimitAccounts, limits: RateLimits, now: float) -> KeyCharge:
        for _ in range(100):
            try:
                return self.limiter.admit(KEY, limits, now)
            except LeaseNeeded:
                self.exchange(accounts, now, asked=True)
        raise AssertionError("it asked for ever")


class _Fleet(RuleBasedStateMachine):
    faults = False

    @initialize(
        gateways=st.integers(1, 4),
        limits=st.builds(RateLimits, st.integers(0, 40), st.sampled_from([0, 100, 600]), st.integers(0, 6)),
    )
    def begin(self, gateways: int, limits: RateLimits) -> None:
        self.now, self.limits = 1_000.0, limits
        self.accounts = KeyLimitAccounts()
        self.gateways = [Gateway(f"g{number}") for number in range(gateways)]
        self.admitted: list[float] = []
        self.tokens: list[tuple[float, int]] = []
        self.waits: list[float] = []
        self.shares = 0.0  # fraction of a minute's limit that cut-off gateways may have admitted as their shares
        for gateway in self.gateways:
            gateway.connect(self.accounts, self.now)
        self.wait(1.0)
        self.wait(1.0)

    def cut(self, gateway: Gateway) -> None:
        if gateway.limiter.accounted:
            gateway.limiter.accounted = False
            self.shares += 1 / len(self.gateways)

    @rule(who=st.integers(0, 3), many=st.integers(1, 12), tokens=st.integers(0, TOKENS))
    def ask(self, who: int, many: int, tokens: int) -> None:
        gateway = self.gateways[who % len(self.gateways)]
        for _ in range(many):
            try:
                admission = gateway.admit(self.accounts, self.limits, self.now)
            except RateLimited as limited:
                self.waits.append(limited.retry_after_s)
                return
            gateway.open.append(admission)
            self.admitted.append(self.now)
            admission.charge(tokens, self.now)
            self.tokens.append((self.now, tokens))

    @rule(who=st.integers(0, 3), many=st.integers(1, 12))
    def end(self, who: int, many: int) -> None:
        gateway = self.gateways[who % len(self.gateways)]
        for admission in gateway.open[:many]:
            admission.close()
        del gateway.open[:many]

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 3.0, 12.0, 70.0]))
    def wait(self, seconds: float) -> None:
        left = seconds
        while left > 0:
            self.now += min(left, 1.0)
            self.shares += sum(not gateway.limiter.accounted for gateway in self.gateways) / len(self.gateways) / 60
            left -= 1.0
            for gateway in self.gateways:
                if gateway.limiter.accounted:
                    gateway.exchange(self.accounts, self.now, asked=False)

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "limits"):
            return
        assert all(0 < wait < math.inf for wait in self.waits)
        count = len(self.gateways)
        if requests := self.limits.requests_per_minute:
            # A share is a whole request at least.
            more = math.ceil(self.shares) * max(requests, count) if self.faults else 0
            for at, begun in enumerate(self.admitted):
                window = len(self.admitted) - at
                assert window <= requests * (1 + (self.now - begun) / 60) + more + 1e-3
        if tokens := self.limits.tokens_per_minute:
            more, used = (math.ceil(self.shares) * tokens if self.faults else 0) + count * TOKENS, 0
            for begun, taken in reversed(self.tokens):
                used += taken
                assert used <= tokens * (1 + (self.now - begun) / 60) + more * (1 + self.faults * self.shares) + 1e-2
        if most := self.limits.in_flight:
            open_ones = sum(len(gateway.open) for gateway in self.gateways)
            assert open_ones <= (most if not self.faults else 2 * max(most, count) * (1 + math.ceil(self.shares)))
        for gateway in self.gateways:
            assert gateway.limiter.in_flight(KEY) == (len(gateway.open) if self.limits != RateLimits() else 0)

    def teardown(self) -> None:
        """After some minutes without requests a single gateway may use all of the limits again."""
        if not hasattr(self, "limits"):
            return
        for gateway in self.gateways:
            for admission in gateway.open:
                admission.close()
            gateway.open.clear()
            if not gateway.limiter.accounted:
                gateway.connect(self.accounts, self.now)
        for _ in range(6):
            self.wait(70.0)
        most = min((limit for limit in (self.limits.requests_per_minute, self.limits.in_flight) if limit), default=20)
        for _ in range(most):
            self.gateways[-1].admit(self.accounts, self.limits, self.now)


class FleetWithoutFaults(_Fleet):
    """Every report arrives: the limits hold to the last request."""


class FleetWithFaults(_Fleet):
    """Routers restart, and streams break and lose messages. A gateway that is cut off admits its share besides the limit."""

    faults = True

    @rule(who=st.integers(0, 3), lost=st.sampled_from(["", "report", "answer"]))
    def break_off(self, who: int, lost: str) -> None:
        gateway = self.gateways[who % len(self.gateways)]
        if gateway.limiter.accounted:
            if lost:
                gateway.exchange(self.accounts, self.now, asked=bool(gateway.limiter.touched()), lost=lost)
            self.cut(gateway)

    @rule(who=st.integers(0, 3))
    def come_back(self, who: int) -> None:
        gateway = self.gateways[who % len(self.gateways)]
        if not gateway.limiter.accounted:
            gateway.connect(self.accounts, self.now)

    @rule()
    def restart_router(self) -> None:
        self.accounts = KeyLimitAccounts()
        for gateway in self.gateways:
            self.cut(gateway)


TestFleetWithoutFaults = FleetWithoutFaults.TestCase
TestFleetWithoutFaults.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestFleetWithFaults = FleetWithFaults.TestCase
TestFleetWithFaults.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def fleet(count: int) -> tuple[KeyLimitAccounts, list[Gateway]]:
    accounts, gateways = KeyLimitAccounts(), [Gateway(f"g{number}") for number in range(count)]
    for now in (0.0, 1.0):
        for gateway in gateways:
            gateway.connect(accounts, now)
    return accounts, gateways


def use_up(gateway: Gateway, accounts: KeyLimitAccounts, limits: RateLimits, now: float) -> int:
    """How many requests it admits until it refuses one."""
    admitted = 0
    while True:
        try:
            gateway.admit(accounts, limits, now).close()
        except RateLimited:
            return admitted
        admitted += 1


def test_one_gateway_may_use_a_whole_minutes_worth_at_once() -> None:
    accounts, gateways = fleet(10)
    assert use_up(gateways[3], accounts, RateLimits(requests_per_minute=600), 2.0) == 600
    assert use_up(gateways[4], accounts, RateLimits(requests_per_minute=600), 2.0) == 0


def test_without_a_router_the_shares_of_all_gateways_are_the_limit() -> None:
    accounts, gateways = fleet(4)
    for gateway in gateways:
        gateway.limiter.accounted = False
    assert [use_up(gateway, accounts, RateLimits(requests_per_minute=40), 2.0) for gateway in gateways] == [10] * 4
    assert [use_up(gateway, accounts, RateLimits(requests_per_minute=40), 32.0) for gateway in gateways] == [5] * 4
    # What they used is sent to the router that comes.
    accounts = KeyLimitAccounts()
    for gateway in gateways:
        gateway.connect(accounts, 33.0)
    assert [use_up(gateway, accounts, RateLimits(requests_per_minute=40), 33.0) for gateway in gateways] == [0] * 4


def test_a_takeover_gives_nobody_a_fresh_minute() -> None:
    accounts, gateways = fleet(3)
    limits = RateLimits(requests_per_minute=60)
    assert use_up(gateways[0], accounts, limits, 2.0) == 60
    taking_over = KeyLimitAccounts()
    for gateway in gateways:
        gateway.limiter.accounted = False
    assert (
        sum(use_up(gateway, taking_over, limits, 2.0) for gateway in gateways) <= 40
    )  # the shares of the two other gateways, which do not know of the first one's requests
    for gateway in gateways:
        gateway.connect(taking_over, 3.0)
        gateway.exchange(taking_over, 3.0, asked=False)
    assert sum(use_up(gateway, taking_over, limits, 3.0) for gateway in gateways) <= 1


def test_what_was_granted_too_late_is_kept_from_nobody() -> None:
    """The gateway already used its share, without a router, when the grants arrived."""
    accounts, (one, other) = fleet(2)
    limits = RateLimits(requests_per_minute=600)
    now = 2.0
    for _ in range(10):
        one.admit(accounts, limits, now).close()
        one.exchange(accounts, now, asked=True, lost="answer")
        one.limiter.accounted = False
        one.limiter.admit(KEY, limits, now).close()
        one.limiter.accounted = True
        now += 6.0
        one.exchange(accounts, now, asked=False)
    # A minute in which it uses little: all of the limit is there again.
    for _ in range(70):
        one.admit(accounts, limits, now).close()
        one.exchange(accounts, now, asked=False)
        now += 1.0
    assert use_up(other, accounts, limits, now) > 500


def test_a_burst_long_ago_keeps_no_slots_from_other_gateways() -> None:
    accounts, (one, other) = fleet(2)
    limits = RateLimits(in_flight=16)
    for admission in [one.admit(accounts, limits, 2.0) for _ in range(16)]:
        admission.close()
    now = 3.0
    for _ in range(5):
        # Twenty a second, four at a time.
        for _ in range(5):
            for admission in [one.admit(accounts, limits, now) for _ in range(4)]:
                admission.close()
        one.exchange(accounts, now, asked=False)
        now += 1.0
    open_there = [other.admit(accounts, limits, now) for _ in range(8)]
    assert len(open_there) == 8


@pytest.mark.parametrize("before", [RateLimits(in_flight=6), RateLimits(requests_per_minute=1_000)])
def test_a_lower_limit_of_requests_in_flight_holds_while_others_are_always_waiting(before: RateLimits) -> None:
    accounts, now = KeyLimitAccounts(), 0.0
    gateway = Gateway("one")
    gateway.connect(accounts, now)
    for _ in range(6):
        gateway.open.append(gateway.admit(accounts, before, now))
    after = RateLimits(in_flight=2)
    for _ in range(20):
        now += 0.5
        gateway.open.pop(0).close()
        try:
            gateway.open.append(gateway.admit(accounts, after, now))
        except RateLimited:
            gateway.exchange(accounts, now, asked=False)
        if len(gateway.open) < 2:
            break
    assert len(gateway.open) <= 2


def test_requests_in_flight_are_sent_to_the_router_that_takes_over() -> None:
    accounts, gateways = fleet(2)
    limits = RateLimits(in_flight=4)
    held = [gateways[0].admit(accounts, limits, 2.0) for _ in range(4)]
    taking_over = KeyLimitAccounts()
    for gateway in gateways:
        gateway.connect(taking_over, 3.0)
    with pytest.raises(RateLimited, match="in flight"):
        gateways[1].admit(taking_over, limits, 3.0)
    for admission in held:
        admission.close()
    gateways[0].exchange(taking_over, 4.0, asked=False)
    gateways[0].exchange(taking_over, 5.0, asked=False)
    assert len([gateways[1].admit(taking_over, limits, 5.5) for _ in range(4)]) == 4


def test_what_a_dead_gateway_had_in_flight_is_over_soon() -> None:
    accounts, gateways = fleet(2)
    limits = RateLimits(in_flight=2)
    for _ in range(2):
        gateways[0].admit(accounts, limits, 2.0)
    with pytest.raises(RateLimited):
        gateways[1].admit(accounts, limits, 2.0)
    gateways[1].admit(accounts, limits, 2.0 + key_limit_accounts.SILENT_S + 1)
    assert accounts.gateways == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"used_requests": -1.0},
        {"used_requests": math.nan},
        {"used_tokens": math.inf},
        {"used_tokens": -1e13},
        {"returned_requests": -5.0},
        {"held_tokens": 1e300},
        {"level_requests": math.nan},
        {"in_flight": 2**31},
        {"requests_per_minute": 2**63},
        {"key": b"short"},
    ],
)
def test_figures_that_cannot_be_are_not_taken(wrong: dict[str, Any]) -> None:
    good = placement_pb2.KeyReport(key=b"0" * 16, requests_per_minute=10, wanted=True)
    fields: dict[str, Any] = {"key": b"1" * 16, "wanted": True} | wrong
    bad = placement_pb2.KeyReport(**fields)
    assert [report.key for report in usage_reports(placement_pb2.UsageReport(keys=[good, bad]))] == [b"0" * 16]


def test_memory_is_bounded_and_idle_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limit_accounts, "MAX_ACCOUNTS", 50)
    accounts = KeyLimitAccounts()

    def report(first: int, many: int, now: float) -> None:
        keys = [b"%016d" % number for number in range(first, first + many)]
        accounts.report("p", "g", [KeyReport(key, 10, used_requests=1.0, level_requests=10.0) for key in keys], now)

    report(0, 200, 0.0)
    assert len(accounts) == 50
    report(1_000, 20, key_limit_accounts.IDLE_S + 10)
    assert len(accounts) == 20


def test_a_grant_that_another_process_reports_as_held_takes_nothing_from_the_level() -> None:
    accounts = KeyLimitAccounts()

    def report(process: str, gateway: str, answered: int, **values: Any) -> float:
        asked = KeyReport(b"k", requests_per_minute=40, level_requests=40.0, **values)
        [grant] = accounts.report(process, gateway, [asked], 0.0, last_answer=answered).grants
        return grant.requests

    report("p3", "h", 0)
    assert report("p1", "g", 0, wanted=True) == 13
    # The other process has the same lease. The first one has not reported yet that the grant has arrived.
    report("p2", "g", 0, held_requests=13.0)
    assert report("p3", "h", 0, wanted=True) == 9, "a third of the 27 that nobody holds"
