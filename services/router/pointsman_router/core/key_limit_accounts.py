"""Usage of API keys at all gateways: a token bucket for each limit, of which gateways get leases.

A bucket's level is the part of the limit that no gateway holds. It fills at the limit's rate per minute, up to the limit minus
what gateways hold. So all gateways together admit at most one minute's worth at once, and the rate after that. A gateway that
asks gets an equal part of the level: one part for each gateway with a lease, and one that is kept for the next gateway. A lease
that is not renewed expires, and whatever was not returned by then counts as used. Nothing is stored: after a takeover, gateways
report what they hold and what the level was.

A lease is what its gateway's last report says that it holds, and the grants of answers that the gateway did not have when it
reported. So what is lost with a stream, in either direction, is corrected by the next report of the key, whatever came before.
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
    requests_per_minute: int = 0  # the key's limit, as this process has it
    tokens_per_minute: int = 0  # the key's limit, as this process has it
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
    held_requests: float = 0.0  # what its lease had left before `used_requests` and `returned_requests`
    held_tokens: float = 0.0  # what its lease had left before `used_tokens` and `returned_tokens`
    held_slots: int = 0  # what its lease has left, without `returned_slots`
    gateway_in_flight: int = 0  # requests at all processes of the gateway now


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """How much is added to a gateway's lease of a key."""

    key: bytes  # as in the report
    requests: float  # added
    tokens: float  # added
    slots: int  # for requests in flight, added
    level_requests: float  # what no gateway holds after that
    level_tokens: float  # what no gateway holds after that
    wanted: bool  # as in the report; a grant of 0 then means that nothing is left


@dataclass(frozen=True, slots=True)
class KeyLimitAnswer:
    """The answer to a report: its number, which is higher than those of earlier answers, the number of gateways that report, the
    grants, and whether the process must send a full report of its requests in flight (`tell_all`)."""

    number: int
    gateways: int
    tell_all: bool
    grants: list[KeyGrant]


