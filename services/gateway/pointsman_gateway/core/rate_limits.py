"""Rate limits of API keys: requests and tokens per minute as token buckets, and requests in flight.

While a router accounts for the limits, a gateway admits requests by leases. A lease is a part of what is left of a key's limits
that the router has granted to the gateway, so that all gateways together stay within the limits. While no router accounts for
them, the gateway admits an equal share of each limit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

from pointsman.router.v1 import placement_pb2

# How long a lease is valid after the last report of its key that was answered, s. The router assumes twice that.
LEASE_S = 5.0
# EMPTY_S: minimum pause, s, before the gateway requests more for a lease that is still used up after a grant. MAX_EMPTY_S:
# maximum of that pause, s.
EMPTY_S, MAX_EMPTY_S = 0.2, 1.0
_NAME_BYTES = 16
# How long the router must report fewer gateways before the lower number is used, s.
_FEWER_AFTER_S = 30.0
_MINUTE_S = 60.0
_IN_FLIGHT_RETRY_S = 1.0
_ALMOST = 1e-6  # tolerance for rounding, for a level that is exactly enough


@dataclass(frozen=True)
class RateLimits:
    """Limits of one key; 0: unlimited. The allowance of a whole minute may be used at once."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompt tokens (cached ones too) and output tokens
    in_flight: int = 0


UNLIMITED = RateLimits()


@dataclass(frozen=True)
class Remaining:
    """What is left of one limit: `remaining` of `limit`. `reset_s`: seconds until all of it is available again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True)
class LimitStatus:
    """What is left of a key's limits per minute; None for a limit that the key does not have."""

    requests: Remaining | None = None
    tokens: Remaining | None = None


NO_LIMITS = LimitStatus()


class RateLimited(Exception):
    """A request exceeds a limit of its key. `what` names the limit. `retry_after_s`: seconds after which the same request may
    pass, never 0."""

    def __init__(self, what: str, retry_after_s: float, status: LimitStatus) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after_s = retry_after_s
        self.status = status


class LeaseNeeded(Exception):
    """The key's lease does not cover the request. More must be requested from the router for the key `name`."""

    def __init__(self, name: bytes = b"") -> None:
        super().__init__()
        self.name = name


@dataclass
class TokenBucket:
    """A token bucket: `level` at the time `at` (s, any monotonic clock). The bucket fills at a rate per minute, up to the amount
    of one minute. The level may become negative: the length of an answer is known only afterwards, and a prompt longer than the
    amount of a whole minute must be able to pass."""

    level: float = math.inf
    at: float = -math.inf

    def left(self, per_minute: float, now: float) -> float:
        """Return the level at `now`. Does not mutate."""
        if self.level == math.inf:
            return float(per_minute)
        return min(self.level + max(0.0, now - self.at) * per_minute / _MINUTE_S, float(per_minute))

    def take(self, amount: float, per_minute: float, now: float) -> None:
        """Subtract `amount` from the level; a negative amount is added. Mutates."""
        self.level = min(self.left(per_minute, now) - amount, float(per_minute))
        self.at = max(now, self.at)

    def set(self, level: float, now: float) -> None:
        """Set the level at `now`. Mutates."""
        self.level, self.at = level, now

    def wait_s(self, amount: float, per_minute: float, now: float) -> float:
        """Return the seconds until the level reaches `amount`; 0 if it already does."""
        missing = amount - self.left(per_minute, now)
        return missing * _MINUTE_S / per_minute if missing > _ALMOST else 0.0


