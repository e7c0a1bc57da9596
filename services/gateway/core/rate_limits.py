"""Rate limits of API keys: requests and tokens a minute as token buckets, and requests in flight.

While a router accounts for them, a gateway admits by leases: a part of what is left of a key's limits that the router has granted
it, so that all gateways together keep to them. While none does, it admits an equal share of each limit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from pointsman.router.v1 import placement_pb2

# A lease is used for so long after the last answer about its key; the router counts on twice that.
LEASE_S = 5.0
# How soon a lease that got nothing more may ask again; at most after so long.
EMPTY_S, MAX_EMPTY_S = 0.2, 1.0
_NAME_BYTES = 16
_FEWER_AFTER_S = 30.0
_MINUTE_S = 60.0
_IN_FLIGHT_RETRY_S = 1.0
_ALMOST = 1e-6  # what rounding may take from a level that is exactly enough


@dataclass(frozen=True)
class RateLimits:
    """What one key may use; 0 means as much as it likes. A minute's worth may come at once."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts (cached ones too) and answers
    in_flight: int = 0


UNLIMITED = RateLimits()


@dataclass(frozen=True)
class Remaining:
    """What is left of one limit: `remaining` of `limit`, all of it again after `reset_s`."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True)
class LimitStatus:
    """What is left of a key's limits by the minute; None for a limit that it does not have."""

    requests: Remaining | None = None
    tokens: Remaining | None = None


NO_LIMITS = LimitStatus()


class RateLimited(Exception):
    """Too much. `what` names the limit; the same request may pass after `retry_after_s`, never 0."""

    def __init__(self, what: str, retry_after_s: float, status: LimitStatus) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s
        self.status = status


class LeaseNeeded(Exception):
    """The key's lease does not cover the request: the router is to be asked for more of `name`."""

    def __init__(self, name: bytes = b"") -> None:
        super().__init__()
        self.name = name


@dataclass
class TokenBucket:
    """A level, as it was `at` a moment (s, any clock that does not go back), that fills with so much a minute up to a minute's
    worth. It may be drawn below zero: an answer's length is known only afterwards, and a prompt longer than a whole minute's
    worth must pass at some time."""

    level: float = math.inf
    at: float = -math.inf

    def left(self, per_minute: float, now: float) -> float:
        """What is there at `now`. Does not mutate."""
        if self.level == math.inf:
            return float(per_minute)
        return min(self.level + max(0.0, now - self.at) * per_minute / _MINUTE_S, float(per_minute))

    def take(self, amount: float, per_minute: float, now: float) -> None:
        """Draw `amount`; a negative one gives back. Mutates."""
        self.level = min(self.left(per_minute, now) - amount, float(per_minute))
        self.at = max(now, self.at)

    def set(self, level: float, now: float) -> None:
        """It holds `level` now. Mutates."""
        self.level, self.at = level, now

    def wait_s(self, amount: float, per_minute: float, now: float) -> float:
        """Until `amount` is there; 0 when it is."""
        missing = amount - self.left(per_minute, now)
        return missing * _MINUTE_S / per_minute if missing > _ALMOST else 0.0


