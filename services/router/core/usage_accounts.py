"""Accounts of what API keys use at all gateways: a bucket for each limit, of which gateways get leases.

What no gateway holds of a limit is its level. It fills by the minute's rate as far as the limit, less what gateways hold, so that
all of them together never admit more than a minute's worth at once and the rate after it. A gateway that asks gets an equal part
of the level, one part for each gateway that holds some and one that is kept for the next. A lease ends by itself: what has not
been given back then counts as used. Nothing is stored: after a takeover gateways tell what they hold and what the level was.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

MINUTE_S = 60.0
# A lease that nothing is heard of ends; gateways use theirs for half as long.
LEASE_S = 10.0
# What a process had in flight is over when it has not reported for so long; gateways report every few seconds.
SILENT_S = 15.0
# An account that is younger takes the level that gateways tell of: another router may have kept it before.
TAKEOVER_S = 10.0
# An account that is not mentioned for so long, and has all of its limits again, is forgotten.
IDLE_S = 60.0
MAX_ACCOUNTS = 200_000
_SWEPT_WITH_A_REPORT = 4


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What a gateway process tells of one key. Limits: 0 for none. See KeyReport in placement.proto."""

    key: bytes
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_in_flight: int = 0
    used_requests: float = 0.0
    used_tokens: float = 0.0
    in_flight: int = 0
    returned_requests: float = 0.0
    returned_tokens: float = 0.0
    returned_slots: int = 0
    wanted: bool = False
    level_requests: float = 0.0
    level_tokens: float = 0.0
    held_requests: float = 0.0
    held_tokens: float = 0.0
    held_slots: int = 0
    lease_ended: bool = False


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """What a gateway's lease of a key grows by, and what no gateway holds now."""

    key: bytes
    requests: float
    tokens: float
    slots: int
    level_requests: float
    level_tokens: float
    wanted: bool


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """The answer to a report: the number of gateways that report, and whether the process is to tell all it has in flight."""

    gateways: int
    tell_all: bool
    grants: list[KeyGrant]


@dataclass(slots=True)
class _Lease:
    """What one gateway holds of one key."""

    requests: float = 0.0
    tokens: float = 0.0
    slots: int = 0
    heard_at: float = 0.0


@dataclass(slots=True)
class _Level:
    """What no gateway holds of a limit by the minute; negative for a debt."""

    per_minute: int
    level: float
    at: float

    def fill(self, held: float, now: float) -> None:
        """Mutates."""
        filled = self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S
        self.level, self.at = min(filled, max(0.0, self.per_minute - held)), now

    def settle(self, lease: float, used: float, returned: float) -> float:
        """What is left of a lease after so much was used and given back; what was used beyond it is drawn from here. Mutates."""
        lease -= used
        if lease < 0:
            self.level += lease
            return 0.0
        back = min(returned, lease)
        self.level += back
        return lease - back

    def grant(self, parts: int) -> int:
        """One of so many parts of what is here, at least 1 where that is there. Mutates."""
        given = max(math.floor(self.level / parts), 1) if self.level >= 1 else 0
        self.level -= given
        return given


@dataclass(slots=True)
class _Account:
    """One key."""

    requests: _Level
    tokens: _Level
    began_at: float
    heard_at: float
    leases: dict[str, _Lease] = field(default_factory=dict)  # by gateway
    in_flight: dict[str, int] = field(default_factory=dict)  # by process, none of them 0


@dataclass(slots=True)
class _Process:
    gateway: str
    heard_at: float
    open_keys: set[bytes] = field(default_factory=set)


