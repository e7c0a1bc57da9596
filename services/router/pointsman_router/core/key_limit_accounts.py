"""Usage of API keys at all gateways: a token bucket for each limit, of which gateways get leases.

A bucket's level is the part of the limit that no gateway holds. It fills at the limit's rate per minute, up to the limit minus
what gateways hold. So all gateways together admit at most one minute's worth at once, and the rate after that. A gateway that
asks gets an equal part of the level: one part for each gateway with a lease, and one that is kept for the next gateway. A lease
that is not renewed expires, and whatever was not returned by then counts as used. Nothing is stored: after a takeover, gateways
report what they hold and what the level was.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

MINUTE_S = 60.0
# Time without a report of its key after which a gateway's lease expires, s. Gateways use a lease for half as long.
LEASE_S = 10.0
# Time without a report after which a process's requests in flight count as ended, s. Gateways report every few seconds.
SILENT_S = 15.0
# Age of an account up to which it adopts the level that gateways report, s: another router may have kept the account before.
TAKEOVER_S = 10.0
# Time without a report after which an account without debt or requests in flight is removed, s.
IDLE_S = 60.0
MAX_ACCOUNTS = 200_000
# Maximum number of idle accounts that are checked for removal with each key of a report.
_SWEPT_WITH_A_REPORT = 4


@dataclass(frozen=True, slots=True)
class KeyReport:
    """A gateway process's report on one key. Limits hold for all gateways together; 0: none. See KeyReport in placement.proto."""

    key: bytes  # digest of the API key's digest
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_in_flight: int = 0  # requests
    used_requests: float = 0.0  # since the last report
    used_tokens: float = 0.0  # since the last report; negative if an earlier estimate was too high
    in_flight: int = 0  # requests at this process now
    returned_requests: float = 0.0  # of the lease, unused
    returned_tokens: float = 0.0  # of the lease, unused
    returned_slots: int = 0  # for requests in flight, unused
    wanted: bool = False  # whether the gateway requests more
    level_requests: float = 0.0  # what no gateway holds, as this one last received it
    level_tokens: float = 0.0  # what no gateway holds, as this one last received it
    held_requests: float = 0.0  # what its lease had left before `used_requests`
    held_tokens: float = 0.0  # what its lease had left before `used_tokens`
    held_slots: int = 0  # what its lease has left
    # Whether the gateway has no lease any more, and has admitted requests by its share of the limit.
    lease_ended: bool = False


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """How much is added to a gateway's lease of a key."""

    key: bytes
    requests: float  # added
    tokens: float  # added
    slots: int  # for requests in flight, added
    level_requests: float  # what no gateway holds after that
    level_tokens: float  # what no gateway holds after that
    wanted: bool  # as in the report; a grant of 0 then means that nothing is left


@dataclass(frozen=True, slots=True)
class KeyLimitAnswer:
    """The answer to a report: the number of gateways that report, the grants, and whether the process must send a full report of
    its requests in flight (`tell_all`)."""

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
    """The part of a limit per minute that no gateway holds; negative: a debt. `at`: when it was last filled, s."""

    per_minute: int
    level: float
    at: float

    def fill(self, held: float, now: float) -> None:
        """Fill the level up to `now`, when gateways hold `held`. Mutates."""
        filled = self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S
        self.level, self.at = min(filled, max(0.0, self.per_minute - held)), now

    def settle(self, lease: float, used: float, returned: float) -> float:
        """Return what is left of a lease after `used` and `returned`. Returned units are added to the level; usage beyond the
        lease is subtracted from it. Mutates."""
        lease -= used
        if lease < 0:
            self.level += lease
            return 0.0
        back = min(returned, lease)
        self.level += back
        return lease - back

    def grant(self, parts: int) -> int:
        """Take one of `parts` equal parts from the level and return it: at least 1 if the level allows, else 0. Mutates."""
        given = max(math.floor(self.level / parts), 1) if self.level >= 1 else 0
        self.level -= given
        return given


@dataclass(slots=True)
class _Account:
    """Usage and leases of one key."""

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