@dataclass
class KeyUsage:
    """What one key has used, and may still use here. Limits that change meet it as it is: what was drawn stays drawn, what is
    open stays open.

    `shares` is N while the gateway admits an Nth of each limit: `requests` and `tokens` fill with an Nth of the rate. It is 0
    while a router accounts: then they are what is left of the lease, and do not fill. `fleet_*` is what no gateway held when a
    router last said so, filled since. `used_*` has not been reported.
    """

    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    fleet_requests: TokenBucket = field(default_factory=TokenBucket)
    fleet_tokens: TokenBucket = field(default_factory=TokenBucket)
    shares: int = 1
    slots: int = 0  # of the lease, for requests in flight
    leased_until: float = 0.0
    peak: int = 0  # most requests in flight since the last report
    empty_until: float = 0.0  # no use in asking for more before
    used_requests: float = 0.0
    used_tokens: float = 0.0
    in_flight: int = 0
    in_flight_elsewhere: int = 0  # requests in flight at other processes

    @property
    def unused(self) -> bool:
        """Whether nothing was ever drawn from it."""
        return self.requests.level == self.tokens.level == math.inf

    def admit_alone(self, limits: RateLimits, gateways: int, now: float) -> None:
        """Count a request against this gateway's share of the limits. Raises RateLimited, and then nothing is used. Mutates."""
        if not self.shares or self.unused:
            self._begin_share(limits, gateways, now)
        requests, tokens = (
            _share(limits.requests_per_minute, self.shares),
            _share(limits.tokens_per_minute, self.shares),
        )
        most = int(_share(limits.in_flight, self.shares))
        if most and self.in_flight + self.in_flight_elsewhere >= most:
            raise self._refusal(_flights(limits), _IN_FLIGHT_RETRY_S, limits, now)
        if requests and (wait := self.requests.wait_s(1.0, requests, now)):
            raise self._refusal(_requests(limits), wait, limits, now)
        if tokens and (wait := self.tokens.wait_s(1.0, tokens, now)):
            raise self._refusal(_tokens(limits), wait, limits, now)
        if requests:
            self.requests.take(1.0, requests, now)
        self.in_flight += 1

    def admit_leased(self, limits: RateLimits, now: float, *, final: bool) -> None:
        """Count a request against the lease. Raises RateLimited where it is empty and asking has just been of no use, or this is
        the `final` try; LeaseNeeded where it is empty else, or there is none. Mutates."""
        if self.shares or now >= self.leased_until:
            raise LeaseNeeded
        if (missing := self._missing(limits)) is not None:
            if now >= self.empty_until and not final:
                raise LeaseNeeded
            raise self._refusal(missing, max(self._wait_s(limits, now), EMPTY_S), limits, now)
        self.used_requests += 1
        if limits.requests_per_minute:
            self.requests.level -= 1
        if limits.in_flight:
            self.slots -= 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight + self.in_flight_elsewhere)

    def charge(self, tokens: float, limits: RateLimits, now: float) -> None:
        """Draw so many tokens. Mutates."""
        if self.shares:
            self.tokens.take(tokens, _share(limits.tokens_per_minute, self.shares), now)
        else:
            self.tokens.level -= tokens
            self.used_tokens += tokens

    def close(self, limits: RateLimits) -> None:
        """A request is no longer in flight. Mutates."""
        self.in_flight -= 1
        if not self.shares and limits.in_flight:
            self.slots += 1

    def report(self, limits: RateLimits, asked: bool, now: float) -> placement_pb2.KeyReport:
        """What was used since the last report, and what is given back of the lease; from now on there is a lease. Mutates."""
        if self.shares:
            return self._end_share(limits, asked, now)
        report = placement_pb2.KeyReport(
            used_requests=self.used_requests,
            used_tokens=self.used_tokens,
            level_requests=self.fleet_requests.left(limits.requests_per_minute, now),
            level_tokens=self.fleet_tokens.left(limits.tokens_per_minute, now),
            held_requests=max(0.0, self.requests.level + self.used_requests),
            held_tokens=max(0.0, self.tokens.level + self.used_tokens),
        )
        # A debt is the router's from here on: it is in what was used.
        self.requests.level, self.tokens.level = max(0.0, self.requests.level), max(0.0, self.tokens.level)
        if asked:
            report.wanted, report.held_slots = True, self.slots
        else:
            self._give_back(report, limits)
        self.used_requests = self.used_tokens = 0.0
        return report

    def grant(self, grant: placement_pb2.KeyGrant, limits: RateLimits, now: float) -> None:
        """Add to the lease what the router granted. One that comes after the gateway has turned to its share is not used: the
        router counts it as used. Mutates."""
        if self.shares:
            return
        self.requests.level += grant.requests
        self.tokens.level += grant.tokens
        self.slots += grant.slots
        self.fleet_requests.set(grant.level_requests, now)
        self.fleet_tokens.set(grant.level_tokens, now)
        self.leased_until = now + LEASE_S
        empty = grant.wanted and self._missing(limits) is not None
        self.empty_until = now + min(max(EMPTY_S, self._wait_s(limits, now)), MAX_EMPTY_S) if empty else 0.0

    def status(self, limits: RateLimits, now: float) -> LimitStatus:
        """What is left of the limits, as far as this gateway knows."""
        return LimitStatus(
            self._remaining(limits.requests_per_minute, self.requests, self.fleet_requests, now),
            self._remaining(limits.tokens_per_minute, self.tokens, self.fleet_tokens, now),
        )

    def _remaining(self, per_minute: int, own: TokenBucket, fleet: TokenBucket, now: float) -> Remaining | None:
        if not per_minute:
            return None
        left = (
            own.left(_share(per_minute, self.shares), now) if self.shares else own.level + fleet.left(per_minute, now)
        )
        left = min(max(left, 0.0), float(per_minute))
        full = _share(per_minute, self.shares) if self.shares else float(per_minute)
        return Remaining(per_minute, int(left + _ALMOST), max(0.0, full - left) * _MINUTE_S / full)

    def _refusal(self, what: str, wait_s: float, limits: RateLimits, now: float) -> RateLimited:
        return RateLimited(what, wait_s, self.status(limits, now))

    def _missing(self, limits: RateLimits) -> str | None:
        """The limit by which the lease does not cover one more request."""
        if limits.in_flight and self.slots < 1:
            return _flights(limits)
        if limits.requests_per_minute and self.requests.level < 1 - _ALMOST:
            return _requests(limits)
        if limits.tokens_per_minute and self.tokens.level < 1 - _ALMOST:
            return _tokens(limits)
        return None

    def _wait_s(self, limits: RateLimits, now: float) -> float:
        """Until all gateways together may admit a request again, by the minute's limits."""
        waits = [0.0]
        if limits.requests_per_minute and self.requests.level < 1 - _ALMOST:
            waits.append(self.fleet_requests.wait_s(1.0, limits.requests_per_minute, now))
        if limits.tokens_per_minute and self.tokens.level < 1 - _ALMOST:
            waits.append(self.fleet_tokens.wait_s(1.0, limits.tokens_per_minute, now))
        return max(waits)

    def _give_back(self, report: placement_pb2.KeyReport, limits: RateLimits) -> None:
        """Keep twice what the time since the last report has used, and slots for one more request than were open at once; want
        more where there is not even as much. Mutates."""
        requests = math.floor(max(0.0, self.requests.level - 2 * self.used_requests))
        tokens = math.floor(max(0.0, self.tokens.level - 2 * max(0.0, self.used_tokens)))
        now_open = self.in_flight + self.in_flight_elsewhere
        slots = max(0, self.slots - (max(self.peak, now_open) - now_open + 1 if self.used_requests else 0))
        self.peak = now_open
        self.requests.level -= requests
        self.tokens.level -= tokens
        self.slots -= slots
        report.returned_requests, report.returned_tokens, report.returned_slots = requests, tokens, slots
        report.held_slots = self.slots
        report.wanted = bool(self.used_requests) and (
            bool(limits.requests_per_minute and self.requests.level < self.used_requests)
            or bool(limits.tokens_per_minute and self.tokens.level < self.used_tokens)
        )

    def _begin_share(self, limits: RateLimits, gateways: int, now: float) -> None:
        """From the lease to an equal share of what was left. Mutates."""
        for own, fleet, per_minute in (
            (self.requests, self.fleet_requests, limits.requests_per_minute),
            (self.tokens, self.fleet_tokens, limits.tokens_per_minute),
        ):
            if per_minute:
                kept = own.level if own.level < math.inf else 0.0
                own.set(min(kept + fleet.left(per_minute, now) / gateways, _share(per_minute, gateways)), now)
            else:
                own.set(math.inf, -math.inf)
        self.shares, self.slots, self.leased_until = gateways, 0, 0.0
        self.used_requests = self.used_tokens = 0.0

    def _end_share(self, limits: RateLimits, asked: bool, now: float) -> placement_pb2.KeyReport:
        """What was used of the share: what it would hold now without, less what it holds. Mutates."""
        report = placement_pb2.KeyReport(wanted=asked, lease_ended=True)
        for name, own, fleet, per_minute in (
            ("requests", self.requests, self.fleet_requests, limits.requests_per_minute),
            ("tokens", self.tokens, self.fleet_tokens, limits.tokens_per_minute),
        ):
            if per_minute:
                level = fleet.left(per_minute, now)
                used = max(0.0, level / self.shares - own.left(_share(per_minute, self.shares), now))
                setattr(report, f"level_{name}", level)
                setattr(report, f"used_{name}", used)
                fleet.set(level - used, now)
            own.set(0.0, now)
        self.shares, self.slots, self.leased_until = 0, 0, 0.0
        return report


