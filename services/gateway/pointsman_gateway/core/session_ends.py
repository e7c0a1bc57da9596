"""The ends of sessions that clients have reported, until every pool's owner knows them. Pure; times in monotonic s."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Time after which an end is dropped if not all owners have confirmed it, s. The session then keeps its owner until that expires.
KEPT_S = 60.0
# Maximum number of ends that are kept; the oldest is dropped first. Owners confirm an end within some milliseconds.
MAX_ENDS = 10_000

_Session = tuple[str, str]


@dataclass(slots=True)
class _End:
    """An end that was reported at `since`. `done`: the pools that need not be told of it any more."""

    since: float
    done: frozenset[str] = frozenset()


class SessionEnds:
    """Ends by (tenant, session id)."""

    def __init__(self) -> None:
        self._ends: OrderedDict[_Session, _End] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, tenant: str, session_id: str, now: float) -> None:
        """Add the end of a session; it replaces an earlier one. Mutates."""
        self._ends[tenant, session_id] = _End(now)
        self._ends.move_to_end((tenant, session_id))
        while len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)

    def begun(self, tenant: str, session_id: str, pool: str) -> None:
        """Record that a new request begins the session again in a pool: its owner must not be told of the earlier end any more.
        Mutates."""
        if self._ends and (end := self._ends.get((tenant, session_id))) is not None:
            end.done |= {pool}

    def confirmed(self, tenant: str, session_id: str, owners_of: Iterable[str], pools: Iterable[str]) -> None:
        """Record that the owners of the pools `owners_of` know an end; remove it if those of all `pools` do. Mutates."""
        if (end := self._ends.get((tenant, session_id))) is not None:
            end.done |= frozenset(owners_of)
            if end.done.issuperset(pools):
                del self._ends[tenant, session_id]

    def untold(self, pools: Collection[str], now: float) -> list[_Session]:
        """Return the ends that the owner of these pools must be told of, oldest first. Drops those that are too old. Mutates."""
        while self._ends and next(iter(self._ends.values())).since <= now - KEPT_S:
            self._ends.popitem(last=False)
        return [session for session, end in self._ends.items() if not end.done.issuperset(pools)]