class KeyLimitAccounts:
    """All accounts of one router. `now`: s on a monotonic clock."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()  # least recently reported first
        self._processes: OrderedDict[str, _Process] = OrderedDict()  # least recently reported first
        self._gateways: Counter[str] = Counter()  # number of processes by gateway

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def gateways(self) -> int:
        """Number of gateways that have reported within SILENT_S, as of the last report."""
        return len(self._gateways)

    def report(
        self, process: str, gateway: str, reports: Iterable[KeyReport], now: float, *, full: bool = False
    ) -> KeyLimitAnswer:
        """Apply a report of a process of `gateway`, and grant what it wants. `full`: the process has no other requests in flight
        than the report lists. Mutates."""
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
        for report in reports:
            self._forget_idle(now)
            grants.append(self._take(process, record, report, now, full=full))
        while len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        return KeyLimitAnswer(max(1, len(self._gateways)), known is None and not full, grants)

    def _take(self, process: str, record: _Process, report: KeyReport, now: float, *, full: bool) -> KeyGrant:
        account = self._accounts.get(report.key)
        if account is None:
            requests, tokens = report.requests_per_minute, report.tokens_per_minute
            account = _Account(_Level(requests, requests, now), _Level(tokens, tokens, now), now, now)
            self._accounts[report.key] = account
        self._accounts.move_to_end(report.key)
        account.heard_at = now
        for gateway in [gateway for gateway, lease in account.leases.items() if now - lease.heard_at > LEASE_S]:
            del account.leases[gateway]
        lease = account.leases.get(record.gateway)
        if lease is None:
            lease = account.leases[record.gateway] = _Lease()
            if now - account.began_at <= TAKEOVER_S:
                self._take_over(account, lease, report)
        if report.lease_ended:
            # What was granted counts as used, so that it is not withheld from other gateways.
            lease.requests, lease.tokens, lease.slots = 0.0, 0.0, 0
        elif full:
            # Grants on the previous stream may not have reached the gateway.
            lease.requests, lease.tokens = (
                min(lease.requests, report.held_requests),
                min(lease.tokens, report.held_tokens),
            )
        lease.heard_at = now
        account.requests.per_minute, account.tokens.per_minute = report.requests_per_minute, report.tokens_per_minute
        account.requests.fill(sum(held.requests for held in account.leases.values()), now)
        account.tokens.fill(sum(held.tokens for held in account.leases.values()), now)
        if report.requests_per_minute:
            lease.requests = account.requests.settle(lease.requests, report.used_requests, report.returned_requests)
        if report.tokens_per_minute:
            lease.tokens = account.tokens.settle(lease.tokens, report.used_tokens, report.returned_tokens)
        if full or report.lease_ended:
            lease.slots = min(report.held_slots, report.max_in_flight)
        else:
            # A request that began used a slot of the lease; one that ended returned its slot to the lease.
            begun = report.in_flight - account.in_flight.get(process, 0)
            lease.slots = max(0, min(lease.slots - begun, report.max_in_flight) - report.returned_slots)
        account.in_flight.pop(process, None)
        record.open_keys.discard(report.key)
        if report.in_flight:
            account.in_flight[process] = report.in_flight
            record.open_keys.add(report.key)
        requests = tokens = slots = 0
        if report.wanted:
            parts = len(account.leases) + 1
            requests = account.requests.grant(parts) if report.requests_per_minute else 0
            tokens = account.tokens.grant(parts) if report.tokens_per_minute else 0
            taken = sum(account.in_flight.values()) + sum(held.slots for held in account.leases.values())
            free = report.max_in_flight - taken
            slots = max(free // parts, 1) if free >= 1 else 0
            lease.requests += requests
            lease.tokens += tokens
            lease.slots += slots
        return KeyGrant(
            report.key, requests, tokens, slots, account.requests.level, account.tokens.level, report.wanted
        )

    @staticmethod
    def _take_over(account: _Account, lease: _Lease, report: KeyReport) -> None:
        account.requests.level = min(account.requests.level, report.level_requests)
        account.tokens.level = min(account.tokens.level, report.level_tokens)
        lease.requests = min(report.held_requests, report.requests_per_minute)
        lease.tokens = min(report.held_tokens, report.tokens_per_minute)

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
        """Remove a few idle accounts. One with requests in flight or a debt is kept, and checked again after IDLE_S."""
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