class UsageAccounts:
    """All accounts of one router. `now`: s of a clock that does not go back."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()  # the one that was mentioned last is last
        self._processes: OrderedDict[str, _Process] = OrderedDict()  # likewise
        self._gateways: Counter[str] = Counter()  # how many processes each has

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def gateways(self) -> int:
        """How many gateways have reported lately."""
        return len(self._gateways)

    def report(
        self, process: str, gateway: str, reports: Iterable[KeyReport], now: float, *, full: bool = False
    ) -> UsageAnswer:
        """Take a report of a process of `gateway`, and grant what is wanted. `full`: the process has nothing else in flight.
        Mutates."""
        self._forget_silent(now)
        known = self._processes.pop(process, None)
        if known is None:
            self._gateways[gateway] += 1
        record = self._processes[process] = known or _Process(gateway, now)
        record.heard_at = now
        if full:
            for key in record.open_keys:
                if (account := self._accounts.get(key)) is not None:
                    account.in_flight.pop(process, None)
            record.open_keys.clear()
        grants = []
        for one in reports:
            self._forget_idle(now)
            grants.append(self._take(process, record, one, now, full=full))
        while len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        return UsageAnswer(max(1, len(self._gateways)), known is None and not full, grants)

    def _take(self, process: str, record: _Process, one: KeyReport, now: float, *, full: bool) -> KeyGrant:
        account = self._accounts.get(one.key)
        if account is None:
            requests, tokens = one.requests_per_minute, one.tokens_per_minute
            account = _Account(_Level(requests, requests, now), _Level(tokens, tokens, now), now, now)
            self._accounts[one.key] = account
        self._accounts.move_to_end(one.key)
        account.heard_at = now
        for gateway in [gateway for gateway, lease in account.leases.items() if now - lease.heard_at > LEASE_S]:
            del account.leases[gateway]
        lease = account.leases.get(record.gateway)
        if lease is None:
            lease = account.leases[record.gateway] = _Lease()
            if now - account.began_at <= TAKEOVER_S:
                self._take_over(account, lease, one)
        if one.lease_ended:
            # What was granted counts as used: whoever holds nothing must not keep it from the others.
            lease.requests, lease.tokens, lease.slots = 0.0, 0.0, 0
        elif full:
            # Grants of the stream before may have been lost on their way.
            lease.requests, lease.tokens = min(lease.requests, one.held_requests), min(lease.tokens, one.held_tokens)
        lease.heard_at = now
        account.requests.per_minute, account.tokens.per_minute = one.requests_per_minute, one.tokens_per_minute
        account.requests.fill(sum(held.requests for held in account.leases.values()), now)
        account.tokens.fill(sum(held.tokens for held in account.leases.values()), now)
        if one.requests_per_minute:
            lease.requests = account.requests.settle(lease.requests, one.used_requests, one.returned_requests)
        if one.tokens_per_minute:
            lease.tokens = account.tokens.settle(lease.tokens, one.used_tokens, one.returned_tokens)
        if full or one.lease_ended:
            lease.slots = min(one.held_slots, one.max_in_flight)
        else:
            # A request that began took a slot of the lease, one that ended gave it back to the lease.
            begun = one.in_flight - account.in_flight.get(process, 0)
            lease.slots = max(0, min(lease.slots - begun, one.max_in_flight) - one.returned_slots)
        account.in_flight.pop(process, None)
        record.open_keys.discard(one.key)
        if one.in_flight:
            account.in_flight[process] = one.in_flight
            record.open_keys.add(one.key)
        requests = tokens = slots = 0
        if one.wanted:
            parts = len(account.leases) + 1
            requests = account.requests.grant(parts) if one.requests_per_minute else 0
            tokens = account.tokens.grant(parts) if one.tokens_per_minute else 0
            taken = sum(account.in_flight.values()) + sum(held.slots for held in account.leases.values())
            free = one.max_in_flight - taken
            slots = max(free // parts, 1) if free >= 1 else 0
            lease.requests += requests
            lease.tokens += tokens
            lease.slots += slots
        return KeyGrant(one.key, requests, tokens, slots, account.requests.level, account.tokens.level, one.wanted)

    @staticmethod
    def _take_over(account: _Account, lease: _Lease, one: KeyReport) -> None:
        account.requests.level = min(account.requests.level, one.level_requests)
        account.tokens.level = min(account.tokens.level, one.level_tokens)
        lease.requests = min(one.held_requests, one.requests_per_minute)
        lease.tokens = min(one.held_tokens, one.tokens_per_minute)

    def _forget_silent(self, now: float) -> None:
        while self._processes:
            process, record = next(iter(self._processes.items()))
            if now - record.heard_at <= SILENT_S:
                return
            del self._processes[process]
            self._gateways[record.gateway] -= 1
            if not self._gateways[record.gateway]:
                del self._gateways[record.gateway]
            for key in record.open_keys:
                if (account := self._accounts.get(key)) is not None:
                    account.in_flight.pop(process, None)

    def _forget_idle(self, now: float) -> None:
        """A few of those that were not mentioned for long. What has requests in flight, or a debt, is looked at again later."""
        for _ in range(_SWEPT_WITH_A_REPORT):
            key, account = next(iter(self._accounts.items()), (b"", None))
            if account is None or now - account.heard_at <= IDLE_S:
                return
            account.requests.fill(0.0, now)
            account.tokens.fill(0.0, now)
            if account.in_flight or min(account.requests.level, account.tokens.level) < 0:
                self._accounts.move_to_end(key)
                account.heard_at = now
            else:
                del self._accounts[key]
