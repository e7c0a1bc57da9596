"""The ends of sessions that clients have reported, until every pool's owner knows them. Pure; times in monotonic s."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

# How long an end is kept, s. Until then the owner of a pool that was unknown or had no owner is told as soon as there is one.
KEPT_S = 60.0
# Maximum number of ends that are kept; the oldest is dropped first.
MAX_ENDS = 10_000
# Time after which an owner that has not confirmed an end is told again, s. It doubles each time.
REPEAT_S = 1.0

_Session = tuple[str, str]


@dataclass(slots=True)
class _End:
    """An end that was reported at `since`. `done`: the pools that need not be told of it any more. An owner that was told is told
    again at `again_at`, and then after `pause_s`."""

    since: float
    done: frozenset[str] = frozenset()
    again_at: float = field(init=False)
    pause_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.was_sent(self.since, REPEAT_S)

    def was_sent(self, now: float, pause_s: float) -> None:
        self.again_at, self.pause_s = now + pause_s, 2.0 * pause_s


class SessionEnds:
    """Ends by (tenant, session id).

    A confirmed end is kept, too: a pool that no router knows at the moment may appear with a session's owner in the store."""

    def __init__(self) -> None:
        self._ends: OrderedDict[_Session, _End] = OrderedDict()

    def unconfirmed(self, pools: Collection[str]) -> int:
        """Return how many ends the owners of these pools have not all confirmed."""
        return sum(not end.done or not end.done.issuperset(pools) for end in self._ends.values())

    def add(self, tenant: str, session_id: str, now: float) -> None:
        """Add the end of a session, of which all owners are told now; it replaces an earlier one. Mutates."""
        self._ends[tenant, session_id] = _End(now)
        self._ends.move_to_end((tenant, session_id))
        while len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)

    def begun(self, tenant: str, session_id: str, pool: str) -> None:
        """Record that a new request begins the session again in a pool: its owner must not be told of the earlier end any more.
        Mutates."""
        if self._ends and (end := self._ends.get((tenant, session_id))) is not None:
            end.done |= {pool}

    def confirmed(self, tenant: str, session_id: str, owners_of: Iterable[str]) -> None:
        """Record that the owners of the pools `owners_of` have stored an end. Mutates."""
        if (end := self._ends.get((tenant, session_id))) is not None:
            end.done |= frozenset(owners_of)

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
