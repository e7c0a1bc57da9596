"""The ends of sessions that clients have reported, until every pool's owner knows them. Pure; times in monotonic s."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

# How long an end is kept, s. Until then the owner of a pool that was unknown or had no owner is told as soon as there is one.
KEPT_S = 60.0
# Maximum number of ends that are kept; the oldest is dropped first.
MAX_ENDS = 10_000
# Time after which an owner that has not confirmed an end is told again, s. It doubles each time.
REPEAT_S = 1.0

_Session = tuple[str, str]
_T = TypeVar("_T")


@dataclass(slots=True)
class _End:
    """An end that was reported at `since`. `begun`: the pools in which the session has begun anew. `confirmed`: those whose
    owners have stored the end. `may_be_undone`: a request of the session may come to a router late, and give it an owner again.
    An owner that was told is told again at `again_at`, and then after `pause_s`."""

    since: float
    may_be_undone: bool
    begun: frozenset[str] = frozenset()
    confirmed: frozenset[str] = frozenset()
    again_at: float = field(init=False)
    pause_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.was_sent(self.since, REPEAT_S)

    def was_sent(self, now: float, pause_s: float) -> None:
        self.again_at, self.pause_s = now + pause_s, 2.0 * pause_s

    @property
    def done(self) -> frozenset[str]:
        """The pools whose owners need not be told of the end any more."""
        return frozenset() if self.may_be_undone and not self.begun else self.begun | self.confirmed


class SessionEnds:
    """Ends by (tenant, session id).

    A confirmed end is kept, too: a pool that no router knows at the moment may appear with a session's owner in the store. Where
    a router was asked in vain for a request of the session, all owners are told again even if they have confirmed: the request
    may reach the router late, over a connection that stood still, when it owns the pool, and is placed."""

    def __init__(self) -> None:
        self._ends: OrderedDict[_Session, _End] = OrderedDict()
        # Sessions for whose requests a router was asked in vain, and when; newest last.
        self._in_vain: OrderedDict[_Session, float] = OrderedDict()

    def unconfirmed(self, pools: Collection[str]) -> int:
        """Return how many ends the owners of these pools have not all confirmed."""
        done = (end.begun | end.confirmed for end in self._ends.values())
        return sum(not known or not known.issuperset(pools) for known in done)

    def asked_in_vain(self, tenant: str, session_id: str, now: float) -> None:
        """Record that a router which was asked for a request of the session is not waited for any more. Mutates."""
        if session_id:
            _add(self._in_vain, (tenant, session_id), now)

    def add(self, tenant: str, session_id: str, now: float) -> None:
        """Add the end of a session, of which all owners are told now; it replaces an earlier one. Mutates."""
        session = tenant, session_id
        _add(self._ends, session, _End(now, self._in_vain.get(session, -inf) > now - KEPT_S))

    def begun(self, tenant: str, session_id: str, pool: str) -> None:
        """Record that a new request begins the session again in a pool: its owner must not be told of the earlier end any more.
        Mutates."""
        if self._ends and (end := self._ends.get((tenant, session_id))) is not None:
            end.begun |= {pool}

    def confirmed(self, tenant: str, session_id: str, owners_of: Iterable[str]) -> None:
        """Record that the owners of the pools `owners_of` have stored an end. Mutates."""
        if (end := self._ends.get((tenant, session_id))) is not None:
            end.confirmed |= frozenset(owners_of)

    def untold(self, pools: Collection[str], now: float) -> list[_Session]:
        """Return the ends that the new owner of these pools must be told of now, oldest first. Drops those that are too old.
        Mutates."""
        self._expire(now)
        untold = [(session, end) for session, end in self._ends.items() if not end.done.issuperset(pools)]
        for _, end in untold:
            end.was_sent(now, REPEAT_S)
        return [session for session, _ in untold]

    def overdue(self, now: float) -> list[tuple[_Session, frozenset[str]]]:
        """Return the ends that owners which have not confirmed them must be told of again now, oldest first, each with the pools
        that need not be told. Drops those that are too old. Mutates."""
        self._expire(now)
        overdue = [(session, end) for session, end in self._ends.items() if end.again_at <= now]
        for _, end in overdue:
            end.was_sent(now, end.pause_s)
        return [(session, end.done) for session, end in overdue]

    def _expire(self, now: float) -> None:
        while self._ends and next(iter(self._ends.values())).since <= now - KEPT_S:
            self._ends.popitem(last=False)


def _add(sessions: OrderedDict[_Session, _T], session: _Session, value: _T) -> None:
    """Set a session's value, the newest of at most MAX_ENDS. Mutates `sessions`."""
    sessions[session] = value
    sessions.move_to_end(session)
    if len(sessions) > MAX_ENDS:
        sessions.popitem(last=False)
