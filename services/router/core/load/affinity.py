"""Which instance a session belongs to, for a while. Pure; `now` is in s on any clock that only grows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

MAX_SESSIONS = 1_000_000


class Affinity:
    """(pool, session) -> owner instance, forgotten `ttl_s` after its last use, bounded to MAX_SESSIONS (oldest go first).

    A session that speaks to two models has an owner for each.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._owner: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()
        self._sessions: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def owner(self, pool: str, session: str, now: float) -> str:
        """The instance of `pool` that owns `session`, or "" when none does any more."""
        owner, expires = self._owner.get((pool, session), ("", 0.0))
        return owner if expires > now else ""

    def assign(self, pool: str, session: str, instance_id: str, now: float) -> None:
        """Make `instance_id` the owner until now + ttl. Mutates."""
        self._forget((pool, session))
        self._owner[pool, session] = (instance_id, now + self.ttl_s)
        self._sessions[instance_id] = self._sessions.get(instance_id, 0) + 1
        while len(self._owner) > MAX_SESSIONS:
            self._forget(next(iter(self._owner)))

    def expire(self, now: float) -> None:
        """Drop what is past its time. Mutates."""
        while self._owner:
            key, (_, expires) = next(iter(self._owner.items()))
            if expires > now:
                return
            self._forget(key)

    def sessions_of(self, instance_id: str) -> int:
        """How many sessions an instance owns."""
        return self._sessions.get(instance_id, 0)

    def newest(self, now: float) -> Iterator[tuple[str, str, str, float]]:
        """(pool, session, owner instance, s since it was assigned), the lately assigned first, those past their time left out."""
        for (pool, session), (owner, expires) in reversed(self._owner.items()):
            if expires <= now:
                return
            yield pool, session, owner, now + self.ttl_s - expires

    def of_pool(self, pool: str) -> dict[str, str]:
        """The (session, owner) pairs of one pool, oldest first."""
        return {session: owner for (of, session), (owner, _) in self._owner.items() if of == pool}

    def forget_pool(self, pool: str) -> None:
        """Drop the sessions of one pool. Mutates."""
        for session in self.of_pool(pool):
            self._forget((pool, session))

    def check_invariants(self) -> None:
        """Raise AssertionError when the per-instance counts disagree with the sessions."""
        counts: dict[str, int] = {}
        for owner, _ in self._owner.values():
            counts[owner] = counts.get(owner, 0) + 1
        assert counts == self._sessions

    def _forget(self, key: tuple[str, str]) -> None:
        before = self._owner.pop(key, None)
        if before is not None:
            left = self._sessions[before[0]] - 1
            if left:
                self._sessions[before[0]] = left
            else:
                del self._sessions[before[0]]
