"""Which instance a session belongs to, for a while. Pure; `now` is in s on any clock that only grows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Affinity:
    """session -> owner instance, forgotten `ttl_s` after its last use, bounded to `capacity` sessions (oldest go first)."""

    def __init__(self, ttl_s: float, capacity: int = 1_000_000) -> None:
        self.ttl_s = ttl_s
        self._capacity = capacity
        self._owner: OrderedDict[str, tuple[str, float, str]] = OrderedDict()
        self._sessions: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def owner(self, session: str, now: float) -> str:
        """The instance that owns `session`, or "" when none does any more."""
        owner, expires, _ = self._owner.get(session, ("", 0.0, ""))
        return owner if expires > now else ""

    def assign(self, session: str, instance_id: str, now: float, pool: str = "") -> None:
        """Make `instance_id`, of `pool`, the owner until now + ttl. Mutates."""
        self._forget(session)
        self._owner[session] = (instance_id, now + self.ttl_s, pool)
        self._sessions[instance_id] = self._sessions.get(instance_id, 0) + 1
        while len(self._owner) > self._capacity:
            self._forget(next(iter(self._owner)))

    def expire(self, now: float) -> None:
        """Drop what is past its time. Mutates."""
        while self._owner:
            session, (_, expires, _) = next(iter(self._owner.items()))
            if expires > now:
                return
            self._forget(session)

    def sessions_of(self, instance_id: str) -> int:
        """How many sessions an instance owns."""
        return self._sessions.get(instance_id, 0)

    def items(self) -> Iterator[tuple[str, str]]:
        """All (session, owner) pairs, oldest first."""
        return ((session, owner) for session, (owner, _, _) in self._owner.items())

    def of_pool(self, pool: str) -> dict[str, str]:
        """The (session, owner) pairs of one pool, oldest first."""
        return {session: owner for session, (owner, _, of) in self._owner.items() if of == pool}

    def forget_pool(self, pool: str) -> None:
        """Drop the sessions of one pool. Mutates."""
        for session in self.of_pool(pool):
            self._forget(session)

    def check_invariants(self) -> None:
        """Raise AssertionError when the per-instance counts disagree with the sessions."""
        counts: dict[str, int] = {}
        for owner, _, _ in self._owner.values():
            counts[owner] = counts.get(owner, 0) + 1
        assert counts == self._sessions

    def _forget(self, session: str) -> None:
        before = self._owner.pop(session, None)
        if before is not None:
            left = self._sessions[before[0]] - 1
            if left:
                self._sessions[before[0]] = left
            else:
                del self._sessions[before[0]]