@dataclass(slots=True)
class _Lease:
    """What one gateway holds of one key. `underway`: by process, the grants of answers that the process may not have, which are
    part of the lease."""

    requests: float = 0.0  # that it may still admit, those in `underway` included
    tokens: float = 0.0  # that it may still admit, those in `underway` included
    slots: int = 0  # for requests in flight, unused
    heard_at: float = 0.0  # when the gateway last reported the key, s; the lease ends LEASE_S later
    underway: dict[str, list[_Underway]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Underway:
    """The grant of one answer, and when it was made."""

    answer: int  # KeyLimitAnswer.number
    at: float  # when the answer was made, s
    requests: int  # added to the lease
    tokens: int  # added to the lease
    slots: int  # added to the lease


@dataclass(slots=True)
class _Level:
    """The part of a limit per minute that no gateway holds; negative: a debt. `at`: when it was last filled, s."""

    per_minute: int
    level: float
    at: float

    def fill(self, held: float, now: float, *, learned: bool = True) -> None:
        """Fill the level up to `now`, when gateways hold `held`. `learned`: whether `held` has a lease that the level has not
        paid for. If not, what is there already stays: a grant to one process of a gateway may count twice for a moment, since
        another one reports it as held, too. Mutates."""
        filled = self.level + max(0.0, now - self.at) * self.per_minute / MINUTE_S
        most = max(0.0, self.per_minute - held)
        if not learned:
            most = max(most, min(self.level, self.per_minute))
        self.level, self.at = min(filled, most), now

    def grant(self, parts: int) -> int:
        """Take one of `parts` equal parts from the level and return it: at least 1 if the level allows, else 0. Mutates."""
        given = max(math.floor(self.level / parts), 1) if self.level >= 1 else 0
        self.level -= given
        return given


@dataclass(slots=True)
class _Account:
    """Usage and leases of one key."""

    requests: _Level  # of the limit of requests per minute
    tokens: _Level  # of the limit of tokens per minute
    began_at: float  # when the account began at this router, s
    heard_at: float  # when the key was last reported, or kept for a debt or requests in flight, s
    leases: dict[str, _Lease] = field(default_factory=dict)  # by gateway
    # By process: its number of requests in flight, not 0, and the value of _Process.round when it reported them.
    in_flight: dict[str, tuple[int, int]] = field(default_factory=dict)

    def taken_slots(self) -> int:
        """Return the number of slots that requests in flight use and that gateways hold."""
        return sum(count for count, _ in self.in_flight.values()) + sum(lease.slots for lease in self.leases.values())


@dataclass(slots=True)
class _Process:
    """A process that reports. Each full report begins another `round`. What the process reported before the round `valid_from`
    is over: the round's report was complete without it. `answered`: number of the last answer that the process has."""

    gateway: str  # id of the gateway that it belongs to, as in its first report
    heard_at: float  # when it last reported, s; forgotten SILENT_S later
    round: int
    valid_from: int
    answered: int = 0


class KeyLimitAccounts:
    """All accounts of one router. `now`: s on a monotonic clock."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()  # least recently reported first
        self._processes: OrderedDict[str, _Process] = OrderedDict()  # least recently reported first
        self._gateways: Counter[str] = Counter()  # number of processes by gateway
        self._rounds = 0  # of full reports, of all processes
        self._answers = 0

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def gateways(self) -> int:
        """Number of gateways that have reported within SILENT_S, as of the last report."""
        return len(self._gateways)

    def report(
        self,
        process: str,
        gateway: str,
        reports: Iterable[KeyReport],
        now: float,
        *,
        full: bool = False,
        full_ends: bool = True,
        last_answer: int | None = None,
    ) -> KeyLimitAnswer:
        """Apply a report of a process of `gateway`, and grant what it wants.

        `full` and `full_ends`: whether a full report begins and ends with this report. When it has ended, the process has no
        other requests in flight than those that it has reported since the beginning. `last_answer`: number of the last answer
        that the process has on this stream; None: it has all. A full report with 0 is the first of its stream, so that earlier
        answers are not on their way any more. Mutates.
        """
        self._forget_silent(now)
        known = self._processes.pop(process, None)
        if known is None:
            self._gateways[gateway] += 1
        record = self._processes[process] = known or _Process(gateway, now, *[self._next_round()] * 2)
        record.heard_at = now
        if last_answer is None or (full and not last_answer):
            record.answered = self._answers
        else:
            record.answered = max(record.answered, last_answer)
        if full:
            record.round = self._next_round()
        self._answers += 1
        grants = []
        for report in reports:
            self._forget_idle(now)
            grants.append(self._take(process, record, report, now))
        if full_ends:
            record.valid_from = record.round
        while len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        return KeyLimitAnswer(self._answers, max(1, len(self._gateways)), known is None and not full, grants)

    def _next_round(self) -> int:
        self._rounds += 1
        return self._rounds

    def _take(self, process: str, record: _Process, report: KeyReport, now: float) -> KeyGrant:
        account = self._accounts.get(report.key)
        if account is None:
            requests, tokens = report.requests_per_minute, report.tokens_per_minute
            account = _Account(_Level(requests, requests, now), _Level(tokens, tokens, now), now, now)
            self._accounts[report.key] = account
        self._accounts.move_to_end(report.key)
        account.heard_at = now
        account.requests.per_minute, account.tokens.per_minute = report.requests_per_minute, report.tokens_per_minute
        for gateway in [gateway for gateway, lease in account.leases.items() if now - lease.heard_at > LEASE_S]:
            del account.leases[gateway]
        lease = account.leases.get(record.gateway)
        learned = lease is None
        # What is left of an expired lease counts as used, so the level does not get it back.
        returnable = lease is not None
        if lease is None:
            lease = account.leases[record.gateway] = _Lease()
            if now - account.began_at <= TAKEOVER_S:
                account.requests.level = min(account.requests.level, report.level_requests)
                account.tokens.level = min(account.tokens.level, report.level_tokens)
                returnable = True
        lease.heard_at = now
        self._forget_arrived(lease, now)
        self._hold(account, lease, report, now, returnable=returnable, learned=learned)
        self._count_in_flight(process, record, account, lease, report)
        requests = tokens = slots = 0
        if report.wanted:
            parts = len(account.leases) + 1
            requests = account.requests.grant(parts) if report.requests_per_minute else 0
            tokens = account.tokens.grant(parts) if report.tokens_per_minute else 0
            free = report.max_in_flight - account.taken_slots()
            slots = max(free // parts, 1) if free >= 1 else 0
            if requests or tokens or slots:
                lease.underway.setdefault(process, []).append(_Underway(self._answers, now, requests, tokens, slots))
            lease.requests += requests
            lease.tokens += tokens
            lease.slots += slots
        return KeyGrant(
            report.key, requests, tokens, slots, account.requests.level, account.tokens.level, report.wanted
        )

    def _forget_arrived(self, lease: _Lease, now: float) -> None:
        """Remove the grants that have reached their process, or that it could not use any more. Mutates."""
        for process, grants in list(lease.underway.items()):
            record = self._processes.get(process)
            answered = record.answered if record is not None else self._answers
            left = [grant for grant in grants if grant.answer > answered and now - grant.at <= LEASE_S]
            if left:
                lease.underway[process] = left
            else:
                del lease.underway[process]

    @staticmethod
    def _hold(
        account: _Account, lease: _Lease, report: KeyReport, now: float, *, returnable: bool, learned: bool
    ) -> None:
        """Set the lease to what the report says, and count what was used and returned. Mutates."""
        underway = [grant for grants in lease.underway.values() for grant in grants]
        for level, name, held, used, returned in (
            (account.requests, "requests", report.held_requests, report.used_requests, report.returned_requests),
            (account.tokens, "tokens", report.held_tokens, report.used_tokens, report.returned_tokens),
        ):
            granted = sum(getattr(grant, name) for grant in underway)
            if not level.per_minute:
                setattr(lease, name, 0.0)
                continue
            held = min(held, level.per_minute)
            debt, left = max(0.0, used - held), max(0.0, held - used)
            back = min(returned, left)
            left -= back
            setattr(lease, name, (held if returnable else left) + granted)
            level.fill(sum(getattr(other, name) for other in account.leases.values()), now, learned=learned)
            level.level += (back if returnable else 0.0) - debt
            setattr(lease, name, left + granted)

    def _count_in_flight(
        self, process: str, record: _Process, account: _Account, lease: _Lease, report: KeyReport
    ) -> None:
        """Count the process's requests in flight. The lease has the gateway's slots that no known request uses. Mutates."""
        account.in_flight[process] = (report.in_flight, record.round)
        self._forget_ended(account)
        granted = sum(grant.slots for grants in lease.underway.values() for grant in grants)
        counted = sum(
            count for other, (count, _) in account.in_flight.items() if self._processes[other].gateway == record.gateway
        )
        whole = report.held_slots + granted + max(report.gateway_in_flight, report.in_flight)
        lease.slots = max(0, min(whole - counted, report.max_in_flight))

    def _forget_ended(self, account: _Account) -> None:
        """Remove the account's requests in flight that are over. Mutates."""
        for process, (count, round_) in list(account.in_flight.items()):
            record = self._processes.get(process)
            if not count or record is None or round_ < record.valid_from:
                del account.in_flight[process]

    def _forget_silent(self, now: float) -> None:
        while self._processes:
            process, record = next(iter(self._processes.items()))
            if now - record.heard_at <= SILENT_S:
                return
            del self._processes[process]
            self._gateways[record.gateway] -= 1
            if not self._gateways[record.gateway]:
                del self._gateways[record.gateway]

    def _forget_idle(self, now: float) -> None:
        """Remove a few idle accounts. One with requests in flight or a debt is kept, and checked again after IDLE_S."""
        for _ in range(_SWEPT_WITH_A_REPORT):
            key, account = next(iter(self._accounts.items()), (b"", None))
            if account is None or now - account.heard_at <= IDLE_S:
                return
            account.requests.fill(0.0, now)
            account.tokens.fill(0.0, now)
            self._forget_ended(account)
            if account.in_flight or min(account.requests.level, account.tokens.level) < 0:
                self._accounts.move_to_end(key)
                account.heard_at = now
            else:
                del self._accounts[key]