def _share(limit: int, shares: int) -> float:
    """An equal share of a limit, at least 1; 0 for no limit."""
    return max(limit / shares, 1.0) if limit else 0.0


def _flights(limits: RateLimits) -> str:
    return f"{limits.in_flight} requests in flight"


def _requests(limits: RateLimits) -> str:
    return f"{limits.requests_per_minute} requests per minute"


def _tokens(limits: RateLimits) -> str:
    return f"{limits.tokens_per_minute} tokens per minute"


class UsageStore(Protocol):
    """Where one key's account is kept."""

    def open(self) -> AbstractContextManager[KeyUsage]:
        """The account, which nobody else changes until it is closed."""


class LocalUsage:
    """An account of this process alone."""

    def __init__(self) -> None:
        self._usage = KeyUsage()

    def open(self) -> AbstractContextManager[KeyUsage]:
        """The account."""
        return nullcontext(self._usage)


@dataclass
class _Account:
    """One key as this process knows it."""

    name: bytes
    store: UsageStore
    limits: RateLimits
    open_here: int = 0  # in flight at this process


class Admission:
    """One admitted request. Closed exactly once in effect, however often close() is called."""

    def __init__(
        self, limiter: RateLimiter | None = None, account: _Account | None = None, status: LimitStatus = NO_LIMITS
    ) -> None:
        """Without arguments: nothing is counted. `status`: what is left of the limits."""
        self.status = status
        self._limiter = limiter
        self._account = account
        self._charged = 0

    def charge(self, tokens: int, now: float) -> None:
        """Say how many tokens the request has used so far, in all; a later and better figure replaces the one before. Mutates."""
        if self._limiter is not None and self._account is not None and self._account.limits.tokens_per_minute:
            self.status = self._limiter.charge(self._account, tokens - self._charged, now)
        self._charged = tokens

    def close(self) -> None:
        """It is no longer in flight, and not charged any more. Mutates."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None and self._account is not None:
            limiter.end(self._account)


class RateLimiter:
    """Admits requests by their keys' accounts. Keys without any limit have none.

    `accounted`: a router accounts for the keys. `gateways`: how many gateways share the limits while none does.
    """

    def __init__(self, store_for: Callable[[bytes], UsageStore] = lambda _: LocalUsage()) -> None:
        """`store_for`: a key's usage store, asked for once as long as the key is known."""
        self.accounted = False
        self.gateways = 1
        self._store_for = store_for
        self._accounts: dict[bytes, _Account] = {}
        self._by_name: dict[bytes, _Account] = {}
        self._fewer_since: float | None = None
        self._touched: dict[bytes, None] = {}  # the names of keys that the next report is about

    def admit(self, key: bytes, limits: RateLimits, now: float, *, final: bool = False) -> Admission:
        """Admit one request of `key` (any name for it). Raises RateLimited, and then nothing is used up; and LeaseNeeded, unless
        this is the `final` try: without any lease that counts against the gateway's share. Mutates."""
        if limits == UNLIMITED:
            return Admission()
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(name_of(key), self._store_for(key), limits)
            self._by_name[account.name] = account
        account.limits = limits
        with account.store.open() as usage:
            if self.accounted:
                try:
                    usage.admit_leased(limits, now, final=final)
                except LeaseNeeded:
                    if not final:
                        raise LeaseNeeded(account.name) from None
                    usage.admit_alone(limits, self.gateways, now)
            else:
                usage.admit_alone(limits, self.gateways, now)
            status = usage.status(limits, now)
        account.open_here += 1
        self._touch(account)
        return Admission(self, account, status)

    def charge(self, account: _Account, tokens: float, now: float) -> LimitStatus:
        """Draw so many tokens of the account; what is left then. Mutates."""
        with account.store.open() as usage:
            usage.charge(tokens, account.limits, now)
            status = usage.status(account.limits, now)
        self._touch(account)
        return status

    def end(self, account: _Account) -> None:
        """A request of the account is no longer in flight. Mutates."""
        with account.store.open() as usage:
            usage.close(account.limits)
        account.open_here -= 1
        self._touch(account)

    def in_flight(self, key: bytes) -> int:
        """How many requests of `key` are open in this process."""
        account = self._accounts.get(key)
        return account.open_here if account is not None else 0

    def keep(self, keys: set[bytes]) -> None:
        """Forget the books of all other keys; their open requests end as ever. Mutates."""
        self._accounts = {key: account for key, account in self._accounts.items() if key in keys}
        self._by_name = {account.name: account for account in self._accounts.values()}
        self._touched = {name: None for name in self._touched if name in self._by_name}

    # What is told to the router that accounts.

    def touched(self) -> list[bytes]:
        """The names of the keys that a report is due of."""
        return list(self._touched)

    def open_names(self) -> list[bytes]:
        """The names of the keys that have requests in flight at this process."""
        return [name for name, account in self._by_name.items() if account.open_here]

    def reports(self, names: Iterable[bytes], now: float, *, asked: bool) -> list[placement_pb2.KeyReport]:
        """What to report of these keys; `asked`: a request waits for more of each. Mutates."""
        found = []
        for name in names:
            account = self._by_name.get(name)
            if account is None:
                self._touched.pop(name, None)
                continue
            limits = account.limits
            with account.store.open() as usage:
                report = usage.report(limits, asked, now)
                holds = usage.requests.level >= 1 or usage.tokens.level >= 1 or usage.slots >= 1
            report.key, report.in_flight = name, max(0, account.open_here)
            report.requests_per_minute = limits.requests_per_minute
            report.tokens_per_minute = limits.tokens_per_minute
            report.max_in_flight = limits.in_flight
            found.append(report)
            # As long as there is something to give back, there is something to report.
            self._touched.pop(name, None)
            if asked or holds:
                self._touched[name] = None
        return found

    def count_gateways(self, gateways: int, now: float) -> None:
        """How many gateways report to the router, as it says: one that has just started does not know all yet. Mutates."""
        if gateways >= self.gateways:
            self.gateways, self._fewer_since = gateways, None
        elif self._fewer_since is None:
            self._fewer_since = now
        elif now - self._fewer_since >= _FEWER_AFTER_S:
            self.gateways, self._fewer_since = max(1, gateways), None

    def granted(self, grants: Iterable[placement_pb2.KeyGrant], now: float) -> None:
        """What a router granted. Mutates."""
        for grant in grants:
            account = self._by_name.get(grant.key)
            if account is not None:
                with account.store.open() as usage:
                    usage.grant(grant, account.limits, now)
                if grant.requests or grant.tokens or grant.slots:
                    self._touched[grant.key] = None

    def _touch(self, account: _Account) -> None:
        self._touched[account.name] = None


def name_of(key: bytes) -> bytes:
    """What a key is called towards routers: a digest of its digest, which finds nobody's account in a gateway."""
    return hashlib.sha256(b"pointsman usage " + key).digest()[:_NAME_BYTES]