@dataclass
class KeyUsage:
    """What one key has used, and may still use in this gateway. A change of the key's limits does not reset it: levels and open
    requests are kept.

    `shares` is N while the gateway admits an Nth of each limit: `requests` and `tokens` then fill at an Nth of the rate. `shares`
    is 0 while a router accounts for the limits: `requests` and `tokens` are then what is left of the lease, and do not fill.
    `fleet_*` is the amount that no gateway held at the router's last grant, filled since then. `used_*` is what was used and not
    reported yet.
    """

    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    fleet_requests: TokenBucket = field(default_factory=TokenBucket)  # a whole minute's before the first grant
    fleet_tokens: TokenBucket = field(default_factory=TokenBucket)  # likewise
    shares: int = 1
    slots: int = 0  # slots for requests in flight that the lease has left
    leased_until: float = 0.0  # monotonic s; 0: no lease
    peak: int = 0  # most requests in flight since the last report
    empty_until: float = 0.0  # earliest time to request more from the router
    used_requests: float = 0.0  # 0 while `shares` is not 0
    used_tokens: float = 0.0  # likewise; negative if an earlier estimate was too high
    in_flight: int = 0  # requests at this process
    in_flight_elsewhere: int = 0  # requests in flight at other processes

    @property
    def unused(self) -> bool:
        """Whether neither bucket has ever been used."""
        return self.requests.level == self.tokens.level == math.inf

    def admit_alone(self, limits: RateLimits, gateways: int, now: float) -> None:
        """Count a request against this gateway's share of the limits. Raises RateLimited, without counting it. Mutates."""
        if not self.shares or self.unused:
            self._begin_share(limits, gateways, now)
        most = int(_share(limits.in_flight, self.shares))
        if most and self.in_flight + self.in_flight_elsewhere >= most:
            raise self._refusal(_flights(limits), _IN_FLIGHT_RETRY_S, limits, now)
        for what, own, _, per_minute in self._rates(limits):
            if wait := own.wait_s(1.0, _share(per_minute, self.shares), now):
                raise self._refusal(f"{per_minute} {what} per minute", wait, limits, now)
        if limits.requests_per_minute:
            self.requests.take(1.0, _share(limits.requests_per_minute, self.shares), now)
        self.in_flight += 1

    def admit_leased(self, limits: RateLimits, now: float, *, final: bool) -> None:
        """Count a request against the lease. Mutates.

        Raises LeaseNeeded if there is no valid lease, or if the lease is used up. Raises RateLimited instead of the latter if the
        router has just granted too little, or on the `final` try.
        """
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
        """Count `tokens` as used; a negative number corrects an earlier estimate. Mutates."""
        if self.shares:
            self.tokens.take(tokens, _share(limits.tokens_per_minute, self.shares), now)
        else:
            self.tokens.level -= tokens
            self.used_tokens += tokens

    def close(self, limits: RateLimits) -> None:
        """Count one request less in flight. Mutates."""
        self.in_flight -= 1
        if not self.shares and limits.in_flight:
            self.slots += 1

    def report(self, limits: RateLimits, asked: bool, now: float) -> placement_pb2.KeyReport:
        """Return a report of what was used since the last one and what the lease returns. `asked`: a request waits for more.

        Mutates: a gateway that admitted its share changes to leases.
        """
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
        # A negative level is part of the reported use. The router accounts for it from now on.
        self.requests.level, self.tokens.level = max(0.0, self.requests.level), max(0.0, self.tokens.level)
        if asked and now < self.leased_until:
            report.wanted, report.held_slots = True, self.slots
        else:
            # A lease that has expired must not be used after the next grant: the router may have granted it to others.
            self._give_back(report, limits, keep=now < self.leased_until)
            report.wanted = report.wanted or asked
        self.used_requests = self.used_tokens = 0.0
        return report

    def lost(self, requests: float, tokens: float, limits: RateLimits, now: float) -> None:
        """Count again what was used beyond the lease: the report of it may not have reached the router. Mutates."""
        if self.shares:
            self.requests.take(requests, _share(limits.requests_per_minute, self.shares), now)
            self.tokens.take(tokens, _share(limits.tokens_per_minute, self.shares), now)
            return
        self.requests.level -= requests
        self.used_requests += requests
        self.tokens.level -= tokens
        self.used_tokens += tokens

    def grant(self, grant: placement_pb2.KeyGrant, limits: RateLimits, now: float, reported_at: float) -> None:
        """Add the router's grant to the lease; `reported_at`: when the report was sent. A grant that arrives after the gateway
        changed to its share is ignored; the router counts it as used. Mutates."""
        if self.shares:
            return
        self.requests.level += grant.requests
        self.tokens.level += grant.tokens
        self.slots += grant.slots
        self.fleet_requests.set(grant.level_requests, now)
        self.fleet_tokens.set(grant.level_tokens, now)
        self.leased_until = reported_at + LEASE_S
        empty = grant.wanted and self._missing(limits) is not None
        self.empty_until = now + min(max(EMPTY_S, self._wait_s(limits, now)), MAX_EMPTY_S) if empty else 0.0

    def status(self, limits: RateLimits, now: float) -> LimitStatus:
        """Return what is left of the limits, by this gateway's own use and the router's last grant."""
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
        """Return the first limit of which the lease does not cover one more request; None if it covers all."""
        # Requests of a time with a higher limit, or without one, give back slots that this one does not have.
        left = limits.in_flight - self.in_flight - self.in_flight_elsewhere
        if limits.in_flight and min(self.slots, left) < 1:
            return _flights(limits)
        used_up = (f"{rate} {what} per minute" for what, own, _, rate in self._rates(limits) if own.level < 1 - _ALMOST)
        return next(used_up, None)

    def _wait_s(self, limits: RateLimits, now: float) -> float:
        """Return the seconds until all gateways together may admit a request again, by the limits per minute."""
        used_up = ((fleet, rate) for _, own, fleet, rate in self._rates(limits) if own.level < 1 - _ALMOST)
        return max((fleet.wait_s(1.0, rate, now) for fleet, rate in used_up), default=0.0)

    def _rates(self, limits: RateLimits) -> Iterator[tuple[str, TokenBucket, TokenBucket, int]]:
        """Yield the limits per minute that the key has: what is limited, the buckets of this gateway and of the fleet, and the
        limit."""
        if limits.requests_per_minute:
            yield "requests", self.requests, self.fleet_requests, limits.requests_per_minute
        if limits.tokens_per_minute:
            yield "tokens", self.tokens, self.fleet_tokens, limits.tokens_per_minute

    def _give_back(self, report: placement_pb2.KeyReport, limits: RateLimits, *, keep: bool) -> None:
        """Write to `report` what the lease returns, and whether the key wants more. Mutates.

        With `keep` the lease keeps twice what was used since the last report, and one slot more than the peak of requests in
        flight. A key whose lease has less than was used since the last report wants more.
        """
        requests, tokens, slots = self.requests.level, self.tokens.level, self.slots
        now_open = self.in_flight + self.in_flight_elsewhere
        if keep:
            requests = math.floor(max(0.0, requests - 2 * self.used_requests))
            tokens = math.floor(max(0.0, tokens - 2 * max(0.0, self.used_tokens)))
            slots = max(0, slots - (max(self.peak, now_open) - now_open + 1 if self.used_requests else 0))
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
        """Change from the lease to an equal share of what was left. Mutates."""
        kept = {"requests": self.requests.level, "tokens": self.tokens.level}
        self.requests.set(math.inf, -math.inf)
        self.tokens.set(math.inf, -math.inf)
        for what, own, fleet, per_minute in self._rates(limits):
            left = kept[what] if kept[what] < math.inf else 0.0
            own.set(min(left + fleet.left(per_minute, now) / gateways, _share(per_minute, gateways)), now)
        self.shares, self.slots, self.leased_until = gateways, 0, 0.0
        self.used_requests = self.used_tokens = 0.0

    def _end_share(self, limits: RateLimits, asked: bool, now: float) -> placement_pb2.KeyReport:
        """Change from the share to a lease; return a report of what was used of the share. Mutates.

        Used is the level that the share would have now without any use, minus its level.
        """
        report = placement_pb2.KeyReport(wanted=asked, lease_ended=True)
        for what, own, fleet, per_minute in self._rates(limits):
            level = fleet.left(per_minute, now)
            used = max(0.0, level / self.shares - own.left(_share(per_minute, self.shares), now))
            setattr(report, f"level_{what}", level)
            setattr(report, f"used_{what}", used)
            fleet.set(level - used, now)
        self.requests.set(0.0, now)
        self.tokens.set(0.0, now)
        self.shares, self.slots, self.leased_until = 0, 0, 0.0
        return report


def _share(limit: int, shares: int) -> float:
    """Return an equal share of a limit, at least 1; 0 if `limit` is 0 (unlimited)."""
    return max(limit / shares, 1.0) if limit else 0.0


def _flights(limits: RateLimits) -> str:
    return f"{limits.in_flight} requests in flight"


# Returns a context manager that locks a key's usage until it is closed.
OpenUsage: TypeAlias = Callable[[], AbstractContextManager[KeyUsage]]


def _of_this_process(key: bytes) -> OpenUsage:
    usage = KeyUsage()
    return lambda: nullcontext(usage)


@dataclass
class _Account:
    """State of one key in this process."""

    name: bytes
    open: OpenUsage
    limits: RateLimits
    open_here: int = 0  # number of requests in flight at this process


class KeyCharge:
    """One admitted request. Only the first close() has an effect."""

    def __init__(
        self, limiter: RateLimiter | None = None, account: _Account | None = None, status: LimitStatus = NO_LIMITS
    ) -> None:
        """Without arguments nothing is counted. `status`: what is left of the limits."""
        self.status = status
        self._limiter = limiter
        self._account = account
        self._charged = 0

    def charge(self, tokens: int, now: float) -> None:
        """Set the total number of tokens that the request has used so far; it replaces the earlier total. Mutates."""
        if self._limiter is not None and self._account is not None and self._account.limits.tokens_per_minute:
            self.status = self._limiter.charge(self._account, tokens - self._charged, now)
        self._charged = tokens

    def close(self) -> None:
        """Count the request as no longer in flight, and stop charging it. Mutates."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None and self._account is not None:
            limiter.end(self._account)


class RateLimiter:
    """Admits requests by their keys' accounts. Keys without any limit have no account.

    `accounted`: a router accounts for the keys. `gateways`: number of gateways that share the limits while no router does.
    """

    def __init__(self, usage_of: Callable[[bytes], OpenUsage] = _of_this_process) -> None:
        """`usage_of`: returns how the usage of a key is opened; called once while the key is known."""
        self.accounted = False
        self.gateways = 1
        self._usage_of = usage_of
        self._accounts: dict[bytes, _Account] = {}
        self._by_name: dict[bytes, _Account] = {}
        self._fewer_since: float | None = None
        self._touched: dict[bytes, None] = {}  # names of the keys in the next report
        self._open: dict[bytes, None] = {}  # names of the keys with requests in flight at this process

    def admit(self, key: bytes, limits: RateLimits, now: float, *, final: bool = False) -> KeyCharge:
        """Admit one request of `key` (any name for it). Raises RateLimited, without using any limit. Raises LeaseNeeded, except
        on the `final` try: without a valid lease the `final` try counts against the gateway's share. Mutates."""
        if limits == UNLIMITED:
            return KeyCharge()
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(name_of(key), self._usage_of(key), limits)
            self._by_name[account.name] = account
        account.limits = limits
        with account.open() as usage:
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
        self._open[account.name] = None
        self._touch(account)
        return KeyCharge(self, account, status)

    def charge(self, account: _Account, tokens: float, now: float) -> LimitStatus:
        """Count `tokens` as used by the account; return what is left. Mutates."""
        with account.open() as usage:
            usage.charge(tokens, account.limits, now)
            status = usage.status(account.limits, now)
        self._touch(account)
        return status

    def end(self, account: _Account) -> None:
        """Count one request of the account less in flight. Mutates."""
        with account.open() as usage:
            usage.close(account.limits)
        account.open_here -= 1
        if not account.open_here and self._by_name.get(account.name) is account:
            self._open.pop(account.name, None)
        self._touch(account)

    def in_flight(self, key: bytes) -> int:
        """Return the number of open requests of `key` in this process."""
        account = self._accounts.get(key)
        return account.open_here if account is not None else 0

    def keep(self, keys: set[bytes]) -> None:
        """Remove the accounts of all other keys. Their open requests are not affected. Mutates."""
        self._accounts = {key: account for key, account in self._accounts.items() if key in keys}
        self._by_name = {account.name: account for account in self._accounts.values()}
        self._touched = {name: None for name in self._touched if name in self._by_name}
        self._open = {name: None for name in self._open if name in self._by_name}

    # Reports to the router that accounts for the limits.

    def touched(self) -> list[bytes]:
        """Return the names of the keys that the next report must contain."""
        return list(self._touched)

    def touch_open(self) -> None:
        """Put all keys with requests in flight at this process in the next report. Mutates."""
        self._touched |= self._open

    def lost(self, reports: Iterable[placement_pb2.KeyReport], now: float) -> None:
        """Put the keys of reports that the router may not have received in the next one, with what they used beyond their leases.
        Mutates."""
        for report in reports:
            if (account := self._by_name.get(report.key)) is None:
                continue
            self._touched[report.key] = None
            requests = max(0.0, report.used_requests - report.held_requests)
            tokens = max(0.0, report.used_tokens - report.held_tokens)
            if requests or tokens:
                with account.open() as usage:
                    usage.lost(requests, tokens, account.limits, now)

    def reports(self, names: Iterable[bytes], now: float, *, asked: bool) -> list[placement_pb2.KeyReport]:
        """Return the reports of these keys. `asked`: a request waits for more of each key. Mutates."""
        found = []
        for name in names:
            account = self._by_name.get(name)
            if account is None:
                self._touched.pop(name, None)
                continue
            limits = account.limits
            with account.open() as usage:
                report = usage.report(limits, asked, now)
                holds = usage.requests.level >= 1 or usage.tokens.level >= 1 or usage.slots >= 1
                report.gateway_in_flight = max(0, usage.in_flight + usage.in_flight_elsewhere)
            report.key, report.in_flight = name, max(0, account.open_here)
            report.requests_per_minute = limits.requests_per_minute
            report.tokens_per_minute = limits.tokens_per_minute
            report.max_in_flight = limits.in_flight
            found.append(report)
            # A key whose lease has something left to return must be in the next report too.
            self._touched.pop(name, None)
            if asked or holds:
                self._touched[name] = None
        return found

    def count_gateways(self, gateways: int, now: float) -> None:
        """Record how many gateways report to the router. Mutates.

        A lower number is used only after _FEWER_AFTER_S, since a router that has just started has not heard from all gateways.
        """
        if gateways >= self.gateways:
            self.gateways, self._fewer_since = gateways, None
        elif self._fewer_since is None:
            self._fewer_since = now
        elif now - self._fewer_since >= _FEWER_AFTER_S:
            self.gateways, self._fewer_since = max(1, gateways), None

    def granted(self, grants: Iterable[placement_pb2.KeyGrant], now: float, reported_at: float) -> None:
        """Add a router's grants to the leases; `reported_at`: when the answered report was sent. Mutates."""
        for grant in grants:
            account = self._by_name.get(grant.key)
            if account is not None:
                with account.open() as usage:
                    usage.grant(grant, account.limits, now, reported_at)
                if grant.requests or grant.tokens or grant.slots:
                    self._touched[grant.key] = None

    def _touch(self, account: _Account) -> None:
        self._touched[account.name] = None


def name_of(key: bytes) -> bytes:
    """Return the name of a key towards routers: a digest of the key's digest. Gateways find a client by the key's digest, so this
    name gives access to nothing."""
    return hashlib.sha256(b"pointsman usage " + key).digest()[:_NAME_BYTES]
